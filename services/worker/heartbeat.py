"""Heartbeats: who this worker is, its load, its progress; at 1 Hz and on change. On the event loop."""

from __future__ import annotations

import asyncio
import time

from services.engine.block_pool import BlockPool
from services.engine.scheduler import Scheduler
from services.runtime.process import Process
from services.wire.bus import Bus
from services.wire.pb import common_pb2, directory_pb2, heartbeat_pb2
from services.wire.subjects import heartbeat_subject
from services.worker.assembly import Assembly
from services.worker.engine_thread import Pulse

PERIOD_S = 1.0
LOOK_S = 0.1
_ROLES = {"prefill": directory_pb2.WORKER_ROLE_PREFILL, "decode": directory_pb2.WORKER_ROLE_DECODE}


class Heartbeat:
    """Publishes this worker's state until it leaves."""

    def __init__(self, process: Process, model: str, address: str, assembly: Assembly, pulse: Pulse, bus: Bus) -> None:
        self._process = process
        self._model = model
        self._address = address
        self._assembly = assembly
        self._pulse = pulse
        self._bus = bus
        self._subject = heartbeat_subject(process.role, process.identity.worker_id)

    async def run(self) -> None:
        """Publishes at 1 Hz, and sooner when the number of sequences or the draining changed."""
        shown: tuple[object, ...] = ()
        shown_s = 0.0
        while True:
            state = self._state()
            if state != shown or time.monotonic() - shown_s >= PERIOD_S:
                shown, shown_s = state, time.monotonic()
                await self.publish()
            await asyncio.sleep(LOOK_S)

    async def publish(self, *, leaving: bool = False) -> None:
        """One heartbeat now; the last one says `leaving`."""
        await self._bus.publish(self._subject, self.message(leaving=leaving).SerializeToString())

    def message(self, *, leaving: bool = False) -> heartbeat_pb2.Heartbeat:
        """What is known now. Counts are read beside the engine thread: each is right, their moments may differ."""
        identity, layout = self._process.identity, self._assembly.layout
        return heartbeat_pb2.Heartbeat(
            peer=common_pb2.Peer(
                process=common_pb2.ProcessId(worker_id=identity.worker_id, epoch=identity.epoch),
                address=self._address,
            ),
            role=_ROLES[self._process.role],
            model=self._model,
            weights_fingerprint=layout.weights_fingerprint,
            tokenizer_fingerprint=layout.tokenizer_fingerprint,
            layout_fingerprint=layout.fingerprint(),
            draining=self._process.draining.is_set(),
            leaving=leaving,
            max_model_len=self._assembly.max_model_len,
            load=_load(self._assembly.scheduler, self._assembly.pool, self._pulse),
            progress=heartbeat_pb2.Progress(
                num_steps=self._pulse.num_steps,
                runnable=self._pulse.runnable,  # first: whoever becomes runnable has made the time young before
                since_last_step_s=time.monotonic() - self._pulse.progress_s,
            ),
        )

    def _state(self) -> tuple[object, ...]:
        load = self._assembly.scheduler.load()
        return load.num_waiting, load.num_running, load.num_receiving, self._process.draining.is_set()


def _load(scheduler: Scheduler, pool: BlockPool, pulse: Pulse) -> heartbeat_pb2.Load:
    load, counts = scheduler.load(), pool.counts()
    return heartbeat_pb2.Load(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_receiving=load.num_receiving,
        backlog_tokens=load.backlog_tokens,
        tokens_per_s=pulse.prefill_tokens_per_s,
        step_s=pulse.step_s,
        num_blocks=counts.total,
        num_free_blocks=counts.free + counts.cached,
        num_leased_blocks=counts.leased,
        num_quarantined_blocks=counts.quarantined,
    )
