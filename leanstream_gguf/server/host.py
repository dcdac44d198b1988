"""Which models there are, which one is loaded, and who may use it: loading in the background, turns, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LeanStreamError, ReadError, StateError
from .errors import ModelUnknownError, NoModelError, StoppingError, log
from .llama import Job, ServedLlama, load
from .queueing import FairQueue
from .settings import ModelSettings

_T = TypeVar("_T")
READ_ERROR_SECONDS = 60.0  # how long a failed read makes the server degraded


@dataclass
class Loading:
    """A load in progress."""

    alias: str
    started: float = field(default_factory=time.monotonic)
    llm: ServedLlama | None = None
    first_byte: float | None = None

    def progress(self) -> dict[str, Any]:
        """`{"progress", "seconds_left", "phase", "bytes", "total_bytes"}`; None where it is not known yet."""
        done, total = self._bytes()
        report: dict[str, Any] = {"progress": None, "seconds_left": None, "phase": "opening", "bytes": done, "total_bytes": total}
        if not total:
            return report
        now = time.monotonic()
        if done and self.first_byte is None:
            self.first_byte = now
        report |= {"phase": "reading weights", "progress": min(1.0, done / total)}
        if self.first_byte is not None and done < total and now > self.first_byte:
            report["seconds_left"] = round((total - done) * (now - self.first_byte) / done, 2)
        return report

    def _bytes(self) -> tuple[int, int]:
        """(read, to read); (0, 0) until the budget is in force, and after a failure closed the model."""
        handle = self.llm._handle if self.llm is not None else None
        if handle is None:
            return 0, 0
        try:
            stats = handle.stats()
            if not stats.load_bytes and not stats.cache_capacity_bytes and not stats.resident_now_bytes:
                return 0, 0
            plan, memory = handle.plan(), handle.memory()
        except LeanStreamError:
            return 0, 0
        streams = "experts" in plan["mode"]  # then the cache fills when experts are used
        total = memory.resident_bytes + memory.pinned_bytes + (0 if streams else memory.cache_bytes)
        return min(total, max(stats.load_bytes, stats.read_bytes)), total  # read_bytes: until activation has counted them


class ModelHost:
    """The models of one server; belongs to its event loop except where a method says otherwise.

    Attributes:
        queue: who waits for the model.
        error: why the last load failed, or None.
        sources: alias -> settings.
    """

    def __init__(self, models: Iterable[ModelSettings], *, max_queue: int = 256) -> None:
        self.queue = FairQueue(max_queue)
        self.sources: dict[str, ModelSettings] = {}
        self.error: BaseException | None = None
        self.stopping = False
        self._failed: str | None = None
        self._llm: ServedLlama | None = None
        self._alias: str | None = None
        self._loading: Loading | None = None
        self._load_task: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._jobs: set[Job] = set()
        self._read_error: tuple[float, str] | None = None
        self._thread = ThreadPoolExecutor(1, "leanstream-model")
        for settings in models:
            self.add(settings)
        self.default = next(iter(self.sources), None)

    # ---- what there is ----------------------------------------------------------------------------------------------

    def add(self, settings: ModelSettings) -> str:
        """Make a model available under its alias, which is returned; a second file of that name gets a number."""
        alias, n = settings.alias, 1
        while alias in self.sources and self.sources[alias].model != settings.model:
            n += 1
            alias = f"{settings.alias}-{n}"
        self.sources[alias] = settings
        self.default = getattr(self, "default", None) or alias
        return alias

    def remove(self, alias: str) -> None:
        """Forget a model that is not loaded.

        Raises:
            ModelUnknownError: no such model. StateError: it is loaded or being loaded.
        """
        self.resolve(alias, exact=True)
        if alias in (self._alias, self._loading.alias if self._loading else None):
            raise StateError(f"model {alias!r} is in use", remedy="unload it first")
        del self.sources[alias]
        if self.default == alias:
            self.default = next(iter(self.sources), None)

    def resolve(self, name: str | None, *, exact: bool = False) -> str:
        """The alias a request means. With one model any name means it, as in llama_cpp.server; with several a name must match.

        Raises:
            NoModelError: there is none. ModelUnknownError: none of that name.
        """
        if not self.sources:
            raise NoModelError("no model is configured", remedy="start with --model FILE, or choose one in the chat")
        if name in self.sources:
            return str(name)
        if not exact and (name is None or len(self.sources) == 1):
            return self._alias or str(self.default)
        known = ", ".join(self.sources)
        raise ModelUnknownError(f"the model {name!r} does not exist; there are: {known}")

    @property
    def state(self) -> str:
        if self.stopping:
            return "stopping"
        if self._loading is not None:
            return "loading"
        if self._llm is not None:
            return "ready"
        return "failed" if self.error is not None else "empty"

    @property
    def alias(self) -> str | None:
        """The model that is loaded or being loaded."""
        return self._loading.alias if self._loading else self._alias or self._failed

    @property
    def llm(self) -> ServedLlama | None:
        """The loaded model, for calls that are thread-safe (statistics, budget)."""
        return self._llm

    def loading(self) -> dict[str, Any] | None:
        return self._loading.progress() if self._loading else None

    def degraded(self) -> str | None:
        """Why the server works less well than it should, None if it does not."""
        llm = self._llm
        if llm is None or not llm.stream.active:
            return None
        if self._read_error is not None and time.monotonic() - self._read_error[0] < READ_ERROR_SECONDS:
            return f"a read failed a short while ago: {self._read_error[1]}"
        with contextlib.suppress(LeanStreamError):  # closed meanwhile
            config = llm.stream.config
            if llm.stream.stats().used_buffered_io and config is not None and config.direct_io:
                return "the file system does not allow reads that bypass the page cache"
            warnings = llm.stream.plan().get("warnings")
            if warnings:
                return str(warnings[0])
        return None

    def models(self) -> list[dict[str, Any]]:
        """The data of /v1/models."""
        return [self._model(alias, settings) for alias, settings in self.sources.items()]

    def _model(self, alias: str, settings: ModelSettings) -> dict[str, Any]:
        path = Path(settings.model)
        created, n_bytes = 0, None
        with contextlib.suppress(OSError):
            created = int(path.stat().st_mtime)
            parts = path.parent.glob(path.name.replace("-00001-of-", "-?????-of-")) if "-00001-of-" in path.name else [path]
            n_bytes = sum(part.stat().st_size for part in parts)
        state = "loaded" if alias == self._alias else "failed" if alias == self._failed else "available"
        if self._loading is not None and alias == self._loading.alias:
            state = "loading"
        return {
            "id": alias,
            "object": "model",
            "created": created,
            "owned_by": "local",
            "file_bytes": n_bytes,
            "loaded": state == "loaded",
            "state": state,
        }

    # ---- using it ---------------------------------------------------------------------------------------------------

    async def run(self, client: str, model: str | None, job: Job, call: Callable[[ServedLlama], _T]) -> _T:
        """`call(llm)` in the model's thread when it is this client's turn. Cancelling this task ends it within a token.

        Raises:
            Cancelled: `job` was cancelled. QueueFullError, StoppingError, NoModelError, ModelUnknownError, and what loading
            and `call` raise.
        """
        alias = self.resolve(model)
        async with self.queue.turn(client):
            llm = await self._loaded(alias)
            self._jobs.add(job)
            try:
                return await self._in_thread(job, lambda: job.run(llm, lambda: call(llm)))
            except ReadError as error:
                self._read_error = (time.monotonic(), str(error))
                raise
            finally:
                self._jobs.discard(job)

    @contextlib.asynccontextmanager
    async def borrowed(self, client: str, model: str | None) -> AsyncIterator[ServedLlama]:
        """The model for something short that does not decode, in turn."""
        alias = self.resolve(model)
        async with self.queue.turn(client):
            yield await self._loaded(alias)

    async def _in_thread(self, job: Job, call: Callable[[], _T]) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancel()
            while not future.done():  # the model must be free before the next turn
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            with contextlib.suppress(BaseException):
                future.result()
            raise

    # ---- loading ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the default model."""
        if self.default is not None:
            self._spawn(self._load_in_turn(self.default))

    async def switch(self, alias: str, changes: Mapping[str, Any] | None = None) -> None:
        """Load a model in the background, after the answers before it; a failed one is tried again.

        Args:
            changes: of its settings; a loaded model is loaded again then.

        Raises:
            ModelUnknownError: no such model. ArgumentError, UnsupportedError: a change that cannot be. StoppingError: the
            server stops.
        """
        alias = self.resolve(alias, exact=True)
        if self.stopping:
            raise StoppingError("the server is stopping")
        if changes:
            self.sources[alias] = self.sources[alias].changed(changes)
        self._spawn(self._load_in_turn(alias, again=bool(changes)))

    async def unload(self) -> None:
        """Free the loaded model after the answers before it."""
        async with self.queue.turn("unload"):
            await self._free()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _load_in_turn(self, alias: str, *, again: bool = False) -> None:
        with contextlib.suppress(LeanStreamError, MemoryError, OSError, ValueError, RuntimeError):  # kept in self.error
            async with self.queue.turn("load"):
                if again or self._failed == alias:
                    await self._free()
                await self._loaded(alias)

    async def _loaded(self, alias: str) -> ServedLlama:
        """The model, loaded if it is not; hold the turn. A load goes on when who asked for it leaves."""
        while self._load_task is not None:
            await asyncio.wait([self._load_task])
        if self._failed == alias and self.error is not None:
            raise self.error.with_traceback(None)  # the same object for everybody who asks
        if self._alias != alias:
            self._loading = Loading(alias)
            self._load_task = asyncio.get_running_loop().create_task(self._load(alias))
            await asyncio.wait([self._load_task])
        if self._llm is None or self._alias != alias:
            raise self.error or StateError(f"model {alias!r} is not loaded")
        return self._llm

    async def _load(self, alias: str) -> None:
        loop = asyncio.get_running_loop()
        loading = self._loading = Loading(alias)
        try:
            await self._free()
            settings = self.sources[alias]

            def watch(llm: ServedLlama) -> None:
                loading.llm = llm

            self._llm = await loop.run_in_executor(self._thread, lambda: load(settings, watch))
            self._alias, self.error, self._failed = alias, None, None
        except Exception as error:
            self.error, self._failed = error, alias
            log.error("%s cannot be loaded: %s", alias, error)
        finally:
            self._loading, self._load_task = None, None

    async def _free(self) -> None:
        llm, self._llm, self._alias = self._llm, None, None
        self.error, self._failed, self._read_error = None, None, None
        if llm is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, llm.close)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """No new answers; running ones finish."""
        self.stopping = True
        self.queue.close(StoppingError("the server is stopping"))

    async def close(self) -> None:
        """Cancel what still runs, then free the model."""
        self.drain()
        for job in list(self._jobs):
            job.cancel()
        if self._load_task is not None:
            await asyncio.wait([self._load_task])
        await self._free()
        self._thread.shutdown(wait=False)
