"""Keeps this gateway's attempts alive and their token streams whole.

1. Every `renew_s` each worker gets one call that renews all of its attempts and acknowledges those that ended.
   Two failures in a row and the worker is lost; frozen counts as lost.
2. A gap is never silent. Replay is asked for, batched per worker, when an event arrived from beyond a gap, when the
   decode call answered with more tokens than arrived, when a renewal says the worker is ahead, when nothing came for
   `silence_s`, and for every attempt when the bus comes back.
3. A worker that does not know an attempt (any more) ends that attempt; the dispatcher starts another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge

from services.gateway.attempt import Attempt, Leg
from services.gateway.gaps import Kept
from services.gateway.membership import Membership, WorkerInfo, WorkerKey
from services.gateway.messages import AttemptRef
from services.gateway.settings import GatewaySettings
from services.gateway.stream import TokenBatch
from services.gateway.workers import AttemptStatus, CallFailedError, Replayed, WorkerLink
from services.runtime.process import Identity

REPLAYS = Counter("pdserve_gateway_replays_total", "attempts for which a replay was asked", ["reason"])
DROPPED = Counter("pdserve_gateway_events_dropped_total", "token events of no live attempt, or from a wrong worker")
REPLAYS_FAILED = Counter("pdserve_gateway_replays_failed_total", "replay calls that were not answered")
RENEWALS_FAILED = Counter("pdserve_gateway_renewals_failed_total", "renewals that were not answered", ["role"])
CANCELS_FAILED = Counter("pdserve_gateway_cancels_failed_total", "cancel calls that were not answered")
LIVE_ATTEMPTS = Gauge("pdserve_gateway_live_attempts", "attempts in flight")

TICK_S = 0.05
NUM_FAILURES = 2
CLOSE_S = 1.0  # how long cancels in flight may take when the gateway leaves
KNOWN_AFTER_S = 2.0  # a worker may not have heard of a younger attempt


@dataclass(eq=False, slots=True)
class _Watch:
    """What this gateway has with one worker."""

    info: WorkerInfo
    link: WorkerLink
    attempts: dict[str, Attempt] = field(default_factory=dict)
    acknowledged: list[str] = field(default_factory=list)
    wanted: dict[str, int] = field(default_factory=dict)  # handoff id to first index
    num_failures: int = 0
    renewed_s: float = 0.0
    renewing: bool = False
    replaying: bool = False


class Keeper:
    """Owner of the links to workers and of the registry of live attempts."""

    def __init__(
        self, identity: Identity, settings: GatewaySettings, membership: Membership, clock: Callable[[], float]
    ) -> None:
        self.clock = clock
        self._identity = identity
        self._settings = settings
        self._membership = membership
        self._kept: dict[str, Kept] = {}
        self._watches: dict[WorkerKey, _Watch] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._cancelling: set[asyncio.Task[None]] = set()
        membership.on_gone(self._gone)

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await asyncio.sleep(TICK_S)
                self._tick()

    async def close(self) -> None:
        """Lets cancels in flight arrive, then closes every link. To be called before `run` is cancelled."""
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=CLOSE_S)
        watches, self._watches = list(self._watches.values()), {}
        await asyncio.gather(*(watch.link.close() for watch in watches))

    def link(self, info: WorkerInfo) -> WorkerLink:
        """The link to a worker."""
        return self._watch(info).link

    def register(self, attempt: Attempt) -> None:
        """From now on the attempt is renewed and gets its events."""
        self._kept[attempt.ref.handoff_id] = Kept(attempt, asked_s=self.clock())
        for info in filter(None, (attempt.route.prefill, attempt.route.decode)):
            watch = self._watch(info)
            if not watch.attempts:
                watch.renewed_s, watch.num_failures = self.clock(), 0
            watch.attempts[attempt.ref.handoff_id] = attempt
        LIVE_ATTEMPTS.set(len(self._kept))

    def deregister(self, attempt: Attempt) -> None:
        """No event reaches the attempt from here on, so its workers may forget its tokens."""
        handoff_id = attempt.ref.handoff_id
        self._kept.pop(handoff_id, None)
        for key in attempt.legs:
            if watch := self._watches.get(key):
                watch.attempts.pop(handoff_id, None)
                watch.wanted.pop(handoff_id, None)
                watch.acknowledged.append(handoff_id)
        LIVE_ATTEMPTS.set(len(self._kept))

    def handed_over(self, attempt: Attempt) -> None:
        """Decode has all it needs: the prefill worker is no longer concerned."""
        prefill = attempt.route.prefill
        if prefill is not None and (watch := self._watches.get(prefill.key)):
            watch.attempts.pop(attempt.ref.handoff_id, None)

    def cancel(self, info: WorkerInfo, ref: AttemptRef, reason: str) -> None:
        """Tells a worker, without waiting for it."""
        watch = self._watches.get(info.key)
        if watch is not None and self._tasks is not None:
            cancelling = self._tasks.create_task(self._cancel(watch, ref, reason))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)

    def deliver(self, batch: TokenBatch) -> None:
        """Hands a message's events to their attempts; what belongs to none, or is a wrong worker's, is dropped."""
        for event in batch.events:
            kept = self._kept.get(event.handoff_id)
            leg = kept.attempt.legs.get(batch.worker) if kept is not None else None
            if kept is None or leg is None or event.choice != 0:
                DROPPED.inc()
                continue
            kept.attempt.take(leg, event)

    def replay_all(self) -> None:
        """The bus is back: whatever was published meanwhile is missing."""
        for kept in self._kept.values():
            self._want(kept, "reconnect")

    def load(self, key: WorkerKey) -> tuple[int, int]:
        """This gateway's live attempts on a worker, and their prompt tokens that are not prefilled yet."""
        watch = self._watches.get(key)
        attempts = watch.attempts.values() if watch is not None else ()
        waiting = (len(a.request.prompt_token_ids) for a in attempts if a.prefill is None)
        return len(attempts), sum(waiting)

    def _watch(self, info: WorkerInfo) -> _Watch:
        watch = self._watches.get(info.key)
        if watch is None:
            watch = self._watches[info.key] = _Watch(info, WorkerLink(info, self._identity))
        return watch

    def _gone(self, key: WorkerKey) -> None:
        watch = self._watches.pop(key, None)
        if watch is None:
            return
        for attempt in list(watch.attempts.values()):
            attempt.lost(key)
        if self._tasks is not None:
            self._tasks.create_task(watch.link.close())

    def _tick(self) -> None:
        now = self.clock()
        for kept in self._kept.values():
            if reason := kept.missing(now, self._settings.silence_s):
                self._want(kept, reason)
        assert self._tasks is not None
        for watch in list(self._watches.values()):
            if not watch.attempts and self._membership.get(watch.info.key) is None:
                self._gone(watch.info.key)
                continue
            if watch.wanted and not watch.replaying:
                watch.replaying = True
                self._tasks.create_task(self._replay(watch))
            due = (watch.attempts or watch.acknowledged) and now - watch.renewed_s >= self._settings.renew_s
            if due and not watch.renewing:
                watch.renewing, watch.renewed_s = True, now
                self._tasks.create_task(self._renew(watch))

    def _want(self, kept: Kept, reason: str) -> None:
        watch = self._watches.get(kept.attempt.route.decode.key)
        if watch is not None:
            REPLAYS.labels(reason).inc()
            kept.asked_s = self.clock()
            watch.wanted[kept.attempt.ref.handoff_id] = kept.attempt.stream.next_index

    async def _replay(self, watch: _Watch) -> None:
        wanted, watch.wanted = watch.wanted, {}
        try:
            answers = await watch.link.replay(wanted, self._settings.renew_deadline_s)
        except CallFailedError:
            REPLAYS_FAILED.inc()  # asked again soon; whether the worker lives is for renewals to find
        else:
            for answer in answers:
                self._take_replayed(answer)
        finally:
            watch.replaying = False

    def _take_replayed(self, answer: Replayed) -> None:
        kept = self._kept.get(answer.event.handoff_id)
        if kept is None:
            return
        attempt = kept.attempt
        if answer.known:
            attempt.take(Leg.DECODE, answer.event)
        elif attempt.decode_ended or self.clock() - attempt.started_s > KNOWN_AFTER_S:
            attempt.fail(Leg.DECODE, "ABORTED", "the worker does not know the attempt")

    async def _renew(self, watch: _Watch) -> None:
        acknowledged = list(watch.acknowledged)
        refs = [attempt.ref for attempt in watch.attempts.values()]
        try:
            who, statuses = await watch.link.renew(refs, acknowledged, self._settings.renew_deadline_s)
        except CallFailedError:
            RENEWALS_FAILED.labels(watch.info.role.value).inc()
            self._unanswered(watch)
            return
        finally:
            watch.renewing = False
        if who != watch.info.key:  # a restart behind the same address
            self._membership.settle(watch.info, who)
            self._gone(watch.info.key)
            return
        watch.num_failures = 0
        del watch.acknowledged[: len(acknowledged)]
        for handoff_id, status in statuses.items():
            kept = self._kept.get(handoff_id)
            if kept is not None and kept.attempt.legs.get(watch.info.key) is Leg.DECODE:
                self._note(kept, status)

    def _note(self, kept: Kept, status: AttemptStatus) -> None:
        """What the decode worker says of an attempt."""
        now = self.clock()
        kept.num_unknown = 0 if status.known else kept.num_unknown + 1
        if kept.num_unknown >= NUM_FAILURES and now - kept.attempt.started_s > KNOWN_AFTER_S:
            kept.attempt.fail(Leg.DECODE, "ABORTED", "the worker does not know the attempt")
        kept.worker_has(status.num_tokens, now)

    def _unanswered(self, watch: _Watch) -> None:
        watch.num_failures += 1
        if watch.num_failures >= NUM_FAILURES:
            self._membership.lose(watch.info.key)
            self._gone(watch.info.key)  # it may not have been a member any more

    async def _cancel(self, watch: _Watch, ref: AttemptRef, reason: str) -> None:
        try:
            await watch.link.cancel(ref, reason)
        except CallFailedError:
            CANCELS_FAILED.inc()
