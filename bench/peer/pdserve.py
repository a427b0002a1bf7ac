"""pdserve itself: colocated, one decode worker with all cores; or disaggregated, both pools on the same cores."""

import importlib.metadata
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from bench.peer.server import NotRunError, Wants
from services.launcher.deployment import Deployment, StartError
from services.launcher.nats_server import NoNatsServerError


class Pdserve:
    """A deployment of its own."""

    def __init__(self, name: str, model: str, prefill: int, threads: int) -> None:
        self.name = name
        self.wants = Wants(model, {"temperature": 0, "ignore_eos": True})
        self._log: TextIO | None = None
        self._house: Deployment | None = None
        self._options: dict[str, Any] = {"model": model, "prefill": prefill, "decode": 1, "threads": threads}

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what it is made of."""
        return {"pdserve": importlib.metadata.version("pdserve"), "torch": importlib.metadata.version("torch")}

    @property
    def settings(self) -> Mapping[str, str]:
        """What it runs with, in words."""
        flags = " ".join(f"--{key} {value}" for key, value in self._options.items())
        return {"flags": f"pdserve up {flags}, all else default", "python": sys.version.split()[0]}

    def start(self, log: Path) -> str:
        """Starts it, its output in `log`; returns the base URL once it answers. Raises NotRunError."""
        self._log = log.open("w")
        try:
            self._house = Deployment(log=self._write, **self._options)
            self._house.start()
        except (StartError, NoNatsServerError, OSError) as error:
            raise NotRunError(str(error).partition("\n")[0]) from error
        return self._house.gateway_url

    def stop(self) -> None:
        """Ends all of its processes; idempotent."""
        if self._house is not None:
            self._house.close()
            self._house = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def groups(self) -> list[int]:
        """The process groups it consists of: one for each of its processes."""
        if self._house is None:
            return []
        pids = [self._house.pid(name) for name in self._house.members]
        return [pid for pid in pids if pid is not None]

    def pause(self) -> None:
        """Freezes it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Thaws it."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._house is not None:
            for name in self._house.members:
                self._house.signal(name, number)

    def _write(self, name: str, line: str) -> None:
        if self._log is not None:
            self._log.write(f"{name:<11} {line}\n")
            self._log.flush()
