"""Free ports for processes that are about to start."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on, never the same one twice in a process.

    It lies below the range the kernel takes outgoing connections' ports from: between now and the listener's start no
    connection can be given it. Raises OSError where none is free.
    """
    for port in random.sample(range(_LOWEST, _highest()), 500):
        if port not in _given and is_free(port, host):
            _given.add(port)
            return port
    raise OSError(errno.EADDRINUSE, "500 ports tried, none free")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether one could listen on `host:port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _highest() -> int:
    try:
        lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except OSError:
        lowest_ephemeral = 32_768
    return max(lowest_ephemeral, _LOWEST + 1_000)
