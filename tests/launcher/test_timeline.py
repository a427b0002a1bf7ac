"""The timeline's arithmetic, on a request whose numbers were chosen by hand."""

import io

import pytest
from rich.console import Console

from services.launcher.timeline import Timeline, read_timeline, timeline_table

ANSWER = {
    "path": "disaggregated",
    "stages": {
        "tokenise": 0.002,
        "dispatch": 0.003,
        "queue": 0.001,
        "prefill": 0.600,
        "exposed_transfer": 0.004,
        "first_decode": 0.040,
        "decode": 0.325,
        "delivery": 0.005,
    },
    "transfer_s": 0.016,
    "num_pulled_blocks": 94,
    "num_pulled_bytes": 94 * 737_280,
    "total_s": 0.99,
}


@pytest.fixture
def timeline() -> Timeline:
    return read_timeline(ANSWER, total_s=1.0)


def test_the_residual_is_what_the_stages_leave_of_the_clients_total(timeline: Timeline) -> None:
    assert timeline.residual_s == pytest.approx(0.020)  # 1 - 0.98
    assert timeline.residual_share == pytest.approx(0.020)


def test_stages_that_overlap_leave_a_residual_too() -> None:
    assert read_timeline(ANSWER, total_s=0.9).residual_share == pytest.approx(0.08 / 0.9)


def test_the_hidden_share_is_what_was_not_exposed(timeline: Timeline) -> None:
    assert timeline.hidden_share == pytest.approx(0.75)  # 4 of 16 ms exposed


@pytest.mark.parametrize(("transfer_s", "hidden"), [(0.0, 0.0), (0.002, 0.0)])
def test_the_hidden_share_is_never_negative(transfer_s: float, hidden: float) -> None:
    assert read_timeline(ANSWER | {"transfer_s": transfer_s}, 1.0).hidden_share == hidden


def test_a_missing_number_is_named() -> None:
    with pytest.raises(KeyError, match="transfer_s"):
        read_timeline({key: value for key, value in ANSWER.items() if key != "transfer_s"}, 1.0)


def test_the_table_shows_each_stage_the_residual_and_the_total(timeline: Timeline) -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(timeline_table(timeline, "a request"))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["prefill", "600.0", "60.0%", "█" * 24] in rows  # 60 % of 40
    assert ["tokenise", "2.0", "0.2%", "█"] in rows  # something, however short
    assert ["residual", "20.0", "2.0%"] in rows
    assert ["total", "(client)", "1,000.0", "100.0%"] in rows
