"""Owning wrappers over native handles: one streamed model, and the scope in which llama.cpp loads it.

Knows bytes, ids and pointers; knows nothing of `llama_cpp.Llama`. Thread-safe like the C API: calls may overlap, and
`close()` waits for the calls in progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import probe
from ._lib import check, native, take_string
from .errors import ArgumentError, StateError
from .settings import FIDELITIES, IO_BACKENDS, StreamConfig, check_max_kl, check_policy, check_speculation
from .stats import Memory, Stats

_live_lock = threading.Lock()
_n_live = 0


@contextlib.contextmanager
def _counted(baseline: list[int]) -> Iterator[None]:
    """While entered, one more streamed model is alive; the first of them is charged for the process as it is now."""
    global _n_live
    with _live_lock:
        baseline.append(probe.resident_bytes() if _n_live == 0 else 0)
        _n_live += 1
    try:
        yield
    finally:
        with _live_lock:
            _n_live -= 1


class ModelHandle:
    """One `ls_model`: the index of a GGUF file and, once activated, its streamed weights.

    Close it after the llama.cpp context and model that use it were freed: they `hold()` it, so that in whatever order a garbage
    collector finalizes them, the weights go last. `close()` is idempotent.

    Attributes:
        path: the file, as given.
        baseline_bytes: what this process held before its first streamed model; 0 if another one is alive. Callers add
            what they allocate for this model themselves before they plan or activate.
    """

    def __init__(self, path: str | os.PathLike[str], config: StreamConfig | None = None) -> None:
        """Index the file and open its devices; nothing of the weights is read.

        Raises:
            ModelFileError: a subclass that says what is wrong with the file.
            UnsupportedError: an architecture that is refused by name.
            LibraryError: the native libraries are missing or do not match.
            ArgumentError: a path that llama.cpp cannot take.
        """
        self._model: Any = None
        self._held: Any = None  # closed, but a context or model of llama.cpp still needs it
        self._n_holds = 0
        self._idle = threading.Condition()
        self._n_users = 0
        self._stack = contextlib.ExitStack()
        self._index: dict[str, Any] | None = None
        self._cache_bytes = 0
        self._process = os.getpid()
        self.path = _checked_path(path)
        ffi, lib = native()
        check(lib.ls_install())
        baseline: list[int] = []
        with self._stack as stack:
            stack.enter_context(_counted(baseline))
            self.baseline_bytes = baseline[0]
            out = ffi.new("ls_model **")
            check(lib.ls_model_open(os.fsencode(self.path), _options(config or StreamConfig()), out))
            self._model = out[0]
            self._stack = stack.pop_all()

    @contextlib.contextmanager
    def _use(self) -> Iterator[tuple[Any, Any, Any]]:
        """(ffi, lib, model) with the model kept open meanwhile."""
        with self._idle:
            if self._model is None:
                raise StateError("the streamed model is closed")
            self._n_users += 1
            model = self._model
        try:
            yield (*native(), model)
        finally:
            with self._idle:
                self._n_users -= 1
                self._idle.notify_all()

    @property
    def foreign(self) -> bool:
        """This is a forked child of the process that opened the model: its readers do not exist here."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Stop the readers and free everything. Idempotent; waits for calls in progress on other threads.

        In a forked child it does nothing: the memory goes with the process.
        """
        if self.foreign:
            return
        with self._idle:
            model, self._model = self._model, None
            self._idle.wait_for(lambda: self._n_users == 0)
            if self._n_holds:
                self._held, model = model or self._held, None
        if model is not None:
            native().lib.ls_model_close(model)
        self._stack.close()

    def hold(self) -> None:
        """Keep the native model until `release()`, also if this is closed meanwhile."""
        with self._idle:
            self._n_holds += 1

    def release(self) -> None:
        """Undo one `hold()`."""
        with self._idle:
            self._n_holds -= 1
            model = None
            if self._n_holds == 0:
                model, self._held = self._held, None
        if model is not None:
            native().lib.ls_model_close(model)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # not fully built, or the interpreter ends
            self.close()

    @property
    def closed(self) -> bool:
        return self._model is None

    def __enter__(self) -> ModelHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what is in the file, and what would be done with it --------------------------------------------------------

    def index(self) -> dict[str, Any]:
        """Shape, shards, tensors and scalar metadata (ls_model_index_json in leanstream.h). Cached."""
        if self._index is None:
            with self._use() as (ffi, lib, model):
                out = ffi.new("char **")
                check(lib.ls_model_index_json(model, out))
                self._index = json.loads(take_string(out))
        return self._index

    def plan(self, budget_bytes: int = 0, cache_bytes: int = 0, baseline_bytes: int | None = None) -> dict[str, Any]:
        """What is or would be pinned, streamed and cached (ls_model_plan_json in leanstream.h).

        Args:
            budget_bytes: 0 = the budget in force.
            cache_bytes: 0 = chosen within the budget.
            baseline_bytes: None = this model's share of the process.

        Raises:
            BudgetError: below the minimum, which is in `limit`.
            StateError: nothing was loaded or measured yet.
        """
        baseline = self.baseline_bytes if baseline_bytes is None else baseline_bytes
        with self._use() as (ffi, lib, model):
            out = ffi.new("char **")
            check(lib.ls_model_plan_json(model, budget_bytes, cache_bytes, baseline, out))
            plan: dict[str, Any] = json.loads(take_string(out))
        return plan

    def plan_in_force(self) -> dict[str, Any]:
        """What is pinned, streamed and cached now: the budget in force, and the size of the expert cache if one was given."""
        return self.plan(0, self._cache_bytes)

    # ---- life -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def load_scope(self, *, no_alloc: bool = False) -> Iterator[None]:
        """llama_model_load_from_file calls of this thread inside give their weights to this model.

        Args:
            no_alloc: measure only; such a llama_model cannot decode.
        """
        with self._use() as (_, lib, model):
            check(lib.ls_load_begin(model, int(no_alloc)))
            try:
                yield
            finally:
                lib.ls_load_end()

    def activate(self, budget_bytes: int, cache_bytes: int = 0) -> None:
        """Choose what is resident, allocate it and read the pinned part. Call after the first context exists.

        Args:
            budget_bytes: bounds the whole process; 0 = no bound.
            cache_bytes: the expert cache alone; 0 = chosen.

        Raises:
            BudgetError: below the minimum, which is in `limit`.
        """
        with self._use() as (_, lib, model):
            check(lib.ls_model_activate(model, budget_bytes, cache_bytes, self.baseline_bytes))
            self._cache_bytes = cache_bytes

    def set_device_budget(self, n_bytes: int) -> None:
        """Device memory that may be used, the driver's own included; before activation.

        Args:
            n_bytes: 0 = what is free then, less a headroom.

        Raises:
            StateError: the model is activated.
        """
        with self._use() as (_, lib, model):
            check(lib.ls_model_set_device_budget(model, n_bytes))

    def set_budget(self, budget_bytes: int, cache_bytes: int = 0) -> None:
        """Change the budget at the next token boundary; returns when it is in force.

        Raises:
            BudgetError: below the minimum; nothing changes.
        """
        with self._use() as (_, lib, model):
            check(lib.ls_model_set_budget(model, budget_bytes, cache_bytes))
            self._cache_bytes = cache_bytes

    def set_policy(self, name: str, params: Mapping[str, float] | None = None) -> None:
        """What the expert cache keeps.

        Raises:
            ArgumentError: unknown policy or parameter.
        """
        check_policy(name, params or {})
        text = json.dumps(dict(params)) if params else ""
        with self._use() as (_, lib, model):
            check(lib.ls_model_set_policy(model, name.encode(), text.encode()))

    def set_speculation(self, depth: int | str = "auto", stages: int | str = "auto") -> None:
        """How far ahead experts and neurons are guessed and read, from the next token on; never changes the output.

        Args:
            depth: layers, 0 = off, at most 2; `auto` = what pays, found while running.
            stages: 1 = a guess is never corrected; `auto` = at every chance (StreamHandle.set_speculation).

        Raises:
            ArgumentError: out of range.
        """
        numbers = check_speculation(depth, stages)
        with self._use() as (_, lib, model):
            check(lib.ls_model_set_speculation(model, *numbers))

    def set_fidelity(self, name: str, max_kl: float | None = None) -> None:
        """Which neurons count as zero, in decodes that begin from now on.

        Raises:
            UnsupportedError: the file does not offer it.
        """
        with self._use() as (_, lib, model):
            check(lib.ls_model_set_fidelity(model, FIDELITIES[name], max_kl or 0.0))

    def set_thresholds(self, value: float | Mapping[int, float] | None, max_kl: float | None = None) -> None:
        """Thresholds of every layer or by layer, or those measured for `max_kl`; see StreamHandle.set_thresholds()."""
        if value is None and max_kl is None:
            raise ArgumentError("give a threshold, one for each layer, or max_kl")
        by_layer = value if isinstance(value, Mapping) else None
        values = list(by_layer.values()) if by_layer is not None else [] if value is None else [value]
        if max_kl is not None:
            check_max_kl(max_kl)
        with self._use() as (ffi, lib, model):
            try:
                blocks = ffi.NULL if by_layer is None else ffi.new("int32_t[]", list(by_layer))
                numbers = ffi.new("float[]", values)
            except (TypeError, OverflowError) as error:
                raise ArgumentError(f"layers must be ints and thresholds numbers: {error}") from error
            if by_layer is not None and not values:
                raise ArgumentError("no layer is named")
            check(lib.ls_model_set_thresholds(model, blocks, numbers, len(values), max_kl or 0.0))

    def fidelity(self) -> dict[str, Any]:
        """Name and thresholds in force (ls_model_fidelity_json in leanstream.h), with the layers as ints."""
        with self._use() as (ffi, lib, model):
            out = ffi.new("char **")
            check(lib.ls_model_fidelity_json(model, out))
            document: dict[str, Any] = json.loads(take_string(out))
        document["thresholds"] = {int(layer): value for layer, value in document["thresholds"].items()}
        return document

    def speculation(self) -> dict[str, Any]:
        """Settings and findings of reading ahead (ls_model_speculation_json in leanstream.h)."""
        with self._use() as (ffi, lib, model):
            out = ffi.new("char **")
            check(lib.ls_model_speculation_json(model, out))
            document: dict[str, Any] = json.loads(take_string(out))
        return document

    @contextlib.contextmanager
    def tracing(self, path: str | os.PathLike[str], **note: Any) -> Iterator[None]:
        """While entered, what each token needs, what was predicted and what had arrived is recorded to a new file.

        Args:
            note: goes into the file's header.

        Raises:
            StateError: nothing to trace streams, or another trace is recorded. ReadError: the disk did not take all of it.
        """
        members = json.dumps(note)[1:-1]
        with self._use() as (_, lib, model):
            check(lib.ls_model_trace_begin(model, os.fsencode(path), members.encode()))
        try:
            yield
        finally:
            with self._use() as (_, lib, model):
                check(lib.ls_model_trace_end(model))

    def pin(self, layer: int, ids: Sequence[int]) -> None:
        """Keep these experts of a layer resident, replacing earlier pins of that layer; none unpins.

        Raises:
            BudgetError: too little would be left for one token. ArgumentError: no such layer or expert.
        """
        with self._use() as (ffi, lib, model):
            try:
                array = ffi.new("int32_t[]", list(ids))
                status = lib.ls_model_pin(model, layer, array, len(ids))
            except (TypeError, OverflowError) as error:
                raise ArgumentError(f"layer and experts to pin must be ints: {error}") from error
            check(status)

    # ---- what happens -----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes by purpose."""
        with self._use() as (ffi, lib, model):
            out = ffi.new("ls_memory *")
            check(lib.ls_model_get_memory(model, out))
            return Memory.from_struct(out)

    def stats(self) -> Stats:
        """Counters since activation or the last reset."""
        with self._use() as (ffi, lib, model):
            out = ffi.new("ls_stats *")
            check(lib.ls_model_get_stats(model, out))
            return Stats.from_struct(out)

    def reset_stats(self) -> None:
        with self._use() as (_, lib, model):
            lib.ls_model_reset_stats(model)

    def raise_context_error(self, llama_context: int, cause: BaseException | None = None) -> None:
        """Raise what went wrong in the last decode on a `llama_context *`, if anything did, and clear it.

        Raises:
            ReadError: or another typed error, `from cause`.
        """
        with self._use() as (ffi, lib, model):
            status = lib.ls_context_take_error(model, ffi.cast("void *", llama_context))
            if status == 0:
                return
            try:
                check(status)
            except Exception as error:
                raise error from cause


def _checked_path(path: str | os.PathLike[str]) -> str:
    """The path as text.

    Raises:
        ArgumentError: it has a zero byte, or bytes that are no UTF-8, in which llama.cpp takes paths.
    """
    text = os.fsdecode(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("utf-8", "backslashreplace")
        raise ArgumentError(f"{shown}: the path is not UTF-8, which llama.cpp needs; rename the file or link to it") from None
    if "\0" in text:
        raise ArgumentError(f"{text!r}: a path cannot hold a zero byte")
    return text


def _options(config: StreamConfig) -> Any:
    options = native().ffi.new("ls_options *")
    options.n_io_threads = config.io_threads
    options.io_depth = config.io_depth
    options.io_backend = IO_BACKENDS[config.io_backend]
    options.direct_io = int(config.direct_io)
    options.chunk_bytes = config.chunk_bytes
    options.n_ring_slots = config.ring_slots
    options.fidelity = FIDELITIES[config.fidelity]
    options.max_kl = config.max_kl or 0.0
    options.repack = int(config.repack)
    options.device_inexact = int(not config.device_exact)
    options.host_cost = config.host_cost
    return options
