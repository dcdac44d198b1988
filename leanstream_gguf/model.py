"""`Llama`: llama_cpp.Llama with a memory budget. Everything about weights and memory is delegated to runtime.py.

Without `memory_budget` and `stream` this class is its parent. With them, the parent's constructor runs inside a load
scope in which llama.cpp gives the weights to our runtime; a property sees the context parameters it assigns, so that
nothing in llama_cpp is patched.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from ._lib import native
from .errors import ArgumentError, LeanStreamWarning, StateError, UnsupportedError
from .settings import Budget, StreamConfig, check_context

native()  # points llama_cpp at our libraries and refuses a mismatch, before the import below

import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402
from llama_cpp import _internals as internals  # noqa: E402

from . import measure, planner, probe  # noqa: E402
from .loading import construction, recorded_log, refusal  # noqa: E402
from .runtime import ModelHandle  # noqa: E402
from .stream import StreamHandle, tell_cost  # noqa: E402

_Parent = llama_cpp.llama.Llama
LEAN_SUFFIX = ".lean.gguf"


class StreamedContext(internals.LlamaContext):
    """A llama_cpp context whose decode raises the typed error of a failed read. Made by changing an instance's class."""

    _leanstream: ModelHandle
    _busy: threading.RLock  # held during a call and while closing
    _n_outputs_max: int  # rows of logits reserved, 0 = one for every token of a batch

    def decode(self, batch: internals.LlamaBatch) -> None:
        """Run the batch.

        Raises:
            ReadError: weights could not be read; the batch left no trace and the context can be used on.
            UnsupportedError: more outputs than were reserved (llama.cpp would abort the process).
            StateError: in use by another thread, or in a forked child.
        """
        self._check_outputs(batch)
        self._call(super().decode, batch)

    def encode(self, batch: internals.LlamaBatch) -> None:
        """Like `decode()`, for encoders."""
        self._call(super().encode, batch)

    def kv_cache_clear(self) -> None:
        with self.turn():
            super().kv_cache_clear()  # type: ignore[no-untyped-call]

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        with self.turn():
            return bool(super().kv_cache_seq_rm(seq_id, p0, p1))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Use the context alone; `close()` on another thread waits.

        Raises:
            StateError: in use by another thread, or in a forked child.
        """
        if self._leanstream.foreign:
            text, remedy = "a streamed model cannot be used in a forked child", "load it there, or start processes with spawn"
            raise StateError(text, remedy=remedy)
        if not self._busy.acquire(blocking=False):
            raise StateError("this model is in use by another thread", remedy="take turns, or load one model for each thread")
        try:
            yield
        finally:
            self._busy.release()

    def _call(self, compute: Callable[[internals.LlamaBatch], None], batch: internals.LlamaBatch) -> None:
        with self.turn():
            cause: BaseException | None = None
            try:
                compute(batch)
            except RuntimeError as error:
                cause = error
            self._settle(cause)

    def _settle(self, cause: BaseException | None) -> None:
        # Also after success: a failed read lets the graph finish with zeros, and only this tells.
        self._leanstream.raise_context_error(self.ctx, cause)
        if cause is not None:
            raise cause

    def _check_outputs(self, batch: internals.LlamaBatch) -> None:
        if self._n_outputs_max == 0 or batch.batch.n_tokens <= self._n_outputs_max:
            return
        wanted = sum(1 for flag in batch.batch.logits[: batch.batch.n_tokens] if flag)
        if wanted > self._n_outputs_max:
            raise UnsupportedError(
                f"the batch asks for the logits of {wanted} tokens, but {self._n_outputs_max} were reserved",
                remedy="load the model with logits_all=True",
            )


def as_streamed(context: internals.LlamaContext, handle: ModelHandle, n_outputs_max: int) -> StreamedContext:
    """Make this one context a StreamedContext of `handle`."""
    vars(context).update(_leanstream=handle, _busy=threading.RLock(), _n_outputs_max=n_outputs_max)
    context.__class__ = StreamedContext
    assert isinstance(context, StreamedContext)
    return context


def _closed(_: object) -> Any:
    raise StateError("the model was closed", remedy="load it again")


class _ClosedModel(internals.LlamaModel):
    """What a closed Llama's model becomes: llama.cpp would crash on the pointers, which are gone."""

    model = vocab = property(_closed)


class _ClosedContext(internals.LlamaContext):
    """Likewise its context."""

    ctx = memory = property(_closed)


def _refuse(options: dict[str, Any]) -> None:
    """Settings of the parent that cannot hold for a streamed model: refused by name, or dropped with a warning."""
    if options.get("lora_path") or options.get("lora_base"):
        raise UnsupportedError("LoRA adapters cannot be applied to streamed weights", remedy="merge the adapter into the GGUF")
    if options.pop("use_mlock", False):  # not an error, because llama_cpp.server asks for it by default
        text = "use_mlock is ignored under a memory budget: streamed weights are read into memory of our own, which is not locked"
        warnings.warn(text, LeanStreamWarning, stacklevel=4)


def _tell_unused_device(handle: ModelHandle, repack: bool, asked: str) -> None:
    """Warn that a device was asked for, with the argument `asked`, and nothing runs on one."""
    plan = handle.plan_in_force()
    if "device" in plan:
        return
    reason = "llama.cpp finds no GPU it was built for (see leanstream doctor)"
    if repack:
        reason = "weights in llama.cpp's repacked form (repack=True) are the host's"
    warnings.warn(f"{asked} is not used: {reason}", LeanStreamWarning, stacklevel=4)


class Llama(_Parent):
    """llama_cpp.Llama under a hard memory budget, with the same output.

    Args:
        model_path: an unmodified GGUF file, or the first of a split set.
        device_budget: GPU memory for the layers that n_gpu_layers puts there: `"8GiB"`, bytes, `"50%"` (of the model file), or
            `"auto"`, which is also None: what is free, less 5 % or 256 MiB. Given without n_gpu_layers, all layers.
        memory_budget: `"2GiB"`, bytes, `"55%"` (of the model file), `"auto"` (the memory limit of the machine or its
            cgroup less a reserve), `"min"` or `"full"`. It bounds the whole process: weights, context, buffers, caches
            and the interpreter. None without `stream` loads exactly as llama_cpp does.
        stream: how to stream (StreamConfig); given alone, the budget is `"full"`.
        **options: everything llama_cpp.Llama takes. Where n_ctx, n_batch and n_ubatch are not given, a streamed model
            gets values chosen from its shape (`leanstream plan` prints them), the same at every budget.

    Raises:
        ArgumentError, ModelFileError, UnsupportedError, BudgetError, OutOfMemoryError, LibraryError: see errors.py.
    """

    def __init__(
        self,
        model_path: str,
        *,
        memory_budget: Budget | int | str | None = None,
        device_budget: Budget | int | str | None = None,
        stream: StreamConfig | None = None,
        **options: Any,
    ) -> None:
        self._handle: ModelHandle | None = None
        self._n_outputs_max = 0
        self._failed = False
        self.stream = StreamHandle(None, None, None)
        if stream is not None and not isinstance(stream, StreamConfig):
            raise ArgumentError(f"stream must be a StreamConfig, not {type(stream).__name__}")
        # llama.cpp cannot read a repacked file by itself
        plain = memory_budget is None and device_budget is None and stream is None and not os.fspath(model_path).endswith(LEAN_SUFFIX)
        if plain or options.get("vocab_only"):
            with construction:
                super().__init__(model_path, **options)
            return
        budget = Budget.parse("full" if memory_budget is None else memory_budget)
        try:
            if device_budget is not None:
                options.setdefault("n_gpu_layers", -1)
            self._device_budget = None if device_budget is None else Budget.parse(device_budget, name="device_budget")
            self._open(os.fspath(model_path), budget, stream or StreamConfig(), options)
        except BaseException:
            self.close()
            raise

    def _open(self, model_path: str, budget: Budget, config: StreamConfig, options: dict[str, Any]) -> None:
        _refuse(options)
        check_context(options)
        self._handle = handle = ModelHandle(model_path, config)
        handle.hold()
        self._holds = True
        handle.set_device_budget(measure.device_bytes(self._device_budget, handle))
        all_logits = bool(options.get("logits_all")) or options.get("draft_model") is not None
        shape = planner.Shape.from_index(handle.index())
        defaults = planner.context_defaults(
            shape,
            **{name: options.get(name) for name in ("n_ctx", "n_batch", "n_ubatch")},
            all_logits=all_logits,
            embedding=bool(options.get("embedding")),
            flash_attn=bool(options.get("flash_attn")),
        )
        self._n_outputs_max = defaults.n_outputs_max
        options |= {"n_ctx": defaults.n_ctx, "n_batch": defaults.n_batch, "n_ubatch": defaults.n_ubatch}
        if options.get("op_offload") is None:
            options["op_offload"] = False  # streamed weights live in host memory and are not copied to a device
        self._check_room(shape, budget, config, options)
        self._construct(handle, model_path, options)
        as_streamed(self._ctx, handle, self._n_outputs_max)
        if not all_logits:
            # Never written then; llama_cpp would only touch its n_batch rows when it restores a state.
            self.scores = np.empty((1, self._n_vocab), dtype=np.single)
        else:
            handle.baseline_bytes += self.scores.nbytes
        measure.activate(handle, budget, config)
        self.stream = StreamHandle(handle, config, budget)
        tell_cost(self.stream.fidelity(), stacklevel=4)
        if self._device_budget is not None or options.get("n_gpu_layers"):
            _tell_unused_device(handle, config.repack, "n_gpu_layers" if self._device_budget is None else "device_budget")
        for text in measure.warnings_of(handle.plan_in_force(), config):
            warnings.warn(text, LeanStreamWarning, stacklevel=3)

    def _check_room(self, shape: planner.Shape, budget: Budget, config: StreamConfig, options: dict[str, Any]) -> None:
        """Refuse a budget that the context alone exceeds before llama.cpp allocates and clears that context.

        Raises:
            BudgetError: with the minimum in `limit`.
        """
        handle = self._handle
        assert handle is not None
        n_bytes, n_ctx = measure.stated_bytes(budget, shape.file_bytes), options["n_ctx"] or shape.n_ctx_train
        measure.check_bookkeeping(n_ctx, n_bytes)
        if n_bytes == 0 or planner.kv_bytes(shape, n_ctx) <= n_bytes // 4:
            return
        before = probe.resident_bytes()
        with ModelHandle(handle.path, config) as dry_handle:
            # Opening the file left the allocator memory, which the dry run uses again and a load has to take.
            dry_handle.baseline_bytes = handle.baseline_bytes + max(0, probe.resident_bytes() - before) + measure.DIFFERENCE_BYTES
            dry = Llama.__new__(Llama)
            dry._handle, dry._n_outputs_max = None, self._n_outputs_max
            try:
                dry._construct(dry_handle, handle.path, {**options, "verbose": False}, no_alloc=True)
                measure.check_dry_run(dry_handle, budget, config)
            finally:
                dry.close()
        handle.baseline_bytes += max(0, probe.resident_bytes() - before)  # what the allocator kept is not used twice

    def _construct(self, handle: ModelHandle, model_path: str, options: dict[str, Any], *, no_alloc: bool = False) -> None:
        """The parent's constructor in the load scope; a refusal of llama.cpp becomes a typed error with its reason."""
        with construction, recorded_log() as log, handle.load_scope(no_alloc=no_alloc):
            try:
                super().__init__(model_path, **options)
            except ValueError as error:
                if not hasattr(self, "_context_params"):
                    raise  # an argument of the parent
                if not hasattr(self, "_model"):
                    raise refusal(model_path, log) from error
                reason = log[0] if log else "it gave no reason"
                raise ArgumentError(f"llama.cpp refuses these context settings: {reason}", path=model_path) from error

    @property
    def context_params(self) -> llama_cpp.llama_context_params:
        """Parameters of the context; the parent's constructor assigns them, and we add the output limit then."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: llama_cpp.llama_context_params) -> None:
        params.n_outputs_max = self._n_outputs_max
        self._context_params = params

    # ---- after a failed read, as if it had not happened -------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens: all of them, or none if an error is raised (models with recurrent state start over then)."""
        if self._handle is None:
            super().eval(tokens)
            return
        n_before = self.n_tokens
        try:
            with self._turn():
                super().eval(tokens)
        except BaseException:
            self.n_tokens = n_before
            self._requires_eval = True
            self._failed = True
            if self._is_recurrent or self._is_hybrid:
                self.reset()  # type: ignore[no-untyped-call]
            raise

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Sole use of the context, where it is a streamed one that is open."""
        turn = getattr(self._ctx, "turn", None)
        return contextlib.nullcontext() if turn is None else turn()

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """The next token; see llama_cpp.Llama.sample."""
        with self._turn():
            return int(super().sample(*args, **kwargs))

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """Tokens after a prompt; see llama_cpp.Llama.generate.

        The call after an error or a change of fidelity starts from an empty context: what that holds came about otherwise.
        """
        changed = self.stream.take_fidelity_changed()
        if (self._failed or changed) and _bound_argument(_Parent.generate, "reset", (self, tokens, *args), kwargs):
            self.n_tokens = 0
        self._failed = False
        return (yield from super().generate(tokens, *args, **kwargs))

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free context, model and streamed weights, in this order, after a call in progress on another thread. Idempotent."""
        handle, parts = getattr(self, "_handle", None), vars(self)
        if handle is not None and handle.foreign:
            for name in ("_ctx", "_model"):
                if name in parts:
                    parts[name]._exit_stack.pop_all()  # not run: it would free what only the parent process may
        with getattr(parts.get("_ctx"), "_busy", contextlib.nullcontext()):
            if "_stack" in parts:
                super().close()  # context, then model
            for name, closed in (("_ctx", _ClosedContext), ("_model", _ClosedModel)):
                if name in parts:
                    parts[name].__class__ = closed
        if handle is not None:
            if getattr(self, "_holds", False):
                self._holds = False
                handle.release()
            handle.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        if self.stream.config is not None:
            state |= {"memory_budget": self.stream.budget, "device_budget": self._device_budget, "stream": self.stream.config}
        return state


def _bound_argument(function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


def _merged_signature(parent: inspect.Signature, own: inspect.Signature) -> inspect.Signature:
    """The parent's parameters with ours added before its **kwargs, for help() and inspect."""
    parameters = [p for p in parent.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [own.parameters[name] for name in ("memory_budget", "device_budget", "stream")]
    return parent.replace(parameters=parameters + [p for p in parent.parameters.values() if p.kind is p.VAR_KEYWORD])


Llama.__init__.__signature__ = _merged_signature(  # type: ignore[attr-defined]
    inspect.signature(_Parent.__init__), inspect.signature(Llama.__init__)
)
Llama.sample.__signature__ = inspect.signature(_Parent.sample)  # type: ignore[attr-defined]
Llama.generate.__signature__ = inspect.signature(_Parent.generate)  # type: ignore[attr-defined]
