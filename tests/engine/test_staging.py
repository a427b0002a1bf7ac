"""Host buffers of steps in flight. The device is the CPU here, whose copies happen at once; events are played."""

import numpy as np
import pytest
import torch

from services.engine import model_runner
from services.engine.batch import Batch, ScheduledSequence
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import StepTensors
from services.engine.sequence import Sequence
from services.engine.staging import ALIGNMENT, Staging
from tests.engine.test_model_runner import Recorder

CPU = torch.device("cpu")


class Rig:
    """A staging whose allocations and events are written down in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.host: list[torch.Tensor] = []
        self.staging = Staging(CPU, self._allocate, self._event)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self.host.append(torch.full((num_bytes,), 0xAB, dtype=torch.uint8))
        self.log.append(f"allocate {num_bytes}")
        return self.host[-1]

    def _event(self) -> "Played":
        return Played(self.log, len([line for line in self.log if line.startswith("allocate")]))


class Played:
    def __init__(self, log: list[str], number: int) -> None:
        self.record = lambda: log.append(f"record {number}")
        self.synchronize = lambda: log.append(f"wait {number}")


def arrays(step: int) -> list[np.ndarray]:
    return [
        np.arange(6, dtype=np.int32).reshape(2, 3).T + step,  # not contiguous
        np.arange(5, dtype=np.int64) - 2**40 * step,
        np.empty(0, dtype=np.int64),
        np.array([step], dtype=np.int32),
    ]


def test_values_types_shapes_and_alignment() -> None:
    rig = Rig()
    for step in range(5):
        wanted, found = arrays(step), rig.staging.to_device(arrays(step))
        for array, tensor in zip(wanted, found, strict=True):
            assert torch.equal(tensor, torch.from_numpy(array.copy()))
            assert tensor.dtype == torch.from_numpy(array.copy()).dtype
            assert not tensor.numel() or (tensor.data_ptr() - found[0].data_ptr()) % ALIGNMENT == 0


def test_two_buffers_take_turns_and_are_waited_for_before_they_are_written() -> None:
    rig = Rig()
    kept = [rig.staging.to_device(arrays(step)) for step in range(4)]
    first, second = "allocate 65536", "allocate 65536"
    assert rig.log == [
        *(first, "wait 1", "record 1"),
        *(second, "wait 2", "record 2"),
        *("wait 1", "record 1"),
        *("wait 2", "record 2"),
    ]
    assert [tensors[3].item() for tensors in kept] == [0, 1, 2, 3]  # what was sent stays


def test_a_larger_step_gets_more_room_once() -> None:
    rig = Rig()
    large = [np.arange(20_000, dtype=np.int64)]
    for _ in range(3):
        assert torch.equal(rig.staging.to_device(large)[0], torch.arange(20_000))
        rig.staging.to_device(arrays(0))
        rig.staging.to_device(large)
    allocated = [line for line in rig.log if line.startswith("allocate")]
    assert allocated == ["allocate 262144", "allocate 65536", "allocate 262144"]
    assert rig.log.index("allocate 262144", 1) == rig.log.index("wait 2", rig.log.index("record 2")) + 1


def test_the_runners_step_is_the_same_through_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    seqs = [Sequence("a", [5, 6, 7, 8]), Sequence("b", [1, 2, 3])]
    seqs[0].block_ids, seqs[1].block_ids = [3], [7]
    batch = Batch([ScheduledSequence(seqs[0], 3, 1, True), ScheduledSequence(seqs[1], 0, 2, False)])

    def step_of(runner: ModelRunner) -> StepTensors:
        runner.run(batch)
        step: StepTensors = runner._model.step  # type: ignore[attr-defined]
        return step

    def runner() -> ModelRunner:
        model = Recorder()
        return ModelRunner(model, KVCache.allocate(model.kv_shape(20)))

    plain, staged = runner(), runner()
    staged._staging = Rig().staging
    assert isinstance(staged._staging, model_runner.Staging)
    a, b = step_of(plain), step_of(staged)
    for name in ("token_ids", "position_ids", "sample_rows"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("block_tables", "seq_lens", "query_starts", "slot_mapping"):
        assert torch.equal(getattr(a.paging, name), getattr(b.paging, name)), name
        assert getattr(a.paging, name).dtype == getattr(b.paging, name).dtype
