"""A worker that computes nothing: it replays a script over real gRPC and real NATS.

The token at index i is `reply[i]`, whatever attempt asks for it, so what a client must get is known beforehand; after
the last scripted token comes the end-of-sequence token. Publishing passes through `mangle`, which may drop, repeat,
delay or reorder; everything a test wants to know is recorded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.wire import rpc, subjects
from services.wire.bus import Bus
from services.wire.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    directory_pb2,
    heartbeat_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    token_events_pb2,
)

EOS = 0
Mangle = Callable[[token_events_pb2.TokenBatch], Sequence[token_events_pb2.TokenBatch]]


@dataclass(eq=False)
class Script:
    """What all fake workers of a test share."""

    model: str
    reply: list[int]
    step_s: float = 0.002
    receive_s: float = 0.0  # before a worker says that it has a request; negative: it never says so
    prefill_s: float = 0.005
    account_s: float = 0.0  # from a choice's last token to the decode call's answer
    prefilled: dict[str, asyncio.Event] = field(default_factory=dict)  # by handoff id: its KV is ready

    def token(self, index: int) -> int:
        return self.reply[index] if index < len(self.reply) else EOS

    def kv_ready(self, handoff_id: str) -> asyncio.Event:
        return self.prefilled.setdefault(handoff_id, asyncio.Event())


@dataclass(eq=False)
class Held:
    """An attempt as a decode worker has it."""

    tokens: list[common_pb2.Token]
    forced: int
    finish: Any = common_pb2.FINISH_REASON_UNSPECIFIED
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class FakeWorker:
    """One life of one worker."""

    def __init__(self, script: Script, bus: Bus, role: str, worker_id: str, **beat: Any) -> None:
        self.script = script
        self.bus = bus
        self.role = role
        self.process = common_pb2.ProcessId(worker_id=worker_id, epoch=secrets.token_hex(16))
        self.beat = {"weights_fingerprint": "w", "layout_fingerprint": "l", "max_model_len": 512} | beat
        self.num_blocks = 64
        self.works: list[common_pb2.Work] = []
        self.cancelled_calls: list[str] = []  # handoff ids whose call was closed under us
        self.cancel_requests: list[str] = []
        self.renewals: list[str] = []
        self.acknowledged: list[str] = []
        self.replays: list[tuple[str, int]] = []
        self.held: dict[str, Held] = {}
        self.live: set[str] = set()
        self.mangle: Mangle = lambda batch: [batch]
        self.replay_enabled = True
        self.fail_with: Callable[[common_pb2.Work], tuple[grpc.StatusCode, str] | None] = lambda work: None
        self.stall_at: int | None = None  # decode: no further than this index
        self.decode_instead: Callable[[Any, Any], Any] | None = None
        self.draining = False
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.address = ""
        self._server = rpc.RpcServer()
        self._beating: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> None:
        if self.role == "prefill":
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_Prefill(self), self._server.server)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(_Decode(self), self._server.server)
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', port)}"
        await self._server.set_serving(True)
        self._beating = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """Like a crash: every open call breaks."""
        self.thawed.set()
        if self._beating is not None:
            self._beating.cancel()
            with suppress(asyncio.CancelledError):
                await self._beating
            self._beating = None
            await self._server.stop(0)

    def freeze(self) -> None:
        """Like SIGSTOP: connections stay open, nothing is answered."""
        self.thawed.clear()

    async def say(self, **changes: Any) -> None:
        """Publishes a heartbeat now."""
        await self.bus.publish(subjects.heartbeat_subject(self.role, self.process.worker_id), self.heartbeat(**changes))

    def heartbeat(self, **changes: Any) -> bytes:
        role = getattr(directory_pb2, f"WORKER_ROLE_{self.role.upper()}")
        beat = heartbeat_pb2.Heartbeat(
            peer=common_pb2.Peer(process=self.process, address=self.address),
            role=role,
            draining=self.draining,
            load=heartbeat_pb2.Load(num_blocks=self.num_blocks, num_free_blocks=self.num_blocks),
            **({"model": self.script.model} | self.beat | changes),
        )
        return beat.SerializeToString()

    async def publish(self, work: common_pb2.Work, first_index: int, tokens: list[Any], **end: Any) -> None:
        await self.thawed.wait()
        event = token_events_pb2.TokenEvent(attempt=work.attempt, first_index=first_index, tokens=tokens, **end)
        batch = token_events_pb2.TokenBatch(worker=self.process, events=[event])
        subject = subjects.token_subject(work.gateway.worker_id, work.gateway.epoch)
        for each in self.mangle(batch):
            await self.bus.publish(subject, each.SerializeToString())

    def make(self, index: int, work: common_pb2.Work) -> common_pb2.Token:
        token = common_pb2.Token(token_id=self.script.token(index))
        if work.sampling.logprobs:
            token.logprob = -0.5 - index
            for rank in range(work.sampling.num_top_logprobs):
                token.top_logprobs.add(token_id=max(0, token.token_id - rank), logprob=-0.5 - index - rank)
        return token

    def finish_of(self, index: int, work: common_pb2.Work) -> Any:
        if self.script.token(index) == EOS and not work.sampling.ignore_eos:
            return common_pb2.FINISH_REASON_STOP
        if index + 1 >= work.sampling.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED

    @asynccontextmanager
    async def call(self, work: common_pb2.Work, context: Any) -> AsyncIterator[None]:
        """Bookkeeping around an open call."""
        self.works.append(work)
        self.live.add(work.attempt.handoff_id)
        try:
            await self.thawed.wait()
            if failure := self.fail_with(work):
                await context.abort(*failure)
            if self.script.receive_s >= 0:
                await asyncio.sleep(self.script.receive_s)
                await context.send_initial_metadata(rpc.RECEIVED)
            yield
        except asyncio.CancelledError:
            self.cancelled_calls.append(work.attempt.handoff_id)
            raise
        finally:
            self.live.discard(work.attempt.handoff_id)

    async def cancel(self, request: common_pb2.CancelRequest) -> common_pb2.CancelResponse:
        await self.thawed.wait()
        self.cancel_requests.append(request.attempt.handoff_id)
        if held := self.held.get(request.attempt.handoff_id):
            held.cancelled.set()
        return common_pb2.CancelResponse()

    async def renew(self, request: common_pb2.RenewRequest) -> common_pb2.RenewResponse:
        await self.thawed.wait()
        self.renewals.extend(attempt.handoff_id for attempt in request.attempts)
        self.acknowledged.extend(request.acknowledged_handoff_ids)
        answer = common_pb2.RenewResponse(worker=self.process)
        for attempt in request.attempts:
            held = self.held.get(attempt.handoff_id)
            known = held is not None or attempt.handoff_id in self.live
            answer.attempts.add(handoff_id=attempt.handoff_id, known=known, num_tokens=len(held.tokens) if held else 0)
        return answer

    async def _beat(self) -> None:
        while True:
            await self.thawed.wait()
            await self.say()
            await asyncio.sleep(0.1)


class _Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:
        worker, work = self._worker, request.work
        async with worker.call(work, context):
            await asyncio.sleep(worker.script.prefill_s)
            index = len(work.forced_token_ids)
            token, finish = worker.make(index, work), worker.finish_of(index, work)
            await worker.publish(work, index, [token], finish_reason=finish)
            worker.script.kv_ready(work.attempt.handoff_id).set()
            return prefill_pb2.PrefillResponse(
                worker=worker.process,
                num_prompt_tokens=len(work.prompt_token_ids),
                num_cached_tokens=3,
                queue_s=0.001,
                prefill_s=worker.script.prefill_s,
                first_token=token,
                finish_reason=finish,
            )

    async def Cancel(self, request: common_pb2.CancelRequest, context: Any) -> common_pb2.CancelResponse:
        return await self._worker.cancel(request)

    async def Renew(self, request: common_pb2.RenewRequest, context: Any) -> common_pb2.RenewResponse:
        return await self._worker.renew(request)


class _Decode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> decode_pb2.DecodeResponse:
        worker, work = self._worker, request.work
        if worker.decode_instead is not None:
            return await worker.decode_instead(request, context)
        handoff_id = work.attempt.handoff_id
        async with worker.call(work, context):
            forced = [common_pb2.Token(token_id=token) for token in work.forced_token_ids]
            held = worker.held[handoff_id] = Held(forced, len(forced))
            try:
                disaggregated = request.HasField("prefill")
                if disaggregated:
                    await worker.script.kv_ready(handoff_id).wait()
                generating = asyncio.ensure_future(self._generate(work, held))
                stopping = asyncio.ensure_future(held.cancelled.wait())
                try:
                    await asyncio.wait((generating, stopping), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    generating.cancel()
                    stopping.cancel()
                if held.cancelled.is_set():
                    held.finish = common_pb2.FINISH_REASON_CANCELLED
                await asyncio.sleep(worker.script.account_s)
            except asyncio.CancelledError:
                del worker.held[handoff_id]
                raise
            return decode_pb2.DecodeResponse(
                worker=worker.process,
                finish_reason=held.finish,
                num_output_tokens=len(held.tokens),
                num_cached_tokens=2,
                num_pulled_blocks=4 if disaggregated else 0,
                num_pulled_bytes=4096 if disaggregated else 0,
                queue_s=0.001,
                prefill_s=0.0 if disaggregated else 0.002,
                transfer_s=0.003 if disaggregated else 0.0,
                exposed_transfer_s=0.001 if disaggregated else 0.0,
                first_decode_s=0.002,
                decode_s=worker.script.step_s * len(held.tokens),
            )

    async def _generate(self, work: common_pb2.Work, held: Held) -> None:
        worker = self._worker
        while not held.finish:
            await worker.thawed.wait()
            index = len(held.tokens)
            if worker.stall_at is not None and index >= worker.stall_at:
                await asyncio.sleep(3600)
            token, finish = worker.make(index, work), worker.finish_of(index, work)
            held.tokens.append(token)
            await worker.publish(work, index, [token], finish_reason=finish)
            held.finish = finish
            await asyncio.sleep(worker.script.step_s)

    async def Cancel(self, request: common_pb2.CancelRequest, context: Any) -> common_pb2.CancelResponse:
        return await self._worker.cancel(request)

    async def Renew(self, request: common_pb2.RenewRequest, context: Any) -> common_pb2.RenewResponse:
        return await self._worker.renew(request)

    async def Replay(self, request: decode_pb2.ReplayRequest, context: Any) -> decode_pb2.ReplayResponse:
        worker = self._worker
        await worker.thawed.wait()
        answer = decode_pb2.ReplayResponse()
        for wanted in getattr(request, "from"):
            worker.replays.append((wanted.handoff_id, wanted.index))
            held = worker.held.get(wanted.handoff_id)
            if not worker.replay_enabled:
                answer.replayed.add(handoff_id=wanted.handoff_id, known=True, first_index=wanted.index)
            elif held is None:
                known = wanted.handoff_id in worker.live
                answer.replayed.add(handoff_id=wanted.handoff_id, known=known, first_index=wanted.index)
            else:
                answer.replayed.add(
                    handoff_id=wanted.handoff_id,
                    known=True,
                    first_index=wanted.index,
                    tokens=held.tokens[wanted.index :],
                    finish_reason=held.finish,
                )
        return answer
