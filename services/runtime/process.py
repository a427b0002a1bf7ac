"""The life of a process: start, ready, drain on SIGTERM, leave.

1. `run(main)` starts an event loop (uvloop) and calls `main(process)`.
2. The process is ready once `process.ready` is set and nothing else is missing.
3. SIGTERM or SIGINT sets `process.draining`; main finishes what runs, within its drain time, and returns. While the
   process waits for something to start with, it ends at once.
4. A second signal ends the wait: `process.leave_now` is set.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

import uvloop

from services.runtime import log
from services.runtime.settings import ProcessSettings


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one process: a restart has the same worker_id and a new epoch."""

    worker_id: str
    epoch: str


class Process:
    """What a running process knows of itself."""

    def __init__(self, settings: ProcessSettings, role: str) -> None:
        self.role = role
        self.identity = Identity(settings.name(role), secrets.token_hex(16))
        self.draining = asyncio.Event()
        self.leave_now = asyncio.Event()
        self.waits_for: str | None = "starting"

    def ready(self) -> str | None:
        """None where work can be taken, else what is missing."""
        return "draining" if self.draining.is_set() else self.waits_for

    def on_signal(self) -> None:
        """First signal: drain. Second: leave."""
        (self.leave_now if self.draining.is_set() else self.draining).set()


def run(settings: ProcessSettings, role: str, main: Callable[[Process], Awaitable[None]]) -> None:
    """Runs `main` until it returns, then leaves at once; what it raises ends the process with a traceback and status 1.

    Does not return: exit handlers of the interpreter are not run.
    """

    async def body() -> None:
        process = Process(settings, role)
        log.configure(settings.log_level, settings.log_json, role=role, worker_id=process.identity.worker_id)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.on_signal)
        work = asyncio.ensure_future(main(process))
        told = asyncio.create_task(process.draining.wait())
        await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
        if told.done() and not work.done() and process.waits_for is not None:
            log.get_logger().info("told to leave while starting", waits_for=process.waits_for)
            _leave()  # nothing has begun, and a thread that loads a model would be waited for
        told.cancel()
        await work

    uvloop.run(body())
    _leave()


def _leave() -> NoReturn:
    """Ends the process with status 0, all being closed: unloading torch module by module would take another second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
