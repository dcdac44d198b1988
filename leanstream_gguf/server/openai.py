"""OpenAI's endpoints. Each request waits for its turn; a client that leaves ends its generation within a token."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from llama_cpp.server import types as upstream

from ..errors import ArgumentError
from . import errors, generation
from .errors import ModelUnknownError
from .host import ModelHost
from .llama import Job, ServedLlama
from .metrics import Sampler
from .requests import ChatRequest, CompletionRequest, EmbeddingRequest
from .sse import EventStream, disconnected, to_json

router = APIRouter()
_T = TypeVar("_T")

HEAD_SECONDS = 5.0  # a stream's status is held back so long, so that an early error can still be one


def _host(request: Request) -> ModelHost:
    host: ModelHost = request.app.state.host
    return host


def client_of(request: Request, user: str | None = None) -> str:
    """Who takes turns: the address, the key and the `user` of the request."""
    key = hashlib.sha256(request.headers.get("authorization", "").encode()).hexdigest()[:16]
    return f"{request.client.host if request.client else ''}|{key}|{user or ''}"


def _observed(request: Request, call: Callable[[ServedLlama], _T]) -> Callable[[ServedLlama], _T]:
    """`call` with the times of its tokens going into the metrics."""
    sampler: Sampler = request.app.state.sampler
    arrived = time.monotonic()

    def observe(is_first: bool, seconds: float) -> None:
        if is_first:
            sampler.first_token.observe(time.monotonic() - arrived)
        else:
            sampler.token_gap.observe(seconds)

    def observed(llm: ServedLlama) -> _T:
        llm.observe = observe
        try:
            return call(llm)
        finally:
            llm.observe = None

    return observed


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of a coroutine, or None when the client left first; the coroutine is cancelled and awaited then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            request.app.state.sampler.cancelled += 1
            task.cancel()
            await asyncio.wait({task})


async def _pieces(request: Request, body: ChatRequest | CompletionRequest, alias: str) -> AsyncIterator[dict[str, Any] | str]:
    """Chunks as they are generated; closing this ends the generation."""
    host, loop = _host(request), asyncio.get_running_loop()
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # bounded by the context's length

    def emit(chunk: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, chunk)

    call = _observed(request, lambda llm: generation.stream(llm, body, alias, emit))
    task = loop.create_task(host.run(client_of(request, body.user), alias, Job(), call))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
            if request.app.state.settings.interrupt_requests and host.queue.waiting:
                break
        else:
            task.result()
        yield "[DONE]"
    finally:
        if not task.done():
            request.app.state.sampler.cancelled += 1
            task.cancel()
            await asyncio.wait({task})


async def _with_errors(first: asyncio.Future[Any], source: Any) -> AsyncIterator[dict[str, Any] | str]:
    """What `first` and then `source` give; an error becomes the last event."""
    async with contextlib.aclosing(source):
        try:
            yield await first
            async for event in source:
                yield event
        except StopAsyncIteration:
            return
        except Exception as error:
            yield errors.describe(error)[1]


async def _streamed(request: Request, body: ChatRequest | CompletionRequest, alias: str) -> Response:
    source = _pieces(request, body, alias)
    first = asyncio.ensure_future(anext(source))
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=HEAD_SECONDS)
        if gone.done() and not first.done():
            first.cancel()
            await asyncio.wait({first})
            return Response(status_code=errors.CLIENT_CLOSED_REQUEST)
    except asyncio.CancelledError:
        first.cancel()
        await asyncio.wait({first})
        raise
    finally:
        gone.cancel()
    if first.done():
        first.result()  # an error that comes before anything was sent gets its own status
    return EventStream(_with_errors(first, source), comments=not request.app.state.settings.disable_ping_events)


def _json(reply: Any) -> Response:
    return Response(to_json(reply), media_type="application/json")


async def _answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
    host = _host(request)
    alias = host.resolve(body.model)
    if body.stream:
        return await _streamed(request, body, alias)
    call = _observed(request, lambda llm: generation.complete(llm, body, alias))
    reply = await _unless_gone(request, host.run(client_of(request, body.user), alias, Job(), call))
    return Response(status_code=errors.CLIENT_CLOSED_REQUEST) if reply is None else _json(reply)


@router.post("/v1/chat/completions", summary="Chat", tags=["OpenAI V1"], response_class=JSONResponse)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    return await _answer(request, body)


@router.post("/v1/completions", summary="Completion", tags=["OpenAI V1"], response_class=JSONResponse)
@router.post("/v1/engines/copilot-codex/completions", include_in_schema=False)
async def completions(request: Request, body: CompletionRequest) -> Response:
    return await _answer(request, body)


@router.post("/v1/embeddings", summary="Embedding", tags=["OpenAI V1"], response_class=JSONResponse)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    host = _host(request)
    alias = host.resolve(body.model)
    work = host.run(client_of(request, body.user), alias, Job(), lambda llm: generation.embed(llm, body, alias))
    reply = await _unless_gone(request, work)
    return Response(status_code=errors.CLIENT_CLOSED_REQUEST) if reply is None else _json(reply)


@router.get("/v1/models", summary="Models", tags=["OpenAI V1"])
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": _host(request).models()}


@router.get("/v1/models/{model:path}", summary="One model", tags=["OpenAI V1"])
async def model(request: Request, model: str) -> dict[str, Any]:
    found = next((item for item in _host(request).models() if item["id"] == model), None)
    if found is None:
        raise ModelUnknownError(f"the model {model!r} does not exist")
    return found


# ---- llama_cpp.server's extras ------------------------------------------------------------------------------------------


async def _tokens(request: Request, body: upstream.TokenizeInputRequest) -> list[int]:
    text = body.input.encode("utf-8")
    async with _host(request).borrowed(client_of(request), body.model) as llm:
        return await asyncio.to_thread(llm.tokenize, text, special=True)


@router.post("/extras/tokenize", summary="Tokenize", tags=["Extras"])
async def tokenize(request: Request, body: upstream.TokenizeInputRequest) -> upstream.TokenizeInputResponse:
    return upstream.TokenizeInputResponse(tokens=await _tokens(request, body))


@router.post("/extras/tokenize/count", summary="Tokenize Count", tags=["Extras"])
async def count_tokens(request: Request, body: upstream.TokenizeInputRequest) -> upstream.TokenizeInputCountResponse:
    return upstream.TokenizeInputCountResponse(count=len(await _tokens(request, body)))


@router.post("/extras/detokenize", summary="Detokenize", tags=["Extras"])
async def detokenize(request: Request, body: upstream.DetokenizeInputRequest) -> upstream.DetokenizeInputResponse:
    async with _host(request).borrowed(client_of(request), body.model) as llm:
        for token in body.tokens:
            if not 0 <= token < llm.n_vocab():  # llama.cpp would throw across the C ABI
                raise ArgumentError(f"token {token} does not exist: this model has {llm.n_vocab()} tokens", limit=llm.n_vocab())
        text = await asyncio.to_thread(llm.detokenize, body.tokens)
    return upstream.DetokenizeInputResponse(text=text.decode("utf-8", "replace"))
