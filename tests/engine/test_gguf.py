"""A GGUF file, written here as llama.cpp lays it out, becomes the folder that it was made from."""

from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from services.engine.stored_weights import StoredWeights
from services.engine.weights import load_model
from services.runtime.model_store import ModelStoreError, resolve

TINY = "tiny-random-llama"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head in llama.cpp's order: the two rotated halves take turns."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write(path: Path) -> dict[str, torch.Tensor]:
    """The tiny model as GGUF, its weights rounded to bf16 first; returns them."""
    folder = resolve(TINY)
    config = AutoConfig.from_pretrained(folder)
    weights = {name: tensor.bfloat16() for name, tensor in StoredWeights(folder).items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [*tokenizer.convert_ids_to_tokens(list(range(config.vocab_size - 1))), "!!"]  # a file has some merge
    special = range(256, len(tokens) - 1)
    types = [gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in weights.items():
        if name in plain or name == "lm_head.weight":
            target = plain.get(name, "output.weight")
        else:
            _, _, index, inner = name.removesuffix(".weight").split(".", 3)
            target = f"blk.{index}.{NAMES[inner]}.weight"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        laid_out = next((interleaved(tensor, n) for part, n in heads.items() if f"{part}.weight" in target), tensor)
        writer.add_tensor(target, laid_out.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    resolve(TINY)  # where it is now
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_weights_and_tokens(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as here:
        here.delenv("PDSERVE_CACHE")
        weights = write(tmp_path / "tiny.gguf")
        expected = AutoTokenizer.from_pretrained(resolve(TINY))("héllo <|eos|>").input_ids
    said: list[str] = []
    folder = resolve(str(tmp_path / "tiny.gguf"), said.append)
    assert any("dequantising" in line for line in said)
    found = StoredWeights(folder)
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
    assert AutoTokenizer.from_pretrained(folder)("héllo <|eos|>", add_special_tokens=False).input_ids == expected
    assert load_model(folder, "float32").max_model_len == 4096
    again: list[str] = []
    (tmp_path / "tiny.gguf").rename(tmp_path / "moved.gguf")
    assert resolve(str(tmp_path / "moved.gguf"), again.append) == folder
    assert not again, "known by its content"


def test_what_is_no_gguf_is_said(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelStoreError, match="making the model failed"):
        resolve(str(tmp_path / "bad.gguf"), lambda line: None)
    assert not list((tmp_path / "cache" / "models").glob("gguf-*"))
