"""Kernels: one Python signature, several backends in one folder.

`reference` is plain torch: the oracle, and what runs anywhere. `cpu` is C++, compiled on first use where there is a
compiler. `triton` runs on CUDA devices.
"""

import torch

from services.engine.kernels import attention_reference
from services.engine.kernels.cpu import attention as attention_cpu
from services.engine.kernels.paging import Paging, write_kv

__all__ = ["Paging", "attention_backend", "paged_attention", "write_kv"]


def attention_backend(query: torch.Tensor, layer: torch.Tensor) -> str:
    """The name of the backend that serves these tensors: `triton`, `cpu` or `reference`."""
    if query.device.type == "cuda":
        return "triton"
    return "cpu" if attention_cpu.supports(query, layer) else "reference"


def paged_attention(
    query: torch.Tensor,
    layer: torch.Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of a step's tokens over their sequences' paged context.

    `query` is `[num_tokens, num_heads, head_dim]`, `layer` one layer of the cache, `[num_blocks, 2, num_kv_heads,
    block_size, head_dim]` in any strides, into which this step's keys and values were already written. num_heads is a
    multiple of num_kv_heads. A token at position p sees positions `(p - window, p]`; `softcap` c turns a score s into
    `c * tanh(s / c)`. Returns `[num_tokens, num_heads, head_dim]` in the query's type.
    """
    backend = attention_backend(query, layer)
    if backend == "triton":
        from services.engine.kernels import attention_triton  # slow to import, and of no use without a GPU

        return attention_triton.paged_attention(query, layer, paging, scale, window, softcap)
    if backend == "cpu":
        return attention_cpu.paged_attention(query, layer, paging, scale, window, softcap)
    return attention_reference.paged_attention(query, layer, paging, scale, window, softcap)
