"""Text to token ids, once per request: `transformers` for the chat template, its Rust tokenizer for the rest.

Short texts are tokenised on the event loop, long ones in a thread (the Rust tokenizer lets go of the interpreter lock).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as RustTokenizer

from services.gateway.detokenizer import Detokenizer
from services.gateway.errors import BadRequestError

INLINE_CHARACTERS = 4096  # a text up to this size takes well under a millisecond


class Tokenizer:
    """The tokenizer of the served model, as every worker has it."""

    def __init__(self, folder: Path) -> None:
        """Loads from a model folder; raises ValueError where it has no fast tokenizer."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer  # slow to import, and wanted in this process only

        self._auto: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not getattr(self._auto, "is_fast", False):
            raise ValueError(f"{folder} has no fast tokenizer (tokenizer.json)")
        self.rust: RustTokenizer = self._auto.backend_tokenizer
        self.rust.no_truncation()
        self.rust.no_padding()
        self._special = frozenset(self._auto.all_special_ids)
        vocabulary = self.rust.get_vocab(with_added_tokens=True)
        self._longest_token = max(len(token) for token in vocabulary)
        self.vocab_size = len(vocabulary)
        self._bytes_of = _byte_level_alphabet() if type(self.rust.decoder).__name__ == "ByteLevel" else None
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return bool(self._auto.chat_template)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`, without tokenising it."""
        if self.rust.normalizer is not None:
            return 0  # may shorten the text
        return len(text) // self._longest_token

    async def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """The token ids of `text`."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The chat as the model's template writes it, ready for an answer. Raises BadRequestError."""
        if not self.has_chat_template:
            raise BadRequestError("the model has no chat template; use /v1/completions", param="messages")
        if sum(len(message["content"]) for message in messages) <= INLINE_CHARACTERS:
            return self._render(messages)
        return await asyncio.to_thread(self._render, messages)

    def decode_stream(self) -> Detokenizer:
        """A fresh incremental detokenizer."""
        return Detokenizer(self.rust)

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text of its own."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; half a character is possible."""
        token = self.rust.id_to_token(token_id)
        if token is not None and self._bytes_of is not None and token_id not in self._special:
            try:
                return bytes(self._bytes_of[character] for character in token)
            except KeyError:  # an added token, written as plain text
                return token.encode()
        return self.token_text(token_id).encode()

    def _token_text(self, token_id: int) -> str:
        return str(self.rust.decode([token_id], skip_special_tokens=False))

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.rust.encode(text, add_special_tokens=add_special_tokens).ids)

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            return str(self._auto.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:  # templates refuse some orders of roles
            raise BadRequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted: printable Latin-1 stands for itself, the rest for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}
