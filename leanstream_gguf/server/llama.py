"""The class the server runs: leanstream_gguf.Llama with a meter and a way to stop, built by llama_cpp.server's own loader."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

from .._lib import native
from ..errors import ArgumentError, LeanStreamError, UnsupportedError
from ..model import Llama
from .errors import Cancelled, ContextLengthError, GenerationError
from .settings import ModelSettings

import llama_cpp  # isort: skip - after ours, which point it at the right libraries
import numpy as np
from llama_cpp import llama_chat_format as chat_formats
from llama_cpp.server import model as upstream

_T = TypeVar("_T")
CONTEXT_STEP = 256


class Meter:
    """Counts of one loaded model. Written by the generating thread, read by others; each field is one store."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # evaluated, without those that the context still held
        self.completion_tokens = 0
        self.prompt_seconds = 0.0
        self.generation_seconds = 0.0
        self.last_prompt_rate: float | None = None


@dataclass
class Usage:
    """Tokens of the last generation: of its whole prompt, and of its answer without the one that ended it."""

    prompt: int = 0
    completion: int = 0


class Stop:
    """A flag that llama.cpp reads between graph nodes; set it from any thread."""

    def __init__(self) -> None:
        self._flag = ctypes.c_uint8(0)

    def attach(self, context: Any) -> None:
        """Let decodes on a `llama_context *` end when the flag is set. This object must outlive the context."""
        ffi, lib = native()
        function = int(ffi.cast("uintptr_t", ffi.addressof(lib, "ls_flag_is_set")))
        llama_cpp.llama_set_abort_callback(context, ctypes.cast(function, llama_cpp.ggml_abort_callback), ctypes.addressof(self._flag))

    @property
    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self, value: bool) -> None:
        self._flag.value = int(value)


def _give_back() -> None:
    """Return what the C library keeps of freed memory (candidates of every token, the size of the vocabulary) to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc's


class Job:
    """One use of the model that can be cancelled from any thread, before, while or after it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Stop | None = None
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._stop is not None:
                self._stop.set(True)

    def run(self, llm: ServedLlama, call: Callable[[], _T]) -> _T:
        """`call()` with this job as what `cancel()` stops.

        Raises:
            Cancelled: instead of whatever came of it.
        """
        with self._lock:
            if self.cancelled:
                raise Cancelled
            self._stop = llm.stop
        try:
            return call()
        except Exception as error:
            if self.cancelled:
                raise Cancelled from error
            raise
        finally:
            with self._lock:
                self._stop = None
                llm.stop.set(False)
            _give_back()


class ServedLlama(Llama):
    """leanstream_gguf.Llama that counts tokens and can be stopped.

    Attributes:
        meter: what it has done.
        stop: ends the decode in progress.
        usage: of the last generation.
        policy: name and parameters of the retention policy in force.
        observe: called for every token with (whether it is the first of its answer, seconds since the one before).
    """

    embedding_pooling = "mean"

    def __init__(self, model_path: str, **options: Any) -> None:
        self.meter, self.stop = Meter(), Stop()
        self.usage = Usage()
        self.observe: Callable[[bool, float], None] | None = None
        self.vocab_only = bool(options.get("vocab_only"))
        self._n_evaluated = 0
        super().__init__(model_path, **options)
        self.stop.attach(self._ctx.ctx)
        config = self.stream.config
        self.policy: tuple[str, dict[str, float]] = (config.policy, dict(config.policy_params)) if config else ("", {})

    def file_metadata(self) -> dict[str, Any]:
        """Metadata of the file, without arrays; {} where it is not streamed."""
        found: dict[str, Any] = self._handle.index()["metadata"] if self._handle is not None else {}
        return found

    def set_policy(self, name: str, params: Mapping[str, float]) -> None:
        """`stream.set_policy()`, remembered in `policy`."""
        self.stream.set_policy(name, **params)
        self.policy = (name, dict(params))

    def eval(self, tokens: Sequence[int]) -> None:
        self._n_evaluated += len(tokens)
        super().eval(tokens)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """As the parent's, counted.

        Raises:
            Cancelled: asked to stop. ArgumentError: no prompt. GenerationError: a failure without a type of its own.
        """
        if not tokens:
            raise ArgumentError("the prompt is empty", remedy="give it at least one token")
        self.usage = Usage(prompt=len(tokens))
        source = super().generate(tokens, *args, **kwargs)
        self._n_evaluated, n_tokens, last = 0, 0, time.monotonic()
        try:
            sent = None
            while True:
                token = source.send(sent)
                now = time.monotonic()
                self._count(n_tokens == 0, now - last)
                self.usage.completion += not llama_cpp.llama_vocab_is_eog(self._model.vocab, token)
                n_tokens, last = n_tokens + 1, now
                if self.stop.is_set:
                    raise Cancelled
                sent = yield token
        except StopIteration:
            return
        except (LeanStreamError, MemoryError, Cancelled):
            raise
        except Exception as error:
            raise GenerationError(f"generation failed: {error}") from error
        finally:
            source.close()

    def _count(self, is_first: bool, seconds: float) -> None:
        meter = self.meter
        meter.completion_tokens += 1
        if is_first:
            meter.prompt_tokens += self._n_evaluated
            meter.prompt_seconds += seconds
            meter.last_prompt_rate = self._n_evaluated / seconds if seconds else None
        else:
            meter.generation_seconds += seconds
        if self.observe is not None:
            self.observe(is_first, seconds)

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("grammar") is not None:
            self._check_grammar(kwargs["grammar"])
        return super()._init_sampler(*args, **kwargs)

    def _check_grammar(self, grammar: Any) -> None:
        """Refuse a grammar that llama.cpp cannot parse; sampling with it would read through a null pointer."""
        sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, grammar._grammar.encode(), grammar._root.encode())
        if not sampler:
            raise ArgumentError("the grammar cannot be parsed", remedy="it must be GBNF with a rule named root")
        llama_cpp.llama_sampler_free(sampler)

    def create_completion(self, prompt: str | list[int], *args: Any, **kwargs: Any) -> Any:
        """As the parent's.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer. UnsupportedError: logprobs without logits_all.
        """
        self._need_weights()
        n_tokens = len(prompt) if isinstance(prompt, list) else len(self.tokenize(prompt.encode("utf-8"), special=True))
        if n_tokens >= self.n_ctx():
            raise ContextLengthError(
                f"this model's context holds {self.n_ctx()} tokens, but the prompt has {n_tokens}",
                used=n_tokens,
                limit=self.n_ctx(),
                remedy="shorten it, or start the server with a larger n_ctx",
            )
        if kwargs.get("logprobs") is not None and not self._logits_all:
            raise UnsupportedError("logprobs need the logits of all tokens", remedy="start the server with --logits_all true")
        return super().create_completion(prompt, *args, **kwargs)

    def create_embedding(self, input: str | list[str], model: str | None = None) -> Any:
        """As the parent's, but always one vector for a text.

        Raises:
            UnsupportedError: the model was loaded without embeddings. ContextLengthError: a text is longer than a batch.
        """
        self._need_weights()
        if not self.context_params.embeddings:
            raise UnsupportedError("this model was not loaded for embeddings", remedy="start the server with --embedding true")
        for text in [input] if isinstance(input, str) else input:
            n_tokens = len(self.tokenize(text.encode("utf-8")))
            if n_tokens > self.n_batch:
                raise ContextLengthError(
                    f"an embedding is computed in one batch of {self.n_batch} tokens, but the text has {n_tokens}",
                    used=n_tokens,
                    limit=self.n_batch,
                    remedy="split it, or start the server with a larger n_batch",
                )
        reply = super().create_embedding(input, model)
        for item in reply["data"]:
            if item["embedding"] and isinstance(item["embedding"][0], list):
                item["embedding"] = self._pooled(item["embedding"])
        return reply

    def _need_weights(self) -> None:
        if self.vocab_only:
            raise UnsupportedError("only the vocabulary of this model was loaded", remedy="start the server without --vocab_only")

    def _pooled(self, rows: list[list[float]]) -> list[float]:
        values = np.asarray(rows, dtype=np.float64)
        vector = values[-1] if self.embedding_pooling == "last" else values.mean(axis=0)
        length = float(np.linalg.norm(vector))
        return [float(x) for x in (vector / length if length else vector)]


class _LlamaCpp:
    """The llama_cpp module as llama_cpp.server's loader sees it: `Llama` is ours, with what its settings cannot say."""

    def __init__(self, llama_class: Any) -> None:
        self.Llama = llama_class

    def __getattr__(self, name: str) -> Any:
        return getattr(llama_cpp, name)


def _check_chat_format(llm: ServedLlama) -> None:
    """Refuse a format that llama_cpp would only look for when somebody chats."""
    name = llm.chat_format
    if llm.chat_handler is not None or name is None or name in llm._chat_handlers:
        return
    known = chat_formats.LlamaChatCompletionHandlerRegistry()._chat_handlers  # type: ignore[no-untyped-call]
    if name not in known:
        raise ArgumentError(f"unknown chat_format {name!r}; there are: {', '.join(sorted(known))}")


def load(settings: ModelSettings, on_start: Callable[[ServedLlama], None] | None = None) -> ServedLlama:
    """Load a model with llama_cpp.server's own loader, which knows all its settings, and our class.

    Args:
        on_start: gets the object before its weights are read, so that progress can be watched.

    Raises:
        LeanStreamError: as for Llama.
    """
    config = settings.stream_config()

    class Configured(ServedLlama):
        embedding_pooling = settings.embedding_pooling

        def __init__(self, model_path: str, **options: Any) -> None:
            if on_start is not None:
                on_start(self)
            given = {name: value for name, value in options.items() if value is not None}
            if given.get("n_ctx"):  # llama.cpp rounds up, and llama_cpp's array of tokens would be too short for it
                given["n_ctx"] = -(-given["n_ctx"] // CONTEXT_STEP) * CONTEXT_STEP
            budgets = {"memory_budget": settings.memory_budget, "device_budget": settings.device_budget}
            super().__init__(model_path, **budgets, stream=config, **given)

    loader = upstream.LlamaProxy.load_llama_from_model_settings
    # A copy of that function whose global `llama_cpp` is the stand-in: nothing in llama_cpp is patched.
    ours = FunctionType(loader.__code__, {**vars(upstream), "llama_cpp": _LlamaCpp(Configured)}, loader.__name__)
    loaded: ServedLlama = ours(settings)
    try:
        _check_chat_format(loaded)
    except BaseException:
        loaded.close()
        raise
    return loaded
