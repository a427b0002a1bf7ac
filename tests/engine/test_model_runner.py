import pytest
import torch

from services.engine.batch import Batch, ScheduledSequence
from services.engine.kernels import Paging
from services.engine.kv_cache import KVCache, KVShape
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import StepTensors
from services.engine.sequence import SamplingParams, Sequence

VOCAB = 11


class Recorder:
    """A model that keeps the step it is given and wants token `row number` next."""

    device = torch.device("cpu")
    dtype = torch.float32
    vocab_size = VOCAB
    max_model_len = 100

    def kv_shape(self, num_blocks: int, block_size: int = 4) -> KVShape:
        return KVShape(num_blocks, 1, 1, block_size, 8, self.dtype)

    def forward(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        self.step = step
        return torch.nn.functional.one_hot(step.sample_rows % VOCAB, VOCAB).float()


def sequence(prompt: list[int], output: list[int], blocks: list[int], **params: object) -> Sequence:
    seq = Sequence("s", prompt, SamplingParams(**params), output_token_ids=output)  # type: ignore[arg-type]
    seq.block_ids = blocks
    return seq


def run(items: list[ScheduledSequence]) -> tuple[Recorder, list[int]]:
    model = Recorder()
    runner = ModelRunner(model, KVCache.allocate(model.kv_shape(20)))
    return model, [token.token_id for token in runner.run(Batch(items))]


def test_step_tensors() -> None:
    decode = sequence([5, 6, 7, 8], [9], [3, 7])
    middle = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], [], [2, 0, 5])
    ending = sequence([1, 2], [3, 4], [9])
    model, tokens = run(
        [
            ScheduledSequence(decode, 4, 1, True),
            ScheduledSequence(middle, 3, 4, False),
            ScheduledSequence(ending, 1, 3, True),  # prompt and output in one chunk, as after a preemption
        ]
    )
    step, paging = model.step, model.step.paging
    assert step.token_ids.tolist() == [9, 4, 5, 6, 7, 2, 3, 4]
    assert step.position_ids.tolist() == [4, 3, 4, 5, 6, 1, 2, 3]
    assert step.sample_rows.tolist() == [0, 7]
    assert tokens == [0, 7]
    assert paging.slot_mapping.tolist() == [28, 11, 0, 1, 2, 37, 38, 39]
    assert paging.block_tables.tolist() == [[3, 7], [2, 0], [9, 9]]
    assert paging.seq_lens.tolist() == paging.host_seq_lens == [5, 7, 4]
    assert paging.query_starts.tolist() == paging.host_query_starts == [0, 1, 5, 8]
    assert (paging.decode_ids, paging.chunk_ids, paging.max_query_len) == ([0], [1, 2], 4)


def test_a_step_that_samples_nothing() -> None:
    model, tokens = run([ScheduledSequence(sequence([1, 2, 3], [], [4]), 0, 2, False)])
    assert tokens == []
    assert model.step.sample_rows.tolist() == []


def test_index_counts_forced_tokens() -> None:
    """min_tokens looks at the whole output, so an attempt that resumes is not held back again."""
    seq = sequence([1], [2, 3], [4], min_tokens=2)
    seq.eos_token_ids = frozenset({2})
    assert run([ScheduledSequence(seq, 0, 3, True)])[1] == [2]  # the recorder wants 2, the row's number
    seq = sequence([1], [2, 3], [4], min_tokens=3)
    seq.eos_token_ids = frozenset({2})
    assert run([ScheduledSequence(seq, 0, 3, True)])[1] != [2]


def test_a_cache_of_another_shape_is_refused() -> None:
    model = Recorder()
    other = KVShape(20, 2, 1, 4, 8, torch.float32)
    with pytest.raises(ValueError, match="shape"):
        ModelRunner(model, KVCache.allocate(other))


def test_paging_write_index() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    paging = Paging(table, one, one, torch.tensor([0, 5, 11]), [1], [0, 1], 4)
    blocks, slots = paging.write_index
    assert (blocks.tolist(), slots.tolist()) == ([0, 1, 2], [0, 1, 3])
