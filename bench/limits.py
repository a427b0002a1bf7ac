"""`python -m bench.limits`: how far the engine by itself is from what the machine can do.

1. The ceilings, measured in the same rounds with the same threads: the best read-only pass over 1 GB (the faster of
   two: a sum of int64, MKL's dot product of float32), and the rate of a layer's matrix products over 512 rows in torch,
   in bfloat16 and in float32.
2. Decode steps at batch 1, 8 and 32 with 256 tokens of context. The bytes of a step, as stored and moved: all weights
   once (an embedding that is not also the head is left out: a step reads a row of it per token), keys and values of
   each sequence's context. Bytes over the median step, as a share of the read-only pass.
3. Prefill of one prompt of 512 tokens: the floating-point operations of its matrix products (attention left out) over
   the time, as a share of the measured rate of bfloat16 products, and of the faster of the two types.

Bars for --check: 40 % of the read bandwidth at batch 1, 45 % at 8, 35 % at 32; prefill 45 % of the bf16 product rate.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import engines, report
from services.engine.models.interface import DecoderModel
from services.engine.stored_weights import StoredWeights
from services.engine.weights import load_model
from services.runtime.model_store import resolve

MODEL = "smollm2-135m"
CONTEXT = 256
NUM_STEPS = 12
NUM_PREFILL = 512
DECODE_BARS = {1: 0.40, 8: 0.45, 32: 0.35}
PREFILL_BAR = 0.45
PASS_BYTES = 2**30
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Figures = dict[str, float]


def weight_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """What a step reads of the weights, as they are stored."""
    unread = {EMBEDDING} if HEAD in weights else set()
    return sum(weights[name].numel() * weights[name].element_size() for name in weights if name not in unread)


def product_flops(weights: Mapping[str, torch.Tensor], num_tokens: int, num_samples: int) -> float:
    """Floating-point operations of the matrix products of a step: 2 a weight and row; the head only where sampled."""
    head = HEAD if HEAD in weights else EMBEDDING
    layers = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and name not in (EMBEDDING, HEAD))
    return 2.0 * (layers * num_tokens + weights[head].numel() * num_samples)


class ReadPass:
    """Bytes/s of reading memory and doing next to nothing with it."""

    def __init__(self) -> None:
        self._memory = torch.ones(PASS_BYTES // 4, dtype=torch.float32)
        self._words = self._memory.view(torch.int64)

    def __call__(self, _: int) -> Figures:
        """The better of both ways in this round."""
        ways: tuple[Callable[[], torch.Tensor], ...] = (
            self._words.sum,
            lambda: torch.dot(self._memory, self._memory),
        )
        return {"bytes_per_s": PASS_BYTES / min(_seconds(way) for way in ways for _ in range(2))}


class Products:
    """Operations/s of torch on a layer's matrix products over NUM_PREFILL rows."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        layer = [w.to(dtype) for name, w in weights.items() if name.startswith("model.layers.0.") and w.dim() == 2]
        self._products = [(torch.randn(NUM_PREFILL, w.shape[1]).to(dtype), w) for w in layer]
        self._flops = 2.0 * NUM_PREFILL * sum(w.numel() for w in layer)

    def __call__(self, _: int) -> Figures:
        """The best of five passes."""
        return {"flops_per_s": self._flops / min(_seconds(self._run) for _ in range(5))}

    def _run(self) -> None:
        for rows, weight in self._products:
            rows @ weight.T


def decode(model: DecoderModel, batch: int) -> Callable[[int], Figures]:
    """A contestant: the median seconds of a decode step, and the keys' and values' bytes that it read."""
    bytes_per_token = model.kv_shape(1).block_bytes / 16

    def run(number: int) -> Figures:
        engine = engines.make_engine(model, batch, CONTEXT + NUM_STEPS + 1)
        engines.add(engine, engines.make_prompts(batch, CONTEXT - NUM_STEPS // 2, number), NUM_STEPS + 1)
        engine.step()
        steps = [_seconds(engine.step) for _ in range(NUM_STEPS)]
        return {"step_s": statistics.median(steps), "kv_bytes": batch * CONTEXT * bytes_per_token}

    return run


def prefill(model: DecoderModel) -> Callable[[int], Figures]:
    """A contestant: seconds of one prompt of NUM_PREFILL tokens."""

    def run(number: int) -> Figures:
        engine = engines.make_engine(model, 1, NUM_PREFILL + 1)
        engines.add(engine, engines.make_prompts(1, NUM_PREFILL, number), 1)
        return {"step_s": _seconds(engine.step)}

    return run


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def measure(model: DecoderModel, weights: Mapping[str, torch.Tensor], num_rounds: int) -> dict[str, Any]:
    """All figures, with their shares of the ceilings round by round."""
    contestants: dict[str, Callable[[int], Figures]] = {
        "read pass": ReadPass(),
        "products bfloat16": Products(weights, torch.bfloat16),
        "products float32": Products(weights, torch.float32),
        **{f"decode {batch}": decode(model, batch) for batch in DECODE_BARS},
        "decode 1 again": decode(model, 1),
        "prefill": prefill(model),
    }
    values = report.rounds(contestants, num_rounds)
    read = values["read pass"]["bytes_per_s"]
    products = {name: values[f"products {name}"]["flops_per_s"] for name in ("bfloat16", "float32")}
    weights_read, flops = weight_bytes(weights), product_flops(weights, NUM_PREFILL, 1)
    steps = {}
    for batch in DECODE_BARS:
        figures = values[f"decode {batch}"]
        rates = [(weights_read + kv) / step for kv, step in zip(figures["kv_bytes"], figures["step_s"], strict=True)]
        steps[str(batch)] = {
            "step_ms": report.spread([1e3 * step for step in figures["step_s"]]),
            "bytes": weights_read + figures["kv_bytes"][0],
            "share": report.spread(report.ratios(rates, read)),
        }
    rates = [flops / step for step in values["prefill"]["step_s"]]
    faster = max(products, key=lambda name: statistics.median(products[name]))
    return {
        "read_gb_per_s": report.spread([rate / 1e9 for rate in read]),
        "products_gflops": {n: report.spread([rate / 1e9 for rate in rates_]) for n, rates_ in products.items()},
        "decode": steps,
        "prefill": {
            "ms": report.spread([1e3 * step for step in values["prefill"]["step_s"]]),
            "share_of_bfloat16": report.spread(report.ratios(rates, products["bfloat16"])),
            "share_of_faster": report.spread(report.ratios(rates, products[faster])),
            "faster": faster,
        },
        "noise": report.spread(report.ratios(values["decode 1 again"]["step_s"], values["decode 1"]["step_s"])),
    }


def print_table(found: Mapping[str, Any]) -> None:
    """Ceilings, then shares."""
    print(f"\nread-only pass     {report.show(found['read_gb_per_s'], 1):>24} GB/s")
    for name, rate in found["products_gflops"].items():
        print(f"products {name:<10}{report.show(rate, 0):>24} GFLOP/s")
    print(f"\n{'':<18} {'ms':>24} {'MB moved':>9} {'share of the ceiling':>24}")
    for batch, step in found["decode"].items():
        share = {key: 100 * value for key, value in step["share"].items()}
        print(
            f"decode, batch {batch:<4} {report.show(step['step_ms'], 1):>24} {step['bytes'] / 1e6:>9.0f} "
            f"{report.show(share, 0):>22} %"
        )
    for of in ("bfloat16", "faster"):
        share = {key: 100 * value for key, value in found["prefill"][f"share_of_{of}"].items()}
        name = of if of == "bfloat16" else found["prefill"]["faster"]
        print(
            f"prefill, {NUM_PREFILL:<9} {report.show(found['prefill']['ms'], 0):>24} {'':>9} "
            f"{report.show(share, 0):>22} % of {name} products"
        )
    print(f"A/A noise of a decode step at batch 1: {report.show(found['noise'])}")


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Shares of the ceilings beside their bars."""
    from matplotlib import pyplot

    names = [f"decode {batch}" for batch in found["decode"]] + [f"prefill {NUM_PREFILL}"]
    shares = [step["share"] for step in found["decode"].values()] + [found["prefill"]["share_of_faster"]]
    least = [*DECODE_BARS.values(), PREFILL_BAR]
    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    medians = [100 * share["median"] for share in shares]
    whiskers = [
        [100 * (share["median"] - share["min"]) for share in shares],
        [100 * (share["max"] - share["median"]) for share in shares],
    ]
    axes.bar(names, medians, 0.5, yerr=whiskers, capsize=3)
    for at, bar in enumerate(least):
        axes.hlines(100 * bar, at - 0.35, at + 0.35, colors="black", linestyles="dashed")
    axes.set(ylabel="% of the ceiling", title="read bandwidth (decode), matrix products (prefill); dashed: bars")
    axes.title.set_fontsize(9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write result.json and limits.svg."""
    given = report.options("limits", __doc__)
    torch.set_num_threads(given.threads)
    folder = resolve(MODEL)
    model = load_model(folder, "auto")
    where = {**report.machine(given.threads), "dtype": str(model.dtype), "path": type(model).__name__}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    found = measure(model, StoredWeights(folder), given.num_rounds)
    print_table(found)
    bars = [
        report.Bar(f"decode at batch {b}, share of the read bandwidth", found["decode"][str(b)]["share"]["median"], bar)
        for b, bar in DECODE_BARS.items()
    ]
    share = found["prefill"]["share_of_bfloat16"]["median"]
    bars.append(report.Bar("prefill, share of the bfloat16 product rate", share, PREFILL_BAR))
    told = [f"{100 * bar.value:.0f} % at batch {batch}" for bar, batch in zip(bars[:-1], DECODE_BARS, strict=True)]
    report.finish(
        given,
        {"machine": where, "model": MODEL, "context": CONTEXT, **found},
        bars,
        f"Of the machine's read bandwidth a decode step uses {', '.join(told)}.",
        {"limits.svg": lambda path: plot(found, path)},
    )


if __name__ == "__main__":
    main()
