"""The life of a real process: signals while it starts, while it runs, and how it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import asyncio, sys, threading, time
from services.runtime.process import run
from services.runtime.settings import ProcessSettings

async def main(process):
    print("begun", flush=True)
    if sys.argv[1] == "starting":
        await asyncio.to_thread(time.sleep, 60)  # a model that takes its time
    process.waits_for = None
    print("ready", flush=True)
    if sys.argv[1] == "broken":
        raise ValueError("out of luck")
    await process.draining.wait()
    await asyncio.sleep(0.2)
    print("drained", end="")  # not flushed

run(ProcessSettings(admin_port=0), "tester", main)
"""


def end(how: str, expected_first: list[str]) -> tuple[int, str, str, float]:
    """(exit code, the rest of stdout, stderr, seconds from SIGTERM to the end)."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in expected_first:
        assert process.stdout.readline().strip() == line
    told_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err, time.monotonic() - told_s


def test_a_signal_while_it_starts_ends_it_at_once() -> None:
    code, out, _, seconds = end("starting", ["begun"])
    assert (code, out.split("\n")[-1]) == (0, "")
    assert "drained" not in out
    assert seconds < 10  # not the 60 that the thread sleeps


def test_a_signal_while_it_runs_drains_it() -> None:
    code, out, _, seconds = end("running", ["begun", "ready"])
    assert code == 0
    assert out.endswith("drained"), "what was printed last is not lost"
    assert seconds >= 0.2


def test_what_is_raised_ends_it_with_a_traceback() -> None:
    broken = subprocess.run([sys.executable, "-c", PROGRAM, "broken"], capture_output=True, text=True, timeout=60)
    assert broken.returncode == 1
    assert "ValueError: out of luck" in broken.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_count(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "running"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["begun", "ready"]
    process.send_signal(number)
    assert process.communicate(timeout=30)[0].endswith("drained")
    assert process.returncode == 0
