"""The fused path: Llama-shaped models on a GPU, five products a layer and the least between them.

Query, key and value are one product, gate and up another; normalisation, rotation, the KV write and SiLU are the fused
operators of `kernels/fused.py`. Logits are float32 whatever the weights' type. Steps of decodes are replayed as CUDA
graphs (`graphs.py`). Where there is no GPU the same code runs on the operators' torch references, which is how its
tokens are tested.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedConfig

from services.engine.kernels import paged_attention
from services.engine.kernels.fused import add_rms_norm, rotate_and_write, silu_and_mul
from services.engine.kv_cache import KVCache, KVShape
from services.engine.models import llama_shape
from services.engine.models.graphs import Capture, DecodeGraphs, default_capture
from services.engine.models.interface import StepTensors
from services.engine.models.llama_shape import LayerWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights as the forward pass wants them."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor, float] | None  # of each query and key head, with eps
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 intermediate, hidden], gates first
    down: torch.Tensor


class FusedModel:
    """A Llama-shaped model that satisfies `DecoderModel`."""

    def __init__(
        self,
        config: PreTrainedConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        capture: Capture | None = None,
    ) -> None:
        """Take the weights, named as in a checkpoint, to the device one at a time. Raises UnsupportedModelError.

        `capture` makes graphs of decode steps; without one CUDA devices take `graphs.CudaCapture`.
        """
        llama_shape.refuse(config, weights)
        self.device = torch.device(device)
        self.dtype = dtype
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(config.max_position_embeddings)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._head_dim = llama_shape.head_dim_of(config)
        self._window = llama_shape.window_of(config)
        self._eps = float(config.rms_norm_eps)
        self._layers = [self._take(llama_shape.layer_weights(weights, i)) for i in range(config.num_hidden_layers)]
        self._embedding = self._put(weights["model.embed_tokens.weight"])
        self._norm = self._put(weights["model.norm.weight"])
        self._head = self._embedding if config.tie_word_embeddings else self._put(weights["lm_head.weight"])
        cos, sin = llama_shape.rotation_tables(config, self.max_model_len)
        self._tables = (cos.to(self.device), sin.to(self.device))
        capture = capture or default_capture(self.device)
        self._graphs = (
            DecodeGraphs(self._compute, self.vocab_size, self.max_model_len, self.device, capture) if capture else None
        )

    def kv_shape(self, num_blocks: int, block_size: int = 16) -> KVShape:
        """Return the shape of a cache for this model."""
        return KVShape(num_blocks, len(self._layers), self._num_kv_heads, block_size, self._head_dim, self.dtype)

    @torch.inference_mode()
    def forward(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        """Write the step's KV into the cache and return logits `[num_samples, vocab_size]` in float32.

        Those of a step of decodes may be overwritten by the next call's.
        """
        if self._graphs is not None and (logits := self._graphs.run(step, kv_cache)) is not None:
            return logits
        return self._compute(step, kv_cache)

    def _compute(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        hidden = functional.embedding(step.token_ids, self._embedding)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed, residual = add_rms_norm(hidden, residual, layer.attention_norm, self._eps)
            attended = self._attention(layer, normed, step, kv_cache.layer(index))
            normed, residual = add_rms_norm(functional.linear(attended, layer.out), residual, layer.mlp_norm, self._eps)
            hidden = functional.linear(silu_and_mul(functional.linear(normed, layer.gate_up)), layer.down)
        rows = step.sample_rows
        normed, _ = add_rms_norm(hidden[rows], None if residual is None else residual[rows], self._norm, self._eps)
        return self._logits(normed)

    def _attention(self, layer: _Layer, normed: torch.Tensor, step: StepTensors, cache: torch.Tensor) -> torch.Tensor:
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        query = rotate_and_write(qkv, cache, step.paging, step.position_ids, self._tables, layer.norms)
        return paged_attention(query, cache, step.paging, self._head_dim**-0.5, self._window).flatten(1)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float32:
            return functional.linear(normed, self._head)
        if self.device.type == "cuda":
            return torch.mm(normed, self._head.t(), out_dtype=torch.float32)
        return functional.linear(normed.float(), self._head.float())

    def _take(self, layer: LayerWeights) -> _Layer:
        return _Layer(
            self._put(layer.attention_norm),
            self._put(layer.qkv),
            None if layer.qkv_bias is None else self._put(layer.qkv_bias),
            None
            if layer.query_norm is None or layer.key_norm is None
            else (self._put(layer.query_norm), self._put(layer.key_norm), self._eps),
            self._put(layer.out),
            self._put(layer.mlp_norm),
            self._put(torch.cat([layer.gate, layer.up])),
            self._put(layer.down),
        )

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)
