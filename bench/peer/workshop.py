"""Where peers are made: a folder that belongs to nobody's dependencies, and long commands with their progress shown."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import report
from bench.peer.server import NotRunError, leashed
from services.runtime.model_store import cache_root

POLITE = ("nice", "-n", "10")
POLL_S = 0.2


def root() -> Path:
    """The folder of all peers: $PDSERVE_PEERS, or `peers` in pdserve's cache."""
    chosen = os.environ.get("PDSERVE_PEERS")
    return Path(chosen) if chosen else cache_root() / "peers"


def do(what: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, its output appended to `log`. Raises NotRunError with its last line."""
    print(f"  {what}", file=sys.stderr, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with log.open("ab") as output:
        child = subprocess.Popen(
            leashed([*POLITE, *command]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            while (code := child.poll()) is None:
                report.progress(f"    {time.monotonic() - started_s:4.0f} s  {_last_line(log)[:100]}")
                time.sleep(POLL_S)
        finally:
            report.progress("")
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if code:
        raise NotRunError(f"{what} failed (exit {code}): {_last_line(log)[:200]}")


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
