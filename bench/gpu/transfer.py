"""Blocks pulled by NIXL from one registered pool into another, both in the device's memory."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.gpu.inputs import seconds
from services.kvtransfer.connector import make_transport
from services.kvtransfer.layout import KVLayout
from services.kvtransfer.transport import Transfer, TransferState, Transport

TIMEOUT_S = 30.0


def run(device: torch.device) -> dict[str, Any]:
    """GB/s by number of blocks, beside a plain copy on the device; and whether every byte arrived."""
    block_bytes = 2**20 if device.type == "cuda" else 2**16
    most = 512 if device.type == "cuda" else 8
    layout = KVLayout("bfloat16", 16, 1, 1, block_bytes // 64, block_bytes)
    holder, puller = (make_transport("nixl", name, "0") for name in ("holder", "puller"))
    try:
        source = holder.allocate(layout, most, str(device))
        target = puller.allocate(layout, most, str(device))
        source.copy_(torch.randint(0, 256, (source.numel(),), dtype=torch.uint8))
        endpoint = holder.endpoint("")
        if (warm_up := puller.connect(endpoint)) is not None:
            _wait(puller, holder, warm_up)
        found: dict[str, Any] = {
            "plain_copy_gb_per_s": source.numel() / seconds(lambda: target.copy_(source), device) / 1e9
        }
        target.zero_()
        for count in (1, 8, 64, most):
            if count > most:
                continue
            ids = list(range(count))
            best = min(_pull(puller, holder, endpoint.peer, ids) for _ in range(5))
            found[f"{count} blocks, GB/s"] = count * block_bytes / best / 1e9
        found["every_byte_arrived"] = bool(torch.equal(source, target))
        if not found["every_byte_arrived"]:
            raise ValueError("bytes differ after the transfer")
        return found
    finally:
        puller.close()
        holder.close()


def _pull(puller: Transport, holder: Transport, peer: Any, ids: list[int]) -> float:
    started_s = time.perf_counter()
    _wait(puller, holder, puller.read(peer, ids, ids))
    return time.perf_counter() - started_s


def _wait(puller: Transport, holder: Transport, transfer: Transfer) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (status := puller.poll(transfer)).settled:
        holder.serve()
        if time.monotonic() > deadline_s:
            raise TimeoutError("the transfer did not settle")
    if status.state is not TransferState.DONE:
        raise RuntimeError(f"the transfer failed: {status.reason}")
