"""Compiles Triton kernels for a GPU that is not there, and reads what the machine code takes of it."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

REGISTER_FILE = 65_536  # 32-bit registers of a multiprocessor, capability 8.0 to 10.0
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block may have (CUDA programming guide)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a kernel takes."""

    registers: int  # per thread
    local_bytes: int  # per thread, in device memory: spilled registers and stack
    shared_bytes: int
    num_threads: int

    @property
    def resident_warps(self) -> int:
        """Warps of this kernel that a multiprocessor's registers hold at once (of 64)."""
        return min(64, REGISTER_FILE // max(1, self.registers * self.num_threads) * self.num_threads // 32)


def compile_for(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, **options: Any
) -> Resources:
    """Compiles for compute capability `capability` / 10; arguments without a type are int32.

    As the launcher finds them at run time, addresses and strides (arguments named stride_*) are multiples of 16.

    Raises what Triton or ptxas has to say where the kernel cannot be compiled.
    """
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride_")
    }
    source = triton.compiler.ASTSource(kernel, signature, constexprs=dict(constants), attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack, local = _usage(compiled.asm["cubin"])
    shared, num_threads = int(compiled.metadata.shared), 32 * int(compiled.metadata.num_warps)
    return Resources(registers, stack + local, shared, num_threads)


def _usage(cubin: bytes) -> tuple[int, int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", shown)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of resources: {shown[:500]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack, local
