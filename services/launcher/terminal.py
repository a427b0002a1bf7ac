"""What the terminal shows: prefixed log lines, and how far the start has come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

_COLOURS = {"nats": "magenta", "kvtransfer": "yellow", "prefill": "green", "decode": "cyan", "gateway": "blue"}


class LogLines:
    """Prints each line behind the name of its process, in the colour of its role."""

    def __init__(self, console: Console, width: int = 10) -> None:
        self._console = console
        self._width = width

    def __call__(self, name: str, line: str) -> None:
        """One line of one process; safe from any thread."""
        colour = _COLOURS.get(name.partition("-")[0], "white")
        self._console.print(Text.assemble((f"{name:<{self._width}} | ", colour), line), soft_wrap=True)


class StartProgress:
    """A line per process with what it waits for."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def expect(self, names: Iterator[str] | list[str]) -> None:
        """Shows these as not started yet."""
        for name in names:
            self._tasks[name] = self._progress.add_task(name, total=1, state="")

    def __call__(self, name: str, waits_for: str | None) -> None:
        """What a process waits for; None: it is ready."""
        state, completed = ("ready", 1) if waits_for is None else (waits_for.strip(), 0)
        self._progress.update(self._tasks[name], state=state, completed=completed)


@contextlib.contextmanager
def start_progress(console: Console) -> Iterator[StartProgress]:
    """Shown while the processes come up."""
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description:<12}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        yield StartProgress(progress)
