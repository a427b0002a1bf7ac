"""The script for a GPU, rehearsed on the CPU: every part runs, and what is wrong is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import correctness, speed
from bench.gpu.inputs import Work
from services.engine.kernels import fused

CPU = torch.device("cpu")


def test_every_part_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--model", "tiny-random-llama", "--check"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rehearsal"] is True
    assert result["failed"] == []
    assert result["correctness"]["wrong"] == []
    assert result["engine"]["same_tokens_as_float32"] == 1
    assert result["transfer"]["every_byte_arrived"] is True


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fused.silu_and_mul

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        out = right(gate_up)
        out[-1, -1] += 0.5 * out.abs().max()  # one element of the last row
        return out

    monkeypatch.setattr(fused, "silu_and_mul", wrong)
    assert correctness.check_all(CPU)["wrong"] == [f"silu_and_mul, {dtype}" for dtype in correctness.TOLERANCE]


def test_a_kernel_that_leaves_something_unwritten_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "silu_and_mul", lambda gate_up: torch.full_like(gate_up[:, ::2], float("nan")))
    assert len(correctness.check_all(CPU)["wrong"]) == 2


def test_bytes_and_operations_by_hand() -> None:
    """Two sequences of 3 and 5 tokens of context; bf16; the second computes its last 2 rows."""
    work = Work(((1, 3), (2, 5)), num_heads=4, num_kv_heads=2, head_dim=8)
    assert speed.num_bytes(work) == (3 + 5) * 2 * 2 * 8 * 2
    visible = 3 + (4 + 5)
    assert speed.num_flop(work) == visible * 4 * 8 * 2 * 2
