"""What the connector and a worker's engine say to one another: plain frozen facts, posted to the engine's inbox."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0 of a handoff's continuation, sampled by the holder. `finish_reason`: stop, length ... or None."""

    token_id: int
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ReadyBlock:
    """A block that may be read now. `index` is its position in the sequence's block table."""

    index: int
    block_id: int
    checksum: int


@dataclass(frozen=True, slots=True)
class BlockPull:
    """One block to pull: from the holder's `remote_block_id` into this pool's `local_block_id`."""

    index: int
    remote_block_id: int
    local_block_id: int
    checksum: int


# To the puller's engine.


@dataclass(frozen=True, slots=True)
class HandoffReady:
    """More blocks of a followed handoff became readable; `num_tokens` and `num_blocks` are those of the whole."""

    handoff_id: str
    num_tokens: int
    num_blocks: int
    blocks: tuple[ReadyBlock, ...]


@dataclass(frozen=True, slots=True)
class HandoffComplete:
    """The prompt is computed; all its blocks were announced before."""

    handoff_id: str
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The handoff will not complete; nothing more comes of it. Answer with `cancel`."""

    handoff_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """Blocks arrived and their checksums are right. `seconds`: from posting to the last byte."""

    handoff_id: str
    indices: tuple[int, ...]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlocksCorrupt:
    """Blocks arrived with wrong checksums; `release` them by index, so that the holder drops them."""

    handoff_id: str
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch will not arrive. Answer with `cancel`, which names the blocks that may still be written."""

    handoff_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The holder's answer to `release`: whether the lease held throughout. Only then do the blocks count.

    `since_complete_s`: by the holder's clock, from token 0 sampled there to the release arrived there; None: unknown.
    """

    handoff_id: str
    held: bool
    since_complete_s: float | None = None


@dataclass(frozen=True, slots=True)
class QuarantineEnded:
    """No transfer can write these blocks any more (they were returned by an earlier `cancel`)."""

    local_block_ids: tuple[int, ...]


# To either engine.


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """A lease ended by a call from outside: `offers.tick` has news. Its only use is to wake the engine."""


@dataclass(frozen=True, slots=True)
class ConnectorFailed:
    """The transfer thread died of a bug: no transfer will ever finish. Drain and restart."""

    reason: str
