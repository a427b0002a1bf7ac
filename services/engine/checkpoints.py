"""Makes model folders: the default model out of its GGUF file, and tiny random ones for tests.

Run as a child process by `services.runtime.model_store`, which has no torch:

    python -m services.engine.checkpoints gguf SOURCE.gguf FOLDER
    python -m services.engine.checkpoints tiny-llama FOLDER --seed N
"""

import argparse
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TINY_CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write `source` (one GGUF file) as a Hugging Face folder with dense bf16 safetensors, tokenizer and chat
    template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if (
        _pre_tokenizer_name(source) == "smollm"
    ):  # transformers leaves out the digit splitting these models were trained with
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    _save(model, tokenizer, folder)


def make_tiny_llama(folder: Path, seed: int) -> None:
    """Write a two-layer random Llama (float32, 4096 positions) with a byte-level tokenizer and a chat template."""
    config = transformers.LlamaConfig(
        vocab_size=256 + len(TINY_SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    _spread_weights(model, seed)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_byte_tokenizer(),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|eos|>",
        extra_special_tokens=list(TINY_SPECIAL_TOKENS[2:]),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    _save(model, tokenizer, folder)


def _spread_weights(model: torch.nn.Module, seed: int) -> None:
    """Random weights large enough that attention is sharp and greedy output varied instead of one token for ever."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms stay at one
                continue
            std = 1.0 if "embed_tokens" in name else 2.0 / parameter.shape[1] ** 0.5
            parameter.copy_(torch.empty_like(parameter).normal_(0.0, std, generator=generator))


def _byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token ids 0 to 255 are the bytes of the text's UTF-8 form."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's mapping of bytes to characters
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(TINY_SPECIAL_TOKENS))
    return tokenizer


def _pre_tokenizer_name(source: Path) -> str:
    import gguf

    field = gguf.GGUFReader(source).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field else ""


def _save(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, folder: Path) -> None:
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Parse the command line and make one folder."""
    parser = argparse.ArgumentParser(prog="python -m services.engine.checkpoints", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    gguf = kinds.add_parser("gguf")
    gguf.add_argument("source", type=Path)
    gguf.add_argument("folder", type=Path)
    tiny = kinds.add_parser("tiny-llama")
    tiny.add_argument("folder", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if arguments.kind == "gguf":
        convert_gguf(arguments.source, arguments.folder)
    else:
        make_tiny_llama(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
