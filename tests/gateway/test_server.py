"""The process itself: start, drain on SIGTERM, exit; and what must never be in it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import httpx2
import pytest

from services.gateway.membership import Role
from tests.conftest import free_port
from tests.gateway.conftest import REPLY, World, WorldMaker, until
from tests.gateway.fake_worker import FakeWorker, Script
from tests.gateway.test_chat import chat, events

ROOT = Path(__file__).parents[2]


def test_the_gateway_imports_no_torch_and_no_engine() -> None:
    code = (
        "import sys, services.gateway.server as _; "
        "wrong = {'torch', 'nixl', 'services.engine'} & set(sys.modules); "
        "sys.exit(str(wrong) if wrong else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.anyio
async def test_drain_lets_streams_finish_and_takes_no_more(world: WorldMaker) -> None:
    async with world() as w:
        w.script.step_s = 0.02
        request = asyncio.create_task(w.http.post("/v1/chat/completions", json=chat(stream=True)))
        await until(lambda: w.decodes[0].held)
        w.process.draining.set()
        await until(lambda: w.gateway.ready() == "draining")
        answer = await request
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(answer.text)) == REPLY
        await until(lambda: _refused(w))


def _refused(w: World) -> bool:
    try:
        httpx2.get(f"{w.url}/live", timeout=1, verify=False)
    except httpx2.ConnectError:
        return True
    return False


@pytest.mark.anyio
async def test_a_real_process_serves_and_leaves_on_sigterm(nats_url: str, model_folder: Path, tmp_path: Path) -> None:
    """Also: no prompt and no output in its logs."""
    from services.wire.bus import Bus

    port = free_port()
    environment = os.environ | {"PDSERVE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "services.gateway", "--model", str(model_folder), "--port", str(port)]
    command += ["--nats-url", nats_url, "--served-model-name", "fake"]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.to_thread(_start, command, environment, log)
    try:
        bus = await Bus.connect(nats_url, "workers")
        worker = FakeWorker(Script(str(model_folder), [70] * 40), bus, "decode", "d0")
        await worker.start()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as http:
            await until(lambda: _ready(port), 30)
            secret = [{"role": "user", "content": "xyzzy plugh"}]
            answer = await http.post("/v1/chat/completions", json=chat(messages=secret))
            assert answer.json()["usage"]["completion_tokens"] == 41
            worker.script.step_s = 0.02
            request = asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=True)))
            await until(lambda: len(worker.works) == 2)
            process.send_signal(signal.SIGTERM)
            assert (await request).text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.wait, 10) == 0
        await worker.stop()
        await bus.close()
        log_text = (tmp_path / "log").read_text()
        assert "gateway listens" in log_text
        assert "plugh" not in log_text and "Traceback" not in log_text
    finally:
        process.kill()
        process.wait()


def _start(command: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def _ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=1, verify=False).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.anyio
async def test_a_worker_that_joins_later_is_found(world: WorldMaker) -> None:
    async with world(prefills=0, decodes=0) as w:
        await w.add("decode", "late")
        await until(lambda: w.gateway.membership.workers(Role.DECODE))
        assert w.gateway.ready() is None
