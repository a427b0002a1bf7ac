"""How often a holder helps along what its peers read.

Over RDMA and cross-memory attach a peer reads without the owner's help. Over tcp, and while a connection is being wired
up, the owner must move UCX on. UCX's own progress thread would do that by spinning, which costs a whole core per
process even when idle; instead the transfer thread serves: often while something is on offer and there is work, rarely
while not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BUSY_S = 0.0002  # after a turn that found work
OFFERING_S = 0.002  # at the least while leases are open, or a peer has just said hello
IDLE_S = 0.02
HELLO_S = 1.0  # how long wiring up may take after a hello


class ServeBeat:
    """Calls `serve` in time. `serve()` says whether it found work; None: this transport needs no help."""

    def __init__(self, serve: Callable[[], bool | None], is_offering: Callable[[], bool]) -> None:
        self._serve = serve
        self._is_offering = is_offering
        self._delay_s = BUSY_S
        self._due_s = 0.0
        self._expected_until_s = 0.0

    def expect(self) -> None:
        """A peer will make first contact now. Any thread; wake the transfer thread afterwards."""
        self._expected_until_s = time.monotonic() + HELLO_S
        self._due_s = 0.0

    def poll(self) -> float | None:
        """Serves where it is time to; returns the seconds until it next is, None for never."""
        now = time.monotonic()
        if now < self._due_s:
            return self._due_s - now
        worked = self._serve()
        if worked is None:
            return None
        slowest_s = OFFERING_S if now < self._expected_until_s or self._is_offering() else IDLE_S
        self._delay_s = BUSY_S if worked else min(self._delay_s * 2, slowest_s)
        self._due_s = time.monotonic() + self._delay_s
        return self._delay_s
