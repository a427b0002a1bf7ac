"""Steps of decodes through static buffers and padded buckets; what plays the graph computes anew from the buffers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.engine.kernels import Paging
from services.engine.kv_cache import KVCache, KVShape
from services.engine.models import graphs
from services.engine.models.fused import FusedModel
from services.engine.models.graphs import Bucket, CaptureError, Compute, DecodeGraphs, MakeStep, bucket_of
from services.engine.models.interface import StepTensors
from services.engine.scheduler import SchedulerConfig
from tests.engine.identity import Rig, tiny_model
from tests.engine.test_identity_lean import FAMILIES

CPU = torch.device("cpu")


class FakeCapture:
    """Computes from the static buffers at each replay, and counts by bucket. Nothing but their contents may change."""

    def __init__(self) -> None:
        self.replays: Counter[tuple[int, int]] = Counter()
        self.num_captures = 0
        self.real_rows: list[int] = []

    def __call__(self, compute: Compute, make_step: MakeStep) -> Callable[[], None]:
        self.num_captures += 1
        addresses: set[tuple[int, ...]] = set()

        def replay() -> None:
            step = make_step()
            paging = step.paging
            tensors = (step.token_ids, step.position_ids, step.sample_rows, paging.slot_mapping, paging.seq_lens)
            tensors += (paging.block_tables, paging.query_starts)
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
            assert len(addresses) == 1
            self.replays[tuple(paging.block_tables.shape)] += 1  # type: ignore[index]
            self.real_rows.append(len(paging.host_seq_lens) - paging.host_seq_lens.count(0))
            compute(step)

        return replay


def model(family: str, capture: Any = None) -> FusedModel:
    like = tiny_model(*FAMILIES[family])
    return FusedModel(like.config, like.state_dict(), torch.float32, "cpu", capture)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_batch_that_grows_and_shrinks_gives_the_eager_tokens(family: str) -> None:
    """11 sequences join over some 15 steps and leave one by one: every bucket from 16 down comes up, then again."""
    prompts = [[(7 * i + j) % 190 + 3 for j in range(3 + 5 * i)] for i in range(11)]
    lengths = [25 + 2 * i for i in range(11)]
    config = SchedulerConfig(token_budget=24, max_num_seqs=16, max_model_len=512)
    expected = Rig(model(family), num_blocks=120, block_size=4, config=config).generate(prompts, lengths)
    capture = FakeCapture()
    rig = Rig(model(family, capture), num_blocks=120, block_size=4, config=config)
    assert rig.generate(prompts, lengths) == expected
    assert {rows for rows, _ in capture.replays} == {1, 2, 4, 8, 16}
    assert capture.num_captures == len(capture.replays)
    assert rig.scheduler.counters.num_steps_mixed > 0  # which ran eagerly, between the replayed ones
    num_decode_steps = sum(capture.replays.values())
    assert num_decode_steps > 20
    padded = sum(bucket_of(rows, 1, 128).rows for rows in capture.real_rows)  # type: ignore[union-attr]
    assert padded == sum(rows * count for (rows, _), count in capture.replays.items()) > sum(capture.real_rows)
    assert rig.generate(prompts, lengths) == expected  # on what the first time left in the buffers
    assert capture.num_captures == len(capture.replays)


def test_sampled_tokens_too() -> None:
    prompts = [[5, 6, 7 + i] for i in range(3)]
    expected = Rig(model("llama"), num_blocks=60).generate(prompts, 20, temperature=1.0, seed=4)
    assert Rig(model("llama", FakeCapture()), num_blocks=60).generate(prompts, 20, temperature=1.0, seed=4) == expected


def test_buckets() -> None:
    rows = {n: bucket_of(n, 1, 8).rows for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 33, 127, 128)}  # type: ignore[union-attr]
    assert list(rows.values()) == [1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 40, 128, 128]
    widths = [bucket_of(1, n, 2000).columns for n in (1, 64, 65, 256, 257, 1024, 1025, 2000)]  # type: ignore[union-attr]
    assert widths == [64, 64, 256, 256, 1024, 1024, 2000, 2000]
    assert bucket_of(1, 3, 32) == Bucket(1, 32)  # no wider than the longest sequence
    assert bucket_of(129, 1, 8) is None
    assert bucket_of(1, 9, 8) is None


def step(lengths: list[int], columns: int, *, rows_each: int = 1, sample: bool = True) -> StepTensors:
    """Sequence s holds blocks 10 s, 10 s + 1 ... of 4 slots."""
    num = len(lengths)
    tables = torch.arange(num)[:, None] * 10 + torch.arange(columns)
    starts = [rows_each * s for s in range(num + 1)]
    last = torch.tensor(lengths) - 1
    paging = Paging(
        block_tables=tables.int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=tables[torch.arange(num), last // 4] * 4 + last % 4,
        host_seq_lens=lengths,
        host_query_starts=starts,
        block_size=4,
    )
    tokens = torch.arange(num * rows_each) + 100
    return StepTensors(tokens, last.repeat_interleave(rows_each), torch.arange(num if sample else 0), paging)


class Recorder:
    """A forward pass that notes its step; the logits of a row are its token id."""

    def __init__(self) -> None:
        self.steps: list[StepTensors] = []

    def __call__(self, step: StepTensors, kv_cache: KVCache) -> torch.Tensor:
        self.steps.append(step)
        return step.token_ids[:, None].float().expand(-1, 3)


def rig(capture: Any) -> tuple[Recorder, DecodeGraphs, KVCache]:
    recorder = Recorder()
    cache = KVCache.allocate(KVShape(40, 1, 1, 4, 8, torch.float32))
    return recorder, DecodeGraphs(recorder, 3, 100, CPU, capture), cache


def test_padding_is_written_anew_when_the_batch_shrinks() -> None:
    recorder, decode, cache = rig(FakeCapture())
    first = decode.run(step([5, 6, 7, 8], 2), cache)
    assert first is not None and first[:, 0].tolist() == [100, 101, 102, 103]
    second = decode.run(step([9, 1, 2], 3), cache)
    assert second is not None and second.shape == (3, 3) and second[:, 0].tolist() == [100, 101, 102]
    seen = recorder.steps[-1]
    assert seen.paging.slot_mapping.tolist() == [8, 40, 81, -1]
    assert seen.paging.seq_lens.tolist() == seen.paging.host_seq_lens == [9, 1, 2, 0]
    assert (seen.paging.num_padding_tokens, seen.paging.max_query_len) == (1, 1)
    assert seen.paging.block_tables.shape == (4, 25)  # 100 tokens in blocks of 4
    assert seen.paging.block_tables[:, :2].tolist() == [[0, 1], [10, 11], [20, 21], [30, 31]]
    assert seen.position_ids.tolist() == [8, 0, 1, 7]  # the last is stale, and inside the rotation tables
    assert seen.sample_rows.tolist() == [0, 1, 2, 3]


def test_only_steps_of_decodes_that_fit_are_replayed() -> None:
    capture = FakeCapture()
    _, decode, cache = rig(capture)
    assert decode.run(step([5, 6], 2, rows_each=2), cache) is None
    assert decode.run(step([5, 6], 2, sample=False), cache) is None
    assert decode.run(step([1] * (graphs.MOST_ROWS + 1), 1), cache) is None
    assert decode.run(step([5], 26), cache) is None
    assert not capture.replays
    assert decode.run(step([1] * graphs.MOST_ROWS, 1), cache) is not None


def test_another_cache_is_captured_anew() -> None:
    capture = FakeCapture()
    recorder, decode, cache = rig(capture)
    for _ in range(2):
        decode.run(step([3], 1), cache)
    other = KVCache.allocate(cache.shape)
    decode.run(step([3], 1), other)
    assert (capture.num_captures, len(recorder.steps)) == (2, 3)


def test_a_refused_capture_means_eager_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(compute: Compute, make_step: MakeStep) -> Callable[[], None]:
        asked.append(1)
        raise CaptureError("operation not permitted when stream is capturing")

    _, decode, cache = rig(refuse)
    for _ in range(3):
        assert decode.run(step([3], 1), cache) is None
    assert len(asked) == 1
    assert "not permitted" in caplog.text


def test_on_a_device_host_lists_say_the_buckets_most() -> None:
    """What sizes the launches must hold for every step that the graph will replay. `meta` stands in for a GPU."""
    buffers = graphs.DecodeBuffers(25, 4, 3, torch.device("meta"))
    buffers.fill(step([5, 6, 7], 2), Bucket(4, 25))
    paging = buffers.step(Bucket(4, 25)).paging
    assert paging.host_seq_lens == [100] * 4
    assert paging.host_query_starts == [0, 1, 2, 3, 4]
    assert paging.num_padding_tokens == 0
    assert graphs.default_capture(CPU) is None
