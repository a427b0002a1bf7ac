"""The lean path: the tokens of `transformers` for each family it takes, and the same bits in any company."""

import random
import shutil
import time
from typing import Any

import pytest
import torch
import transformers

from services.engine.batch import Batch, ScheduledSequence
from services.engine.kernels.cpu import library
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel, UnsupportedModelError
from services.engine.models.lean import LeanModel
from services.engine.scheduler import SchedulerConfig
from services.engine.sequence import Sequence
from tests.engine.identity import Reference, Rig, tiny_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: the kernels can't be built")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama 3 rope": (
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
        },
    ),
    "tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
}


def lean(model: transformers.PreTrainedModel) -> LeanModel:
    return LeanModel(model.config, model.state_dict())


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """What int8 leaves of a matrix: per output 255 equidistant values, the outermost being its largest magnitude."""
    step = weight.abs().amax(1, keepdim=True) / 127
    return torch.where(step > 0, (weight / step).round().clamp(-127, 127) * step, 0.0)


def rounded(model: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model in float32 with weights as `dtype` has them; its buffers (inverse frequencies) stay exact."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).float())
    return model


PROMPT_LENGTHS = (1, 5, 16, 17, 30, 47)


def make_prompts(seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 199) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family: str, dtype: torch.dtype) -> None:
    """With weights in bfloat16 the reference computes with the same weights in float32, as the lean path does."""
    model = tiny_model(*FAMILIES[family]).to(dtype)
    prompts = make_prompts()
    reference = Reference(rounded(tiny_model(*FAMILIES[family]), dtype))
    rig = Rig(lean(model), num_blocks=40, config=SchedulerConfig(token_budget=20, max_model_len=512))
    outputs = rig.generate(prompts, 12)
    assert rig.scheduler.counters.num_steps_mixed > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output)


def logits_of(model: DecoderModel, sequences: list[Sequence], chunk: int) -> dict[str, list[torch.Tensor]]:
    """Each sequence's logits after every step, its tokens computed `chunk` at a time, all sequences side by side."""
    cache = KVCache.allocate(model.kv_shape(64))
    runner = ModelRunner(model, cache)
    free = iter(range(64))
    found: dict[str, list[torch.Tensor]] = {seq.sequence_id: [] for seq in sequences}
    for seq in sequences:
        seq.block_ids = [next(free) for _ in range(-(-seq.num_tokens // 16))]
        seq.num_computed_tokens = 0
    while items := [
        ScheduledSequence(s, s.num_computed_tokens, min(chunk, s.num_tokens - s.num_computed_tokens), True)
        for s in sequences
        if s.num_computed_tokens < s.num_tokens
    ]:
        for item, row in zip(items, runner.forward(Batch(items)), strict=True):
            item.seq.num_computed_tokens += item.num_tokens
            found[item.seq.sequence_id].append(row)
    return found


def test_the_same_bits_in_any_company() -> None:
    """Alone or in a batch, token by token or in chunks of any size: the last logits have the same bits."""
    model = lean(tiny_model("LlamaConfig", {}))
    prompts = make_prompts() + make_prompts(2) + make_prompts(3)
    sequences = [Sequence(str(n), prompt) for n, prompt in enumerate(prompts)]
    together = logits_of(model, sequences, 64)
    assert all(len(rows) == 1 for rows in together.values())
    for chunk in (1, 7, 16):
        in_pieces = logits_of(model, sequences, chunk)
        for name, rows in together.items():
            assert torch.equal(in_pieces[name][-1], rows[-1])
    for seq in sequences:
        alone = logits_of(model, [seq], 13)
        assert torch.equal(alone[seq.sequence_id][-1], together[seq.sequence_id][-1])


def test_any_number_of_threads() -> None:
    model = lean(tiny_model("Qwen3Config", {}))
    sequences = [Sequence(str(n), prompt) for n, prompt in enumerate(make_prompts())]
    expected = logits_of(model, sequences, 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        got = logits_of(model, sequences, 16)
    finally:
        torch.set_num_threads(before)
    for name, rows in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(rows, got[name], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_weights(family: str) -> None:
    """The tokens of a model whose matrices hold what int8 can hold; its embedding and its norms are untouched."""
    model = tiny_model(*FAMILIES[family])
    in_int8 = LeanModel(model.config, {k: v.clone() for k, v in model.state_dict().items()}, weights_in_int8=True)
    if model.config.tie_word_embeddings:  # the head is quantised, the embedding is not
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed_tokens" not in name:
                parameter.copy_(dequantised(parameter))
    reference = Reference(model)
    for prompt, tokens in zip(make_prompts(), Rig(in_int8).generate(make_prompts(), 12), strict=True):
        reference.check(prompt, tokens)


def test_parts_of_the_time_make_up_the_whole() -> None:
    model = lean(tiny_model("LlamaConfig", {}))
    assert model.take_part_seconds() == {}
    model.time_parts()
    started_s = time.perf_counter()
    Rig(model).generate(make_prompts(), 4)
    taken = model.take_part_seconds()
    assert library.library() is not None and list(taken) == list(library.PARTS)
    assert len(taken) == library.library().num_parts()
    assert all(seconds > 0 for seconds in taken.values())
    assert sum(taken.values()) < time.perf_counter() - started_s
    assert sum(model.take_part_seconds().values()) == 0.0


def test_positions_beyond_the_first_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.models.lean.FIRST_POSITIONS", 8)
    prompts = make_prompts()
    reference = Reference(tiny_model("LlamaConfig", {}))
    outputs = Rig(lean(tiny_model("LlamaConfig", {})), num_blocks=40).generate(prompts, 12)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output)


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        ("GPTNeoXConfig", {}),
        ("LlamaConfig", {"head_dim": 12}),
        ("LlamaConfig", {"hidden_act": "gelu"}),
        ("LlamaConfig", {"attention_bias": True}),
        ("LlamaConfig", {"intermediate_size": 100}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ],
    ids=str,
)
def test_what_it_does_not_take_is_refused_by_name(config: str, extra: dict[str, Any]) -> None:
    model = tiny_model(config, extra)
    with pytest.raises(UnsupportedModelError, match=model.config.model_type):
        lean(model)
