"""What is sent: random prompts of chosen lengths, as token ids or text, and the request bodies around them.

Lengths follow `vllm bench serve --dataset-name random`: uniform over the whole numbers from floor(length x (1 - ratio))
to ceil(length x (1 + ratio)), the prefix on top, the same for all requests. Contents are drawn symbol by symbol.
Lengths, contents and arrivals each have their own generator, so that changing one leaves the others as they were.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

CHAT = "/chat/completions"
# short words that common tokenizers know whole, so that a word is about a token where no tokenizer is at hand
WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city name team minute idea body back parent face others level
""".split()  # noqa: SIM905 (to be read)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and answers are, in tokens."""

    num_input: int
    num_output: int
    range_ratio: float = 0.0
    num_prefix: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ValueError("the range ratio must lie in [0, 1)")
        if self.num_prefix + self.input_range[0] < 1:
            raise ValueError("a prompt must have at least one token")

    @property
    def input_range(self) -> tuple[int, int]:
        """The least and the most tokens behind the prefix."""
        return self._range(self.num_input, 0)

    @property
    def output_range(self) -> tuple[int, int]:
        """The least and the most tokens to generate."""
        return self._range(self.num_output, 1)

    def _range(self, length: int, least: int) -> tuple[int, int]:
        low, high = math.floor(length * (1 - self.range_ratio)), math.ceil(length * (1 + self.range_ratio))
        return max(low, least), max(high, least)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts are made of, and how a sequence of it is written in a request."""

    name: str  # "token ids", "text", "words"
    symbols: Sequence[int]
    write: Callable[[list[int]], list[int] | str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, as it is meant; the server's usage says what became of it."""

    content: list[int] | str
    num_tokens: int
    num_output_tokens: int


def token_ids(symbols: Sequence[int]) -> Vocabulary:
    """Prompts that are lists of these ids."""
    return Vocabulary("token ids", symbols, lambda ids: ids)


def words() -> Vocabulary:
    """Prompts that are texts with a word for each token."""
    return Vocabulary("words", range(len(WORDS)), lambda ids: " ".join(WORDS[index] for index in ids))


def text_of(tokenizer: Tokenizer) -> Vocabulary:
    """Prompts that are texts of as many tokens, as far as this tokenizer can be made to agree."""

    def write(ids: list[int]) -> str:
        text = str(tokenizer.decode(ids))
        for _ in range(4):  # neighbours merge or split: cut what is too much, append what is missing
            found = tokenizer.encode(text, add_special_tokens=False).ids
            if len(found) == len(ids):
                break
            text = str(tokenizer.decode((found + ids)[: len(ids)]))
        return text

    return Vocabulary("text", plain_ids(tokenizer), write)


def plain_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that stand for text, in order."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises ValueError where it has none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def make_prompts(num_prompts: int, lengths: Lengths, vocabulary: Vocabulary, seed: int | str) -> list[Prompt]:
    """Random prompts; the same arguments make the same prompts. A prefix depends on `seed` alone up to its first space.

    (So that warm-ups, with the seed "7 warm-up", share the prefix of the measured requests and nothing else.)
    """
    prefix_rng = random.Random(f"prefix {str(seed).partition(' ')[0]}")
    length_rng, content_rng = random.Random(f"lengths {seed}"), random.Random(f"contents {seed}")
    prefix = prefix_rng.choices(vocabulary.symbols, k=lengths.num_prefix)
    prompts = []
    for _ in range(num_prompts):
        num_input, num_output = length_rng.randint(*lengths.input_range), length_rng.randint(*lengths.output_range)
        symbols = prefix + content_rng.choices(vocabulary.symbols, k=num_input)
        prompts.append(Prompt(vocabulary.write(symbols), len(symbols), num_output))
    return prompts


def bodies(prompts: Iterable[Prompt], endpoint: str, model: str, extra: Mapping[str, Any]) -> list[bytes]:
    """The JSON of each request, streaming and with usage; `extra` goes into every one and wins."""
    return [_body(prompt, endpoint, model, extra) for prompt in prompts]


def _body(prompt: Prompt, endpoint: str, model: str, extra: Mapping[str, Any]) -> bytes:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if endpoint.endswith(CHAT):
        body["messages"] = [{"role": "user", "content": prompt.content}]
        body["max_completion_tokens"] = prompt.num_output_tokens
    else:
        body["prompt"] = prompt.content
        body["max_tokens"] = prompt.num_output_tokens
    return json.dumps(body | dict(extra), separators=(",", ":")).encode()
