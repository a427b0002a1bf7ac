"""What a heartbeat says of progress, from the loop of a real worker: idle time is no sickness, a step that hangs is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from services.gateway.router import SICK_AFTER_S
from tests.engine.identity import tiny_model
from tests.engine.test_identity_lean import FAMILIES
from tests.worker.pair import pair

HANGS_S = 0.3


def test_the_first_step_after_a_long_idle_time_is_young(tmp_path: Path) -> None:
    config, extra = next(iter(FAMILIES.values()))
    tiny_model(config, extra).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    seen: list[tuple[bool, float, float]] = []  # in each step: runnable, seconds without progress at begin and end

    async def run() -> None:
        async with pair(tmp_path, num_blocks=64) as both:
            await both.decode.books()  # a turn has ended: it is idle
            pulse = both.decode.engine.pulse
            assert not pulse.runnable
            pulse.progress_s -= 10 * SICK_AFTER_S
            runner = both.decode.engine._engine.runner
            compute = runner.run

            def slowly(batch):  # type: ignore[no-untyped-def]
                began_s = time.monotonic() - pulse.progress_s
                time.sleep(HANGS_S)
                seen.append((pulse.runnable, began_s, time.monotonic() - pulse.progress_s))
                return compute(batch)

            runner.run = slowly  # type: ignore[method-assign]
            await both.generate([5, 6, 7], 3)

    asyncio.run(run())
    assert len(seen) == 2  # the first of three tokens is prefill's
    for runnable, began_s, ended_s in seen:
        assert runnable
        assert began_s < SICK_AFTER_S / 10
        assert ended_s >= began_s + HANGS_S
