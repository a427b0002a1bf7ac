"""Every sequence that has not ended, in the place that its state says it is in."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from services.engine.deadlines import Deadlines
from services.engine.policies import rank
from services.engine.sequence import Sequence, SequenceState
from services.engine.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """How much there is to do now."""

    num_waiting: int
    num_running: int
    num_receiving: int
    backlog_tokens: int  # of waiting and prefilling sequences, not computed yet


class Roster:
    """WAITING ones are in `waiting`, RECEIVING ones in `receiving`, RUNNING ones in `decoding` or `prefilling`.

    Whoever moves a sequence here changes its state accordingly; the scheduler does both.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.waiting = WaitingQueue()
        self.receiving: dict[str, int] = {}  # sequence id -> new blocks allocated for it
        self.decoding: dict[str, Sequence] = {}  # their newest output token is all there is to compute
        self.prefilling: list[Sequence] = []  # sorted by rank
        self.deadlines = Deadlines(self.by_id)
        self._num_entered = 0

    def enter(self, seq: Sequence) -> None:
        """Register a new sequence and give it its place in the order of arrival."""
        self._num_entered += 1
        seq.order = self._num_entered
        self.by_id[seq.sequence_id] = seq
        if seq.deadline_s is not None:
            self.deadlines.push(seq.deadline_s, seq.sequence_id)

    def prefill(self, seq: Sequence) -> None:
        """Put a sequence among the prefilling ones."""
        insort(self.prefilling, seq, key=rank)

    def leave_state(self, seq: Sequence) -> None:
        """Take a sequence out of where it is; it is still registered."""
        if seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        elif seq.state is SequenceState.RECEIVING:
            del self.receiving[seq.sequence_id]
        elif self.decoding.pop(seq.sequence_id, None) is None:
            self.prefilling.remove(seq)

    def exit(self, seq: Sequence) -> None:
        """Take a sequence out altogether."""
        self.leave_state(seq)
        del self.by_id[seq.sequence_id]

    def running(self) -> Iterator[Sequence]:
        """Those a step may compute."""
        return chain(self.decoding.values(), self.prefilling)

    @property
    def num_seated(self) -> int:
        """How many hold blocks."""
        return len(self.decoding) + len(self.prefilling) + len(self.receiving)

    @property
    def num_inbound_blocks(self) -> int:
        """New blocks allocated for the receiving ones."""
        return sum(self.receiving.values())

    def load(self) -> SchedulerLoad:
        """How much there is to do now."""
        return SchedulerLoad(
            num_waiting=len(self.waiting),
            num_running=len(self.decoding) + len(self.prefilling),
            num_receiving=len(self.receiving),
            backlog_tokens=self.waiting.num_tokens
            + sum(seq.num_tokens - seq.num_computed_tokens for seq in self.prefilling),
        )
