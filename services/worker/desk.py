"""The part of both gRPC services that is the same: admit an attempt, wait for its end, renew, cancel, sweep.

Life of a call: `serve` tells the gateway that it came (initial metadata), admits the attempt, posts its arrival to the
engine and waits for its end. The attempt is released when the caller hangs up, cancels, is fenced by a higher attempt,
or stops renewing. On the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from services.engine.sequence import Sequence
from services.runtime import log
from services.runtime.process import Process
from services.wire.pb import common_pb2
from services.wire.rpc import RECEIVED
from services.worker.attempts import AttemptBook, FencedError
from services.worker.intake import Attempt, GatewayRef, RefusedWorkError
from services.worker.outlet import Failure, Outlet
from services.worker.publisher import FINISH_TO_PROTO
from services.worker.token_log import TokenLog

SWEEP_S = 0.25


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """To the engine: this attempt is not wanted any more. Idempotent."""

    handoff_id: str
    reason: str
    code: str = "CANCELLED"  # name of the gRPC status that its call ends with
    by_gateway: bool = False  # asked for with Cancel: whoever waits for the call wants to know how far it came


class Desk:
    """Where calls wait. `outlet` answers them."""

    def __init__(
        self, process: Process, book: AttemptBook, tokens: TokenLog, outlet: Outlet, post: Callable[[object], None]
    ) -> None:
        self._process = process
        self._book = book
        self._tokens = tokens
        self._outlet = outlet
        self._post = post

    @property
    def num_open(self) -> int:
        """Attempts whose sequences have not left."""
        return len(self._book)

    async def serve(
        self, attempt: Attempt, seq: Sequence, arrival: object, context: aio.ServicerContext[Any, Any]
    ) -> object:
        """Posts `arrival` and returns how the attempt ended; every failure aborts the call with its status."""
        await _say_received(context)  # first: once the engine computes, what is sent waits for its turn
        if self._process.draining.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining: takes no more work")
        self._release(self._book.hear(attempt.gateway), "its gateway was restarted")
        try:
            self._release(self._book.admit(attempt), "fenced by a higher attempt")
        except FencedError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        self._tokens.open(attempt, seq.num_forced_tokens)
        ended = self._outlet.call(attempt.handoff_id)
        self._post(arrival)
        try:
            outcome = await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._cancel(attempt.handoff_id, "the caller hung up")
            raise
        finally:
            ended.add_done_callback(lambda _: self._book.end(attempt.handoff_id))
        if isinstance(outcome, Failure):
            await context.abort(grpc.StatusCode[outcome.code], outcome.reason)
        return outcome

    def cancel(self, request: common_pb2.CancelRequest) -> common_pb2.CancelResponse:
        """Ends an attempt, also one that has not come yet."""
        self._cancel(request.attempt.handoff_id, request.reason[:200] or "cancelled", by_gateway=True)
        return common_pb2.CancelResponse()

    def renew(self, request: common_pb2.RenewRequest) -> common_pb2.RenewResponse:
        """Keeps the gateway's attempts alive, forgets what it acknowledges, says what became of each."""
        gateway = GatewayRef(request.gateway.worker_id, request.gateway.epoch)
        if gateway.gateway_id:
            self._release(self._book.hear(gateway), "its gateway was restarted")
            self._tokens.hear(gateway)
        self._book.renew(attempt.handoff_id for attempt in request.attempts)
        self._tokens.forget(request.acknowledged_handoff_ids)
        identity = self._process.identity
        response = common_pb2.RenewResponse(
            worker=common_pb2.ProcessId(worker_id=identity.worker_id, epoch=identity.epoch)
        )
        for attempt in request.attempts:
            entry = self._tokens.get(attempt.handoff_id)
            response.attempts.add(
                handoff_id=attempt.handoff_id,
                known=entry is not None,
                num_tokens=entry.num_tokens if entry else 0,
                finish_reason=FINISH_TO_PROTO[entry.finish if entry else None],
            )
        return response

    def hand_back(self, reason: str) -> None:
        """Ends every attempt so that its gateway goes on with it elsewhere."""
        for attempt in self._book.live():
            self._book.cancel(attempt.handoff_id)
            self._post(CancelAttempt(attempt.handoff_id, reason, code="UNAVAILABLE"))

    async def sweep_forever(self) -> None:
        """Releases what nobody renews."""
        while True:
            self._release(self._book.sweep(), "its gateway renews it no more")
            self._tokens.sweep()
            await asyncio.sleep(SWEEP_S)

    def _release(self, attempts: Iterable[Attempt], reason: str) -> None:
        for attempt in attempts:
            log.get_logger().info("attempt released", handoff_id=attempt.handoff_id, reason=reason)
            self._cancel(attempt.handoff_id, reason)

    def _cancel(self, handoff_id: str, reason: str, *, by_gateway: bool = False) -> None:
        if self._book.cancel(handoff_id) is not None or by_gateway:  # a prefill that has answered may hold a lease
            self._post(CancelAttempt(handoff_id, reason, by_gateway=by_gateway))


async def _say_received(context: aio.ServicerContext[Any, Any]) -> None:
    """Tells the gateway that the request is here. To one that has hung up: its call is cancelled anyway."""
    with contextlib.suppress(aio.BaseError):
        await context.send_initial_metadata(RECEIVED)


async def refuse(context: aio.ServicerContext[Any, Any], error: RefusedWorkError | ValueError) -> None:
    """Ends a call whose message cannot be served."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
