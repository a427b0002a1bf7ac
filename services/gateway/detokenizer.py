"""Token ids to text, piece by piece, without ever splitting a character.

`tokenizers`' DecodeStream holds back bytes that are not yet a character. What it still holds at the end (half a
character that was never completed) is taken from a one-shot decode of the whole, so that the pieces always add up to
it.
"""

from __future__ import annotations

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one choice as its tokens arrive. Special tokens have no text."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._num_pending = 0  # tokens since the last piece
        self.num_characters = 0  # given out so far

    def feed(self, token_id: int) -> str:
        """The text this token completes; empty where it completes none."""
        self._token_ids.append(token_id)
        self._num_pending += 1
        piece = self._stream.step(self._tokenizer, token_id)
        return self._give(piece) if piece else ""

    def flush(self) -> str:
        """The rest of the text, now that no more tokens will come."""
        if not self._num_pending:
            return ""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        given = "".join(self._pieces)
        if whole.startswith(given):
            return self._give(whole[len(given) :])
        # This decoder rewrites earlier text when a later byte is invalid: what was given stays, the rest stands alone.
        return self._give(self._tokenizer.decode(self._token_ids[-self._num_pending :], skip_special_tokens=True))

    def _give(self, piece: str) -> str:
        self._pieces.append(piece)
        self._num_pending = 0
        self.num_characters += len(piece)
        return piece
