"""The engine's step: schedule, run, settle. The worker around it receives (its inbox) and publishes.

One engine serves both pools, and knows of no network. It sleeps when has_work() is False; what then wakes it is a
message in the inbox, or the time next_wake_s().
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.engine.batch import Batch, SampledToken, SequenceOutput
from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence

__all__ = ["Batch", "Engine", "Runner", "SampledToken", "SequenceOutput", "StepResult"]


class Runner(Protocol):
    """Computes a batch."""

    def run(self, batch: Batch) -> list[SampledToken]:
        """Write the KV of every item into its blocks; one token per item with sample=True, in order."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: tokens and ends, and the sequences that got on with a chunk of their prompt."""

    outputs: list[SequenceOutput]
    progressed: list[Sequence]  # num_computed_tokens of each is what is ready; may have ended in this step
    num_prefill_tokens: int
    num_decode_tokens: int
    duration_s: float


class Engine:
    """A scheduler and a runner in a loop that somebody else turns. Only the engine thread calls this."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        before_release: Callable[[Sequence], None] | None = None,
        on_admitted: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        if before_release is not None:
            scheduler.before_release = before_release
        if on_admitted is not None:
            scheduler.on_admitted = on_admitted

    def step(self) -> StepResult | None:
        """One step; None if there was nothing to do. What the runner raises passes through, and nothing is booked."""
        started_s = self.clock()
        complete = self.scheduler.take_complete()
        batch = self.scheduler.schedule()
        if batch is None:
            return StepResult(complete, [], 0, 0, self.clock() - started_s) if complete else None
        tokens = self.runner.run(batch)
        outputs = complete + self.scheduler.settle(batch, tokens)
        progressed = [item.seq for item in batch.items[batch.num_decodes :]]
        duration_s = self.clock() - started_s
        return StepResult(outputs, progressed, batch.num_prefill_tokens, batch.num_decodes, duration_s)

    def has_work(self) -> bool:
        """Whether a step would do something now: the worker's loop steps while this holds, else it sleeps."""
        return self.scheduler.is_runnable

    def next_wake_s(self) -> float | None:
        """When (engine clock) an idle engine must be looked at again: the earliest deadline. None: when told."""
        return self.scheduler.next_deadline_s()
