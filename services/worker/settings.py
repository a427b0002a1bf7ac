"""What a worker can be told. The two pools are sized separately: every field may differ per role."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.runtime.settings import ProcessSettings


class WorkerSettings(ProcessSettings):
    """Settings of a prefill or decode worker."""

    model: str = Field("smollm2-135m", description="alias, Hugging Face id or local folder")
    served_model: str = Field("", description="name that heartbeats carry; empty: model")
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto", description="of weights and KV; int8: weights alone, on the CPU"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: torch's choice")
    block_size: int = Field(16, ge=1, le=256, description="token slots of a KV block")
    kv_memory_mb: int = Field(1024, ge=1, description="memory for KV blocks, MiB")
    num_blocks: int = Field(0, ge=0, description="KV blocks; 0: as many as fit into kv_memory_mb")
    token_budget: int = Field(512, ge=1, description="most tokens of one step; what decodes leave is the prefill chunk")
    max_num_seqs: int = Field(64, ge=1, description="most sequences that hold blocks")
    max_model_len: int = Field(0, ge=0, description="most tokens of a sequence; 0: the model's context")
    admission: Literal["optimistic", "worst_case"] = "optimistic"
    max_leased_share: float = Field(
        0.5, gt=0, le=1, description="prefill admits nobody above this share of leased blocks"
    )
    max_inbound_share: float = Field(0.5, gt=0, le=1, description="most of the pool that transfers may be filling")
    directory: str = Field("", description="host:port of the kvtransfer process; empty: none")
    transport: Literal["nixl", "shm"] = "nixl"
    checksum: Literal["auto", "xxh3_64", "mix32x2"] = Field(
        "auto", description="of transferred blocks, the same in both pools; auto: xxh3_64 on CPUs, mix32x2 on GPUs"
    )
    lease_s: float = Field(5.0, gt=0, description="how long offered blocks stay without renewal")
    room_wait_s: float = Field(10.0, gt=0, description="how long an inbound handoff may wait for blocks")
    renewal_s: float = Field(
        2.0, gt=0, description="an attempt that its gateway has not renewed for so long is released"
    )
    token_log_mb: int = Field(64, ge=1, description="memory for tokens that gateways have not acknowledged, MiB")
