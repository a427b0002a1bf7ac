"""The bodies of requests, as OpenAI (and vLLM's extensions) define them. Unknown fields are ignored.

What is known but not offered yet is refused by name, never silently ignored: a client that asked for a JSON schema must
not get free text.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from services.gateway.errors import BadRequestError

MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096


def _number(value: object) -> object:
    """JSON numbers only: no strings, no booleans, nothing infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _stops(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise ValueError("must be a string or a list of strings")
    if len(value) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
    if not all(value):
        raise ValueError("stop strings must not be empty")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in value):
        raise ValueError(f"stop strings may have at most {MAX_STOP_CHARACTERS} characters")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Stops = Annotated[list[str], BeforeValidator(_stops)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """What a stream should say besides text."""

    include_usage: StrictBool | None = None


class GenerationBody(BaseModel):
    """What both completion routes take."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    # Fields refused unless they hold one of these values, with which they ask for nothing.
    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "logit_bias": ({},),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "response_format": ({"type": "text"},),
        "guided_json": (),
        "guided_regex": (),
        "guided_grammar": (),
        "guided_choice": (),
        "structured_outputs": (),
    }

    model: Annotated[str, Field(min_length=1, max_length=512, strict=True)]
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    priority: StrictInt | None = None
    return_token_ids: StrictBool | None = None


def _prompts(value: object) -> object:
    """One prompt or several, each text or token ids. Errors don't repeat the prompt."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if not isinstance(value[0], str | list):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed")
    if all(isinstance(prompt, str) for prompt in value):
        return value
    for prompt in value:
        if not isinstance(prompt, list) or any(type(token) is not int or not 0 <= token < 2**31 for token in prompt):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    return value


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = GenerationBody.refused | {
        "suffix": ("",),
        "echo": (False,),
        "best_of": (1,),
        "prompt_logprobs": (),
    }

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def _content(value: object) -> object:
    """A message's text. Parts are joined; parts that are not text are refused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')
        texts.append(part["text"])
    return "".join(texts)


class Message(BaseModel):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = GenerationBody.refused | {
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


Body = TypeVar("Body", bound=GenerationBody)


def parse(cls: type[Body], raw: bytes) -> Body:
    """The body, checked. Raises BadRequestError, whose `param` names the field at fault."""
    try:
        fields = pydantic_core.from_json(raw)
    except ValueError as error:  # also bytes that are not UTF-8, lone surrogates and too deep a nesting
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise BadRequestError("the body must be a JSON object", code="invalid_json")
    try:
        body = cls.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None
    for name, neutral in cls.refused.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise BadRequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if body.n not in (None, 1):
        raise BadRequestError("n must be 1: several choices per prompt are not supported", param="n")
    return body


def _explain(error: ValidationError) -> BadRequestError:
    """The first thing that is wrong, in words that never repeat the client's text."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").split(" or instance of ")[0]
    missing = first["type"] == "missing"
    code = "missing_required_parameter" if missing else "invalid_value"
    text = f"{path} is required" if missing else f"{path}: {message}"
    return BadRequestError(text, param=str(first["loc"][0]), code=code)
