"""`python -m bench.offline`: the engine beside `transformers` generate, tokens per second, no network.

1. The same bf16 checkpoint (smollm2-135m) and the same number of threads, in one process, one after the other.
2. Each round has fresh random prompts of 128 tokens, the same for all, at batch 1, 8 and 32. In random order the engine
   (in its `auto` dtype), the engine again (the control: their ratio is the noise) and `transformers` generate as many
   tokens. Prefill is from the start to the last first token, decode is the rest. The engine takes all prompts in one
   step, as generate does.
3. The peer gets its best: it is tried in bfloat16 and in float32, once each on prompts of the full size, and whichever
   is faster in a phase is the one to beat. A type slower than 0.8 times the other in both phases of the trial is not
   run again; the trial is kept in the result.

Bars for --check: decode at least 1.3 times generate at batch 1, and 1.5 at batch 8.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import engines, report
from bench.engines import Prompts
from services.engine.models.interface import DecoderModel
from services.engine.weights import load_model
from services.runtime.model_store import resolve

MODEL = "smollm2-135m"
NUM_PROMPT_TOKENS = 128
NUM_TRIAL_TOKENS = 9
NEAR_BEST = 0.8  # a peer's type this near the faster one is run in the rounds too
DECODE_BARS = {1: 1.3, 8: 1.5}
PHASES = ("prefill", "decode")
Speeds = dict[str, float]  # tokens/s by phase
Run = Callable[[Any, Prompts, int], tuple[Speeds, Prompts]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run."""

    batches: tuple[int, ...]
    num_new_tokens: int  # per sequence, the first included


def make_prompts(batch: int, number: int) -> Prompts:
    """The prompts of one round."""
    return engines.make_prompts(batch, NUM_PROMPT_TOKENS, number)


def run_engine(model: DecoderModel, prompts: Prompts, num_new_tokens: int) -> tuple[Speeds, Prompts]:
    """Tokens/s of the engine by phase, and what it generated."""
    batch = len(prompts)
    engine = engines.make_engine(model, batch, NUM_PROMPT_TOKENS + num_new_tokens)
    started_s = time.perf_counter()
    sequences = engines.add(engine, prompts, num_new_tokens)
    while not all(seq.output_token_ids for seq in sequences):
        engine.step()
    prefilled_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    ended_s = time.perf_counter()
    return speeds((batch, NUM_PROMPT_TOKENS), num_new_tokens, started_s, prefilled_s, ended_s), [
        seq.output_token_ids for seq in sequences
    ]


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token was there."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run_generate(model: Any, prompts: Prompts, num_new_tokens: int) -> tuple[Speeds, Prompts]:
    """Tokens/s of `transformers` generate by phase, and what it generated."""
    ids, clock = torch.tensor(prompts), _Clock()
    started_s = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_new_tokens,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    ended_s = time.perf_counter()
    measured = speeds((len(prompts), ids.shape[1]), num_new_tokens, started_s, clock.times_s[0], ended_s)
    return measured, output[:, ids.shape[1] :].tolist()


def speeds(shape: tuple[int, int], num_new_tokens: int, started_s: float, prefilled_s: float, ended_s: float) -> Speeds:
    """Tokens/s of both phases for prompts of `shape` (batch, tokens)."""
    batch, num_prompt_tokens = shape
    prefill = batch * num_prompt_tokens / (prefilled_s - started_s)
    return {"prefill": prefill, "decode": batch * (num_new_tokens - 1) / (ended_s - prefilled_s)}


def measure(engine_model: DecoderModel, peers: Mapping[str, Any], sizes: Sizes, num_rounds: int) -> dict[str, Any]:
    """All figures, by batch size."""
    found: dict[str, Any] = {}
    for batch in sizes.batches:
        trials = {}
        for name, peer in peers.items():
            report.progress(f"batch {batch}: a trial of {name}")
            trials[name] = run_generate(peer, make_prompts(batch, -2), NUM_TRIAL_TOKENS)[0]
        kept = [
            name
            for name in peers
            if any(trials[name][phase] > NEAR_BEST * max(trial[phase] for trial in trials.values()) for phase in PHASES)
        ]
        ours = _contestant(run_engine, engine_model, batch, sizes)
        theirs = {name: _contestant(run_generate, peers[name], batch, sizes) for name in kept}
        contestants = {"pdserve": ours, "pdserve again": ours, **theirs}
        values = report.rounds(contestants, num_rounds, f"batch {batch},")
        found[str(batch)] = {"trials": trials, **compare(values, kept)}
    return found


def _contestant(run: Run, model: Any, batch: int, sizes: Sizes) -> Callable[[int], Speeds]:
    return lambda number: run(model, make_prompts(batch, number), sizes.num_new_tokens)[0]


def compare(values: Mapping[str, Mapping[str, list[float]]], peers: list[str]) -> dict[str, Any]:
    """Speeds, ratios to the best peer, and the noise, by phase."""
    out: dict[str, Any] = {}
    for phase in PHASES:
        of_phase = {name: report.spread(figures[phase]) for name, figures in values.items()}
        best = max(peers, key=lambda name: of_phase[name]["median"])
        out[phase] = {
            "tokens_per_s": of_phase,
            "best_peer": best,
            "ratio": report.spread(report.ratios(values["pdserve"][phase], values[best][phase])),
            "noise": report.spread(report.ratios(values["pdserve again"][phase], values["pdserve"][phase])),
        }
    return out


def agreement(engine_model: DecoderModel, peer: Any, num_new_tokens: int) -> float:
    """Share of a batch's tokens that are those of `transformers` in float32: both do the same work."""
    prompts = make_prompts(4, -3)
    mine = run_engine(engine_model, prompts, num_new_tokens)[1]
    theirs = run_generate(peer, prompts, num_new_tokens)[1]
    pairs = [(a, b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def print_table(batches: Mapping[str, Any]) -> None:
    """Tokens/s and ratios, a line for each batch size and phase."""
    heads = f"{'pdserve tok/s':>26} {'best peer':<22} {'peer tok/s':>26} {'ratio':>18} {'noise':>18}"
    print(f"\n{'batch':>5} {'phase':<8} {heads}")
    for batch, phases in batches.items():
        for phase in PHASES:
            row = phases[phase]
            mine, best = row["tokens_per_s"]["pdserve"], row["tokens_per_s"][row["best_peer"]]
            print(
                f"{batch:>5} {phase:<8} {report.show(mine, 1):>26} {row['best_peer']:<22} {report.show(best, 1):>26} "
                f"{report.show(row['ratio']):>18} {report.show(row['noise']):>18}"
            )


def plot(batches: Mapping[str, Any], path: Path) -> None:
    """Tokens/s by batch size, a panel for each phase; whiskers from the lowest to the highest round."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axes, phase in zip(panels, PHASES, strict=True):
        rows = [phases[phase] for phases in batches.values()]
        for offset, label in enumerate(("pdserve", "transformers, its best")):
            names = [row["best_peer"] if offset else "pdserve" for row in rows]
            figures = [row["tokens_per_s"][name] for name, row in zip(names, rows, strict=True)]
            medians = [each["median"] for each in figures]
            whiskers = [
                [median - each["min"] for median, each in zip(medians, figures, strict=True)],
                [each["max"] - median for median, each in zip(medians, figures, strict=True)],
            ]
            at = [n + 0.4 * offset - 0.2 for n in range(len(rows))]
            axes.bar(at, medians, 0.38, yerr=whiskers, label=label, capsize=3)
        axes.set(xticks=range(len(rows)), xticklabels=list(batches), xlabel="batch", title=phase, ylabel="tokens/s")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write result.json and offline.svg."""
    given = report.options("offline", __doc__, rounds=report.FEWEST_ROUNDS)
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    folder = resolve(MODEL)
    engine_model = load_model(folder, "auto")
    peers = {
        f"transformers {str(dtype).removeprefix('torch.')}": transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype
        ).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    for peer in peers.values():
        peer.generation_config.eos_token_id = None  # to the last token, as the engine is asked to
    sizes = Sizes((1, 8), 17) if given.quick else Sizes((1, 8, 32), 33)
    where = {**report.machine(given.threads), "pdserve_dtype": str(engine_model.dtype), "torch": torch.__version__}
    where |= {"pdserve_path": type(engine_model).__name__, "transformers": transformers.__version__}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    agreed = agreement(engine_model, peers["transformers float32"], sizes.num_new_tokens)
    batches = measure(engine_model, peers, sizes, given.num_rounds)
    print_table(batches)
    print(f"\n{agreed:.1%} of greedy tokens are those of transformers in float32")
    decode = {batch: batches[str(batch)]["decode"] for batch in sizes.batches}
    bars = [
        report.Bar(f"decode at batch {b}, ratio", decode[b]["ratio"]["median"], least)
        for b, least in DECODE_BARS.items()
    ]
    told = [f"{report.show(figures['ratio'])} at batch {batch}" for batch, figures in decode.items()]
    report.finish(
        given,
        {
            "machine": where,
            "model": MODEL,
            "agreement": agreed,
            "num_new_tokens": sizes.num_new_tokens,
            "batches": batches,
        },
        bars,
        f"Decode, times transformers generate at its best: {', '.join(told)}.",
        {"offline.svg": lambda path: plot(batches, path)},
    )


if __name__ == "__main__":
    main()
