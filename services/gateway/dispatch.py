"""Owns a request until its end, whatever happens to the workers that compute it.

1. The router names a pair; an attempt calls both. Tokens are fed to the caller in order as they arrive.
2. The first of these ends the choice, once: its tokens are complete; the caller says that a stop string was found;
   the attempt fails beyond retry; the client leaves (this task is cancelled); time is up.
3. An attempt that fails otherwise is closed, which fences it, and in the same synchronous step all tokens that it
   delivered become the forced output of the next. The client sees a pause.

Each rung is bounded: `max_attempts` in all, `max_lost_attempts` lost to dying workers, one internal error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from services.gateway.attempt import Attempt, Failure, Leg
from services.gateway.census import Census
from services.gateway.errors import BadRequestError, DeadlineError, GatewayError, InternalError, UnavailableError
from services.gateway.keeper import Keeper
from services.gateway.membership import Membership, Role, WorkerInfo, WorkerKey
from services.gateway.messages import AttemptRef
from services.gateway.request import Finish, GenerationRequest, Token
from services.gateway.router import Candidate, Need, Route, pick
from services.gateway.settings import GatewaySettings
from services.gateway.timeline import AttemptRecord
from services.runtime import log

ATTEMPTS = Counter("pdserve_gateway_attempts_total", "attempts begun", ["path"])
FALLBACKS = Counter("pdserve_gateway_fallbacks_total", "attempts that decode had to prefill itself", ["reason"])
FAILURES = Counter("pdserve_gateway_attempt_failures_total", "attempts that failed", ["leg", "code"])
RESUMED = Counter("pdserve_gateway_resumed_total", "attempts begun after tokens were already emitted")

DEAD = ("LOST", "UNAVAILABLE", "DEADLINE_EXCEEDED")  # perhaps: the worker is asked
BROKEN = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
ABOUT_THE_PAIR = ("ABORTED", "FAILED_PRECONDITION", "CANCELLED")  # said by decode: prefill may be at fault
HANDOFF = "handoff"  # decode's reason begins with it where the handoff failed, whatever the code
NEVER_REACHED = "failed to connect"  # in gRPC's words
RETRY_AFTER_S = 2.0
RETRY_PAUSE_S = 0.1

Feed = Callable[[Sequence[Token]], bool]


@dataclass(slots=True)
class _Run:
    """What is known of a request while it lives."""

    request: GenerationRequest
    feed: Feed
    records: list[AttemptRecord]
    tokens: list[int] = field(default_factory=list)  # emitted, and so forced on the next attempt
    avoid: set[WorkerKey] = field(default_factory=set)  # last resort
    exclude: set[WorkerKey] = field(default_factory=set)  # prefill workers that are out
    weights_fingerprint: str = ""
    num_lost: int = 0
    num_broken: int = 0


class Dispatcher:
    """Serves requests on the workers that the membership knows."""

    def __init__(self, settings: GatewaySettings, membership: Membership, keeper: Keeper, census: Census) -> None:
        self._settings = settings
        self._membership = membership
        self._keeper = keeper
        self._census = census
        self._turn = 0
        self._log = log.get_logger()

    async def serve(self, request: GenerationRequest, feed: Feed, records: list[AttemptRecord]) -> Finish:
        """Feeds the tokens of one choice to `feed`, which returns True to end it; returns STOP or LENGTH.

        `records` gets an entry per attempt. Raises BadRequestError (a worker refuses the request), UnavailableError,
        InternalError, DeadlineError. Cancelling the task cancels both workers at once.
        """
        run = _Run(request, feed, records)
        try:
            async with asyncio.timeout_at(request.deadline_s):
                return await self._serve(run)
        except TimeoutError:
            raise DeadlineError("the request's time is over", code="timeout") from None

    async def _serve(self, run: _Run) -> Finish:
        failure: Failure | None = None
        for number in range(1, self._settings.max_attempts + 1):
            began_s = self._keeper.clock()
            route = await self._route(run, number)
            record = self._begin(run, route, number, began_s)
            ref = AttemptRef(run.request.request_id, number, record.handoff_id)
            async with Attempt(ref, run.request, route, tuple(run.tokens), self._keeper) as attempt:
                try:
                    outcome = await self._follow(attempt, run)
                finally:
                    record.end(attempt.prefill, attempt.decode, attempt.received_s, attempt.ended_s)
            if isinstance(outcome, Finish):
                return outcome
            failure = outcome
            record.failure = f"{failure.leg.value}: {failure.code}"
            await self._judge(failure, route, run)
        detail = f": {failure.detail}" if failure and failure.code == "RESOURCE_EXHAUSTED" else ""
        raise UnavailableError(f"no worker could finish the request{detail}", retry_after_s=RETRY_AFTER_S)

    async def _follow(self, attempt: Attempt, run: _Run) -> Finish | Failure:
        """Feeds an attempt's tokens until it ends; lowest index first, so that every token goes before any ending."""
        stream = attempt.stream
        while True:
            if tokens := stream.take():
                run.tokens.extend(token.token_id for token in tokens)
                if run.feed(tokens):
                    await attempt.stop()
                    return Finish.STOP
            if stream.complete and stream.finish is not None:
                await attempt.settle()
                return stream.finish
            if attempt.failure is not None:
                attempt.close()  # with the take above, in one synchronous step
                return attempt.failure
            await attempt.wake.wait()
            attempt.wake.clear()

    async def _route(self, run: _Run, number: int) -> Route:
        """A pair for the next attempt. A first attempt never waits for a worker; a broken request does, for a while."""
        deadline_s = self._keeper.clock() + (self._settings.retry_wait_s if number > 1 else 0.0)
        sampling = run.request.sampling
        num_prompt_tokens = len(run.request.prompt_token_ids)
        need = Need(
            num_prompt_tokens=num_prompt_tokens + len(run.tokens),
            num_tokens=num_prompt_tokens + sampling.max_tokens,
            block_size=self._settings.block_size,
            weights_fingerprint=run.weights_fingerprint if run.tokens else "",
        )
        while True:
            self._turn += 1
            prefills, decodes = self._candidates(Role.PREFILL), self._candidates(Role.DECODE)
            if route := pick(prefills, decodes, need, run.avoid, run.exclude, self._turn):
                run.weights_fingerprint = route.decode.weights_fingerprint
                return route
            if self._keeper.clock() >= deadline_s:
                raise UnavailableError("no decode worker can take the request now", retry_after_s=RETRY_AFTER_S)
            await asyncio.sleep(RETRY_PAUSE_S)

    def _candidates(self, role: Role) -> list[Candidate]:
        return [Candidate(info, *self._keeper.load(info.key)) for info in self._membership.workers(role)]

    def _begin(self, run: _Run, route: Route, number: int, began_s: float) -> AttemptRecord:
        record = AttemptRecord.of(route, number, began_s)
        run.records.append(record)
        ATTEMPTS.labels(record.path).inc()
        if route.fallback is not None:
            FALLBACKS.labels(route.fallback).inc()
        if run.tokens:
            RESUMED.inc()
        return record

    async def _judge(self, failure: Failure, route: Route, run: _Run) -> None:
        """Decides whether and where the request goes on. Raises the GatewayError that ends it, if it may not."""
        FAILURES.labels(failure.leg.value, failure.code).inc()
        self._log.warning(
            "attempt failed",
            request_id=run.request.request_id,
            leg=failure.leg.value,
            worker_id=failure.worker.worker_id,
            code=failure.code,
            num_tokens=len(run.tokens),
        )
        if failure.code == "INVALID_ARGUMENT":
            raise BadRequestError(failure.detail or "a worker refused the request")
        blamed = self._blame(failure, route, run)
        run.num_broken += failure.code in BROKEN
        run.num_lost += await self._is_dead(failure, blamed)
        if run.num_broken > 1:
            raise InternalError("a worker failed while serving the request", code="worker_error")
        if run.num_lost >= self._settings.max_lost_attempts:
            raise _gone()
        if failure.code == "RESOURCE_EXHAUSTED":
            await asyncio.sleep(RETRY_PAUSE_S)

    def _blame(self, failure: Failure, route: Route, run: _Run) -> WorkerInfo:
        """Whose fault it is, and whether that worker may be tried again.

        A prefill worker that failed its own call is out. If decode says that the handoff went wrong, the prefill worker
        is avoided, and out if it happens again or can't be helped: where it is the only one, its blocks are cached.
        """
        handoff = failure.code in ABOUT_THE_PAIR or failure.detail.startswith(HANDOFF)
        if route.prefill is None or (failure.leg is Leg.DECODE and not handoff):
            run.avoid.add(route.decode.key)
            return route.decode
        key = route.prefill.key
        if failure.leg is Leg.PREFILL or failure.code != "ABORTED" or key in run.avoid:
            run.exclude.add(key)
        run.avoid.add(key)
        return route.prefill

    async def _is_dead(self, failure: Failure, blamed: WorkerInfo) -> bool:
        """Whether the attempt may have killed its worker. Suspicion is settled by asking.

        A worker that was dead before the call reached it was not killed by this request.
        """
        if failure.code == "LOST":
            return True
        if failure.code in DEAD or failure.code in ABOUT_THE_PAIR:
            return not await self._census.ask(blamed) and NEVER_REACHED not in failure.detail
        return False


def _gone() -> GatewayError:
    return UnavailableError(
        "the workers that served the request were lost", code="workers_lost", retry_after_s=RETRY_AFTER_S
    )
