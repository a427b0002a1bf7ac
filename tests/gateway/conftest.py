"""A tokenizer made on the spot, and a whole gateway among fake workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from services.gateway.gateway import Gateway
from services.gateway.membership import Role
from services.gateway.server import _serve_http
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import Tokenizer
from services.runtime.process import Process
from services.wire.bus import Bus
from tests.conftest import NatsServer, free_port
from tests.gateway.fake_worker import FakeWorker, Script

MODEL = "fake"
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLY = "The capital of France is Paris 🗼, and é is one character of ☃ snow. " * 2


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the gateway reads of a model: a byte-level tokenizer with a chat template, and the configuration."""
    folder = tmp_path_factory.mktemp("model")
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(["the capital of France is Paris " * 4], trainer)
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
                "chat_template": TEMPLATE,
            }
        )
    )
    config = {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 2048, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    server = NatsServer()
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


@dataclass
class World:
    """A gateway, its workers, and a client."""

    gateway: Gateway
    process: Process
    script: Script
    bus: Bus
    http: httpx2.AsyncClient
    url: str
    prefills: list[FakeWorker] = field(default_factory=list)
    decodes: list[FakeWorker] = field(default_factory=list)

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    async def add(self, role: str, worker_id: str, **beat: Any) -> FakeWorker:
        worker = FakeWorker(self.script, self.bus, role, worker_id, **beat)
        await worker.start()
        (self.prefills if role == "prefill" else self.decodes).append(worker)
        return worker

    async def known(self) -> None:
        """Waits until the gateway knows all workers."""

        def names(workers: Any) -> set[str]:
            return {worker.worker_id for worker in workers}

        for role, workers in ((Role.PREFILL, self.prefills), (Role.DECODE, self.decodes)):
            wanted = {worker.process.worker_id for worker in workers}
            await until(lambda: {i.key.worker_id for i in self.gateway.membership.workers(role)} >= wanted)  # noqa: B023

    async def idle(self) -> None:
        """Waits until no worker has an open call of ours; within 1 s, as promised to clients that leave."""
        await until(lambda: not any(worker.live for worker in self.workers), 1.0)


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


WorldMaker = Callable[..., Any]


@pytest.fixture
def world(nats_url: str, model_folder: Path, tokenizer: Tokenizer) -> WorldMaker:
    """`async with world(prefills=1, decodes=1, **settings) as w:`"""

    @asynccontextmanager
    async def make(prefills: int = 1, decodes: int = 1, nats: str = nats_url, **options: Any) -> AsyncIterator[World]:
        script = Script(MODEL, list(tokenizer.rust.encode(REPLY).ids))
        port = free_port()
        settings = GatewaySettings(model=MODEL, port=port, drain_s=5.0, **options)
        life = Process(settings, "gateway")
        async with AsyncExitStack() as stack:
            buses = [await Bus.connect(nats, name) for name in ("workers", "gateway")]
            for bus in buses:
                stack.push_async_callback(bus.close)
            gateway = Gateway(settings, life.identity, tokenizer, model_folder, buses[1])
            await stack.enter_async_context(gateway.running())
            url = f"http://127.0.0.1:{port}"
            http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=20, verify=False))
            w = World(gateway, life, script, buses[0], http, url)
            for i in range(prefills):
                await w.add("prefill", f"p{i}")
            for i in range(decodes):
                await w.add("decode", f"d{i}")
            serving = asyncio.create_task(_serve_http(settings, life, gateway))
            try:
                await w.known()
                await until(lambda: life.waits_for is None)
                yield w
            finally:
                life.draining.set()
                await http.aclose()
                await serving
                for worker in w.workers:
                    await worker.stop()

    return make
