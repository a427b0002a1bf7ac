"""What `bench.interference` makes of a trial, on times and figures worked out by hand."""

import os
import time

import pytest

from bench import interference, interference_load
from bench.interference_load import Trial, TrialError
from bench.load.stream import Stream


def stream(*times_s: float) -> Stream:
    return Stream(chunk_times_s=list(times_s))


def test_an_interval_belongs_to_a_window_that_it_overlaps() -> None:
    times_s = [0.0, 1.0, 2.0, 5.0, 6.0]
    assert interference_load.intervals(times_s, (1.0, 3.0)) == [(1.0, 2.0), (2.0, 5.0)]
    assert interference_load.intervals(times_s, (1.5, 1.6)) == [(1.0, 2.0)]
    assert interference_load.intervals([1.0], (0.0, 9.0)) == []


def test_of_a_gap_only_what_lies_in_the_window_counts() -> None:
    found = [(0.0, 3.0), (3.0, 4.0), (4.0, 9.0)]  # the window is 1 to 7: 2 s, none (not longer than 2 s), 3 s
    assert interference_load.gap_share(found, (1.0, 7.0), 2.0, 1) == pytest.approx(5 / 6)
    assert interference_load.gap_share(found, (1.0, 7.0), 2.0, 2) == pytest.approx(5 / 12)
    assert interference_load.gap_share(found, (1.0, 7.0), 5.0, 1) == 0.0


def test_the_figures_of_a_trial() -> None:
    trial = Trial(
        streams=[stream(10.0, 10.1, 10.2, 10.3, 10.45, 11.5, 11.6), stream(10.0, 10.1, 10.2, 10.3, 10.4, 11.4, 11.7)],
        quiet=(10.0, 10.3),
        beside=(10.3, 11.3),
        long_sent_s=[10.3, 11.1],
        long_first_s=[11.0, 11.7],
        long_ended_s=[11.1, 11.8],
    )
    figures = interference_load.figures(trial)
    assert figures["quiet_itl_ms"] == pytest.approx(100.0)
    # beside: 0.15 and 1.05 of the first, 0.1 and 1.0 of the second; whole, although the window ends at 11.3
    assert figures["itl_max_ms"] == pytest.approx(1050.0)
    assert figures["itl_p99_ms"] == pytest.approx(1000.0 + 0.97 * 50.0)  # rank 2.97 of 0 to 3
    # longer than 0.2: of the first 10.45 to 11.3, of the second 10.4 to 11.3
    assert figures["gap_share"] == pytest.approx((0.85 + 0.9) / 2)
    assert figures["long_ttft_ms"] == pytest.approx(650.0)  # between 700 and 600
    assert figures["output_tokens_per_s"] == pytest.approx(2.0)
    assert figures["tokens_per_s"] == pytest.approx(2.0 + 2 * 1500 / 1.5)
    assert figures["num_long"] == 2


def test_a_trial_without_a_long_prompt_says_nothing() -> None:
    with pytest.raises(TrialError, match="no long prompt"):
        interference_load.figures(Trial([stream(1.0, 2.0)]))


def test_prompts_are_fresh_for_each_seed_and_the_same_for_the_same() -> None:
    make = interference_load.bodies
    lengths = interference_load.LONG_LENGTHS
    assert make("m", lengths, 1, "long-0-0") == make("m", lengths, 1, "long-0-0")
    assert len({make("m", lengths, 1, f"long-{seed}")[0] for seed in ("0-0", "0-1", "0 again-0", "1-0")}) == 4


@pytest.mark.parametrize(
    ("mine", "theirs", "share"), [(25.0, 100.0, 0.75), (150.0, 100.0, -0.5), (0.0, 0.0, 0.0), (0.1, 0.0, -1.0)]
)
def test_a_cut(mine: float, theirs: float, share: float) -> None:
    assert interference.cut(mine, theirs) == pytest.approx(share)


def test_cuts_are_taken_round_by_round_and_judged_by_their_median() -> None:
    def values(p99: list[float], most: list[float], share: list[float]) -> dict[str, list[float]]:
        return {"itl_p99_ms": p99, "itl_max_ms": most, "gap_share": share}

    found = {
        interference.SPLIT: values([50.0, 60.0, 40.0], [90.0, 100.0, 90.0], [0.0, 0.1, 0.0]),
        interference.WHOLE: values([100.0, 200.0, 400.0], [100.0, 100.0, 100.0], [0.9, 0.8, 0.9]),
        interference.CHUNKED: values([100.0, 50.0, 80.0], [90.0, 90.0, 80.0], [0.4, 0.1, 0.4]),
    }
    cuts = {other: interference.cuts(found, other) for other in interference.LEAST_CUT}
    assert cuts[interference.WHOLE]["itl_p99_ms"] == pytest.approx({"median": 0.7, "min": 0.5, "max": 0.9})
    assert cuts[interference.WHOLE]["itl_max_ms"]["median"] == pytest.approx(0.1)
    missed = [bar.name for bar in interference.bars(cuts) if bar.missed]
    assert missed == [
        "ITL maximum of disaggregated, cut from that of colocated, no chunks",
        "ITL maximum of disaggregated, cut from that of colocated, 512",
    ]


def test_cpu_time_is_that_of_the_kernel() -> None:
    deadline_s = time.process_time() + 0.2
    before_s = interference.cpu_s([os.getpid()])
    while time.process_time() < deadline_s:
        pass
    assert interference.cpu_s([os.getpid()]) - before_s == pytest.approx(0.2, abs=0.1)
