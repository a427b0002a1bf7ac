"""What leaves the engine thread: how attempts ended, and whose tokens are still kept."""

from __future__ import annotations

import asyncio

import pytest

from services.engine.batch import SampledToken
from services.runtime.process import Identity
from services.worker import gauges
from services.worker.intake import Attempt, GatewayRef
from services.worker.outlet import Failure, Outlet
from services.worker.publisher import TokenEvent
from services.worker.token_log import TokenLog


@pytest.mark.parametrize(
    ("outcome", "cancelled", "label", "num_kept"),
    [
        ("an account", False, "done", 1),
        ("an account", True, "cancelled", 0),
        (Failure("ABORTED", "why"), False, "aborted", 0),
        (Failure("CANCELLED", "why"), True, "cancelled", 0),
    ],
)
def test_tokens_are_kept_of_what_is_done_alone(outcome: object, cancelled: bool, label: str, num_kept: int) -> None:
    async def body() -> None:
        log = TokenLog(10**6)
        outlet = Outlet(Identity("d0", "e"), log, asyncio.get_running_loop())
        attempt = Attempt("r", 1, "h", GatewayRef("g", "e"))
        log.open(attempt, 0)
        answer = outlet.call("h")
        counter = gauges.ATTEMPTS.labels(label)
        before = counter._value.get()
        outlet.token(TokenEvent(attempt, 0, SampledToken(1), None))
        outlet.end("h", outcome, cancelled=cancelled)
        outlet.flush()
        assert await asyncio.wait_for(answer, 5) == outcome
        assert len(log) == num_kept
        assert counter._value.get() == before + 1

    asyncio.run(body())
