"""One dispatch of a request: its two calls, its token stream, its first failure.

1. Entering opens both calls at once under a fresh handoff id, and registers with the keeper, which renews the
   attempt, brings its events and asks for replays.
2. Whatever happens (tokens, an answer, a failure) sets `wake`; the dispatcher looks and decides.
3. `close` is the one way out: from then on no event reaches the attempt, calls that still run are cancelled, and the
   workers are told. Leaving the `async with` closes, also when the task is cancelled because the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from services.gateway.membership import WorkerKey
from services.gateway.messages import AttemptRef
from services.gateway.request import Finish, GenerationRequest
from services.gateway.router import Route
from services.gateway.stream import TokenEvent, TokenStream
from services.gateway.workers import CallFailedError, DecodeResult, PrefillResult, WorkerLink

if TYPE_CHECKING:
    from services.gateway.keeper import Keeper

SETTLE_S = 1.0  # how long an attempt whose tokens are complete waits for the workers' own account of it
SPEAK_S = 0.25  # how long an ending on the bus waits for the call's own answer, which says more
STOP_S = 0.25  # likewise after a stop string, when the worker has to be told first
ENDS = (Finish.STOP, Finish.LENGTH)


class Leg(StrEnum):
    """Which half of an attempt."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt can't go on. `code` is a gRPC status, or LOST where the worker answers nothing any more."""

    leg: Leg
    worker: WorkerKey
    code: str
    detail: str


class Attempt:
    """One try of one pair of workers."""

    def __init__(
        self, ref: AttemptRef, request: GenerationRequest, route: Route, forced: Sequence[int], keeper: Keeper
    ) -> None:
        self.ref = ref
        self.request = request
        self.route = route
        self.stream = TokenStream(first_index=len(forced))
        self.wake = asyncio.Event()
        self.failure: Failure | None = None
        self.prefill: PrefillResult | None = None
        self.decode: DecodeResult | None = None
        self.received_s: float | None = None  # when the worker that computes the prompt said that it has the request
        self.ended_s: float | None = None  # when the event or answer that ended the tokens arrived
        self.decode_runs = False  # decode has the KV: a token that only it can have made arrived
        self.legs: dict[WorkerKey, Leg] = {route.decode.key: Leg.DECODE}
        if route.prefill is not None:
            self.legs[route.prefill.key] = Leg.PREFILL
        self.started_s = self.progress_s = keeper.clock()
        self._forced = forced
        self._keeper = keeper
        self._calls: dict[Leg, asyncio.Task[None]] = {}
        self._told: set[Leg] = set()
        self._closed = False

    async def __aenter__(self) -> Attempt:
        self._keeper.register(self)
        decode = self._keeper.link(self.route.decode)
        self._calls[Leg.DECODE] = asyncio.create_task(self._run_decode(decode))
        if self.route.prefill is not None:
            prefill = self._keeper.link(self.route.prefill)
            self._calls[Leg.PREFILL] = asyncio.create_task(self._run_prefill(prefill))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def close(self) -> None:
        """Ends the attempt at once; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._keeper.deregister(self)
        self._cancel("attempt over")
        for call in self._calls.values():
            call.cancel()

    async def stop(self) -> None:
        """The gateway ended the choice: tells the workers, and waits shortly for their account."""
        self.ended_s = self._keeper.clock()
        self._cancel("stop string")
        await self._settle(STOP_S)

    async def settle(self) -> None:
        """The tokens are complete: waits shortly for the workers' account."""
        await self._settle(SETTLE_S)

    def take(self, leg: Leg, event: TokenEvent) -> None:
        """An event of one of this attempt's workers, from the bus or from a replay."""
        ended = event.finish if event.finish in ENDS else None
        if self.stream.add(event.first_index, event.tokens, ended):
            self.progress_s = self._keeper.clock()
            self._note_end()
            self.wake.set()
            its_own = event.first_index + len(event.tokens) > len(self._forced) + 1  # the first may be prefill's
            if leg is Leg.DECODE and its_own and not self.decode_runs:
                self.decode_runs = True
                self._keeper.handed_over(self)
        if event.finish is not None and ended is None:
            self._end_badly_soon(leg, event.finish, event.error)

    def fail(self, leg: Leg, code: str, detail: str) -> None:
        """Records the first failure."""
        if self.failure is None:
            worker = next(key for key, its_leg in self.legs.items() if its_leg is leg)
            self.failure = Failure(leg, worker, code, detail)
            self.wake.set()

    def lost(self, worker: WorkerKey) -> None:
        """A worker of this attempt is gone."""
        leg = self.legs[worker]
        done = leg is Leg.PREFILL and self.decode_runs
        if not done and not (leg is Leg.DECODE and self.decode is not None and self.stream.complete):
            self.fail(leg, "LOST", "the worker is gone")

    @property
    def decode_ended(self) -> bool:
        """Whether the decode call has answered: what is missing now can only come from a replay."""
        return self.decode is not None

    async def _run_prefill(self, link: WorkerLink) -> None:
        decode = self.route.decode
        try:
            result = await link.prefill(
                self.ref, self.request, self._forced, decode, self._time_left_s(), self._note_received
            )
        except CallFailedError as error:
            if not self.decode_runs:
                self.fail(Leg.PREFILL, error.code, error.detail)
            return
        self.prefill = result
        if result.first_token is not None:
            first = TokenEvent(self.ref.handoff_id, 0, len(self._forced), [result.first_token], result.finish)
            self.take(Leg.PREFILL, first)
        elif result.finish in ENDS:  # the forced output was complete already
            self.stream.end_at(len(self._forced), result.finish)
            self._note_end()
        elif result.finish is not None:
            self._ended_badly(Leg.PREFILL, result.finish, "no first token")
        self.wake.set()

    async def _run_decode(self, link: WorkerLink) -> None:
        prefill = self.route.prefill
        on_received = self._note_received if prefill is None else _ignore
        try:
            result = await link.decode(self.ref, self.request, self._forced, prefill, self._time_left_s(), on_received)
        except CallFailedError as error:
            if prefilling := self._calls.get(Leg.PREFILL):  # decode may only have heard what befell it
                await asyncio.wait((prefilling,), timeout=SPEAK_S)
            if not self.stream.complete:
                self.fail(Leg.DECODE, error.code, error.detail)
            return
        self.decode = result
        if result.finish in ENDS:
            self.stream.end_at(result.num_output_tokens, result.finish)
            self._note_end()
        elif result.finish is Finish.CANCELLED and Leg.DECODE in self._told:  # as we asked: an account, no failure
            self.ended_s = self._keeper.clock()
        else:
            self._ended_badly(Leg.DECODE, result.finish or Finish.ERROR, "the call ended without a finish")
        self.wake.set()

    def _note_received(self) -> None:
        self.received_s = self._keeper.clock()

    def _note_end(self) -> None:
        if self.ended_s is None and self.stream.complete:
            self.ended_s = self._keeper.clock()

    def _end_badly_soon(self, leg: Leg, finish: Finish, detail: str) -> None:
        call = self._calls.get(leg)
        delay_s = 0.0 if call is None or call.done() else SPEAK_S
        asyncio.get_running_loop().call_later(delay_s, self._ended_badly, leg, finish, detail)

    def _ended_badly(self, leg: Leg, finish: Finish, detail: str) -> None:
        self.fail(leg, "ABORTED" if finish is Finish.CANCELLED else "INTERNAL", detail)

    def _cancel(self, reason: str) -> None:
        for leg, call in self._calls.items():
            if leg not in self._told and (not call.done() or (leg is Leg.PREFILL and self._lease_is_open)):
                self._told.add(leg)
                info = self.route.decode if leg is Leg.DECODE else self.route.prefill
                if info is not None:
                    self._keeper.cancel(info, self.ref, reason)

    @property
    def _lease_is_open(self) -> bool:
        """Whether prefill may hold blocks for a decode worker that will not release them."""
        taken = self.decode_runs or (self.decode is not None and self.decode.finish in ENDS)
        return self.prefill is not None and not taken

    async def _settle(self, timeout_s: float) -> None:
        await asyncio.wait(self._calls.values(), timeout=timeout_s)

    def _time_left_s(self) -> float:
        return max(0.001, self.request.deadline_s - self._keeper.clock())


def _ignore() -> None:
    """Of a decode worker that pulls the KV nobody waits to hear that it has the request."""
