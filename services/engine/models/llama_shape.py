"""The Llama shape: what a configuration and a set of weights must be for our own decoders (`lean`, `fused`).

Of `transformers` only the configuration is used, so that a worker starts without loading any modelling code. A weight
we have no place for is a reason to refuse the model: whoever has one is not of this shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.engine.models.interface import UnsupportedModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_LAYER_WEIGHTS = (
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_OPTIONAL_LAYER_WEIGHTS = (
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *(f"self_attn.{name}_proj.bias" for name in "qkv"),
)


def name_of(config: PreTrainedConfig) -> str:
    """How messages call the model."""
    return str((config.architectures or [config.model_type])[0])


def head_dim_of(config: PreTrainedConfig) -> int:
    """The size of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def window_of(config: PreTrainedConfig) -> int | None:
    """The sliding window of all layers, or None where they see everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return None if types and set(types) == {"full_attention"} else window


def refuse(config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises UnsupportedModelError, naming the model and the reason, where it is not of this shape."""
    _refuse_config(config)
    _refuse_weights(config, weights)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights out of a checkpoint, those of one product side by side; None where the model has none."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 num_kv_heads) head_dim, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    out: torch.Tensor  # [hidden, num_heads head_dim]
    mlp_norm: torch.Tensor
    gate: torch.Tensor  # [intermediate, hidden]
    up: torch.Tensor
    down: torch.Tensor  # [hidden, intermediate]


def layer_weights(weights: Mapping[str, torch.Tensor], index: int) -> LayerWeights:
    """Reads one layer; what is not kept of it is freed again: never two copies of a model."""
    prefix = f"model.layers.{index}."

    def side_by_side(kind: str) -> torch.Tensor:
        return torch.cat([weights[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"])

    return LayerWeights(
        attention_norm=weights[f"{prefix}input_layernorm.weight"],
        qkv=side_by_side("weight"),
        qkv_bias=side_by_side("bias") if f"{prefix}self_attn.q_proj.bias" in weights else None,
        query_norm=weights.get(f"{prefix}self_attn.q_norm.weight"),
        key_norm=weights.get(f"{prefix}self_attn.k_norm.weight"),
        out=weights[f"{prefix}self_attn.o_proj.weight"],
        mlp_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate=weights[f"{prefix}mlp.gate_proj.weight"],
        up=weights[f"{prefix}mlp.up_proj.weight"],
        down=weights[f"{prefix}mlp.down_proj.weight"],
    )


def head_weight(config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The output projection `[vocab, hidden]`; the embedding where they are tied."""
    return weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]


def rotation_tables(config: PreTrainedConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[num_positions, head_dim / 2]` in float32, scaled as the configuration's rope type wants."""
    rope: dict[str, Any] = config.rope_parameters
    head_dim = head_dim_of(config)
    if rope.get("rope_type", "default") == "default":
        inverse_frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        scale = 1.0
    else:
        inverse_frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies
    return angles.cos() * scale, angles.sin() * scale


def _refuse_config(config: PreTrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "is not one of " + ", ".join(MODEL_TYPES): config.model_type not in MODEL_TYPES,
        "has another activation than SiLU": getattr(config, "hidden_act", "") != "silu",
        "has quantised weights": getattr(config, "quantization_config", None) is not None,
        "mixes windows": len(set(getattr(config, "layer_types", None) or [0])) > 1,
        "rotates part of a head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "rotates by the batch's longest sequence": rope.get("rope_type") in ("dynamic", "longrope"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{name_of(config)} {reason}")


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
        raise UnsupportedModelError(f"{name_of(config)} has no weight {missing[0]}")
    if others := sorted(names - needed - allowed):
        raise UnsupportedModelError(f"{name_of(config)} has a weight we have no place for: {others[0]}")
    dtypes = {weights[name].dtype for name in names if not name.endswith(("norm.weight", "bias"))}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise UnsupportedModelError(f"{name_of(config)} has weights of type {', '.join(sorted(map(str, dtypes)))}")
