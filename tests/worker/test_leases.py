"""A lease that nobody will take: the gateway's Cancel ends it, however late it comes."""

from __future__ import annotations

import asyncio
import time

from services.runtime.model_store import resolve
from tests.worker.pair import ask, pair

LEASE_S = 30.0


def test_a_cancel_after_token_0_ends_the_lease() -> None:
    """Prefill has answered; decode never came. Without the cancel the blocks would stay for the whole lease."""

    async def run() -> None:
        async with pair(resolve("tiny-random-llama"), num_blocks=64, lease_s=LEASE_S) as both:
            ref, request = ask(list(range(40)), 8)
            answer = await both.prefill.link.prefill(ref, request, (), both.decode.info, 60.0, lambda: None)
            assert answer.first_token is not None
            books = await both.prefill.books()
            assert (books["leases"], books["leased"], books["sequences"]) == (1, 3, 0)
            started_s = time.monotonic()
            for _ in range(2):  # idempotent
                await both.prefill.link.cancel(ref, "nobody wants it")
            while (books := await both.prefill.books())["leases"]:
                assert time.monotonic() - started_s < 5
                await asyncio.sleep(0.01)
            assert books["free"] + books["cached"] == books["total"]
            again = await both.generate(list(range(40)), 8)  # the prefix stayed cached
            assert again.prefill.num_cached_tokens == 32
            await both.prefill.link.cancel(ref, "again, for one long gone")
            assert len((await both.generate(list(range(50)), 8)).token_ids) == 8

    asyncio.run(run())
