"""Every Triton kernel compiled ahead of time for sm_80, sm_90 and sm_100: registers, spills, shared memory.

No GPU is needed, and none is timed: this shows that the kernels compile for each, and that none spills.

    python -m bench.aot --check
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from bench import report
from services.engine.kernels import attention_triton, fused_triton, sampling_triton
from services.engine.kernels.ahead_of_time import SHARED_LIMIT, Resources, compile_for
from services.kvtransfer import checksum_triton

CAPABILITIES = (80, 90, 100)
LEAST_RESIDENT_WARPS = 8  # of a multiprocessor by their registers: two for each of its four schedulers
HEADS = {  # query heads per KV head, head size
    "SmolLM2 135M": (3, 64),
    "Llama 3.2 1B": (4, 64),
    "Phi-3 mini": (1, 96),
    "Qwen2.5 7B": (7, 128),
    "Llama 3.1 70B": (8, 128),
    "Gemma 2 2B": (2, 256),
}
VOCABULARIES = {"SmolLM2 135M": 49_152, "Llama 3.1 8B": 128_256, "Gemma 2 2B": 256_000}
WIDTHS = {"SmolLM2 135M": (576, 1536), "Llama 3.1 8B": (4096, 14336)}  # hidden, intermediate
INTS = ("block_tables", "seq_lens", "query_starts", "tile_seqs", "tile_offsets")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is launched for one kind of model or work."""

    kernel: str
    what: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


def variants(element: str = "bf16") -> Iterator[Variant]:
    """Every kernel, in the shapes that models in use ask for; weights and cache of type `element`."""
    yield from _attention(element)
    yield from _fused(element)
    yield from _sampling()
    yield from _checksum()


def _attention(element: str) -> Iterator[Variant]:
    types = dict.fromkeys(("query", "layer", "out"), f"*{element}") | dict.fromkeys(("partial", "stats"), "*fp32")
    types |= dict.fromkeys(INTS, "*i32") | {"scale": "fp32", "softcap": "fp32"}
    for model, (group, head_dim) in HEADS.items():
        extras = {"window": model.startswith("Gemma"), "softcap": model.startswith("Gemma"), "ieee": element == "fp32"}
        for work, block_q, num_splits in (
            ("decode", 1, 1),
            ("decode, split", 1, 8),
            ("prefill", attention_triton.chunk_rows(group), 1),
        ):
            attend, combine = attention_triton.constants(group, head_dim, 16, block_q, num_splits, **extras)
            options = attention_triton.options(attend)
            yield Variant("attend", f"{work}, {model}", attention_triton._attend, types, attend, options)
            if num_splits > 1:
                yield Variant("combine", f"{work}, {model}", attention_triton._combine, types, combine, options)


def _fused(element: str) -> Iterator[Variant]:
    for model, (hidden, intermediate) in WIDTHS.items():
        types = dict.fromkeys(("hidden", "residual", "total", "out", "weight", "gate_up"), f"*{element}")
        norm = fused_triton.norm_constants(hidden, has_residual=True)
        yield Variant("add_rms_norm", model, fused_triton._add_rms_norm, types | {"eps": "fp32"}, norm, {})
        silu = fused_triton.silu_constants(intermediate)
        yield Variant("silu_and_mul", model, fused_triton._silu_and_mul, types, silu, {})
    types = dict.fromkeys(("qkv", "query", "layer", "query_norm", "key_norm"), f"*{element}")
    types |= {"cos": "*fp32", "sin": "*fp32", "position_ids": "*i64", "slot_mapping": "*i64", "eps": "fp32"}
    for model, (group, head_dim) in HEADS.items():
        rotate = fused_triton.rotate_constants(8 * group, 8, head_dim, 16, has_norm=model.startswith("Qwen"))
        yield Variant("rotate_and_write", model, fused_triton._rotate_and_write, types, rotate, {})


def _sampling() -> Iterator[Variant]:
    types = dict.fromkeys(("logits", "peaks", "best_values"), "*fp32") | {"table": "*i32", "best_tokens": "*i32"}
    types |= {"chosen": "*i64"}
    for model, vocab_size in VOCABULARIES.items():
        given = sampling_triton.constants(vocab_size)
        for name in ("peaks", "choose", "pick"):
            function = getattr(sampling_triton, f"_{name}")
            constants = {key: value for key, value in given.items() if key in function.arg_names}
            yield Variant(f"sample_{name}", model, function, types, constants, {})


def _checksum() -> Iterator[Variant]:
    types = {"words": "*i32", "block_ids": "*i32", "sums": "*i64"}
    yield Variant("checksum", "any block", checksum_triton._sums, types, checksum_triton.CONSTANTS, {})


def compiled(variant: Variant, capability: int) -> Resources:
    """What the variant takes of a GPU of that compute capability."""
    return compile_for(variant.function, variant.types, variant.constants, capability, **variant.options)


def problems(found: Resources, capability: int) -> list[str]:
    """In words, what is wrong with it."""
    complaints = {
        f"spills {found.local_bytes} bytes a thread": found.local_bytes > 0,
        f"wants {found.shared_bytes} bytes of shared memory": found.shared_bytes > SHARED_LIMIT[capability],
        f"{found.registers} registers leave room for {found.resident_warps} warps on a multiprocessor": (
            found.resident_warps < LEAST_RESIDENT_WARPS
        ),
    }
    return [complaint for complaint, holds in complaints.items() if holds]


def main() -> None:
    """Compile all, print a row per kernel, shape and capability."""
    options = report.options("aot", __doc__)
    rows, bad = [], []
    print(f"{'kernel':18}{'what':32}{'sm':>5}{'registers':>11}{'spilled':>9}{'shared':>9}{'warps':>10}")
    for variant in variants():
        for capability in CAPABILITIES[1:2] if options.quick else CAPABILITIES:
            found = compiled(variant, capability)
            rows.append(
                {"kernel": variant.kernel, "what": variant.what, "capability": capability}
                | asdict(found)
                | {"resident_warps": found.resident_warps}
            )
            bad += [
                f"{variant.kernel}, {variant.what}, sm_{capability}: {each}" for each in problems(found, capability)
            ]
            print(
                f"{variant.kernel:18}{variant.what:32}{capability:5}{found.registers:11}{found.local_bytes:9}"
                f"{found.shared_bytes:9}{found.resident_warps:10}"
            )
    print("\n".join(bad) or "no kernel spills, all fit")
    share = 1 - len(bad) / len(rows)
    where = report.machine(options.threads) | {"triton": version("triton")}
    bars = [report.Bar("share of compiled kernels within bounds", share, 1.0)]
    report.finish(options, {"machine": where, "kernels": rows, "out_of_bounds": bad}, bars=bars, summary="")


if __name__ == "__main__":
    main()
