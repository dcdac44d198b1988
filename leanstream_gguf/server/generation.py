"""From a request body to answers: calls of the model's thread, whole or piece by piece."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from typing import Any

from llama_cpp.server.app import prepare_request_resources

from ..errors import ArgumentError
from .errors import request_mistakes
from .llama import ServedLlama
from .requests import ChatRequest, CompletionRequest, EmbeddingRequest

# Read by us, not by the model.
_OURS = {"n", "best_of", "logit_bias_type", "user", "min_tokens", "stream_options", "max_completion_tokens", "model", "prompt"}

Emit = Callable[[dict[str, Any]], None]


def _arguments(llm: ServedLlama, body: ChatRequest | CompletionRequest, alias: str) -> dict[str, Any]:
    """Keyword arguments of the model's method, with llama_cpp.server's preparation of biases, grammar and least tokens."""
    kwargs: dict[str, Any] = body.model_dump(exclude=_OURS)
    kwargs["model"] = alias
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        kwargs["max_tokens"] = body.max_completion_tokens
    prepare_request_resources(body, lambda _: llm, alias, kwargs)  # type: ignore[arg-type]
    for token in kwargs.get("logit_bias") or {}:
        _check_token(llm, token)
    return kwargs


def _check_token(llm: ServedLlama, token: str | int) -> None:
    try:
        number = int(token)
    except ValueError:
        raise ArgumentError(f"logit_bias must name tokens by number, not {token!r}") from None
    if not 0 <= number < llm.n_vocab():
        raise ArgumentError(f"token {number} does not exist: this model has {llm.n_vocab()} tokens", limit=llm.n_vocab())


def _calls(llm: ServedLlama, body: ChatRequest | CompletionRequest, alias: str) -> Iterator[Callable[[], Any]]:
    """One call for every choice, in order; each choice of a fixed seed gets its own."""
    if isinstance(body, ChatRequest):
        prompts: list[dict[str, Any]] = [{}]
        method: Callable[..., Any] = llm.create_chat_completion
    else:
        prompts = [{"prompt": prompt} for prompt in body.prompts()]
        method = llm.create_completion
        for prompt in prompts:
            for token in prompt["prompt"] if isinstance(prompt["prompt"], list) else ():
                _check_token(llm, token)
    for prompt in prompts:
        for i in range(body.n_choices):
            with request_mistakes():
                kwargs = _arguments(llm, body, alias) | prompt
            if body.seed is not None:
                kwargs["seed"] = (body.seed + i) & 0xFFFFFFFF
            yield lambda kwargs=kwargs: method(**kwargs)  # type: ignore[misc]


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def complete(llm: ServedLlama, body: ChatRequest | CompletionRequest, alias: str) -> dict[str, Any]:
    """The whole reply, with all choices."""
    reply: dict[str, Any] = {}
    n_prompt = n_completion = 0
    for index, call in enumerate(_calls(llm, body, alias)):
        with request_mistakes():
            part = call()
        n_prompt, n_completion = max(n_prompt, llm.usage.prompt), n_completion + llm.usage.completion
        choice = {**part["choices"][0], "index": index}
        reply = {**part, "choices": [*reply.get("choices", []), choice]}
    reply["usage"] = _usage(n_prompt, n_completion)
    return reply


def stream(llm: ServedLlama, body: ChatRequest | CompletionRequest, alias: str, emit: Emit) -> None:
    """The reply in pieces, each given to `emit`; choices follow one another."""
    first: dict[str, Any] = {}
    n_prompt = n_completion = 0
    for index, call in enumerate(_calls(llm, body, alias)):
        with request_mistakes():
            for chunk in call():
                first = first or chunk
                choice = {**chunk["choices"][0], "index": index}
                emit({**chunk, "id": first["id"], "choices": [choice]})
        n_prompt, n_completion = max(n_prompt, llm.usage.prompt), n_completion + llm.usage.completion
    if body.stream_options is not None and body.stream_options.include_usage and first:
        kept = {name: first[name] for name in ("id", "object", "created", "model")}
        emit({**kept, "choices": [], "usage": _usage(n_prompt, n_completion)})


def embed(llm: ServedLlama, body: EmbeddingRequest, alias: str) -> dict[str, Any]:
    """The reply of /v1/embeddings."""
    if body.dimensions is not None and body.dimensions != llm.n_embd():
        raise ArgumentError(f"this model's embeddings have {llm.n_embd()} dimensions", limit=llm.n_embd())
    with request_mistakes():
        reply: dict[str, Any] = llm.create_embedding(body.input, alias)
    if body.encoding_format == "base64":
        for item in reply["data"]:
            item["embedding"] = base64.b64encode(struct.pack(f"<{len(item['embedding'])}f", *item["embedding"])).decode()
    return reply
