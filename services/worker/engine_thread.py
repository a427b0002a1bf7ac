"""The engine thread: the only one that touches sequences and the block pool.

One turn of the loop:

    receive   what other threads posted: arrivals, cancels, finished transfers
    tick      what time changes: leases, deadlines, waiting handoffs
    step      schedule, run, settle (engine)
    flush     tokens and ends go to the event loop

It sleeps when there is nothing to do; pending leases and waiting handoffs count as something.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from services.engine.engine import Engine, StepResult
from services.engine.inbox import Inbox
from services.runtime import log
from services.worker import gauges

IDLE_S = 1.0  # sleeps no longer than this
TENDING_S = 0.05  # while leases or handoffs are watched
GAUGES_S = 0.25


class Life(Protocol):
    """What a role does around the engine's step. Every method is called on the engine thread."""

    def receive(self, message: object) -> None:
        """Takes one message of the inbox."""

    def tick(self, now: float) -> None:
        """Does what is due at `now` (time.monotonic)."""

    def settle(self, result: StepResult) -> None:
        """Books what a step did."""

    def flush(self) -> None:
        """Hands the turn's news over."""

    def is_tending(self) -> bool:
        """Whether time alone may change something soon."""

    def books(self) -> dict[str, object]:
        """Proves and shows the books. Raises BooksError."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the engine thread, answered between two steps."""

    question: Callable[[], object]
    answer: Future[object] = field(default_factory=Future)


@dataclass(slots=True)
class Pulse:
    """Progress of the loop; written by the engine thread, read by any."""

    num_steps: int = 0
    runnable: bool = False
    progress_s: float = field(default_factory=time.monotonic)  # a step last ended, or work came to an idle engine
    step_s: float = 0.0  # smoothed
    prefill_tokens_per_s: float = 0.0  # smoothed


class EngineThread:
    """Turns the loop until stopped."""

    def __init__(
        self,
        engine: Engine,
        life: Life,
        inbox: Inbox,
        on_crash: Callable[[str], None],
        on_blocks: Callable[[list[bytes], list[bytes]], None],
    ) -> None:
        """`on_blocks(added, removed)` hears which chain keys the prefix index gained and lost in a turn."""
        self.pulse = Pulse()
        self._engine = engine
        self._life = life
        self._inbox = inbox
        self._on_crash = on_crash
        self._on_blocks = on_blocks
        self._stopping = False
        self._shown_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to turn."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends after the current turn; idempotent."""
        self._stopping = True
        self._inbox.post(Ask(lambda: None))
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def ask(self, question: Callable[[], object]) -> Future[object]:
        """Runs `question` on the engine thread, between two steps."""
        ask = Ask(question)
        self._inbox.post(ask)
        return ask.answer

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # noqa: BLE001 - a bug: the process leaves, with its trace
            log.get_logger().exception("the engine thread died")
            self._on_crash(repr(error))

    def _turn(self) -> None:
        for message in self._inbox.drain():
            if isinstance(message, Ask):
                self._answer(message)
            else:
                self._life.receive(message)
        self._life.tick(time.monotonic())
        self._look_for_work()
        result = self._engine.step() if self.pulse.runnable else None
        if result is not None:
            self._life.settle(result)
            self._beat(result)
        self._life.flush()
        self._on_blocks(*self._engine.scheduler.pool.index.take_changes())
        self._show()
        if result is None and not len(self._inbox):
            self._inbox.wait(self._sleep_s())

    def _sleep_s(self) -> float:
        due_s = self._engine.next_wake_s()
        longest = TENDING_S if self._life.is_tending() else IDLE_S
        return longest if due_s is None else min(longest, max(0.0, due_s - time.monotonic()))

    def _look_for_work(self) -> None:
        """What waits for a step waits since it came: the idle time before it is no sign of sickness."""
        runnable = self._engine.has_work()
        if runnable and not self.pulse.runnable:
            self.pulse.progress_s = time.monotonic()  # before `runnable`: a heartbeat may read between the two
        self.pulse.runnable = runnable

    def _beat(self, result: StepResult) -> None:
        pulse = self.pulse
        pulse.num_steps += 1
        pulse.progress_s = time.monotonic()
        pulse.step_s = result.duration_s if not pulse.step_s else 0.9 * pulse.step_s + 0.1 * result.duration_s
        if result.num_prefill_tokens > result.num_decode_tokens and result.duration_s > 0:
            rate = result.num_prefill_tokens / result.duration_s
            known = pulse.prefill_tokens_per_s
            pulse.prefill_tokens_per_s = rate if not known else 0.8 * known + 0.2 * rate
        gauges.observe_step(result)

    def _show(self) -> None:
        """Sets the gauges, at most a few times a second while busy and always before sleeping."""
        now = time.monotonic()
        if now - self._shown_s > GAUGES_S or not self.pulse.runnable:
            self._shown_s = now
            scheduler = self._engine.scheduler
            pool = scheduler.pool
            gauges.show(scheduler.load(), pool.counts(), scheduler.counters, pool.num_evictions)

    def _answer(self, ask: Ask) -> None:
        try:
            ask.answer.set_result(ask.question())
        except Exception as error:  # noqa: BLE001 - carried to whoever asked
            ask.answer.set_exception(error)
