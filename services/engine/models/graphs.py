"""Decode steps as CUDA graphs: one launch for the hundreds of kernels of a step.

The life of a step:

1. It is for a graph where every sequence has one token and wants the next (`DecodeGraphs.run`); all else runs eagerly.
2. Its *bucket* is the next larger number of rows and the next larger width of the block tables.
3. Its tensors are copied into buffers that never move. Rows beyond the step are padding: slot -1, which no kernel
   writes, and length 0, for which attention reads nothing. All else in them is what an earlier step left: valid.
4. The first step of a bucket captures its graph, every step replays it, and the step's rows of the logits are returned.

A graph has the addresses of one cache, of the buffers and of the weights in it, and the sizes of its launches, so the
host lists of its `Paging` say the bucket's most: kernels take the real lengths from the device. How a context is split
over programs follows from the bucket then, so results may differ from eager ones in the last bits.

What captures is injected; `CudaCapture` is the real thing and has **never run on a GPU**. Tests run the rest on the
CPU, where a "graph" computes anew from the same buffers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.kernels import Paging
from services.engine.kv_cache import KVCache
from services.engine.models.interface import StepTensors

MOST_ROWS = 128  # larger steps run eagerly; the buffer of logits has so many rows, 65 MB at a vocabulary of 128,000
FEWEST_COLUMNS = 64  # of a block table; each width is four times the one before
WARM_UPS = 2  # eager runs before a capture: kernels are compiled and libraries make their workspaces

Compute = Callable[[StepTensors], None]
MakeStep = Callable[[], StepTensors]
Capture = Callable[[Compute, MakeStep], Callable[[], None]]  # returns what replays compute(make_step())

log = logging.getLogger(__name__)


class CaptureError(Exception):
    """CUDA refused to capture a step; the text is CUDA's."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of one graph: sequences, and block ids of each."""

    rows: int
    columns: int


def bucket_of(rows: int, columns: int, most_columns: int) -> Bucket | None:
    """The smallest bucket with room; None where none has.

    Rows: 1, 2, 4, 8, 16, 24, 32 ... `MOST_ROWS`; columns: 64, 256, 1024 ..., the last cut to `most_columns`.
    """
    if rows > MOST_ROWS or columns > most_columns:
        return None
    padded = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    width = FEWEST_COLUMNS
    while width < columns:
        width *= 4
    return Bucket(padded, min(width, most_columns))


class DecodeBuffers:
    """The tensors of a step of decodes, at addresses that never change; a bucket is their first rows and columns."""

    def __init__(self, most_columns: int, block_size: int, vocab_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._token_ids = torch.zeros(MOST_ROWS, dtype=torch.int64, device=device)
        self._position_ids = torch.zeros_like(self._token_ids)
        self._slot_mapping = torch.full_like(self._token_ids, -1)
        self._seq_lens = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(MOST_ROWS, most_columns, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(MOST_ROWS + 1, dtype=torch.int32, device=device)
        self._sample_rows = torch.arange(MOST_ROWS, dtype=torch.int64, device=device)
        self.logits = torch.zeros(MOST_ROWS, vocab_size, dtype=torch.float32, device=device)
        self._lengths: list[int] = []  # of the step that was filled in last

    def fill(self, step: StepTensors, bucket: Bucket) -> None:
        """Take a step over and pad it to its bucket. Queued on the current stream; nothing is waited for."""
        paging = step.paging
        rows, columns = paging.block_tables.shape
        self._token_ids[:rows].copy_(step.token_ids)
        self._position_ids[:rows].copy_(step.position_ids)
        self._slot_mapping[:rows].copy_(paging.slot_mapping)
        self._seq_lens[:rows].copy_(paging.seq_lens)
        self._block_tables[:rows, :columns].copy_(paging.block_tables)
        self._slot_mapping[rows : bucket.rows].fill_(-1)
        self._seq_lens[rows : bucket.rows].zero_()
        self._lengths = paging.host_seq_lens

    def step(self, bucket: Bucket) -> StepTensors:
        """The bucket's part of the buffers. Its host lists hold the most it can have, on a CPU what was filled in."""
        rows, num_padding = bucket.rows, 0
        lengths = [bucket.columns * self._block_size] * rows
        if self._device.type == "cpu":  # whose kernels work from the host lists
            num_padding = rows - len(self._lengths)
            lengths = self._lengths + [0] * num_padding
        paging = Paging(
            block_tables=self._block_tables[:rows, : bucket.columns],
            seq_lens=self._seq_lens[:rows],
            query_starts=self._query_starts[: rows + 1],
            slot_mapping=self._slot_mapping[:rows],
            host_seq_lens=lengths,
            host_query_starts=list(range(rows + 1)),
            block_size=self._block_size,
            num_padding_tokens=num_padding,
        )
        return StepTensors(self._token_ids[:rows], self._position_ids[:rows], self._sample_rows[:rows], paging)


class DecodeGraphs:
    """The graphs of one model, made as their buckets come up. Not for several threads at once."""

    def __init__(
        self,
        forward: Callable[[StepTensors, KVCache], torch.Tensor],
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`forward` computes a step eagerly, reading nothing back from the device."""
        self._forward = forward
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._device = device
        self._capture: Capture | None = capture
        self._kv_cache: KVCache | None = None
        self._replays: dict[Bucket, Callable[[], None]] = {}

    def run(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor | None:
        """Logits `[num_rows, vocab_size]` that the next call overwrites; None where the step is to be run eagerly."""
        rows, columns = step.paging.block_tables.shape
        if self._capture is None or not rows == len(step.token_ids) == len(step.sample_rows):
            return None
        if kv_cache is not self._kv_cache:
            self._begin(kv_cache)
        if (bucket := bucket_of(rows, columns, self._most_columns)) is None:
            return None
        self._buffers.fill(step, bucket)
        if bucket not in self._replays:
            try:
                self._replays[bucket] = self._capture(self._compute, lambda: self._buffers.step(bucket))
            except CaptureError as error:
                log.warning("decode steps run without CUDA graphs: %s", error)
                self._capture = None
                return None
        self._replays[bucket]()
        return self._buffers.logits[:rows]

    def _begin(self, kv_cache: KVCache) -> None:
        """Another cache lies elsewhere: what was captured is of no more use."""
        self._replays.clear()
        self._kv_cache = kv_cache
        block_size = kv_cache.shape.block_size
        self._most_columns = -(-self._max_model_len // block_size)
        self._buffers = DecodeBuffers(self._most_columns, block_size, self._vocab_size, self._device)

    def _compute(self, step: StepTensors) -> None:
        assert self._kv_cache is not None
        self._buffers.logits[: len(step.token_ids)].copy_(self._forward(step, self._kv_cache))


class CudaCapture:
    """Captures on the current device; all graphs share one pool of memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute, make_step: MakeStep) -> Callable[[], None]:
        """Runs the step eagerly first, which is harmless: the replay writes the same KV. Raises CaptureError."""
        step = make_step()  # once: what kernels keep in its memo must have been made before the capture, and stay
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the transfer thread may allocate and wait meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute(step)
        except RuntimeError as error:
            raise CaptureError(str(error)) from error

        def replay(step: StepTensors = step) -> None:  # which lives as long as the graph that reads it
            graph.replay()

        return replay


def default_capture(device: torch.device) -> Capture | None:
    """The real one on a CUDA device, unless PDSERVE_CUDA_GRAPHS is 0; None elsewhere."""
    if device.type != "cuda" or os.environ.get("PDSERVE_CUDA_GRAPHS", "1") == "0":
        return None
    return CudaCapture()
