"""The script for a GPU, rehearsed on the CPU: every part runs, and what is wrong is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import choices, correctness, speed
from bench.gpu.inputs import Work
from services.engine.kernels import fused
from services.engine.models.graphs import Bucket, DecodeBuffers
from services.engine.models.interface import StepTensors
from services.kvtransfer.checksum import BlockMemory

CPU = torch.device("cpu")


def test_every_part_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--model", "tiny-random-llama", "--check"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rehearsal"] is True
    assert result["failed"] == []
    assert result["correctness"]["wrong"] == []
    assert result["choices"]["wrong"] == []
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


def test_wrong_choices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that writes, a checksum that overlooks a byte, tokens that differ: on the CPU as it would be on a GPU."""
    monkeypatch.setattr(choices, "VOCABULARIES", (1000,))
    monkeypatch.setattr(choices, "BLOCK_BYTES", (64,))
    monkeypatch.setattr(BlockMemory, "flip_byte", lambda self, block_id: None)
    fill, tokens = DecodeBuffers.fill, iter(range(10**6))

    def padding_that_writes(self: DecodeBuffers, step: StepTensors, bucket: Bucket) -> None:
        fill(self, step, bucket)
        self._lengths = self._lengths + [1] * (bucket.rows - len(self._lengths))

    monkeypatch.setattr(DecodeBuffers, "fill", padding_that_writes)
    monkeypatch.setattr(choices, "sample", lambda logits, rows: [next(tokens) for _ in rows])
    names = ["same tokens, vocabulary 1000", "checksums of 64 bytes", "replayed decode steps"]
    assert choices.check_all(CPU)["wrong"] == names


def test_bytes_and_operations_by_hand() -> None:
    """Two sequences of 3 and 5 tokens of context; bf16; the second computes its last 2 rows."""
    work = Work(((1, 3), (2, 5)), num_heads=4, num_kv_heads=2, head_dim=8)
    assert speed.num_bytes(work) == (3 + 5) * 2 * 2 * 8 * 2
    visible = 3 + (4 + 5)
    assert speed.num_flop(work) == visible * 4 * 8 * 2 * 2
