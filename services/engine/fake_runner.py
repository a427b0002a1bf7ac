"""A runner without a model, for tests and rehearsals: every token is a hash of all tokens before it.

It keeps a KV cache like a real one: the step's tokens are written into the slots of their blocks, and what precedes
is read back from there, never from the sequence. So a block that was evicted, shared, transferred or indexed wrongly
changes the output, and `expected_output` says what it must be.
"""

import hashlib
from collections.abc import Sequence as Tokens

from services.engine.batch import Batch, SampledToken

SLOT_BYTES = 8  # one token id plus one, native uint64; 0 is an empty slot


def next_token(token_ids: Tokens[int], vocab_size: int) -> int:
    """The token that follows token_ids."""
    text = ",".join(map(str, token_ids)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % vocab_size


def expected_output(prompt_token_ids: Tokens[int], num_tokens: int, vocab_size: int = 1000) -> list[int]:
    """The num_tokens tokens that a FakeRunner gives for a prompt, worked out without blocks or batches."""
    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, vocab_size))
    return token_ids[len(prompt_token_ids) :]


class FakeRunner:
    """Implements Runner over `memory`: writable bytes of num_blocks * block_bytes (its own where none are given).

    Block i is bytes [i * block_bytes, (i + 1) * block_bytes), as a transport that moves blocks expects.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        memory: bytearray | memoryview | None = None,
        vocab_size: int = 1000,
    ) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * SLOT_BYTES
        self.vocab_size = vocab_size
        self.num_steps = 0
        if memory is None:
            memory = bytearray(num_blocks * self.block_bytes)
        self._slots = memoryview(memory).cast("B")[: num_blocks * self.block_bytes].cast("Q")

    def run(self, batch: Batch) -> list[SampledToken]:
        """One token per item with sample=True, in order. Raises LookupError where KV it has to read was never written.

        First every item writes and then every item reads, as the layers of a model do: an item that wrote into a
        block of another one would be noticed.
        """
        self.num_steps += 1
        for item in batch.items:
            new = item.seq.token_ids(item.start, item.start + item.num_tokens)
            for position, token_id in enumerate(new, item.start):
                self.write_slot(self._slot(item.seq.block_ids, position), token_id)
        tokens = []
        for item in batch.items:
            if item.sample:
                seen = self._read(item.seq.block_ids, item.start + item.num_tokens)
                tokens.append(SampledToken(next_token(seen, self.vocab_size)))
        return tokens

    def write_slot(self, slot: int, token_id: int) -> None:
        """Put a token's KV into a slot (block id * block_size + offset)."""
        self._slots[slot] = token_id + 1

    def _slot(self, block_ids: list[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, block_ids: list[int], num_tokens: int) -> list[int]:
        token_ids = [self._slots[self._slot(block_ids, position)] - 1 for position in range(num_tokens)]
        if -1 in token_ids:
            raise LookupError(f"position {token_ids.index(-1)} of blocks {block_ids} was never written")
        return token_ids
