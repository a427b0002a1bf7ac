"""When sequences must have ended."""

import heapq
from collections.abc import Container


class Deadlines:
    """A heap of (time, sequence id) in which those that ended early are forgotten lazily."""

    def __init__(self, live: Container[str]) -> None:
        self._live = live
        self._heap: list[tuple[float, str]] = []
        self._compact_at = 64

    def push(self, deadline_s: float, sequence_id: str) -> None:
        """Remember one; costs O(log n) of those remembered, at most about twice the live ones."""
        heapq.heappush(self._heap, (deadline_s, sequence_id))
        if len(self._heap) > self._compact_at:
            self._heap = sorted(entry for entry in self._heap if entry[1] in self._live)
            self._compact_at = 2 * len(self._heap) + 64

    def next(self) -> float | None:
        """The earliest deadline of a live sequence."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_s: float) -> list[str]:
        """The live sequences whose deadline is not after now_s, each once."""
        expired = []
        while (deadline_s := self.next()) is not None and deadline_s <= now_s:
            expired.append(heapq.heappop(self._heap)[1])
        return expired
