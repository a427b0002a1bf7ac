"""The holder's side: blocks that a peer may read, from reservation to release.

The life of an offer, all calls on the engine thread:

0. `expect` when the prompt arrives and must wait for its turn: whoever follows the handoff waits with it;
1. `open` when the blocks of the whole prompt are reserved: a lease begins. False: it was cancelled before it came;
2. `progress` as chunks finish: full blocks become readable, after the transfer thread has taken their checksums;
3. `complete` with the first token, when the last chunk is done (or `fail`);
4. `tick`, each turn of the loop and at least once a second, returns the leases that ended: their blocks are the
   engine's again. A LeasesChanged in the inbox says that one ended just now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.kvtransfer.checksum import BlockMemory
from services.kvtransfer.feed import OfferFeed
from services.kvtransfer.leases import LeaseClosed, LeaseOutcome, LeaseTable
from services.kvtransfer.messages import FirstToken, ReadyBlock
from services.kvtransfer.transfer_thread import TransferThread


@dataclass(slots=True)
class _Offer:
    """[0, num_ready) of block_ids were announced, never written again while the lease lasts."""

    num_tokens: int
    block_ids: tuple[int, ...]
    num_ready: int = 0


class Offers:
    """All offers of one worker."""

    def __init__(
        self,
        leases: LeaseTable,
        feed: OfferFeed,
        thread: TransferThread,
        memory: BlockMemory,
        block_size: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._leases = leases
        self._feed = feed
        self._thread = thread
        self._memory = memory
        self._block_size = block_size
        self._loop = loop
        self._clock = clock
        self._offers: dict[str, _Offer] = {}

    def expect(self, handoff_id: str) -> None:
        """The prompt has arrived; `open` or `fail` comes."""
        self._tell(self._feed.expected, handoff_id)

    def open(self, handoff_id: str, num_tokens: int, block_ids: Sequence[int]) -> bool:
        """Leases the blocks that will hold `num_tokens` of KV. False where the handoff is over already: do not begin.

        Raises ValueError where the blocks are not exactly those that the tokens need, or the handoff is open.
        """
        if len(block_ids) != -(-num_tokens // self._block_size) or num_tokens < 1:
            raise ValueError(f"{num_tokens} tokens do not fill {len(block_ids)} blocks of {self._block_size}")
        if not self._leases.open(handoff_id, block_ids, self._clock()):
            return False
        self._offers[handoff_id] = _Offer(num_tokens, tuple(block_ids))
        self._tell(self._feed.opened, handoff_id, num_tokens, len(block_ids))
        return True

    def progress(self, handoff_id: str, num_ready_tokens: int) -> None:
        """The KV of the first `num_ready_tokens` is in memory: their full blocks become readable, the last one with the
        last token. Unused slots of the last block must be zeroed by now. Nothing happens where the offer is over."""
        offer = self._offers.get(handoff_id)
        if offer is None:
            return
        all_ready = num_ready_tokens >= offer.num_tokens
        num_ready = len(offer.block_ids) if all_ready else num_ready_tokens // self._block_size
        if num_ready > offer.num_ready:
            first, offer.num_ready = offer.num_ready, num_ready
            block_ids = offer.block_ids[first:num_ready]
            self._thread.submit(lambda: self._announce(handoff_id, first, block_ids))
        if all_ready:
            self._leases.complete(handoff_id)

    def complete(self, handoff_id: str, first_token: FirstToken) -> None:
        """The prompt is computed, `progress` has said so, and token 0 sampled now: what the release is timed from.

        Followers hear of it after all blocks.
        """
        if handoff_id in self._offers:
            self._leases.complete(handoff_id, self._clock())
            self._thread.submit(lambda: self._tell(self._feed.completed, handoff_id, first_token))

    def fail(self, handoff_id: str, reason: str) -> None:
        """The holder gives up a handoff, also one it never opened; followers are told, `tick` returns the lease."""
        self._leases.close(handoff_id, self._clock())
        self._tell(self._feed.ended, handoff_id, reason)

    def tick(self, now: float) -> list[LeaseClosed]:
        """The leases that ended since the last tick; `now` is of the connector's clock (time.monotonic)."""
        closed = self._leases.sweep(now)
        for lease in closed:
            self._offers.pop(lease.handoff_id, None)
            failed = "" if lease.outcome is LeaseOutcome.RELEASED else f"the lease is {lease.outcome.value}"
            self._tell(self._feed.ended, lease.handoff_id, failed)
        return closed

    @property
    def num_open(self) -> int:
        """Leases not yet given back; a draining holder stays until there are none."""
        return self._leases.num_open

    def _announce(self, handoff_id: str, first: int, block_ids: tuple[int, ...]) -> None:
        checksums = self._memory.checksums(block_ids)
        blocks = [ReadyBlock(first + i, block_ids[i], checksums[i]) for i in range(len(block_ids))]
        self._tell(self._feed.ready, handoff_id, blocks)

    def _tell(self, news: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(news, *arguments)
