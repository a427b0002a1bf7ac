"""One handoff on its way into a decode worker: what was announced, pulled and verified so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.sequence import Sequence
from services.kvtransfer.messages import BlockPull, FirstToken, ReadyBlock


class HandoffMismatchError(Exception):
    """What the holder offers is not what the request asked for; the text says what differs."""


@dataclass(slots=True)
class Inbound:
    """Blocks `[0, num_held)` of the table were cached here; the rest is pulled, each block once."""

    seq: Sequence
    room_by_s: float  # time.monotonic; the attempt ends without room by then
    num_blocks: int  # that the prompt fills
    num_held: int = 0  # known once reserved
    reserved: bool = False
    releasing: bool = False
    ready: list[ReadyBlock] = field(default_factory=list)  # announced, not asked for yet
    num_verified: int = 0
    num_bytes: int = 0
    first_token: FirstToken | None = None
    fetch_began_s: float | None = None
    verified_s: float | None = None
    complete_s: float | None = None  # when decode heard that the prompt is computed
    since_complete_s: float | None = None  # a span of the holder's clock: token 0 sampled to the release arrived there

    def exposed_s(self, runnable_s: float) -> float:
        """What of the transfer did not hide behind the prefill, in seconds.

        By the holder's clock where it told; else from hearing that the prompt is computed to `runnable_s`, or 0.
        """
        if self.since_complete_s is not None:
            return self.since_complete_s
        return max(0.0, runnable_s - self.complete_s) if self.complete_s is not None else 0.0

    @property
    def transfer_s(self) -> float:
        """First pull posted to last block verified, in seconds."""
        if self.fetch_began_s is None or self.verified_s is None:
            return 0.0
        return self.verified_s - self.fetch_began_s

    def announced(self, num_tokens: int, num_blocks: int, blocks: tuple[ReadyBlock, ...]) -> None:
        """Takes news of readable blocks. Raises HandoffMismatchError."""
        if num_tokens != self.seq.num_tokens or num_blocks != self.num_blocks:
            raise HandoffMismatchError(
                f"num_tokens: {num_tokens} in {num_blocks} blocks offered, "
                f"{self.seq.num_tokens} in {self.num_blocks} wanted"
            )
        if any(block.index >= self.num_blocks for block in blocks):
            raise HandoffMismatchError(f"block index outside the {self.num_blocks} offered")
        self.ready.extend(blocks)

    def take_pulls(self, now: float) -> list[BlockPull]:
        """What can be pulled now and was not asked for; needs the reservation."""
        pulls = [
            BlockPull(block.index, block.block_id, self.seq.block_ids[block.index], block.checksum)
            for block in self.ready
            if block.index >= self.num_held
        ]
        self.ready.clear()
        if pulls and self.fetch_began_s is None:
            self.fetch_began_s = now
        return pulls

    @property
    def is_whole(self) -> bool:
        """Every block is here and verified, and the first token is known."""
        return self.reserved and self.first_token is not None and self.num_verified == self.num_blocks - self.num_held
