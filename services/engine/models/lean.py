"""The lean path: Llama-shaped models on the CPU, a step of all layers in one call into C++.

Weights are read by name, one at a time, and packed for the kernels (query, key and value side by side, gate and up
interleaved), in bfloat16 where that is what they came in: widened to float32 as they are used, they give the same
products for half the memory traffic. Activations, keys and values are float32. A row's logits do not depend on what
else is in the batch, nor on how a prompt was cut into chunks, to the last bit.

Of `transformers` only the configuration is used, so that a worker starts without loading any modelling code. A weight
we have no place for is a reason to refuse the model: whoever has one is not of this shape.
"""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.engine.kernels.cpu.attention import tiles_of
from services.engine.kernels.cpu.library import Layer, Shape, Step, Weights, library
from services.engine.kv_cache import KVCache, KVShape
from services.engine.models.interface import StepTensors, UnsupportedModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FIRST_POSITIONS = 4096  # of the rotation tables, which grow on demand
_LAYER_WEIGHTS = (
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_OPTIONAL_LAYER_WEIGHTS = (
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *(f"self_attn.{name}_proj.bias" for name in "qkv"),
)


class LeanModel:
    """A Llama-shaped model that satisfies `DecoderModel`."""

    def __init__(self, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the weights, named as in a checkpoint (`model.layers.0.self_attn.q_proj.weight`), one at a time.

        Raises UnsupportedModelError where the model or the machine does not allow it.
        """
        kernels = library()
        if kernels is None:
            raise UnsupportedModelError("the lean path needs a C++ compiler")
        panel = int(kernels.panel_width())
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        _refuse_config(config, head_dim, panel)
        _refuse_weights(config, weights)
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
            bf16=weights["model.embed_tokens.weight"].dtype == torch.bfloat16,
            eps=config.rms_norm_eps,
            scale=head_dim**-0.5,
        )
        self._rotary = _inverse_frequencies(config, head_dim)
        self._kept: list[torch.Tensor] = []  # whatever C++ has an address of
        self._work = torch.empty(0)
        self._num_positions = 0
        self._weights = Weights()
        self._take_weights(config, weights, panel)

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

    def _keep(self, tensor: torch.Tensor | None) -> int:
        """The address of a tensor that lives as long as the model; 0 for none."""
        if tensor is None:
            return 0
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    @torch.inference_mode()
    def _take_weights(self, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor], panel: int) -> None:
        layers = (Layer * self._shape.num_layers)()
        for index, target in enumerate(layers):
            for name, tensor in _packed_layer(weights, f"model.layers.{index}.", panel):
                setattr(target, name, self._keep(tensor))
        embedding = weights["model.embed_tokens.weight"]
        self._weights.layers = layers
        self._weights.norm = self._keep(weights["model.norm.weight"].float())
        self._weights.head = self._keep(
            pack(embedding if config.tie_word_embeddings else weights["lm_head.weight"], panel)
        )
        self._weights.embedding = self._keep(embedding.detach())

    @torch.inference_mode()
    def _cover(self, num_positions: int) -> None:
        """Have rotation tables for that many positions."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = max(FIRST_POSITIONS, 2 * self._num_positions, num_positions)
        inverse_frequencies, scale = self._rotary
        angles = torch.arange(self._num_positions).float()[:, None] * inverse_frequencies
        self._tables = (angles.cos() * scale, angles.sin() * scale)
        self._weights.cos, self._weights.sin = (table.data_ptr() for table in self._tables)


def pack(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Lay `[outputs, inputs]` out as `[outputs / panel, inputs, panel]`, outputs padded with zeros to full panels."""
    missing = -weight.shape[0] % panel
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    return padded.view(-1, panel, weight.shape[1]).transpose(1, 2).contiguous()


def _packed_layer(
    weights: Mapping[str, torch.Tensor], prefix: str, panel: int
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the fields of `Layer` and what belongs there, one at a time: never two copies of the model."""

    def stored(name: str) -> torch.Tensor | None:
        return weights.get(prefix + name)

    def as_float(name: str) -> torch.Tensor | None:
        tensor = stored(name)
        return None if tensor is None else tensor.float()

    def side_by_side(kind: str) -> torch.Tensor:
        return torch.cat([weights[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"])

    yield "attention_norm", as_float("input_layernorm.weight")
    yield "mlp_norm", as_float("post_attention_layernorm.weight")
    yield "query_norm", as_float("self_attn.q_norm.weight")
    yield "key_norm", as_float("self_attn.k_norm.weight")
    yield "qkv", pack(side_by_side("weight"), panel)
    yield "qkv_bias", side_by_side("bias").float() if stored("self_attn.q_proj.bias") is not None else None
    yield "out", pack(weights[f"{prefix}self_attn.o_proj.weight"], panel)
    gate, up = (pack(weights[f"{prefix}mlp.{name}_proj.weight"], panel) for name in ("gate", "up"))
    yield "gate_up", torch.stack([gate, up], dim=1)
    yield "down", pack(weights[f"{prefix}mlp.down_proj.weight"], panel)


def _inverse_frequencies(config: PreTrainedConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` float32, and what cosines and sines are to be multiplied by."""
    rope: dict[str, Any] = config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    inverse_frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return inverse_frequencies, float(scale)


def _window(config: PreTrainedConfig) -> int | None:
    """The sliding window of all layers, or None where they see everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return None if types and set(types) == {"full_attention"} else window


def _name(config: PreTrainedConfig) -> str:
    return str((config.architectures or [config.model_type])[0])


def _refuse_config(config: PreTrainedConfig, head_dim: int, panel: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "is not one of " + ", ".join(MODEL_TYPES): config.model_type not in MODEL_TYPES,
        f"has heads of {head_dim}, no multiple of {panel}": head_dim % panel != 0,
        "has sizes that fill no whole panels": any(
            size % panel for size in (config.hidden_size, config.intermediate_size)
        ),
        "has another activation than SiLU": getattr(config, "hidden_act", "") != "silu",
        "has quantised weights": getattr(config, "quantization_config", None) is not None,
        "mixes windows": len(set(getattr(config, "layer_types", None) or [0])) > 1,
        "rotates part of a head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "rotates by the batch's longest sequence": rope.get("rope_type") in ("dynamic", "longrope"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{_name(config)} {reason}")


def _refuse_weights(config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Every weight that there must be is there, and none but those that there may be."""
    needed = {"model.embed_tokens.weight", "model.norm.weight"}
    allowed = {"lm_head.weight"}
    if not config.tie_word_embeddings:
        needed.add("lm_head.weight")
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        needed.update(prefix + name for name in _LAYER_WEIGHTS)
        allowed.update(prefix + name for name in _OPTIONAL_LAYER_WEIGHTS)
    names = {name for name in weights if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(needed - names):
        raise UnsupportedModelError(f"{_name(config)} has no weight {missing[0]}")
    if others := sorted(names - needed - allowed):
        raise UnsupportedModelError(f"{_name(config)} has a weight we have no place for: {others[0]}")
    dtypes = {weights[name].dtype for name in names if not name.endswith(("norm.weight", "bias"))}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise UnsupportedModelError(f"{_name(config)} has weights of type {', '.join(sorted(map(str, dtypes)))}")
