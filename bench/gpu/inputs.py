"""Paged attention inputs of any shape on any device, and how long something takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.engine.kernels import Paging


@dataclass(frozen=True, slots=True)
class Work:
    """One step's attention: `lengths` holds (query rows, context length with them) of each sequence."""

    lengths: Sequence[tuple[int, int]]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a `Work`; `keys` and `values` repeat the cache contiguously, `[context, num_kv_heads, head_dim]`."""

    query: torch.Tensor
    layer: torch.Tensor
    paging: Paging
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make(work: Work, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Random keys and values in shuffled blocks; slots that no sequence owns hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = work.block_size
    counts = [-(-context // size) for _, context in work.lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    layer = torch.full((len(order), 2, work.num_kv_heads, size, work.head_dim), float("nan"), dtype=dtype)
    keys, values, first = [], [], 0
    for row, (count, (_, context)) in enumerate(zip(counts, work.lengths, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        shape = (2, context, work.num_kv_heads, work.head_dim)
        both = torch.randn(shape, generator=generator).to(dtype)
        padded = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, count * size - context), value=float("nan"))
        blocks = padded.view(2, count, size, work.num_kv_heads, work.head_dim).permute(1, 0, 3, 2, 4)
        layer[tables[row, :count].long()] = blocks
        keys.append(both[0].to(device))
        values.append(both[1].to(device))
    rows = [rows for rows, _ in work.lengths]
    starts = [0, *torch.tensor(rows).cumsum(0).tolist()]
    paging = Paging(
        block_tables=tables.to(device),
        seq_lens=torch.tensor([context for _, context in work.lengths], dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64, device=device),
        host_seq_lens=[context for _, context in work.lengths],
        host_query_starts=starts,
        block_size=size,
    )
    query = torch.randn(sum(rows), work.num_heads, work.head_dim, generator=generator).to(dtype)
    return Inputs(query.to(device), layer.to(device), paging, keys, values)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """The median of `repeats` runs after three to warm up, each timed on the device itself where it can be."""
    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize(device)
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started_s = time.perf_counter()
            work()
            found.append(time.perf_counter() - started_s)
    return float(statistics.median(found))
