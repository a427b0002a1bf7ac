"""Where a request's time went: the stages as each process measured them, and what they leave unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

_BAR = 40


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. Each stage was timed by one process, on its own clock; none is a difference of the others."""

    path: str  # disaggregated, colocated
    stages_s: Mapping[str, float]  # in order
    total_s: float  # as the client measured it
    transfer_s: float  # first pull posted to last block verified
    num_bytes: int
    num_blocks: int

    @property
    def residual_s(self) -> float:
        """What the stages don't explain; negative where they overlap."""
        return self.total_s - sum(self.stages_s.values())

    @property
    def residual_share(self) -> float:
        """Of the total, unsigned."""
        return abs(self.residual_s) / self.total_s

    @property
    def hidden_share(self) -> float:
        """How much of the transfer ran behind the prefill: 1 - exposed / transfer, at least 0.

        Exposed is from the first token sampled to the release arrived at the prefill worker, so with the way of the
        news and of the release: of a transfer that takes no longer than these, nothing counts as hidden.
        """
        return max(0.0, 1 - self.stages_s["exposed_transfer"] / self.transfer_s) if self.transfer_s > 0 else 0.0


def read_timeline(answer: Mapping[str, Any], total_s: float) -> Timeline:
    """The timeline in the gateway's GET /debug/requests/{id}. Raises KeyError naming what is missing."""
    return Timeline(
        path=answer["path"],
        stages_s={stage: float(seconds) for stage, seconds in answer["stages"].items()},
        total_s=total_s,
        transfer_s=float(answer["transfer_s"]),
        num_bytes=int(answer["num_pulled_bytes"]),
        num_blocks=int(answer["num_pulled_blocks"]),
    )


def timeline_table(timeline: Timeline, title: str) -> Table:
    """Stages one below the other, each bar beginning where the last one ended."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("%", justify="right")
    table.add_column("", no_wrap=True)
    begin_s = 0.0
    for stage, seconds in timeline.stages_s.items():
        table.add_row(
            *_row(stage.replace("_", " "), seconds, timeline.total_s), _bar(begin_s, seconds, timeline.total_s)
        )
        begin_s += seconds
    table.add_row(*_row("residual", timeline.residual_s, timeline.total_s), "", style="dim")
    table.add_row(*_row("total (client)", timeline.total_s, timeline.total_s), "", style="bold")
    return table


def _row(name: str, seconds: float, total_s: float) -> tuple[str, str, str]:
    return name, f"{seconds * 1e3:,.1f}", f"{seconds / total_s:.1%}"


def _bar(begin_s: float, seconds: float, total_s: float) -> str:
    """`seconds` as blocks, at least one where there is anything, indented to where it begins."""
    begin = min(_BAR - 1, round(_BAR * begin_s / total_s))
    width = round(_BAR * seconds / total_s) or (seconds > 0)
    return " " * begin + "█" * min(width, _BAR - begin)
