"""Runs a command that the kernel kills when its parent dies: `python leash.py PARENT_PID COMMAND...`.

1. The supervisor starts this file as a plain script (no site-packages: some 20 ms).
2. It asks the kernel for SIGKILL at the death of the thread that started it, and looks whether it is already too late.
3. It becomes the command; the request survives `execve`.

A `preexec_fn` would do the same between fork and exec of a process that has threads, where Python may deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Never returns. Raises OSError where the kernel refuses or the command does not exist."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)  # it died before step 2
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
