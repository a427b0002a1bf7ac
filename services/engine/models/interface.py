"""What the runner needs of a model, and nothing else: step tensors and a cache in, logits of the sampled rows out."""

from dataclasses import dataclass
from typing import Protocol

import torch

from services.engine.kernels import Paging
from services.engine.kv_cache import KVCache, KVShape


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message names it and what it needs."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """One step's tokens, flattened over its sequences."""

    token_ids: torch.Tensor  # [num_tokens] int64
    position_ids: torch.Tensor  # [num_tokens] int64
    sample_rows: torch.Tensor  # [num_samples] int64, rows of token_ids whose next token is wanted
    paging: Paging


class DecoderModel(Protocol):
    """A decoder-only model over a paged cache."""

    device: torch.device
    dtype: torch.dtype  # of activations, and so of keys and values
    vocab_size: int
    max_model_len: int

    def kv_shape(self, num_blocks: int, block_size: int = 16) -> KVShape:
        """Return the shape of a cache for this model."""
        ...

    def forward(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        """Write the step's KV into the cache and return logits `[num_samples, vocab_size]` in float32."""
        ...
