"""The sequences that hold no blocks and want to run, in the order in which they may."""

from bisect import insort
from collections import OrderedDict

from services.engine.policies import rank
from services.engine.sequence import PriorityClass, Sequence


class WaitingQueue:
    """Sequences that had blocks before, by rank; then new ones, by class and first come first served.

    Adding, finding the head and removing a new one cost O(1); the returned ones are at most as many as run at once.
    """

    def __init__(self) -> None:
        self._returned: list[Sequence] = []  # sorted by rank
        self._new: dict[PriorityClass, OrderedDict[str, Sequence]] = {each: OrderedDict() for each in PriorityClass}
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        """How many wait."""
        return len(self._returned) + sum(len(queue) for queue in self._new.values())

    @property
    def num_returned(self) -> int:
        """How many of them were preempted, or lost the transfer they were waiting for."""
        return len(self._returned)

    def push(self, seq: Sequence) -> None:
        """Queue a new arrival."""
        self._new[seq.priority][seq.sequence_id] = seq
        self.num_tokens += seq.num_tokens

    def push_back(self, seq: Sequence) -> None:
        """Queue one that gave its blocks back: before all new arrivals, whatever their class."""
        insort(self._returned, seq, key=rank)
        self.num_tokens += seq.num_tokens

    def head(self) -> Sequence | None:
        """The next to be admitted."""
        if self._returned:
            return self._returned[0]
        for queue in self._new.values():
            if queue:
                return next(iter(queue.values()))
        return None

    def remove(self, seq: Sequence) -> None:
        """Take one out, admitted or given up."""
        if self._new[seq.priority].pop(seq.sequence_id, None) is None:
            self._returned.remove(seq)
        self.num_tokens -= seq.num_tokens
