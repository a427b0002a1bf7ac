"""The Triton kernels, in Triton's interpreter. Interpreting is decided when triton is imported, so the cases run in a
child."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.attention_cases import CASES, DECODES

FILES = {  # and their tests
    "kernels_triton_interpreted.py": len(CASES) * 2 + len(DECODES) * 2 + 2,
    "kernels_fused_interpreted.py": 8 + 16 + 1,
    "kernels_sampling_interpreted.py": 7 + 7,
}


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(str(Path(__file__).with_name(name)))
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
    assert f"{FILES[name]} passed" in child.stdout, child.stdout[-2000:]
