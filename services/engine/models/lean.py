"""The lean path: Llama-shaped models on the CPU, a step of all layers in one call into C++.

Weights are read by name, one at a time, and packed for the kernels (query, key and value side by side, gate and up
interleaved), in bfloat16 where that is what they came in: widened to float32 as they are used, they give the same
products for half the memory traffic. Asked for int8, each output's weights become int8 times one scale (symmetric, the
largest magnitude is 127): a quarter of float32's traffic for results that are close, not the same. Activations, keys
and values are float32. A row's logits do not depend on what else is in the batch, nor on how a prompt was cut into
chunks, to the last bit.
"""

import ctypes
from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedConfig

from services.engine.kernels.cpu.attention import tiles_of
from services.engine.kernels.cpu.library import PARTS, TYPES, Layer, Shape, Step, Weights, library
from services.engine.kv_cache import KVCache, KVShape
from services.engine.models import llama_shape
from services.engine.models.interface import StepTensors, UnsupportedModelError

FIRST_POSITIONS = 4096  # of the rotation tables, which grow on demand


class LeanModel:
    """A Llama-shaped model that satisfies `DecoderModel`."""

    def __init__(
        self, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor], *, weights_in_int8: bool = False
    ) -> None:
        """Take the weights, named as in a checkpoint (`model.layers.0.self_attn.q_proj.weight`), one at a time.

        Raises UnsupportedModelError where the model or the machine does not allow it.
        """
        kernels = library()
        if kernels is None:
            raise UnsupportedModelError("the lean path needs a C++ compiler")
        panel = int(kernels.panel_width())
        llama_shape.refuse(config, weights)
        _refuse_sizes(config, panel)
        head_dim = llama_shape.head_dim_of(config)
        stored = weights["model.embed_tokens.weight"].dtype
        self._config = config
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
            window=llama_shape.window_of(config) or 0,
            weights=TYPES[torch.int8 if weights_in_int8 else stored],
            embedding=TYPES[stored],
            eps=config.rms_norm_eps,
            scale=head_dim**-0.5,
        )
        self._kept: list[torch.Tensor] = []  # whatever C++ has an address of
        self._work = torch.empty(0)
        self._num_positions = 0
        self._weights = Weights()
        self._part_seconds: ctypes.Array[ctypes.c_double] | None = None
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
            part_seconds=self._part_seconds,
        )
        self._kernels.decoder_forward(
            ctypes.byref(self._shape), ctypes.byref(self._weights), ctypes.byref(arguments), torch.get_num_threads()
        )
        return logits[:, : self.vocab_size]

    def time_parts(self) -> None:
        """From now on, note what each part of a forward pass takes."""
        self._part_seconds = (ctypes.c_double * len(PARTS))()

    def take_part_seconds(self) -> dict[str, float]:
        """Seconds by part (`PARTS`) since the last call, waiting for the slowest thread included. {}: not timed."""
        if self._part_seconds is None:
            return {}
        taken = dict(zip(PARTS, self._part_seconds, strict=True))
        self.time_parts()
        return taken

    def _keep(self, tensor: torch.Tensor | None) -> int:
        """The address of a tensor that lives as long as the model; 0 for none."""
        if tensor is None:
            return 0
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    @torch.inference_mode()
    def _take_weights(self, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor], panel: int) -> None:
        layers = (Layer * self._shape.num_layers)()
        in_int8 = self._shape.weights == TYPES[torch.int8]
        for index, target in enumerate(layers):
            for name, tensor in _packed(llama_shape.layer_weights(weights, index), panel, in_int8):
                setattr(target, name, self._keep(tensor))
        self._weights.layers = layers
        self._weights.norm = self._keep(weights["model.norm.weight"].float())
        head, scale = _values(llama_shape.head_weight(config, weights), in_int8)
        self._weights.head = self._keep(pack(head, panel))
        self._weights.head_scale = self._keep(None if scale is None else pad(scale, panel))
        self._weights.embedding = self._keep(weights["model.embed_tokens.weight"].detach())

    @torch.inference_mode()
    def _cover(self, num_positions: int) -> None:
        """Have rotation tables for that many positions."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = max(FIRST_POSITIONS, 2 * self._num_positions, num_positions)
        self._tables = llama_shape.rotation_tables(self._config, self._num_positions)
        self._weights.cos, self._weights.sin = (table.data_ptr() for table in self._tables)


def pad(tensor: torch.Tensor, panel: int) -> torch.Tensor:
    """The tensor with zeros behind its first dimension, up to full panels."""
    missing = -tensor.shape[0] % panel
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor


def pack(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Lay `[outputs, inputs]` out as `[outputs / panel, inputs, panel]`, outputs padded with zeros to full panels."""
    return pad(weight, panel).view(-1, panel, weight.shape[1]).transpose(1, 2).contiguous()


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[outputs, inputs]` in int8, and each output's scale in float32: their product is nearest to the weight."""
    wide = weight.float()
    scale = wide.abs().amax(1) / 127
    return (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), scale


def _values(weight: torch.Tensor, in_int8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix as it is to be stored, and the scales that belong to it."""
    return quantise(weight) if in_int8 else (weight, None)


def _packed(layer: llama_shape.LayerWeights, panel: int, in_int8: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the fields of `Layer` and what belongs there, one at a time."""
    for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "qkv_bias"):
        tensor = getattr(layer, name)
        yield name, None if tensor is None else tensor.float()
    for name in ("qkv", "out", "down"):
        values, scale = _values(getattr(layer, name), in_int8)
        yield name, pack(values, panel)
        yield f"{name}_scale", scale
    (gate, gate_scale), (up, up_scale) = _values(layer.gate, in_int8), _values(layer.up, in_int8)
    yield "gate_up", torch.stack([pack(gate, panel), pack(up, panel)], dim=1)
    if gate_scale is not None and up_scale is not None:
        yield "gate_up_scale", torch.stack([gate_scale.view(-1, panel), up_scale.view(-1, panel)], dim=1)


def _refuse_sizes(config: PreTrainedConfig, panel: int) -> None:
    head_dim = llama_shape.head_dim_of(config)
    if head_dim % panel:
        raise UnsupportedModelError(f"{llama_shape.name_of(config)} has heads of {head_dim}, no multiple of {panel}")
    if any(size % panel for size in (config.hidden_size, config.intermediate_size)):
        raise UnsupportedModelError(f"{llama_shape.name_of(config)} has sizes that fill no whole panels of {panel}")
