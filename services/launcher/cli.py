"""The `pdserve` command."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from services.launcher import chat as chat_command
from services.launcher import demo as demo_command
from services.launcher import doctor as doctor_command
from services.launcher import models
from services.launcher import up as up_command
from services.launcher.client import ApiError
from services.launcher.deployment import Deployment, StartError
from services.launcher.nats_server import NoNatsServerError
from services.launcher.terminal import LogLines, StartProgress
from services.runtime.model_store import ModelStoreError

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_PORT = 8000

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Prefill here, decode there, one API.")
model_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(model_app, name="model")
_console = Console(highlight=False)

Model = Annotated[str, typer.Option(help="Alias, Hugging Face id, folder or GGUF file.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="HTTP port of the gateway.")]
Transport = Annotated[Literal["nixl", "shm"], typer.Option(help="How KV blocks move.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"],
    typer.Option(help="Of weights and KV; int8: of the weights alone, on the CPU."),
]
MemoryMb = Annotated[int | None, typer.Option(min=1, help="KV memory of each worker of this pool, in MiB.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads per worker; default: the cores shared out.")]
Logs = Annotated[bool, typer.Option(help="Show the lines that the processes print.")]
Url = Annotated[str, typer.Option(help="Base URL of a gateway.")]


@app.command()
def up(
    model: Model = DEFAULT_MODEL,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: decode serves alone.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    transport: Transport = "nixl",
    dtype: Dtype = "auto",
    port: Port = DEFAULT_PORT,
    kv_memory_mb_prefill: MemoryMb = None,
    kv_memory_mb_decode: MemoryMb = None,
    threads: Threads = None,
    restart: Annotated[bool, typer.Option(help="Start again what dies.")] = True,
    logs: Logs = True,
) -> None:
    """Everything on this machine, until Ctrl-C."""
    models.fetch(model, _console)

    def make(progress: StartProgress) -> Deployment:
        return Deployment(
            model=model,
            prefill=prefill,
            decode=decode,
            transport=transport,
            dtype=dtype,
            port=port,
            threads=threads,
            kv_memory_mb_prefill=kv_memory_mb_prefill,
            kv_memory_mb_decode=kv_memory_mb_decode,
            restart=restart,
            log=LogLines(_console) if logs else lambda name, line: None,
            on_state=progress,
        )

    up_command.run(make, model, _console)


@app.command()
def chat(
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.2,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
) -> None:
    """A conversation in the terminal."""
    chat_command.converse(url.rstrip("/"), system, temperature, max_tokens, _console)


@app.command()
def doctor(port: Port = DEFAULT_PORT, model: Model = DEFAULT_MODEL) -> None:
    """What this machine offers, and what to do about what it lacks."""
    if not doctor_command.run(port, model, _console):
        raise typer.Exit(1)


@app.command()
def demo(
    model: Model = DEFAULT_MODEL, transport: Transport = "nixl", dtype: Dtype = "auto", logs: Logs = False
) -> None:
    """Two answers through both pools, with a timeline of each; exits 1 where something is not as promised."""
    models.fetch(model, _console)

    def make(progress: StartProgress) -> Deployment:
        log = LogLines(_console) if logs else lambda name, line: None
        return Deployment(model=model, transport=transport, dtype=dtype, log=log, on_state=progress)

    passed = False
    with up_command.started(make, _console) as house:
        passed = demo_command.run(house, model, _console)
    if not passed:
        raise typer.Exit(1)


@model_app.command("fetch")
def model_fetch(name: Annotated[str, typer.Argument(help="Alias, Hugging Face id, folder or GGUF file.")]) -> None:
    """Brings a model into the cache; prints its folder."""
    sys.stdout.write(f"{models.fetch(name, Console(stderr=True, highlight=False))}\n")


def main() -> None:
    """Entry point: what a user can mend is one line, everything else a traceback."""
    try:
        app()
    except (ApiError, ModelStoreError, NoNatsServerError, StartError) as error:
        Console(stderr=True, highlight=False).print(f"pdserve: {error}", style="red", markup=False)
        sys.exit(1)
