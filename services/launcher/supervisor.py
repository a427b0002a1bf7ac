"""Keeps named processes running, and leaves none behind.

1. `start(spec)` has the keeper thread spawn the command on a leash (`leash.py`), in a session of its own.
2. The keeper hands every line the process prints to `log(name, line)`.
3. When the process ends unasked, what is left of its group is killed; with `restart` on it is started again after a
   pause that doubles from 0.5 s to 30 s, and begins anew once a life has lasted a minute.
4. `stop(name)` sends SIGTERM, waits, then SIGKILL. `close()` does so for all, last started first.

The leash ends processes with the *thread* that spawned them, so the keeper alone spawns and lives until `close()`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")
Log = Callable[[str, str], None]

_LEASH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("leash.py")), str(os.getpid()))
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONG_LIFE_S = 0.5, 30.0, 60.0
_TAIL_LINES = 60


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep: its unique name, its command, and what its environment has on top of ours."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_s: float = 10.0  # from SIGTERM to SIGKILL


@dataclass(slots=True, eq=False)
class _Child:
    """One spec and its present life. Touched by the keeper only, but for `ended`, `tail` and `code`."""

    spec: ProcessSpec
    wanted: bool = True
    popen: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started_s: float = 0.0
    num_failures: int = 0
    restart_at_s: float | None = None
    unfinished_line: bytes = b""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    code: int | None = None  # of the last life; negative: the signal that ended it
    ended: Event = field(default_factory=Event)


class Supervisor:
    """Safe to call from any thread; a context manager that closes itself."""

    def __init__(self, log: Log, restart: bool = True, on_start: Callable[[int], None] = lambda pid: None) -> None:
        """`log(name, line)` and `on_start(pid)` are called on the keeper thread."""
        self._log = log
        self._restart = restart
        self._on_start = on_start
        self._children: dict[str, _Child] = {}
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._open = True
        self._keeper = Thread(target=self._keep, name="supervisor", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what callers ask

    def start(self, spec: ProcessSpec) -> int:
        """Starts it; returns its pid. Raises ValueError where that name runs already."""
        return self._ask(partial(self._begin, spec))

    def signal(self, name: str, number: int) -> None:
        """Signals the process and its children; nothing where it has ended. Raises KeyError for an unknown name."""
        child = self._children[name]
        self._ask(partial(_signal_group, child, number))

    def stop(self, *names: str, timeout_s: float | None = None) -> None:
        """Ends them for good, together: SIGTERM, and SIGKILL after `timeout_s` (default: each spec's)."""
        children = [self._children[name] for name in names]
        began_s = time.monotonic()
        for child in children:
            self._ask(partial(self._dismiss, child))
        for child in children:
            patience_s = child.spec.stop_s if timeout_s is None else timeout_s
            if not child.ended.wait(max(0.0, began_s + patience_s - time.monotonic())):
                self._say(child.spec.name, f"did not end within {patience_s:g} s of SIGTERM: killed")
                self._ask(partial(_signal_group, child, signal.SIGKILL))
                child.ended.wait()

    def close(self, timeout_s: float | None = None) -> None:
        """Ends everything, last started first, and then the keeper; idempotent."""
        if not self._open:
            return
        for name in reversed(list(self._children)):
            self.stop(name, timeout_s=timeout_s)
        self._open = False
        os.eventfd_write(self._wake, 1)
        self._keeper.join()
        self._selector.close()
        os.close(self._wake)

    def knows(self, name: str) -> bool:
        """Whether it was ever started."""
        return name in self._children

    def pid(self, name: str) -> int | None:
        """The pid of its present life; None while it has none."""
        child = self._children[name]
        return None if child.ended.is_set() or child.popen is None else child.popen.pid

    def exit_code(self, name: str) -> int | None:
        """How its last life ended; negative: by that signal. None where none has ended."""
        return self._children[name].code

    def tail(self, name: str) -> list[str]:
        """The last lines it printed."""
        return list(self._children[name].tail)

    def wait(self, name: str, timeout_s: float) -> bool:
        """Waits for the present life to end; returns whether it did."""
        return self._children[name].ended.wait(timeout_s)

    # what the keeper does

    def _ask(self, call: Callable[[], T]) -> T:
        """Runs `call` on the keeper; returns or raises what it does."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001  it belongs to the caller
                answer.set_exception(error)

        self._calls.put(run)
        os.eventfd_write(self._wake, 1)
        return answer.result()

    def _keep(self) -> None:
        """The loop: calls, what the kernel reports, restarts that are due."""
        while self._open:
            for key, _ in self._selector.select(self._pause()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif key.fd == key.data.pidfd:
                    self._reap(key.data)
                elif key.fd in self._selector.get_map():  # else the same round has reaped it
                    self._read(key.data, key.fd)
            with contextlib.suppress(Empty):
                while True:
                    self._calls.get_nowait()()
            for child in list(self._children.values()):
                if child.restart_at_s is not None and child.restart_at_s <= time.monotonic():
                    self._spawn_again(child)

    def _pause(self) -> float | None:
        """Seconds until the next restart is due."""
        due = [child.restart_at_s for child in self._children.values() if child.restart_at_s is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _begin(self, spec: ProcessSpec) -> int:
        old = self._children.pop(spec.name, None)
        if old is not None and (old.popen is not None or old.restart_at_s is not None):
            self._children[spec.name] = old
            raise ValueError(f"{spec.name} runs already")
        child = self._children[spec.name] = _Child(spec)
        return self._spawn(child)

    def _spawn_again(self, child: _Child) -> None:
        try:
            self._spawn(child)
        except OSError as error:  # no memory, no more processes: that may pass
            child.restart_at_s = time.monotonic() + _LONGEST_PAUSE_S
            self._say(child.spec.name, f"cannot be started: {error}; trying again in {_LONGEST_PAUSE_S:g} s")

    def _spawn(self, child: _Child) -> int:
        child.restart_at_s = None
        child.popen = subprocess.Popen(
            [*_LEASH, *child.spec.command],
            env={**os.environ, **child.spec.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert child.popen.stdout is not None
        self._on_start(child.popen.pid)
        os.set_blocking(child.popen.stdout.fileno(), False)
        child.pidfd = os.pidfd_open(child.popen.pid)
        child.started_s = time.monotonic()
        child.ended.clear()
        self._selector.register(child.popen.stdout, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return child.popen.pid

    def _read(self, child: _Child, fd: int) -> bool:
        """Passes on whole lines; returns whether there may be more."""
        try:
            data = os.read(fd, 65_536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
        *lines, child.unfinished_line = (child.unfinished_line + data).split(b"\n")
        if not data and child.unfinished_line:
            lines, child.unfinished_line = [child.unfinished_line], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            child.tail.append(text)
            self._say(child.spec.name, text)
        return bool(data)

    def _say(self, name: str, line: str) -> None:
        """A terminal that went away must not end the keeper, and with it everything kept."""
        with contextlib.suppress(OSError, ValueError):
            self._log(name, line)

    def _reap(self, child: _Child) -> None:
        """Books the end of a life, and the next one where it was not asked for."""
        popen = child.popen
        assert popen is not None
        assert popen.stdout is not None
        _signal_group(child, signal.SIGKILL)  # what it left behind; its pid is not free before wait()
        child.code = popen.wait()
        while popen.stdout.fileno() in self._selector.get_map() and self._read(child, popen.stdout.fileno()):
            pass
        with contextlib.suppress(KeyError):
            self._selector.unregister(popen.stdout)
        popen.stdout.close()
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.popen, child.pidfd = None, -1
        if child.wanted:
            self._after_unasked_end(child)
        child.ended.set()

    def _after_unasked_end(self, child: _Child) -> None:
        how = f"status {child.code}" if child.code is None or child.code >= 0 else signal.Signals(-child.code).name
        if not self._restart:
            self._say(child.spec.name, f"ended: {how}")
            return
        child.num_failures = 1 if time.monotonic() - child.started_s > _LONG_LIFE_S else child.num_failures + 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (child.num_failures - 1))
        child.restart_at_s = time.monotonic() + pause_s
        self._say(child.spec.name, f"ended: {how}; starting again in {pause_s:g} s")

    def _dismiss(self, child: _Child) -> None:
        child.wanted = False
        child.restart_at_s = None
        if child.popen is None:
            child.ended.set()
        _signal_group(child, signal.SIGTERM)
        _signal_group(child, signal.SIGCONT)  # a frozen process can't end


def _signal_group(child: _Child, number: int) -> None:
    if child.popen is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.popen.pid, number)
