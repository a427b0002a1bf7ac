"""Which lives of which workers are over. A restart is a new epoch; what comes from an old one is refused."""

from __future__ import annotations

REMEMBERED = 64  # past epochs per worker


class EpochBook:
    """The current epoch of every worker heard of, and those it had before."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}
        self._over: dict[str, list[str]] = {}

    def is_over(self, worker_id: str, epoch: str) -> bool:
        """True for an epoch that a later one of the same worker has replaced."""
        return epoch in self._over.get(worker_id, ())

    def is_current(self, worker_id: str, epoch: str) -> bool:
        """True for the epoch that was admitted last."""
        return self._current.get(worker_id) == epoch

    def admit(self, worker_id: str, epoch: str) -> bool:
        """Makes `epoch` the current one. False where it is over: a delayed message of a past life changes nothing.

        Only for an epoch that the process itself has spoken or answered with: hearsay must not depose a live process.
        """
        if self.is_over(worker_id, epoch):
            return False
        current = self._current.get(worker_id)
        if current is not None and current != epoch:
            over = self._over.setdefault(worker_id, [])
            over.append(current)
            del over[:-REMEMBERED]
        self._current[worker_id] = epoch
        return True
