"""Draining a worker: finish what runs, keep leases until they are released, hand back the rest."""

from __future__ import annotations

import asyncio

from services.kvtransfer.offers import Offers
from services.runtime import log
from services.worker.desk import Desk

LOOK_S = 0.02
HAND_BACK_S = 1.0


async def drain(desk: Desk, offers: Offers, drain_s: float, leave_now: asyncio.Event) -> None:
    """Returns when no attempt and no lease is left, at the latest a second after `drain_s`.

    What outlasts `drain_s` (or a second signal) fails as UNAVAILABLE: its gateway goes on with it elsewhere.
    """
    logger = log.get_logger()
    logger.info("draining", attempts=desk.num_open, leases=offers.num_open)
    try:
        async with asyncio.timeout(drain_s):
            while (desk.num_open or offers.num_open) and not leave_now.is_set():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("the drain time is over", attempts=desk.num_open, leases=offers.num_open)
    desk.hand_back("draining")
    try:
        async with asyncio.timeout(HAND_BACK_S):
            while desk.num_open:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("attempts left behind", attempts=desk.num_open)
