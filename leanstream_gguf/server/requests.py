"""Request bodies: llama_cpp.server's, plus what OpenAI's clients send today, with every number and length bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from .._lib import native

native()  # before llama_cpp is imported

import llama_cpp  # noqa: E402
from llama_cpp.server import types as upstream  # noqa: E402
from pydantic import BaseModel, Field, field_validator, model_validator  # noqa: E402

MAX_CHOICES = 16  # answers that one request may ask for
MAX_TOKENS = 1 << 24  # more than any context; larger numbers are mistakes
MAX_TEXTS = 2048
MAX_REPETITIONS = 10_000  # of a JSON schema's minItems and the like, which the grammar writes out
MAX_GRAMMAR_CHARS = 1 << 18
MAX_DEPTH = 100
_SEED = Field(default=None, ge=-(2**63), le=2**64 - 1)
_COUNTED = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def _walk(value: Any, depth: int = 0) -> Iterator[Any]:
    """Every value inside a JSON document, keys included.

    Raises:
        ValueError: nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    yield value
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _walk(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, depth + 1)


def _check_plain(document: Any) -> Any:
    """Refuse what JSON's own grammar does not have but Python's parser lets through, and text that is no Unicode."""
    for value in _walk(document):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("NaN and infinities are no JSON numbers")
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError("text with a lone surrogate is no Unicode") from error
    return document


def _check_schema(schema: Any) -> None:
    """Refuse a JSON schema whose grammar would be huge."""
    for value in _walk(schema):
        if isinstance(value, dict):
            for name in _COUNTED:
                count = value.get(name)
                if isinstance(count, (int, float)) and count > MAX_REPETITIONS:
                    raise ValueError(f"{name} in a JSON schema must be at most {MAX_REPETITIONS}, not {count}")


def _check_grammar(text: str) -> None:
    """Refuse a grammar that the recursive parsers of llama.cpp could not take."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"a grammar may have {MAX_GRAMMAR_CHARS} characters, not {len(text)}")
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth > MAX_DEPTH:
            raise ValueError(f"parentheses in a grammar may be nested {MAX_DEPTH} deep")


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Generation(BaseModel):
    """What chat and text completions share."""

    n: int | None = Field(default=1, ge=1, le=MAX_CHOICES, description="Answers to generate, one after another")
    seed: int | None = _SEED
    stream_options: StreamOptions | None = None
    grammar: str | None = None
    top_k: int = Field(default=40, ge=0, le=2**31 - 1)
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    temperature: float = Field(default=0.8, ge=0, le=1000)
    repeat_penalty: float = Field(default=1.1, gt=0, le=1000)
    stop: str | list[str] | None = Field(default=None, description="Texts at which to stop, 64 at most")
    logit_bias: dict[str, float] | None = Field(default=None, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return _check_plain(value)

    @field_validator("grammar")
    @classmethod
    def _grammar(cls, value: str | None) -> str | None:
        if value is not None:
            _check_grammar(value)
        return value

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > 64 or any(not text for text in texts):
            raise ValueError("at most 64 texts, none of them empty")
        return value

    @property
    def n_choices(self) -> int:
        return self.n or 1


class CompletionRequest(_Generation, upstream.CreateCompletionRequest):
    """POST /v1/completions. `prompt` may be several texts (one answer each) or the tokens of one."""

    prompt: str | list[str] | list[int] = Field(  # type: ignore[assignment]
        default="", description="Text to continue, several, or tokens of this model"
    )
    max_tokens: int | None = Field(default=16, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(default=None, ge=0, le=1000)
    best_of: int | None = Field(default=1, ge=1, le=1, description="Only 1: answers are not ranked")

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], str) and len(value) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} prompts in one request")
        return value

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str)):
            return prompt or [""]
        return [prompt]

    @model_validator(mode="after")
    def _bounded(self) -> CompletionRequest:
        if len(self.prompts()) * self.n_choices > MAX_CHOICES:
            raise ValueError(f"prompts times n may be {MAX_CHOICES} at most")
        return self


def _normal_message(message: Any) -> Any:
    """A message as llama_cpp knows them: no `developer`, no null content, lists of text parts joined."""
    if not isinstance(message, dict):
        return message
    message = dict(message)
    if message.get("role") == "developer":
        message["role"] = "system"
    if "content" in message and message["content"] is None:
        message["content"] = ""
    parts = message.get("content")
    if isinstance(parts, list) and parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        message["content"] = "".join(str(part.get("text", "")) for part in parts)
    elif isinstance(parts, list):
        _check_images(parts)
    return message


def _check_images(parts: list[Any]) -> None:
    """Images come inside the request: a URL would make the server read a file or call another server."""
    for part in parts:
        image = part.get("image_url") if isinstance(part, dict) else None
        url = image.get("url") if isinstance(image, dict) else image
        if image is not None and not (isinstance(url, str) and url.startswith("data:")):
            raise ValueError("image_url must be a data: URL; the server fetches nothing")


def _normal_format(value: Any) -> Any:
    """OpenAI's `json_schema` format as llama_cpp's `json_object` with a schema."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ValueError("response_format json_schema needs json_schema.schema")
    return {"type": "json_object", "schema": inner["schema"]}


class ChatRequest(_Generation, upstream.CreateChatCompletionRequest):
    """POST /v1/chat/completions."""

    messages: list[llama_cpp.ChatCompletionRequestMessage] = Field(
        min_length=1, max_length=MAX_TEXTS, description="The conversation so far"
    )
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS, description="Tokens to generate at most")
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS, description="OpenAI's newer name for it")
    top_logprobs: int | None = Field(default=None, ge=0, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _normal(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if isinstance(value.get("messages"), list):
            value["messages"] = [_normal_message(message) for message in value["messages"]]
        value["response_format"] = _normal_format(value.get("response_format"))
        return value

    @model_validator(mode="after")
    def _schemas(self) -> ChatRequest:
        if self.response_format is not None:
            _check_schema(self.response_format.get("schema"))
        for tool in self.tools or []:
            _check_schema(tool["function"].get("parameters"))
        for function in self.functions or []:
            _check_schema(function.get("parameters"))
        return self


class EmbeddingRequest(upstream.CreateEmbeddingRequest):
    """POST /v1/embeddings."""

    input: str | list[str] = Field(description="The text to embed, or several")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, le=1 << 20, description="Must be the model's own number if given")

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return _check_plain(value)

    @field_validator("input")
    @classmethod
    def _some(cls, value: str | list[str]) -> str | list[str]:
        texts = [value] if isinstance(value, str) else value
        if not 1 <= len(texts) <= MAX_TEXTS or any(not text for text in texts):
            raise ValueError(f"from 1 to {MAX_TEXTS} texts, none of them empty")
        return value


class Thresholds(BaseModel):
    model_config = {"extra": "forbid"}

    max_kl: float = Field(gt=0, le=100, description="Use the setting measured for the largest KL up to this")


class ConfigChange(BaseModel):
    """POST /v1/stream/config. What is left out stays as it is."""

    model_config = {"extra": "forbid"}

    budget: int | str | None = Field(default=None, description="2GiB, bytes, 55%, min, auto or full")
    cache: int | str | None = Field(default=None, description="Size of the expert cache alone: 44MiB, bytes, 25% or min")
    policy: str | None = Field(default=None, description="What the expert cache keeps")
    policy_params: dict[str, float] = Field(default_factory=dict)
    depth: int | Literal["auto"] | None = Field(default=None, description="Layers to look ahead for experts, 0 = off")
    stages: int | Literal["auto"] | None = Field(default=None, description="How often such a guess is corrected, 1 = never")
    fidelity: str | None = Field(default=None, description="exact, or what the file offers")
    thresholds: Thresholds | None = Field(default=None, description="For fidelity `threshold`")


class LoadRequest(BaseModel):
    """POST /v1/stream/load."""

    model_config = {"extra": "forbid"}

    model: str
    memory_budget: int | str | None = None
    device_budget: int | str | None = None
