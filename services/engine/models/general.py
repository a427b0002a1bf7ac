"""The general path: any decoder-only model of `transformers`, through its attention interface.

1. The model is loaded with the attention function `pdserve_paged`, and a mask function that returns nothing.
2. A probe of one token records what each layer asks of its attention; a model that does not follow the interface, or
   asks for something we do not have, is refused by name then and there.
3. A step's sequences lie one after the other in one row `[1, num_tokens]` with their position ids. Each layer's
   attention writes its keys and values into the paged cache and attends over it.
4. The model's own head runs on the sampled rows alone, in float32.
"""

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from services.engine.kernels import paged_attention, write_kv
from services.engine.kv_cache import KVCache, KVShape
from services.engine.models.interface import StepTensors, UnsupportedModelError

ATTENTION_NAME = "pdserve_paged"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their angles depend on the longest sequence of the batch


@dataclass(slots=True)
class _Probe:
    """What the layers' attention calls looked like: layer index to (kv heads, key head size, value head size)."""

    model_name: str
    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Step:
    step: StepTensors
    kv_cache: KVCache


_running = threading.local()  # .task: the _Probe or _Step of the forward pass that this thread is in


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function; returns `[1, num_tokens, num_heads, value head_dim]`."""
    layer_index, task = int(cast(int, module.layer_idx)), _running.task
    value_dim = value.shape[-1]
    if isinstance(task, _Probe):
        _refuse_unknown(task.model_name, module, attention_mask, unused)
        task.layers[layer_index] = (key.shape[1], key.shape[-1], value_dim)
        return query.new_zeros(1, query.shape[2], query.shape[1], value_dim), None
    if value_dim < key.shape[-1]:  # multi-head latent attention: pad to the cache's one head size
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - value_dim))
    layer, paging = task.kv_cache.layer(layer_index), task.step.paging
    write_kv(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paging)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attended = paged_attention(query[0].transpose(0, 1), layer, paging, scale, sliding_window, softcap)
    return attended[None, :, :, :value_dim], None


def _refuse_unknown(
    name: str, module: torch.nn.Module, attention_mask: torch.Tensor | None, unused: dict[str, Any]
) -> None:
    wanted = {"s_aux": "attention sinks", "position_bias": "a position bias", "head_mask": "a head mask"}
    for argument, what in wanted.items():
        if unused.get(argument) is not None:
            raise UnsupportedModelError(f"{name} needs {what} ({argument}), which is not supported")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} brings an attention mask of its own")
    if unused.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} has attention that is not causal")


def _no_mask(*_: Any, **__: Any) -> None:
    """The registered mask function: the paged attention needs none."""


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class _Float32Head(torch.nn.Module):
    """The output projection in float32, whatever the weights' type: real models have near-ties below bf16 spacing."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = None if head.bias is None else head.bias.float()
        # a CPU wants its float32 copy once; a GPU multiplies bf16 and accumulates and returns float32
        self.weight = head.weight.float() if head.weight.device.type == "cpu" else head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype == torch.float32:
            return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)
        logits = torch.mm(hidden.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
        logits = logits.view(*hidden.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias


class GeneralModel:
    """A `transformers` model that satisfies `DecoderModel`."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        """Take a loaded model over. Raises UnsupportedModelError, naming the model, where it cannot be served."""
        config = model.config.get_text_config()
        self.name = type(model).__name__
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(config.max_position_embeddings)
        _refuse_config(self.name, config)
        try:
            model.set_attn_implementation(ATTENTION_NAME)
        except ValueError as error:
            raise UnsupportedModelError(f"{self.name} does not follow the attention interface: {error}") from error
        if model.dtype != torch.float32:
            model.set_output_embeddings(_Float32Head(model.get_output_embeddings()))
        self._model = model.eval()
        self._num_layers, self._num_kv_heads, self._head_dim = self._probe(int(config.num_hidden_layers))

    def kv_shape(self, num_blocks: int, block_size: int = 16) -> KVShape:
        """Return the shape of a cache for this model."""
        return KVShape(num_blocks, self._num_layers, self._num_kv_heads, block_size, self._head_dim, self.dtype)

    @torch.inference_mode()
    def forward(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        """Write the step's KV into the cache and return logits `[num_samples, vocab_size]` in float32."""
        return self._run(_Step(step, kv_cache), step.token_ids, step.position_ids, step.sample_rows)

    def _run(
        self, task: _Step | _Probe, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        _running.task = task
        try:
            output = self._model(
                input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=rows
            )
        finally:
            del _running.task
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    @torch.inference_mode()
    def _probe(self, num_layers: int) -> tuple[int, int, int]:
        """Run one token and return (layers, kv heads, head size) as the layers' attention asked for them."""
        probe, zero = _Probe(self.name), torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            self._run(probe, zero, zero, zero)
        except (TypeError, AttributeError, KeyError, RuntimeError) as error:
            raise UnsupportedModelError(f"{self.name} does not follow the attention interface: {error!r}") from error
        if sorted(probe.layers) != list(range(num_layers)):
            raise UnsupportedModelError(
                f"{self.name} sent {len(probe.layers)} of its {num_layers} layers through the attention interface"
            )
        shapes = set(probe.layers.values())
        if len(shapes) > 1:
            raise UnsupportedModelError(f"{self.name} has layers of different KV shapes: {sorted(shapes)}")
        num_kv_heads, key_dim, value_dim = shapes.pop()
        if value_dim > key_dim:
            raise UnsupportedModelError(f"{self.name} has values of head size {value_dim} for keys of {key_dim}")
        return num_layers, num_kv_heads, key_dim


def _refuse_config(name: str, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModelError(f"{name}: rope type {rope['rope_type']!r} depends on the batch's longest sequence")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if odd := layer_types - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"{name} has layers of type {sorted(odd)}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model")
