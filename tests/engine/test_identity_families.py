"""The general path on tiny random models of many families: the tokens of `transformers`, or a refusal by name."""

import random
from typing import Any

import pytest

from services.engine.models.general import GeneralModel
from services.engine.models.interface import UnsupportedModelError
from services.engine.scheduler import SchedulerConfig
from tests.engine.identity import Reference, Rig, tiny_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 10}),
    "cohere": ("CohereConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "decoder_sparse_step": 1}),
    "gpt2": ("GPT2Config", {"n_positions": 512}),
    "opt": ("OPTConfig", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        | {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48, "first_k_dense_replace": 1, "head_dim": 8},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", {}),
    "bloom": ("BloomConfig", {}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4}),
    "mamba": ("MambaConfig", {}),
    "dynamic rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family: str) -> None:
    model = tiny_model(*FAMILIES[family])
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 199) for _ in range(length)] for length in (1, 5, 16, 17, 30, 47)]
    reference = Reference(tiny_model(*FAMILIES[family]))
    rig = Rig(GeneralModel(model), num_blocks=40, config=SchedulerConfig(token_budget=20, max_model_len=512))
    outputs = rig.generate(prompts, 12)
    assert rig.scheduler.counters.num_steps_mixed > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output)


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name(family: str) -> None:
    model = tiny_model(*REFUSED[family])
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        GeneralModel(model)
