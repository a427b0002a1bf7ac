"""The Triton kernel, in Triton's interpreter. Interpreting is decided when triton is imported, so the cases run in a
child."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.attention_cases import CASES

CASES_FILE = Path(__file__).with_name("kernels_triton_interpreted.py")


def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES_FILE)]
    child = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-8000:]
    assert f"{len(CASES) * 2 + 2} passed" in child.stdout, child.stdout[-2000:]


@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_compiles_for_hopper(element: str) -> None:
    """Ahead of time, with no GPU present: the kernels lower to machine code for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget

    from services.engine.kernels import attention_triton

    sizes = {"GROUP": 3, "HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_Q": 1, "BLOCK_M": 16, "NUM_SPLITS": 4}
    attend = sizes | {"BLOCK_SIZE": 16, "BLOCK_N": 64, "HAS_WINDOW": True, "HAS_SOFTCAP": True}
    attend["PRECISION"] = "ieee" if element == "fp32" else "tf32"
    types = {"query": f"*{element}", "layer": f"*{element}", "out": f"*{element}", "partial": "*fp32", "stats": "*fp32"}
    types |= {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("block_tables", "seq_lens", "query_starts", "tile_seqs", "tile_offsets"), "*i32")
    for kernel, constants in ((attention_triton._attend, attend), (attention_triton._combine, sizes)):
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
        assert compiled.asm["cubin"]
