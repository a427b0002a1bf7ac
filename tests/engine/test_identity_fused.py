"""The fused path, on its operators' torch references: the tokens of `transformers` for each family it takes."""

from typing import Any

import pytest
import torch

from services.engine.batch import Batch, ScheduledSequence
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.fused import FusedModel
from services.engine.models.interface import UnsupportedModelError
from services.engine.scheduler import SchedulerConfig
from services.engine.sequence import Sequence
from services.engine.weights import load_model
from tests.engine.identity import Reference, Rig, tiny_model
from tests.engine.test_identity_lean import FAMILIES, make_prompts


def fused(family: str, dtype: torch.dtype) -> FusedModel:
    model = tiny_model(*FAMILIES[family])
    return FusedModel(model.config, model.state_dict(), dtype, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family: str) -> None:
    prompts = make_prompts()
    reference = Reference(tiny_model(*FAMILIES[family]))
    config = SchedulerConfig(token_budget=20, max_model_len=512)
    rig = Rig(fused(family, torch.float32), num_blocks=40, config=config)
    outputs = rig.generate(prompts, 12)
    assert rig.scheduler.counters.num_steps_mixed > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_errs_no_more_than_transformers_does(family: str) -> None:
    """Both against float32; ours rounds less often, but not in the same places."""
    (prompt,) = make_prompts()[-1:]
    model = fused(family, torch.bfloat16)
    seq = Sequence("only", prompt)
    seq.block_ids = list(range(8))
    runner = ModelRunner(model, KVCache.allocate(model.kv_shape(8)))
    ours = runner.forward(Batch([ScheduledSequence(seq, 0, len(prompt), True)]))[0]
    assert ours.dtype == torch.float32
    exact, rounded = tiny_model(*FAMILIES[family]), tiny_model(*FAMILIES[family])
    for parameter in rounded.parameters():  # its inverse frequencies stay float32, as when it is loaded
        parameter.data = parameter.data.bfloat16()
    with torch.inference_mode():
        expected, theirs = (each(torch.tensor([prompt])).logits[0, -1].float() for each in (exact, rounded))
    assert (ours - expected).abs().mean() < 1.5 * (theirs - expected).abs().mean()


@pytest.mark.parametrize("config, extra", [("GPTNeoXConfig", {}), ("LlamaConfig", {"hidden_act": "gelu"})])
def test_what_it_does_not_take_is_refused_by_name(config: str, extra: dict[str, Any]) -> None:
    model = tiny_model(config, extra)
    with pytest.raises(UnsupportedModelError, match=model.config.model_type):
        FusedModel(model.config, model.state_dict(), torch.float32, "cpu")


def test_it_can_be_asked_for() -> None:
    assert isinstance(load_model("tiny-random-llama", "bfloat16", path="fused"), FusedModel)
