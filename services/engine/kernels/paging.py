"""Where a step's tokens lie in the paged cache: what every attention backend needs, on the host and on the device."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch


@dataclass(frozen=True, eq=False)
class Paging:
    """The sequences of one step, laid out one after the other along the token axis.

    Sequence s owns query rows `[query_starts[s], query_starts[s + 1])`: the last tokens of its context of `seq_lens[s]`
    tokens, whose KV lies in `block_tables[s]`. The host lists repeat the device tensors, so that nothing is read back.
    `memo` keeps what a backend derives from this once per step rather than once per layer.

    A step may end in padding: sequences of length 0 with one query row, whose slot is -1. Their KV is not written and
    nothing of the cache is read for them; what attention gives for them means nothing.
    """

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; entries past a sequence's end are any valid block
    seq_lens: torch.Tensor  # [num_seqs] int32, this step's tokens included
    query_starts: torch.Tensor  # [num_seqs + 1] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block id * block_size + slot, where each token's KV goes; or -1
    host_seq_lens: list[int]
    host_query_starts: list[int]
    block_size: int
    num_padding_tokens: int = 0  # for torch's write; kernels on a device go by the slot
    memo: dict[object, object] = field(default_factory=dict)

    @cached_property
    def max_query_len(self) -> int:
        """Longest run of query rows of one sequence."""
        starts = self.host_query_starts
        return max(after - before for before, after in pairwise(starts))

    @cached_property
    def decode_ids(self) -> list[int]:
        """Sequences with exactly one query row, in order."""
        starts = self.host_query_starts
        return [s for s in range(len(self.host_seq_lens)) if starts[s + 1] - starts[s] == 1]

    @cached_property
    def chunk_ids(self) -> list[int]:
        """Sequences with more than one query row, in order."""
        starts = self.host_query_starts
        return [s for s in range(len(self.host_seq_lens)) if starts[s + 1] - starts[s] > 1]

    @cached_property
    def write_index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`slot_mapping` without the padding as (block ids, slots), each [num_tokens - num_padding_tokens]."""
        slots = self.slot_mapping[: len(self.slot_mapping) - self.num_padding_tokens]
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        return blocks, slots - blocks * self.block_size


def write_kv(layer: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paging: Paging) -> None:
    """Write a step's keys and values `[num_tokens, num_kv_heads, head_dim]` into one layer of the cache.

    `layer` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]` in any strides.
    """
    blocks, slots = paging.write_index
    layer[blocks, 0, :, slots] = key[: len(blocks)].to(layer.dtype)
    layer[blocks, 1, :, slots] = value[: len(blocks)].to(layer.dtype)
