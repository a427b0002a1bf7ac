"""When each request is due: a list made before the first is sent, so that no answer can shift it."""

import math
import random


def due_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return seconds after the start at which each request is due, in order; all 0 where `rate` is infinite.

    Gaps are gamma distributed with shape `burstiness` and mean 1/rate: 1 is a Poisson process, less is burstier, more
    is more even, infinite is a metronome. As in `vllm bench serve`, the first gap lies before the first request, and
    the whole is stretched so that the last is due at exactly num_requests/rate: every seed offers the same rate.
    Raises ValueError where rate or burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError("rate and burstiness must be positive")
    if math.isinf(rate):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(num_requests)]
    rng = random.Random(f"arrivals {seed}")
    times: list[float] = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1.0)
        times.append(now)
    stretch = num_requests / rate / now if now else 0.0
    return [time * stretch for time in times]
