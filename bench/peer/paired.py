"""Ratios of paired rounds, and how sure one can be of them."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

# Student's t, two-sided 95 %, by degrees of freedom from 1; beyond the table the last, which is on the safe side
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def interval_95(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the geometric mean ratio: Student's t on the logarithms. Infinite for a single round."""
    if len(ratios) < 2:
        return 0.0, math.inf
    logs = [math.log(ratio) for ratio in ratios]
    freedom = len(logs) - 1
    half = T_95[min(freedom, len(T_95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - half), math.exp(middle + half)


def compare(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Mine over theirs, round by round: the ratios, their median, lowest, highest, and 95 % interval."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    low, high = interval_95(ratios)
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "low_95": low,
        "high_95": high,
        "by_round": ratios,
    }
