"""Removes the shared memory of processes that could not do so themselves, also when the launcher itself was killed.

1. The launcher starts this file as a plain script and writes the pid of every process it starts to its input.
2. The input ends when the launcher closes it, or dies.
3. The sweeper waits until each pid is gone, for a while, and removes the segments that carry it in their name.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

SEGMENT_FOLDER = Path("/dev/shm")
SEGMENT_PREFIX = "pdserve-kv-"  # of services.kvtransfer.shm_transport, followed by the owner's pid and a dash
_PATIENCE_S = 10.0


class Sweeper:
    """The launcher's side."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__]
        self._popen = Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def watch(self, pid: int) -> None:
        """Has what `pid` leaves in shared memory removed at the end."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(b"%d\n" % pid)
        self._popen.stdin.flush()

    def close(self) -> None:
        """Returns when all is swept; the watched processes must have ended. Idempotent."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()


def sweep(pids: list[int]) -> None:
    """Removes the segments of those of `pids` that end within the patience."""
    deadline_s = time.monotonic() + _PATIENCE_S
    left = set(pids)
    while left and time.monotonic() < deadline_s:
        for pid in [pid for pid in left if not _runs(pid)]:
            for segment in SEGMENT_FOLDER.glob(f"{SEGMENT_PREFIX}{pid}-*"):
                segment.unlink(missing_ok=True)
            left.discard(pid)
        time.sleep(0.02 if left else 0)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False


if __name__ == "__main__":
    sweep([int(line) for line in sys.stdin])
