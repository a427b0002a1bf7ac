"""`python -m bench.int8`: weights in int8 beside the same weights in bfloat16, both on the lean path of the CPU.

1. Speed: decode steps at batch 1 to 32 and a prompt of 512 tokens, in milliseconds, interleaved; the ratio says where
   int8 wins.
2. Price: on passages of this repository's documents, the mean divergence (Kullback-Leibler, in nats) of the next
   token's distribution from that of the bfloat16 weights, how often the likeliest token is the same, and both models'
   mean negative log-likelihood of the text.

Bars for --check: at batch 1 a decode step in int8 is no slower than in bfloat16; the likeliest token is the same at
90 % of positions.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench import engines, report
from services.engine.batch import Batch, ScheduledSequence
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel
from services.engine.sequence import Sequence
from services.engine.weights import load_model
from services.runtime.model_store import resolve

MODEL = "smollm2-135m"
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXT, NUM_STEPS, NUM_PREFILL = 128, 8, 512
TEXTS = ("README.md", "k8s/README.md", "services/gateway/README.md", "services/kvtransfer/README.md")
PASSAGE = 256  # tokens
SAME_BAR = 0.90
ROOT = Path(__file__).parent.parent
Figures = dict[str, float]


def run(model: DecoderModel, number: int) -> Figures:
    """Milliseconds of a decode step by batch size, and of a prompt of NUM_PREFILL tokens."""
    found = {}
    for batch in BATCHES:
        engine = engines.make_engine(model, batch, CONTEXT + NUM_STEPS + 1)
        engines.add(engine, engines.make_prompts(batch, CONTEXT, number), NUM_STEPS + 1)
        engine.step()
        found[f"decode {batch}"] = statistics.median(_ms(engine.step) for _ in range(NUM_STEPS))
    engine = engines.make_engine(model, 1, NUM_PREFILL + 1)
    engines.add(engine, engines.make_prompts(1, NUM_PREFILL, number), 1)
    return found | {f"prefill {NUM_PREFILL}": _ms(engine.step)}


def _ms(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started_s)


def passages(folder: Path) -> list[list[int]]:
    """The documents' text in token ids, in pieces of PASSAGE tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for name in TEXTS:
        ids: list[int] = tokenizer((ROOT / name).read_text(), verbose=False)["input_ids"]
        found += [ids[at : at + PASSAGE] for at in range(0, len(ids) - PASSAGE + 1, PASSAGE)]
    return found


def distributions(model: DecoderModel, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token after each of `tokens`, `[num_tokens, vocab_size]`."""
    cache = KVCache.allocate(model.kv_shape(-(-len(tokens) // 16)))
    runner = ModelRunner(model, cache)
    seq = Sequence("passage", tokens)
    seq.block_ids = list(range(-(-len(tokens) // 16)))
    rows = [runner.forward(Batch([ScheduledSequence(seq, at, 1, True)])) for at in range(len(tokens))]
    return torch.cat(rows).log_softmax(-1)


def price(models: Mapping[str, DecoderModel], texts: list[list[int]]) -> dict[str, float]:
    """What int8 costs in quality, over all positions of the texts."""
    divergence, same = [], []
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for number, tokens in enumerate(texts):
        report.progress(f"passage {number + 1} of {len(texts)}")
        exact, near = (distributions(model, tokens) for model in models.values())
        divergence.append((exact.exp() * (exact - near)).sum(-1))
        same.append((exact.argmax(-1) == near.argmax(-1)).float())
        targets = torch.tensor(tokens[1:])[:, None]
        for name, logprobs in zip(models, (exact, near), strict=True):
            losses[name].append(-logprobs[:-1].gather(1, targets))
    report.progress("")
    return {
        "num_positions": float(sum(map(len, texts))),
        "divergence_nats": float(torch.cat(divergence).mean()),
        "same_likeliest": float(torch.cat(same).mean()),
        **{f"nll_{name}": float(torch.cat(each).mean()) for name, each in losses.items()},
    }


def print_table(values: Mapping[str, Mapping[str, list[float]]], ratios: Mapping[str, Any]) -> None:
    """Milliseconds and ratios, a line for each size."""
    print(f"\n{'ms':<12}{'bfloat16':>24}{'int8':>24}{'bfloat16 / int8':>22}{'A/A noise':>22}")
    for size, ratio in ratios.items():
        both = "".join(f"{report.show(report.spread(values[name][size]), 1):>24}" for name in ("bfloat16", "int8"))
        print(f"{size:<12}{both}{report.show(ratio['ratio']):>22}{report.show(ratio['noise']):>22}")


def main() -> None:
    """Measure, print, write result.json."""
    given = report.options("int8", __doc__, rounds=report.FEWEST_ROUNDS)
    torch.set_num_threads(given.threads)
    folder = resolve(MODEL)
    models = {"bfloat16": load_model(folder, "float32", path="lean"), "int8": load_model(folder, "int8")}
    where = report.machine(given.threads)
    print(", ".join(f"{name} {value}" for name, value in where.items()))

    def contestant(name: str) -> Callable[[int], Figures]:
        return lambda number: run(models[name], number)

    contestants = {name: contestant(name) for name in models} | {"bfloat16 again": contestant("bfloat16")}
    values = report.rounds(contestants, given.num_rounds)
    ratios = {
        size: {
            "ratio": report.spread(report.ratios(values["bfloat16"][size], values["int8"][size])),
            "noise": report.spread(report.ratios(values["bfloat16 again"][size], values["bfloat16"][size])),
        }
        for size in values["int8"]
    }
    print_table(values, ratios)
    texts = passages(folder)
    cost = price(models, texts[: 2 if given.quick else 12])
    print("\n" + ", ".join(f"{name} {value:.4g}" for name, value in cost.items()))
    first = ratios["decode 1"]["ratio"]
    report.finish(
        given,
        {
            "machine": where,
            "model": MODEL,
            "ms": {name: {size: report.spread(each) for size, each in sizes.items()} for name, sizes in values.items()},
            "ratios": ratios,
            "price": cost,
        },
        [
            report.Bar("a decode step at batch 1, bfloat16 over int8", first["median"], 1.0),
            report.Bar("share of positions with the same likeliest token", cost["same_likeliest"], SAME_BAR),
        ],
        f"A decode step at batch 1 in int8 is {report.show(first)} times as fast as in bfloat16; the likeliest token "
        f"is the same at {100 * cost['same_likeliest']:.1f} % of positions.",
    )


if __name__ == "__main__":
    main()
