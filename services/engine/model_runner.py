"""Runs a batch: scheduled sequences in, one sampled token per sequence that reached its end out.

1. Flatten: the batch's tokens, positions, slots and block tables become step tensors (host first, one copy for all).
2. Forward: the model writes the step's KV into the cache and returns logits of the rows to be sampled.
3. Sample: one pass over those rows; reading the tokens is the step's one synchronisation with the device.

It knows nothing of requests, and decides nothing.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.batch import Batch, SampledToken, ScheduledSequence
from services.engine.kernels import Paging
from services.engine.kv_cache import KVCache
from services.engine.models.interface import DecoderModel, StepTensors
from services.engine.sampling import SamplingRow, sample
from services.engine.staging import Staging


class ModelRunner:
    """One model over one cache. Satisfies the engine's `Runner`."""

    def __init__(self, model: DecoderModel, kv_cache: KVCache) -> None:
        """Raises ValueError where the cache was not made for the model."""
        shape = kv_cache.shape
        if shape != model.kv_shape(shape.num_blocks, shape.block_size):
            raise ValueError(f"the cache's shape {shape} is not the model's")
        self._model = model
        self._kv_cache = kv_cache
        self._staging = None if model.device.type == "cpu" else Staging(model.device)

    def run(self, batch: Batch) -> list[SampledToken]:
        """Compute the batch; return one token per item with `sample`, in order."""
        logits = self.forward(batch)
        rows = self.sampling_rows(batch)
        return sample(logits, rows) if rows else []

    @staticmethod
    def sampling_rows(batch: Batch) -> list[SamplingRow]:
        """Who asks for a token, one for each row of logits."""
        return [
            SamplingRow(item.seq.params, item.seq.num_output_tokens, item.seq.eos_token_ids)
            for item in batch.items
            if item.sample
        ]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's KV; return the float32 logits `[num_samples, vocab_size]` of the items with `sample`."""
        return self._model.forward(self._flatten(batch.items), self._kv_cache)

    def _flatten(self, items: list[ScheduledSequence]) -> StepTensors:
        block_size = self._kv_cache.shape.block_size
        lengths = np.array([item.num_tokens for item in items])
        starts = np.array([item.start for item in items])
        query_starts = np.concatenate(([0], lengths.cumsum()))
        owners = np.repeat(np.arange(len(items)), lengths)  # [num_tokens]: which item each token belongs to
        positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[owners]
        tables = _block_tables(items, block_size)
        slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
        token_ids = np.empty(len(owners), dtype=np.int64)
        for item, first in zip(items, query_starts.tolist(), strict=False):
            token_ids[first : first + item.num_tokens] = item.seq.token_ids(item.start, item.start + item.num_tokens)
        sampled = np.array([item.sample for item in items])
        tensors = self._tensors(
            {
                "block_tables": tables,
                "seq_lens": (starts + lengths).astype(np.int32),
                "query_starts": query_starts.astype(np.int32),
                "slot_mapping": slots,
                "token_ids": token_ids,
                "position_ids": positions,
                "sample_rows": query_starts[1:][sampled] - 1,
            }
        )
        paging = Paging(
            block_tables=tensors["block_tables"],
            seq_lens=tensors["seq_lens"],
            query_starts=tensors["query_starts"],
            slot_mapping=tensors["slot_mapping"],
            host_seq_lens=(starts + lengths).tolist(),
            host_query_starts=query_starts.tolist(),
            block_size=block_size,
        )
        return StepTensors(
            token_ids=tensors["token_ids"],
            position_ids=tensors["position_ids"],
            sample_rows=tensors["sample_rows"],
            paging=paging,
        )

    def _tensors(self, arrays: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """The arrays on the device; on a CPU they share the memory."""
        if self._staging is None:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        return dict(zip(arrays, self._staging.to_device(list(arrays.values())), strict=True))


def _block_tables(items: list[ScheduledSequence], block_size: int) -> NDArray[np.int32]:
    """The items' block tables as far as this step reads them, `[num_items, longest]`, padded with their own first
    block."""
    counts = [-(-(item.start + item.num_tokens) // block_size) for item in items]
    tables = np.empty((len(items), max(counts)), dtype=np.int32)
    for row, item, count in zip(tables, items, counts, strict=True):
        row[:count] = item.seq.block_ids[:count]
        row[count:] = row[0]
    return tables
