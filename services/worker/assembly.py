"""A worker's parts, put together once: model, KV memory, transport, block pool, scheduler, engine."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from services.engine.block_pool import BlockPool
from services.engine.engine import Engine
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel
from services.engine.policies import Admission
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.weights import load_model, tokenizer_fingerprint, weights_fingerprint
from services.kvtransfer.connector import make_transport
from services.kvtransfer.layout import KVLayout, checksum_for
from services.kvtransfer.transport import Transport
from services.runtime.model_store import read_model_info, resolve
from services.runtime.process import Identity
from services.worker.settings import WorkerSettings


class TooLittleMemoryError(ValueError):
    """The KV memory holds no block."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a worker computes with. `eos_token_ids` end a choice unless the request says otherwise.

    `dtype` is that of weights and KV, or int8 where the weights alone are in int8.
    """

    engine: Engine
    kv_cache: KVCache
    transport: Transport
    layout: KVLayout
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    dtype: str
    device: torch.device

    @property
    def scheduler(self) -> Scheduler:
        """The engine's scheduler."""
        return self.engine.scheduler

    @property
    def pool(self) -> BlockPool:
        """The scheduler's block pool."""
        return self.engine.scheduler.pool


def assemble(settings: WorkerSettings, identity: Identity) -> Assembly:
    """Loads the model and allocates everything; takes seconds. Raises what is wrong with the model or the memory."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = resolve(settings.model)
    info = read_model_info(folder)
    model = load_model(folder, settings.dtype, settings.device)
    in_int8 = settings.dtype == "int8"
    shape = model.kv_shape(settings.num_blocks or 1, settings.block_size)
    if not settings.num_blocks:
        shape = shape.fitting(settings.kv_memory_mb * 2**20)
    if shape.num_blocks < 1:
        raise TooLittleMemoryError(
            f"kv_memory_mb: {settings.kv_memory_mb} MiB hold no block of {shape.block_bytes} bytes"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    layout = KVLayout(
        dtype=dtype,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_bytes=shape.block_bytes,
        checksum=(
            checksum_for(settings.device, shape.block_bytes) if settings.checksum == "auto" else settings.checksum
        ),
        weights_fingerprint=weights_fingerprint(folder) + ("-int8" if in_int8 else ""),  # another model's KV
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
    )
    transport = make_transport(settings.transport, identity.worker_id, identity.epoch)
    memory = transport.allocate(layout, shape.num_blocks, settings.device)
    kv_cache = KVCache(memory, shape)
    engine = _engine(settings, model, kv_cache)
    return Assembly(
        engine=engine,
        kv_cache=kv_cache,
        transport=transport,
        layout=layout,
        eos_token_ids=info.eos_token_ids,
        vocab_size=model.vocab_size,
        max_model_len=engine.scheduler.config.max_model_len,
        dtype="int8" if in_int8 else dtype,
        device=model.device,
    )


def _engine(settings: WorkerSettings, model: DecoderModel, kv_cache: KVCache) -> Engine:
    max_model_len = min(settings.max_model_len or model.max_model_len, model.max_model_len)
    config = SchedulerConfig(
        token_budget=settings.token_budget,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        admission=Admission(settings.admission),
        max_leased_share=settings.max_leased_share,
        max_inbound_share=settings.max_inbound_share,
    )
    pool = BlockPool(kv_cache.shape.num_blocks, kv_cache.shape.block_size)
    return Engine(Scheduler(config, pool, time.monotonic), ModelRunner(model, kv_cache))
