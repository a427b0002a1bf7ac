"""What followers of a handoff are told, in order and from its beginning, whenever they come. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.kvtransfer.leases import TOMBSTONE_S
from services.kvtransfer.messages import FirstToken, ReadyBlock

MAX_WAIT_S = 60.0


class HandoffState(Enum):
    """Where a handoff stands, as its holder sees it."""

    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Progress:
    """One piece of news: blocks that became readable, and with COMPLETE the first token."""

    handoff_id: str
    state: HandoffState
    reason: str = ""
    num_tokens: int = 0
    num_blocks: int = 0
    blocks: tuple[ReadyBlock, ...] = ()
    first_token: FirstToken | None = None


Follower = Callable[[Progress], None]


@dataclass(slots=True)
class _Handoff:
    """`num_tokens` is 0 while nobody has opened it: then followers only wait, and where it is `expected`, unbounded."""

    num_tokens: int = 0
    expected: bool = False
    num_blocks: int = 0
    blocks: list[ReadyBlock] = field(default_factory=list)
    first_token: FirstToken | None = None
    failed: str = ""
    followers: list[Follower] = field(default_factory=list)

    @property
    def is_unknown(self) -> bool:
        """Whether only followers have spoken of it."""
        return self.num_tokens == 0 and not self.expected and not self.failed


class OfferFeed:
    """All handoffs of one holder."""

    def __init__(self) -> None:
        self._handoffs: dict[str, _Handoff] = {}

    def expected(self, handoff_id: str) -> None:
        """The prompt waits for its turn here: followers wait with it, however long the queue."""
        self._handoffs.setdefault(handoff_id, _Handoff()).expected = True

    def opened(self, handoff_id: str, num_tokens: int, num_blocks: int) -> None:
        """The handoff exists; those who waited for it are told."""
        handoff = self._handoffs.setdefault(handoff_id, _Handoff())
        handoff.num_tokens, handoff.num_blocks = num_tokens, num_blocks
        self._tell(handoff_id, handoff, HandoffState.OPEN, ())

    def ready(self, handoff_id: str, blocks: Sequence[ReadyBlock]) -> None:
        """Blocks became readable."""
        if (handoff := self._handoffs.get(handoff_id)) and not handoff.failed:
            handoff.blocks += blocks
            self._tell(handoff_id, handoff, HandoffState.OPEN, tuple(blocks))

    def completed(self, handoff_id: str, first_token: FirstToken) -> None:
        """The first token was sampled."""
        if (handoff := self._handoffs.get(handoff_id)) and not handoff.failed:
            handoff.first_token = first_token
            self._tell(handoff_id, handoff, HandoffState.COMPLETE, ())

    def ended(self, handoff_id: str, failed: str = "") -> None:
        """The lease ended. With a reason, followers are told and late ones will be; without, they know already."""
        handoff = self._handoffs.setdefault(handoff_id, _Handoff())
        if failed and not handoff.failed:
            handoff.failed = failed
            self._tell(handoff_id, handoff, HandoffState.FAILED, ())
        handoff.blocks.clear()
        asyncio.get_running_loop().call_later(TOMBSTONE_S, self._handoffs.pop, handoff_id, None)

    def follow(self, handoff_id: str, follower: Follower, wait_s: float) -> None:
        """Tells `follower` all that was, then all that comes. An unknown handoff may stay so for `wait_s` seconds."""
        handoff = self._handoffs.setdefault(handoff_id, _Handoff())
        if follower not in handoff.followers:
            handoff.followers.append(follower)
        if handoff.failed:
            follower(self._progress(handoff_id, handoff, HandoffState.FAILED, ()))
        elif handoff.num_tokens == 0:
            wait_s = min(max(wait_s, 0.0), MAX_WAIT_S)
            asyncio.get_running_loop().call_later(wait_s, self._give_up, handoff_id, follower)
        else:
            follower(self._progress(handoff_id, handoff, HandoffState.OPEN, tuple(handoff.blocks)))
            if handoff.first_token is not None:
                follower(self._progress(handoff_id, handoff, HandoffState.COMPLETE, ()))

    def unfollow(self, handoff_id: str, follower: Follower) -> None:
        """Tells `follower` no more; idempotent."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return
        if follower in handoff.followers:
            handoff.followers.remove(follower)
        self._drop_unknown(handoff_id, handoff)

    def _give_up(self, handoff_id: str, follower: Follower) -> None:
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None and handoff.is_unknown and follower in handoff.followers:
            handoff.followers.remove(follower)
            follower(Progress(handoff_id, HandoffState.UNKNOWN, "the holder never heard of it"))
            self._drop_unknown(handoff_id, handoff)

    def _drop_unknown(self, handoff_id: str, handoff: _Handoff) -> None:
        if handoff.is_unknown and not handoff.followers:
            self._handoffs.pop(handoff_id, None)

    def _tell(self, handoff_id: str, handoff: _Handoff, state: HandoffState, blocks: tuple[ReadyBlock, ...]) -> None:
        for follower in handoff.followers:
            follower(self._progress(handoff_id, handoff, state, blocks))

    @staticmethod
    def _progress(handoff_id: str, handoff: _Handoff, state: HandoffState, blocks: tuple[ReadyBlock, ...]) -> Progress:
        token = handoff.first_token if state is HandoffState.COMPLETE else None
        return Progress(handoff_id, state, handoff.failed, handoff.num_tokens, handoff.num_blocks, blocks, token)
