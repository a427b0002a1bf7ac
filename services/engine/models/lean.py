"""The lean path: Llama-shaped models on the CPU, a step of all layers in one call into C++.

Weights are taken over from a loaded `transformers` model and packed for the kernels (query, key and value side by side,
gate and up interleaved), in bfloat16 where that is what they came in: widened to float32 as they are used, they give
the same products for half the memory traffic. Activations, keys and values are float32. A row's logits do not depend on
what else is in the batch, nor on how a prompt was cut into chunks, to the last bit.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import transformers

from services.engine.kernels.cpu.attention import tiles_of
from services.engine.kernels.cpu.library import Layer, Shape, Step, Weights, library
from services.engine.kv_cache import KVCache, KVShape
from services.engine.models.interface import StepTensors, UnsupportedModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FIRST_POSITIONS = 4096  # of the rotation tables, which grow on demand


class LeanModel:
    """A Llama-shaped model that satisfies `DecoderModel`."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        """Take a loaded model's weights over (the model is of no use afterwards).

        Raises UnsupportedModelError where the model or the machine does not allow it.
        """
        kernels = library()
        if kernels is None:
            raise UnsupportedModelError("the lean path needs a C++ compiler")
        config = model.config
        panel = int(kernels.panel_width())
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        _refuse(type(model).__name__, model, head_dim, panel)
        self._kernels = kernels
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(config.max_position_embeddings)
        self._heads = (int(config.num_attention_heads), int(config.num_key_value_heads), int(head_dim))
        self._shape = Shape(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab=-(-self.vocab_size // panel) * panel,
            window=_window(config) or 0,
            bf16=model.dtype == torch.bfloat16,
            eps=config.rms_norm_eps,
            scale=head_dim**-0.5,
        )
        self._rotary = model.model.rotary_emb
        self._kept: list[torch.Tensor] = []  # whatever C++ has an address of
        self._work = torch.empty(0)
        self._num_positions = 0
        self._weights = Weights()
        self._take_weights(model, panel)

    def kv_shape(self, num_blocks: int, block_size: int = 16) -> KVShape:
        """Return the shape of a cache for this model."""
        _, num_kv_heads, head_dim = self._heads
        return KVShape(num_blocks, self._shape.num_layers, num_kv_heads, block_size, head_dim, self.dtype)

    def forward(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        """Write the step's KV into the cache and return logits `[num_samples, vocab_size]` in float32."""
        self._cover(max(step.paging.host_seq_lens))
        self._shape.block_size = kv_cache.shape.block_size
        for index in range(self._shape.num_layers):
            self._weights.layers[index].kv = kv_cache.layer(index).data_ptr()
        needed = self._kernels.work_size(ctypes.byref(self._shape), len(step.token_ids))
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
        layer, paging = kv_cache.layer(0), step.paging
        tiles, _ = tiles_of(paging, self._heads[0] // self._heads[1])
        logits = torch.empty(len(step.sample_rows), self._shape.vocab)
        arguments = Step(
            num_tokens=len(step.token_ids),
            num_samples=len(step.sample_rows),
            num_tiles=len(tiles),
            table_stride=paging.block_tables.stride(0),
            kv_block_stride=layer.stride(0),
            kv_value_offset=layer.stride(1),
            kv_head_stride=layer.stride(2),
            token_ids=step.token_ids.data_ptr(),
            position_ids=step.position_ids.data_ptr(),
            slot_mapping=paging.slot_mapping.data_ptr(),
            sample_rows=step.sample_rows.data_ptr(),
            block_tables=paging.block_tables.data_ptr(),
            tiles=tiles.data_ptr(),
            work=self._work.data_ptr(),
            logits=logits.data_ptr(),
        )
        self._kernels.decoder_forward(
            ctypes.byref(self._shape), ctypes.byref(self._weights), ctypes.byref(arguments), torch.get_num_threads()
        )
        return logits[:, : self.vocab_size]

    @torch.inference_mode()
    def _take_weights(self, model: transformers.PreTrainedModel, panel: int) -> None:
        def keep(tensor: torch.Tensor | None) -> int:
            if tensor is None:
                return 0
            self._kept.append(tensor.contiguous())
            return self._kept[-1].data_ptr()

        def keep_float(tensor: torch.Tensor | None) -> int:
            return keep(None if tensor is None else tensor.float())

        layers = (Layer * self._shape.num_layers)()
        for index, (target, source) in enumerate(zip(layers, model.model.layers, strict=True)):
            _fill_layer(target, source, panel, keep, keep_float)
            model.model.layers[index] = torch.nn.Identity()  # free as we go: never two copies of the model
        self._weights.layers = layers
        self._weights.norm = keep_float(model.model.norm.weight)
        self._weights.head = keep(pack(model.lm_head.weight, panel))
        self._weights.embedding = keep(model.model.embed_tokens.weight.detach())

    @torch.inference_mode()
    def _cover(self, num_positions: int) -> None:
        """Have rotation tables for that many positions, computed by the model's own module."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = max(FIRST_POSITIONS, 2 * self._num_positions, num_positions)
        positions = torch.arange(self._num_positions)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), positions)
        half = self._heads[2] // 2
        self._tables = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        self._weights.cos, self._weights.sin = (table.data_ptr() for table in self._tables)


def pack(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Lay `[outputs, inputs]` out as `[outputs / panel, inputs, panel]`, outputs padded with zeros to full panels."""
    missing = -weight.shape[0] % panel
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    return padded.view(-1, panel, weight.shape[1]).transpose(1, 2).contiguous()


def _fill_layer(
    target: Layer,
    source: Any,
    panel: int,
    keep: Callable[[torch.Tensor | None], int],
    keep_float: Callable[[torch.Tensor | None], int],
) -> None:
    attention, mlp = source.self_attn, source.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biased = projections[0].bias is not None
    gate_up = torch.stack([pack(mlp.gate_proj.weight, panel), pack(mlp.up_proj.weight, panel)], dim=1)
    target.attention_norm = keep_float(source.input_layernorm.weight)
    target.mlp_norm = keep_float(source.post_attention_layernorm.weight)
    target.qkv = keep(pack(torch.cat([each.weight for each in projections]), panel))
    target.qkv_bias = keep_float(torch.cat([each.bias for each in projections]) if biased else None)
    target.query_norm = keep_float(attention.q_norm.weight if hasattr(attention, "q_norm") else None)
    target.key_norm = keep_float(attention.k_norm.weight if hasattr(attention, "k_norm") else None)
    target.out = keep(pack(attention.o_proj.weight, panel))
    target.gate_up = keep(gate_up)
    target.down = keep(pack(mlp.down_proj.weight, panel))


def _window(config: Any) -> int | None:
    """The sliding window of all layers, or None where they see everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return None if types and set(types) == {"full_attention"} else window


def _refuse(name: str, model: transformers.PreTrainedModel, head_dim: int, panel: int) -> None:
    config = model.config
    first = model.model.layers[0] if config.model_type in MODEL_TYPES else None
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "is not one of " + ", ".join(MODEL_TYPES): config.model_type not in MODEL_TYPES,
        "is not on the CPU": model.device.type != "cpu",
        f"has weights of type {model.dtype}": model.dtype not in (torch.float32, torch.bfloat16),
        f"has heads of {head_dim}, no multiple of {panel}": head_dim % panel != 0,
        "has sizes that fill no whole panels": any(
            size % panel for size in (config.hidden_size, config.intermediate_size)
        ),
        "has another activation than SiLU": getattr(config, "hidden_act", "") != "silu",
        "has biases we have no place for": first is not None
        and any(each.bias is not None for each in (first.self_attn.o_proj, first.mlp.down_proj, first.mlp.gate_proj)),
        "mixes windows": len(set(getattr(config, "layer_types", None) or [0])) > 1,
        "rotates part of a head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "rotates by the batch's longest sequence": rope.get("rope_type") in ("dynamic", "longrope"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{name} {reason}")
