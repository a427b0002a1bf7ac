"""The servers by the names that `--servers` takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import report
from bench.peer import llama_cpp, transformers_serve, vllm
from bench.peer.pdserve import Pdserve
from bench.peer.server import Server
from services.launcher.ports import free_port

OURS, AGAIN, DISAGGREGATED = "pdserve", "pdserve-again", "pdserve-disaggregated"


@dataclass(frozen=True, slots=True)
class Yard:
    """What servers are made from: where peers lie, the model, and the cores."""

    root: Path
    model: str
    folder: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Kind:
    """How a server is prepared and made. Both raise NotRunError."""

    make: Callable[[Yard], Server]
    prepare: Callable[[Yard, Path], None] = lambda yard, log: None


def _vllm(dtype: str) -> Kind:
    return Kind(
        lambda yard: vllm.server(yard.root, yard.folder, yard.threads, free_port(), dtype),
        lambda yard, log: vllm.prepare(yard.root, log),
    )


def _llama(weights: str) -> Kind:
    return Kind(
        lambda yard: llama_cpp.server(yard.root, yard.threads, free_port(), weights),
        lambda yard, log: llama_cpp.prepare(yard.root, yard.folder, log),
    )


def _faster_dtype(yard: Yard) -> str:
    """bfloat16 where the processor multiplies it; elsewhere torch takes many times as long over it as over float32."""
    has_bf16 = {"avx512_bf16", "amx_bf16"} & set(report.machine(yard.threads)["instructions"])
    return "bfloat16" if has_bf16 else "float32"


KINDS: Mapping[str, Kind] = {
    OURS: Kind(lambda yard: Pdserve(OURS, yard.model, 0, yard.threads)),
    DISAGGREGATED: Kind(lambda yard: Pdserve(DISAGGREGATED, yard.model, 1, max(1, yard.threads // 2))),
    "vllm": _vllm("bfloat16"),
    "vllm-float32": _vllm("float32"),
    "llama-bf16": _llama("BF16"),
    "llama-q4_1": _llama("Q4_1"),
    "transformers": Kind(
        lambda yard: transformers_serve.server(yard.folder, yard.threads, free_port(), _faster_dtype(yard))
    ),
}
USUAL = tuple(KINDS)
