"""Arrival times: their mean, their law and their seed."""

import itertools
import math
import statistics

import pytest

from bench.load.arrivals import due_times


def gaps_of(burstiness: float, rate: float = 50.0, number: int = 20_000, seed: int = 3) -> list[float]:
    times = due_times(number, rate, burstiness, seed)
    assert times == sorted(times)
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]


def test_mean_gap_is_one_over_the_rate():
    assert statistics.fmean(gaps_of(1.0)) == pytest.approx(0.02, rel=1e-9)
    assert due_times(30, 5.0, 1.0, 0)[-1] == pytest.approx(6.0)


def test_poisson_gaps_are_exponential():
    gaps = gaps_of(1.0)
    for mean_gaps in (0.5, 1.0, 2.0):  # P(gap > t) = exp(-t x rate); 20,000 draws: a standard error of 0.0035
        share = sum(gap > mean_gaps * 0.02 for gap in gaps) / len(gaps)
        assert share == pytest.approx(math.exp(-mean_gaps), abs=0.015)
    seconds = [0] * 400  # counts per second: variance = mean = 50
    for time in due_times(20_000, 50.0, 1.0, 3):
        seconds[min(int(time), 399)] += 1
    assert statistics.pvariance(seconds) == pytest.approx(50, rel=0.25)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (100.0, 0.1)])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness, variation):
    gaps = gaps_of(burstiness)
    # a gamma distribution of shape k has standard deviation / mean = 1/sqrt(k)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_infinite_burstiness_is_a_metronome():
    assert due_times(4, 2.0, math.inf, 0) == [0.5, 1.0, 1.5, 2.0]


def test_infinite_rate_is_all_at_once():
    assert due_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_the_seed_decides():
    assert due_times(100, 5.0, 1.0, 7) == due_times(100, 5.0, 1.0, 7)
    assert due_times(100, 5.0, 1.0, 7) != due_times(100, 5.0, 1.0, 8)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_rates_that_are_none(rate, burstiness):
    with pytest.raises(ValueError, match="positive"):
        due_times(3, rate, burstiness, 0)
