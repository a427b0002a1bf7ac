"""Compiles the C++ kernels once per machine, and loads them. Where there is no compiler, there is no library, and no
error.

The object calls OpenMP but links no runtime: the symbols resolve to the runtime that the process has already (torch's,
or one preloaded in its stead), so that there is one pool of threads and one way of waiting.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from services.runtime.model_store import cache_root

SOURCES = Path(__file__).parent
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # `Type` of decoder.cpp
PARTS = ("embed", "norm", "qkv", "place", "attention", "out", "gate_up", "down", "head")  # `Part` of decoder.cpp
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
COMPILE_TIMEOUT_S = 300.0

log = logging.getLogger(__name__)


class Shape(ctypes.Structure):
    """`Shape` of decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "vocab", "block_size", "window", "weights", "embedding")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    """`Layer` of decoder.cpp: addresses, 0 where the model has no such part."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for names in (
            ("attention_norm", "qkv_bias", "query_norm", "key_norm", "mlp_norm"),
            ("qkv", "out", "gate_up", "down"),
            ("qkv_scale", "out_scale", "gate_up_scale", "down_scale", "kv"),
        )
        for name in names
    )


class Weights(ctypes.Structure):
    """`Weights` of decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "head_scale", "cos", "sin")),
        ("layers", ctypes.POINTER(Layer)),
    )


class Step(ctypes.Structure):
    """`Step` of decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_samples", "num_tiles", "table_stride")),
        *((name, ctypes.c_int64) for name in ("kv_block_stride", "kv_value_offset", "kv_head_stride")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "position_ids", "slot_mapping", "sample_rows")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "tiles", "work", "logits")),
        ("part_seconds", ctypes.POINTER(ctypes.c_double)),
    )


class AttentionStep(ctypes.Structure):
    """`AttentionStep` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("block_stride", "value_offset", "head_stride")),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, None where they cannot be had (the log says why). Calls release the interpreter."""
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("no C++ kernels on this machine, torch takes their place: %s", detail[-2000:])
        return None
    for constant in (loaded.panel_width, loaded.num_parts):
        constant.restype = ctypes.c_int64
    loaded.work_size.restype = ctypes.c_int64
    loaded.work_size.argtypes = [ctypes.POINTER(Shape), ctypes.c_int64]
    loaded.decoder_forward.restype = None
    loaded.decoder_forward.argtypes = [
        ctypes.POINTER(Shape),
        ctypes.POINTER(Weights),
        ctypes.POINTER(Step),
        ctypes.c_int,
    ]
    loaded.paged_attention.restype = None
    loaded.paged_attention.argtypes = [
        ctypes.POINTER(AttentionStep),
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return loaded


def _compiled() -> Path:
    """The shared object for these sources, this compiler and this processor, made if it is not there yet."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise OSError("no C++ compiler (g++) found")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    digest = hashlib.sha256("\0".join([*FLAGS, version, platform.machine(), _cpu_flags()]).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    target = cache_root() / "kernels" / f"decoder-{digest.hexdigest()[:20]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers start together: one compiles
        if target.is_file():
            return target
        log.info("compiling the CPU kernels (about 10 s)")
        made, shared = Path(folder) / "decoder.o", Path(folder) / "decoder.so"
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCES / "decoder.cpp"), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(shared)],  # without -fopenmp: see above
        ):
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
        shared.rename(target)
    return target


def _cpu_flags() -> str:
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return platform.processor()
    return found.group(1) if found else platform.processor()
