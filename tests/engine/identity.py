"""Runs prompts through the whole engine, and says what `transformers` generates for them, float32 and greedy."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from services.engine.block_pool import BlockPool
from services.engine.engine import Engine
from services.engine.kv_cache import KVCache
from services.engine.model_runner import ModelRunner
from services.engine.models.interface import DecoderModel
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.sequence import SamplingParams, Sequence

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
torch.set_num_threads(1)  # a machine that runs tests runs much else
TIE = 2e-4  # logits nearer than this are not told apart by float32 rounding over a few dozen layers


@dataclass
class Rig:
    """One engine over one cache; prompts may be sent again and again."""

    model: DecoderModel
    num_blocks: int = 256
    block_size: int = 16
    config: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(self.config, self.pool, time.monotonic)
        self.kv_cache = KVCache.allocate(self.model.kv_shape(self.num_blocks, self.block_size))
        self.kv_cache.blocks.fill_(float("nan"))  # whoever reads a slot that was never written shows it
        self.engine = Engine(self.scheduler, ModelRunner(self.model, self.kv_cache))
        self.num_sent = 0

    def generate(self, prompts: list[list[int]], num_tokens: int | list[int], **params: object) -> list[list[int]]:
        """Send all at once, run until all are done, return their outputs."""
        wanted = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        sequences = []
        for prompt, most in zip(prompts, wanted, strict=True):
            self.num_sent += 1
            chosen = SamplingParams(max_tokens=most, **params)  # type: ignore[arg-type]
            sequences.append(Sequence(str(self.num_sent), list(prompt), chosen))
            self.scheduler.add(sequences[-1])
        while self.engine.has_work():
            self.engine.step()
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total
        return [seq.output_token_ids for seq in sequences]


class Reference:
    """Stock `transformers`: its own attention, its own cache, one prompt at a time."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model.eval()
        model.generation_config.eos_token_id = None
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The greedy continuation; nothing ends it early."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < num_tokens:
            ids = torch.tensor([prompt])
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
            known = self._known[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return known[:num_tokens]

    def check(self, prompt: list[int], got: list[int]) -> None:
        """Assert that `got` is what the reference generates, up to the first tie that rounding decides."""
        expected = self.tokens(prompt, len(got))
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            if mine != theirs:
                with torch.inference_mode():
                    logits = self.model(torch.tensor([prompt + expected[:i]])).logits[0, -1].float()
                gap = float(logits[theirs] - logits[mine])
                assert gap < TIE, f"token {i} of {len(got)}: {mine} instead of {theirs}, {gap} below it in logits"
                print(f"tie at token {i}: {mine} and {theirs} are {gap:.1e} apart")
                return


def tiny_model(config_class: str, extra: dict[str, Any]) -> transformers.PreTrainedModel:
    """A small random model of a family, the same on every call."""
    torch.manual_seed(0)
    settings = {**SMALL, **extra}
    if config_class == "FalconConfig":
        del settings["head_dim"]  # which it computes itself
    config = getattr(transformers, config_class)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # enough spread that the output is varied
                parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5)
    return model.eval()
