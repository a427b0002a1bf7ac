"""The supervisor against real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.launcher.supervisor import ProcessSpec, Supervisor
from services.launcher.sweeper import SEGMENT_FOLDER, SEGMENT_PREFIX, Sweeper

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(c.pid, flush=True); time.sleep(600)"
)


Eventually = Callable[..., None]


class Lines:
    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.all.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for owner, line in list(self.all) if owner == name]


def python(name: str, code: str, **more: object) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code), **more)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def keeper(lines: Lines) -> Iterator[Supervisor]:
    with Supervisor(lines, restart=False) as supervisor:
        yield supervisor


def test_lines_arrive_whole_and_the_last_one_needs_no_newline(keeper: Supervisor, lines: Lines) -> None:
    keeper.start(
        python("a", "import sys, os; print('one'); print(os.environ['X']); sys.stdout.write('end')", env={"X": "y"})
    )
    assert keeper.wait("a", 10)
    assert lines.of("a") == ["one", "y", "end", "ended: status 0"]
    assert keeper.exit_code("a") == 0
    assert keeper.pid("a") is None


def test_a_large_burst_of_output_is_not_lost(keeper: Supervisor, lines: Lines) -> None:
    keeper.start(python("a", "for i in range(50_000): print(i, 'x' * 20)"))
    assert keeper.wait("a", 20)
    assert len(lines.of("a")) == 50_001
    assert lines.of("a")[49_999].startswith("49999 ")


def test_an_exit_status_and_a_signal_are_told_apart(keeper: Supervisor, lines: Lines, eventually: Eventually) -> None:
    keeper.start(python("a", "raise SystemExit(3)"))
    keeper.start(python("b", SLEEPER))
    eventually(lambda: lines.of("b"), "b is up")
    keeper.signal("b", signal.SIGKILL)
    assert keeper.wait("a", 10) and keeper.wait("b", 10)
    assert (keeper.exit_code("a"), keeper.exit_code("b")) == (3, -signal.SIGKILL)
    assert lines.of("b")[-1] == "ended: SIGKILL"


def test_a_name_runs_once_and_can_run_again(keeper: Supervisor) -> None:
    first = keeper.start(python("a", SLEEPER))
    with pytest.raises(ValueError, match="a runs already"):
        keeper.start(python("a", SLEEPER))
    keeper.stop("a")
    second = keeper.start(python("a", SLEEPER))
    assert second != first
    assert keeper.pid("a") == second


def test_a_command_that_does_not_exist_ends_with_what_python_says(keeper: Supervisor, lines: Lines) -> None:
    keeper.start(ProcessSpec("a", ("/nonexistent/program",)))
    assert keeper.wait("a", 10)
    assert keeper.exit_code("a") == 1
    assert any("FileNotFoundError" in line for line in lines.of("a"))


def test_stop_kills_what_ignores_sigterm(keeper: Supervisor, lines: Lines, eventually: Eventually) -> None:
    keeper.start(python("a", DEAF, stop_s=0.3))
    eventually(lambda: lines.of("a"), "a is up")
    keeper.stop("a")
    assert keeper.exit_code("a") == -signal.SIGKILL


def test_stop_ends_a_frozen_process(keeper: Supervisor, lines: Lines, eventually: Eventually) -> None:
    pid = keeper.start(python("a", SLEEPER))
    eventually(lambda: lines.of("a"), "a is up")
    keeper.signal("a", signal.SIGSTOP)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "a is frozen")
    keeper.stop("a")
    assert keeper.exit_code("a") == -signal.SIGTERM


def test_children_of_a_killed_process_go_with_it(keeper: Supervisor, lines: Lines, eventually: Eventually) -> None:
    pid = keeper.start(python("a", PARENT))
    eventually(lambda: lines.of("a"), "a is up")
    grandchild = psutil.Process(int(lines.of("a")[0]))
    os.kill(pid, signal.SIGKILL)
    assert keeper.wait("a", 10)
    eventually(
        lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE, "the grandchild ended"
    )


def test_what_dies_comes_back_after_pauses_that_double(lines: Lines, eventually: Eventually) -> None:
    with Supervisor(lines, restart=True) as keeper:
        keeper.start(python("a", "raise SystemExit(1)"))
        eventually(lambda: len(lines.of("a")) >= 2, "two deaths", 20)
        assert lines.of("a")[:2] == [
            "ended: status 1; starting again in 0.5 s",
            "ended: status 1; starting again in 1 s",
        ]
        keeper.stop("a")
        count = len(lines.of("a"))
        time.sleep(0.3)
        assert len(lines.of("a")) == count, "a stopped process must stay down"


def test_close_ends_the_last_started_first(lines: Lines, eventually: Eventually) -> None:
    ending = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))\n{SLEEPER}"
    with Supervisor(lines) as keeper:
        for name in ("a", "b", "c"):
            keeper.start(python(name, ending))
        eventually(lambda: len(lines.all) == 3, "all are up")
    assert [name for name, line in lines.all if line == "bye"] == ["c", "b", "a"]


def test_a_killed_launcher_takes_its_processes_and_their_shared_memory_along(
    tmp_path: Path, eventually: Eventually
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(
        "import sys, time\n"
        "from services.launcher.supervisor import ProcessSpec, Supervisor\n"
        "from services.launcher.sweeper import Sweeper\n"
        "sweeper = Sweeper()\n"
        "keeper = Supervisor(lambda name, line: None, on_start=sweeper.watch)\n"
        "print(keeper.start(ProcessSpec('a', (sys.executable, '-c', 'import time; time.sleep(600)'))), flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    with launcher:
        assert launcher.stdout is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        segment = SEGMENT_FOLDER / f"{SEGMENT_PREFIX}{child.pid}-test"
        segment.write_bytes(b"left behind")
        launcher.kill()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child ended")
    eventually(lambda: not segment.exists(), "the segment is gone")


def test_the_sweeper_spares_the_segments_of_others() -> None:
    sweeper = Sweeper()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
        sweeper.watch(ended.pid)
    mine, other = (SEGMENT_FOLDER / f"{SEGMENT_PREFIX}{name}-test" for name in (ended.pid, f"{ended.pid}0"))
    mine.touch()
    other.touch()
    try:
        sweeper.close()
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        other.unlink()
