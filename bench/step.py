"""`python -m bench.step`: where the time of a decode step goes, at batch 1, 8 and 32.

1. A worker's parts without its network server: scheduler, model runner, sampler, and the outlet that hands tokens to an
   event loop in another thread, which encodes them and publishes them over a real NATS server.
2. Each round fills the batch with fresh prompts and takes decode steps. Every other step is taken apart, with a clock
   between the parts; the others are whole, `Engine.step()` and the hand-over, and say whether the parts add up. On the
   lean path the model's own parts come from its clock, waiting for the slower thread included.
3. Overhead is all that is not the model's forward pass. What the event loop does meanwhile is printed beside it; it
   does not lengthen the step where there is a core for it.

Bar for --check: overhead at most 10 % of a step at batch 32.
"""

import asyncio
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import engines, report
from services.engine.batch import Batch, SequenceOutput
from services.engine.engine import Engine
from services.engine.kv_cache import KVCache, KVShape
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel, StepTensors
from services.engine.models.lean import LeanModel
from services.engine.sampling import sample
from services.engine.weights import load_model
from services.launcher.nats_server import nats_command
from services.launcher.ports import free_port, is_free
from services.runtime.model_store import resolve
from services.runtime.process import Identity
from services.wire.bus import Bus
from services.worker.intake import Attempt, GatewayRef
from services.worker.outlet import Outlet
from services.worker.publisher import TokenEvent
from services.worker.token_log import TokenLog

MODEL = "smollm2-135m"
BATCHES = (1, 8, 32)
CONTEXT = 256
NUM_STEPS = 16
OVERHEAD_BAR = 0.10
MODEL_PARTS = {  # of the table: of the lean path's clock
    "products": ("qkv", "out", "gate_up", "down"),
    "attention": ("attention",),
    "logits": ("head",),
    "norms, rotation, KV write": ("embed", "norm", "place"),
}
OTHER_MODEL = "model, not told apart"
OUTSIDE = ("scheduling", "step tensors", "sampling", "settling", "handing over")
Figures = dict[str, float]


class TimedModel:
    """A model that adds up the seconds of its forward passes."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.device, self.dtype = model.device, model.dtype
        self.vocab_size, self.max_model_len = model.vocab_size, model.max_model_len
        self.seconds = 0.0

    def kv_shape(self, num_blocks: int, block_size: int = 16) -> KVShape:
        """The model's."""
        return self._model.kv_shape(num_blocks, block_size)

    def forward(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        """The model's."""
        started_s = time.perf_counter()
        logits = self._model.forward(step, kv_cache)
        self.seconds += time.perf_counter() - started_s
        return logits


class Publishing:
    """An outlet whose event loop runs in a thread of its own and publishes over NATS."""

    def __init__(self, nats_url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        identity = Identity("bench", "0")
        self._log = TokenLog(64 * 2**20)
        self._bus: Bus = self._do(Bus.connect(nats_url, "bench"))
        self.outlet: Outlet = self._do(self._make(identity))
        self._gateway = GatewayRef("bench", "0")
        self._task = asyncio.run_coroutine_threadsafe(self.outlet.publish_forever(self._bus), self._loop)

    def hand_over(self, outputs: list[SequenceOutput]) -> None:
        """What a worker does with a step's tokens."""
        for output in outputs:
            attempt = Attempt(output.seq.sequence_id, 0, output.seq.sequence_id, self._gateway)
            self.outlet.token(TokenEvent(attempt, output.index, output.token, output.finish_reason))
        self.outlet.flush()

    def cpu_s(self) -> float:
        """Processor seconds of the event loop's thread so far."""
        seconds: float = self._do(self._thread_time())
        return seconds

    def close(self) -> None:
        """Ends the loop and its thread."""
        self._task.cancel()
        self._do(self._bus.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _make(self, identity: Identity) -> Outlet:
        return Outlet(identity, self._log, asyncio.get_running_loop())

    async def _thread_time(self) -> float:
        return time.thread_time()


@contextmanager
def nats() -> Iterator[str]:
    """A NATS server's URL, for as long as it is needed."""
    port, monitoring = free_port(), free_port()
    server = subprocess.Popen(nats_command("127.0.0.1", port, monitoring), stderr=subprocess.DEVNULL)
    try:
        while is_free(port):
            time.sleep(0.01)
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


class Laps:
    """Seconds between calls, by what was done in between."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def note(self, name: str) -> float:
        """The seconds since the last call, noted under a name."""
        now = time.perf_counter()
        lap, self._last_s = now - self._last_s, now
        self.seconds[name] = lap
        return lap


def parts_of_step(engine: Engine, model: TimedModel, lean: LeanModel | None, out: Publishing) -> Figures:
    """One step, in parts: seconds by name."""
    scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(runner, ModelRunner)
    if lean is not None:
        lean.take_part_seconds()
    model.seconds = 0.0
    laps = Laps()
    batch: Batch | None = scheduler.schedule()
    assert batch is not None
    laps.note("scheduling")
    logits = runner.forward(batch)
    forward_s = laps.note("step tensors")
    tokens = sample(logits, runner.sampling_rows(batch))
    laps.note("sampling")
    outputs = scheduler.settle(batch, tokens)
    laps.note("settling")
    out.hand_over(outputs)
    laps.note("handing over")
    found = laps.seconds
    found["step tensors"] = forward_s - model.seconds
    inner = lean.take_part_seconds() if lean is not None else {}
    for name, parts in MODEL_PARTS.items() if inner else ():
        found[name] = sum(inner[part] for part in parts)
    found[OTHER_MODEL] = model.seconds - sum(inner.values())
    return found


def contestant(model: DecoderModel, batch: int, out: Publishing) -> Callable[[int], Figures]:
    """Runs a round at one batch size: medians over its steps, in seconds."""
    timed = TimedModel(model)
    lean = model if isinstance(model, LeanModel) else None

    def run(number: int) -> Figures:
        engine = engines.make_engine(timed, batch, CONTEXT + NUM_STEPS + 1)
        engines.add(engine, engines.make_prompts(batch, CONTEXT - NUM_STEPS // 2, number), NUM_STEPS + 1)
        engine.step()
        laps: dict[str, list[float]] = defaultdict(list)
        cpu_s = out.cpu_s()
        for _ in range(NUM_STEPS // 2):
            for name, seconds in parts_of_step(engine, timed, lean, out).items():
                laps[name].append(seconds)
            started_s = time.perf_counter()
            result = engine.step()
            assert result is not None
            out.hand_over(result.outputs)
            laps["whole"].append(time.perf_counter() - started_s)
        found = {name: statistics.median(seconds) for name, seconds in laps.items()}
        return found | {"event loop": (out.cpu_s() - cpu_s) / NUM_STEPS}

    return run


def summarise(values: Mapping[str, list[float]]) -> dict[str, Any]:
    """Milliseconds by part, the whole step, the residual, and the share of overhead, round by round."""
    names = [name for name in (*MODEL_PARTS, OTHER_MODEL, *OUTSIDE) if name in values]
    outside = [sum(row) for row in zip(*(values[name] for name in OUTSIDE), strict=True)]
    total = [sum(row) for row in zip(*(values[name] for name in names), strict=True)]
    return {
        "parts_ms": {name: report.spread([1e3 * value for value in values[name]]) for name in names},
        "whole_ms": report.spread([1e3 * value for value in values["whole"]]),
        "residual": report.spread([(w - t) / w for w, t in zip(values["whole"], total, strict=True)]),
        "overhead": report.spread(report.ratios(outside, total)),
        "event_loop_ms": report.spread([1e3 * value for value in values["event loop"]]),
    }


def print_table(found: Mapping[str, Any]) -> None:
    """Milliseconds by part, a column for each batch size."""
    names = list(next(iter(found.values()))["parts_ms"])
    print(f"\n{'ms of a decode step':<28}" + "".join(f"{'batch ' + batch:>26}" for batch in found))
    for name in names:
        print(f"{name:<28}" + "".join(f"{report.show(each['parts_ms'][name]):>26}" for each in found.values()))
    for name, key in (("whole step", "whole_ms"), ("event loop, meanwhile (CPU)", "event_loop_ms")):
        print(f"{name:<28}" + "".join(f"{report.show(each[key]):>26}" for each in found.values()))
    for name, key in (("overhead, %", "overhead"), ("whole less parts, %", "residual")):
        shares = [{k: 100 * v for k, v in each[key].items()} for each in found.values()]
        print(f"{name:<28}" + "".join(f"{report.show(share, 1):>26}" for share in shares))


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Shares of a step, a bar for each batch size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    labels, below = [f"batch {batch}" for batch in found], [0.0] * len(found)
    for name in next(iter(found.values()))["parts_ms"]:
        medians = [each["parts_ms"][name]["median"] for each in found.values()]
        totals = [sum(part["median"] for part in each["parts_ms"].values()) for each in found.values()]
        shares = [100 * m / total for m, total in zip(medians, totals, strict=True)]
        axes.barh(labels, shares, left=below, label=name)
        below = [b + s for b, s in zip(below, shares, strict=True)]
    axes.set(xlabel="% of a decode step", xlim=(0, 100))
    axes.legend(bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write result.json and step.svg."""
    given = report.options("step", __doc__)
    torch.set_num_threads(given.threads)
    model = load_model(resolve(MODEL), "auto")
    if isinstance(model, LeanModel):
        model.time_parts()
    where = {**report.machine(given.threads), "dtype": str(model.dtype), "path": type(model).__name__}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    with nats() as url:
        out = Publishing(url)
        runs: dict[str, Callable[[int], Figures]] = {str(batch): contestant(model, batch, out) for batch in BATCHES}
        values = report.rounds({**runs, "1 again": runs["1"]}, given.num_rounds)
        out.close()
    found = {str(batch): summarise(values[str(batch)]) for batch in BATCHES}
    print_table(found)
    noise = report.spread(report.ratios(values["1 again"]["whole"], values["1"]["whole"]))
    print(f"A/A noise of a whole step at batch 1: {report.show(noise)}")
    overhead = found["32"]["overhead"]["median"]
    report.finish(
        given,
        {"machine": where, "model": MODEL, "context": CONTEXT, "batches": found, "noise": noise},
        [report.Bar("share of a step at batch 32 that is the model", 1 - overhead, 1 - OVERHEAD_BAR)],
        f"Outside the model: {100 * overhead:.1f} % of a decode step at batch 32.",
        {"step.svg": lambda path: plot(found, path)},
    )


if __name__ == "__main__":
    main()
