"""A server under comparison: what it is told, its life, and what it costs while it idles.

1. A `Launch` says how to start it at its best settings, and how it wants to be asked.
2. `start(log)` returns the base URL once it answers; `stop()` ends all of its processes, by their process groups.
3. `pause()` freezes and `resume()` thaws all of them: for one that spins while another is in play.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import httpx2

from services.launcher.leash import __file__ as leash_file
from services.launcher.supervisor import ProcessSpec, Supervisor

START_TIMEOUT_S = 1200.0  # the first start of vLLM compiles for minutes
STOP_S = 20.0  # from SIGTERM to SIGKILL
POLL_S = 0.05


class NotRunError(RuntimeError):
    """A server could not be prepared or started; the message says why."""


@dataclass(frozen=True, slots=True)
class Wants:
    """How a server is asked."""

    model: str  # of the request
    extra: Mapping[str, Any]  # what a request body has on top: greedy, never stopping early
    ends_without_done: bool = False  # it closes a stream without [DONE]


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that serves, and where it says that it is ready."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    base_url: str
    wants: Wants
    ready_path: str = "/health"
    without: tuple[str, ...] = ()  # variables of ours that it must not inherit
    settings: Mapping[str, str] = field(default_factory=dict)  # what it runs with, in words

    @property
    def full_command(self) -> tuple[str, ...]:
        """The command, behind `env` where variables are taken away."""
        taken = [part for name in self.without for part in ("-u", name)]
        return ("env", *taken, *self.command) if taken else self.command


class Server(Protocol):
    """One server, whatever it is made of."""

    @property
    def name(self) -> str:
        """As the table names it."""

    @property
    def wants(self) -> Wants:
        """How it is asked."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what it is made of."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What it runs with, in words."""

    def start(self, log: Path) -> str:
        """Starts it, its output in `log`; returns the base URL once it answers. Raises NotRunError."""

    def stop(self) -> None:
        """Ends all of its processes; idempotent."""

    def groups(self) -> list[int]:
        """The process groups it consists of."""

    def pause(self) -> None:
        """Freezes it."""

    def resume(self) -> None:
        """Thaws it."""


class Spawned:
    """A server that is one command, and what that command starts."""

    def __init__(self, name: str, launch: Launch, versions: Mapping[str, str]) -> None:
        self.name, self.wants, self.versions, self.settings = name, launch.wants, versions, launch.settings
        self._launch = launch
        self._supervisor: Supervisor | None = None
        self._log: TextIO | None = None

    def start(self, log: Path) -> str:
        """Starts it, its output in `log`; returns the base URL once it answers. Raises NotRunError."""
        self._log = log.open("w")
        self._supervisor = Supervisor(self._write, restart=False)
        spec = ProcessSpec(self.name, self._launch.full_command, self._launch.env, stop_s=STOP_S)
        self._supervisor.start(spec)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with httpx2.Client(timeout=2.0, trust_env=False) as client:
            while not _answers(client, self._launch.base_url + self._launch.ready_path):
                if self._supervisor.wait(self.name, POLL_S):
                    raise NotRunError(f"it ended with {self._supervisor.exit_code(self.name)}: {self._last_words()}")
                if time.monotonic() > deadline_s:
                    raise NotRunError(f"not ready within {START_TIMEOUT_S:g} s: {self._last_words()}")
        return self._launch.base_url

    def stop(self) -> None:
        """Ends all of its processes; idempotent."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def groups(self) -> list[int]:
        """The process groups it consists of."""
        pid = None if self._supervisor is None else self._supervisor.pid(self.name)
        return [] if pid is None else [pid]

    def pause(self) -> None:
        """Freezes it."""
        if self._supervisor is not None:
            self._supervisor.signal(self.name, signal.SIGSTOP)

    def resume(self) -> None:
        """Thaws it."""
        if self._supervisor is not None:
            self._supervisor.signal(self.name, signal.SIGCONT)

    def _write(self, name: str, line: str) -> None:
        if self._log is not None:
            self._log.write(line + "\n")
            self._log.flush()

    def _last_words(self) -> str:
        assert self._supervisor is not None
        said = [line for line in self._supervisor.tail(self.name) if line.strip()]
        return said[-1][:200] if said else "it said nothing"


def leashed(command: Iterable[str]) -> list[str]:
    """The command, killed by the kernel where this process dies."""
    return [sys.executable, "-I", "-S", leash_file, str(os.getpid()), *command]


def idle_share(server: Server, seconds: float) -> float:
    """What the server computes while nobody asks it: seconds of CPU per second, of all its processes."""
    before_s, started_s = _cpu_s(server.groups()), time.perf_counter()
    time.sleep(seconds)
    return (_cpu_s(server.groups()) - before_s) / (time.perf_counter() - started_s)


def _cpu_s(groups: Iterable[int]) -> float:
    wanted, ticks = set(groups), 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) in wanted:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _answers(client: httpx2.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx2.HTTPError:
        return False
