"""Measures a model and this machine without loading the model: sizes by a dry run of llama.cpp, speeds by short timings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from . import kernel_rate, planner, probe
from ._lib import native
from .errors import ArgumentError, BudgetError, LeanStreamError, LibraryError
from .runtime import ModelHandle
from .settings import IO_BACKENDS, Budget, StreamConfig, check_context
from .units import format_bytes

MINIMUM_ATTEMPTS = 4

_T = TypeVar("_T")


@dataclass(frozen=True)
class ContextWish:
    """Context settings as asked for; None = chosen from the model's shape."""

    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_threads: int | None = None
    flash_attn: bool = False
    n_gpu_layers: int = 0

    def __post_init__(self) -> None:
        check_context(vars(self))

    def sizes(self, shape: planner.Shape, *, all_logits: bool = False) -> planner.ContextDefaults:
        return planner.context_defaults(
            shape,
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            all_logits=all_logits,
            flash_attn=self.flash_attn,
        )

    @property
    def threads(self) -> int:
        return self.n_threads or probe.cpu_count()


def warnings_of(plan: dict[str, Any], config: StreamConfig) -> list[str]:
    """What a plan warns of, and what was asked for in vain."""
    texts = list(plan.get("warnings", ()))
    if config.parsed_cache is not None and not plan["experts"]["total_bytes"]:
        texts.append("cache_budget is not used: this model has no experts")
    return texts


@dataclass(frozen=True)
class Measured:
    """A model whose sizes are known and whose weights were not read; `handle.plan()` works on it."""

    handle: ModelHandle
    shape: planner.Shape
    sizes: planner.ContextDefaults

    def plan(self, budget: Budget, config: StreamConfig) -> dict[str, Any]:
        """The plan for a budget as asked for; `full` is planned at the smallest budget that keeps everything resident."""
        full = int(self.handle.plan()["full_budget_bytes"])
        plan = at(self.handle, budget, config, lambda n_bytes, n_cache: self.handle.plan(n_bytes or full, n_cache))
        return {**plan, "warnings": warnings_of(plan, config)}


def resolve(handle: ModelHandle, budget: Budget, config: StreamConfig) -> tuple[int, int]:
    """(budget_bytes, cache_bytes) for the native library, of a model that was loaded or measured.

    Raises:
        StateError: neither loaded nor measured.
    """
    plan = handle.plan()
    minimum, smallest_cache = int(plan["minimum_budget_bytes"]), 0
    cache = config.parsed_cache
    if cache is not None and cache.kind == "min":
        smallest_cache = int(handle.plan(minimum)["experts"]["capacity_bytes"])
    n_cache = planner.cache_bytes(cache, expert_bytes=int(plan["experts"]["total_bytes"]), minimum=smallest_cache)
    if budget.kind == "min" and n_cache:
        minimum = int(handle.plan(0, n_cache)["minimum_budget_bytes"])
    n_bytes = planner.budget_bytes(
        budget,
        minimum=minimum,
        full=int(plan["full_budget_bytes"]),
        file_bytes=int(handle.index()["file_bytes"]),
        automatic=probe.automatic_budget().n_bytes if budget.kind == "auto" else 0,
    )
    return n_bytes, n_cache


def device_bytes(budget: Budget | None, handle: ModelHandle) -> int:
    """A device budget in bytes, 0 = what is free.

    Raises:
        ArgumentError: a word that has no meaning for device memory.
    """
    if budget is None or budget.kind in ("auto", "full"):
        return 0
    if budget.kind not in ("bytes", "share"):
        raise ArgumentError(f"device_budget {budget} has no meaning; give a size, a share of the model file, or 'auto'")
    return budget.n_bytes or max(1, int(budget.share * int(handle.index()["file_bytes"])))


def at(handle: ModelHandle, budget: Budget, config: StreamConfig, call: Callable[[int, int], _T]) -> _T:
    """`call(budget_bytes, cache_bytes)` with a budget as asked for.

    Raises:
        BudgetError: below the minimum, which is in `limit`.
    """
    n_bytes, n_cache = resolve(handle, budget, config)
    for _ in range(MINIMUM_ATTEMPTS):
        try:
            return call(n_bytes, n_cache)
        except BudgetError as error:
            # The process itself grew a little since the minimum was computed; any other budget was named by the caller.
            if budget.kind != "min" or error.limit is None:
                raise
            n_bytes = error.limit
    return call(n_bytes, n_cache)


DRY_RUN_BYTES = 64 << 20  # a dry run may take so much whatever the budget: it finds out what the smallest one is
CELL_BYTES = 48  # of llama.cpp's bookkeeping for one position of a context; a dry run allocates it too


def check_bookkeeping(n_ctx: int, budget_bytes: int) -> None:
    """Refuse a context length whose bookkeeping alone does not fit; without it, even a dry run would take all memory.

    Args:
        budget_bytes: 0 = the memory there is.

    Raises:
        BudgetError: with the bytes it needs at least in `limit`.
    """
    needed, available = n_ctx * CELL_BYTES, probe.available_memory().n_bytes
    limit_bytes = min(max(budget_bytes, DRY_RUN_BYTES), available) if budget_bytes else available
    if needed > limit_bytes:
        text = f"a context of {n_ctx} tokens needs more than {format_bytes(needed)}, but there are {format_bytes(limit_bytes)}"
        raise BudgetError(text, used=limit_bytes, limit=needed, remedy="lower n_ctx")


DIFFERENCE_BYTES = 256 << 10  # between one process and the next that loads the same: what one names is to work in the other
DRY_RUN_SLACK = 16 << 20  # within the margin of every plan: a dry run counts up to so much more than a load


def check_dry_run(handle: ModelHandle, budget: Budget, config: StreamConfig) -> None:
    """Refuse a budget that is clearly below the minimum of a model that was measured; a close call is left to loading.

    Raises:
        BudgetError: with the minimum in `limit`.
    """
    try:
        at(handle, budget, config, handle.plan)
    except BudgetError as error:
        if error.used is None or error.limit is None or error.used + DRY_RUN_SLACK < error.limit:
            raise


def stated_bytes(budget: Budget, file_bytes: int) -> int:
    """The bound of a budget that has one whatever the model needs, else 0 (min, min+share, full)."""
    automatic = probe.automatic_budget().n_bytes if budget.kind == "auto" else 0
    return planner.budget_bytes(budget, minimum=0, full=0, file_bytes=file_bytes, automatic=automatic)


def activate(handle: ModelHandle, budget: Budget, config: StreamConfig) -> None:
    """Activate a loaded model under a budget as asked for, with its policy.

    Raises:
        BudgetError: below the minimum; in `limit` is one that works in the next process too.
    """
    try:
        at(handle, budget, config, handle.activate)
    except BudgetError:
        at(handle, budget, config, lambda n_bytes, n_cache: handle.plan(n_bytes, n_cache, handle.baseline_bytes + DIFFERENCE_BYTES))
        raise
    handle.set_policy(config.policy, config.policy_params)
    handle.set_speculation(*config.speculation)


LLAMA_BYTES = 6 << 20  # what a Llama holds around the model and context that are opened here


@contextlib.contextmanager
def measured(
    path: str | os.PathLike[str], config: StreamConfig, wish: ContextWish, device_budget: Budget | None = None
) -> Iterator[Measured]:
    """Run llama.cpp's loading and reservation without memory or weights, so that plans are exact.

    Raises:
        ModelFileError, UnsupportedError, ArgumentError: as for loading.
    """
    from . import loading

    with ModelHandle(path, config) as handle:
        handle.set_device_budget(device_bytes(device_budget, handle))
        shape = planner.Shape.from_index(handle.index())
        sizes = wish.sizes(shape)
        check_bookkeeping(sizes.n_ctx or shape.n_ctx_train, 0)
        params = loading.context_params(sizes, n_threads=wish.threads, flash_attn=wish.flash_attn)
        with loading.opened(os.fspath(path), handle.load_scope(no_alloc=True), params, n_gpu_layers=wish.n_gpu_layers):
            handle.baseline_bytes += LLAMA_BYTES
            yield Measured(handle, shape, sizes)


def outlook(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Can the model be streamed? {streamable, plan: with no bound, auto: plan or error under `auto`} or {streamable, why_not: error}.

    At the default settings, but for the fidelity that the layout of a lean file needs.
    """
    try:
        with ModelHandle(path) as handle:
            layout = handle.index().get("metadata", {}).get("leanstream.layout")
        config = StreamConfig(fidelity="faithful" if layout == "faithful" else "exact")
        with measured(path, config, ContextWish()) as model:
            found: dict[str, Any] = {"streamable": True, "plan": model.handle.plan()}
            try:
                found["auto"] = model.plan(Budget.parse("auto"), config)
            except BudgetError as error:
                found["auto"] = {"error": error.to_dict()}
            return found
    except LeanStreamError as error:
        return {"streamable": False, "why_not": error.to_dict()}


@dataclass(frozen=True)
class Speeds:
    """What a forecast is made of. Fields are None where something could not be measured; the reasons say so.

    `drive` reads layers, `experts` experts; each as the plan makes the runtime read them.
    """

    compute: kernel_rate.ComputeRate | None
    compute_reason: str
    drive: probe.DriveRate | None
    drive_reason: str
    experts: probe.DriveRate | None = None
    experts_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# What the runtime does where StreamConfig says "chosen".
READ_BLOCK_BYTES = 1 << 20
URING_DEPTH = 16
PREAD_THREADS = 4


def _read_depth(config: StreamConfig) -> int:
    """Reads in flight under this configuration, at most."""
    uring = config.io_backend != "pread" and bool(native().lib.ls_have_io_uring())
    return min(64, (config.io_depth or URING_DEPTH) if uring else (config.io_threads or PREAD_THREADS))


def layer_reads(index: Mapping[str, Any], dense: Mapping[str, Any], block_bytes: int) -> tuple[int, int]:
    """(bytes of one read, reads at once) where layers stream: blocks of matrices, as many as the ring takes besides what is in use."""
    sizes = [int(tensor["bytes"]) for tensor in index["tensors"] if _streams(tensor)]
    n_reads = sum(-(-size // block_bytes) for size in sizes)
    mean = max(4096, sum(sizes) // max(1, n_reads) // 4096 * 4096)
    return mean, max(1, (int(dense["n_ring_slots"]) - 1) * int(dense["group_bytes"]) // mean)


def _streams(tensor: Mapping[str, Any]) -> bool:
    """A matrix of a layer that every token needs."""
    name = tensor["name"]
    return (
        name.startswith("blk.")
        and name.endswith(".weight")
        and tensor["shape"][1] > 1
        and "_exps" not in name
        and "bundle" not in tensor
    )


def expert_reads(index: Mapping[str, Any], experts: Mapping[str, Any], hit_ratio: float) -> tuple[int, int]:
    """(bytes of one read, reads at once) where a layer's missing experts are read: a record each, or a slice of each matrix."""
    slices = {tensor["name"].split(".", 2)[2] for tensor in index["tensors"] if tensor["name"].endswith("_exps.weight")}
    n_slices = 1 if any("bundle" in tensor for tensor in index["tensors"]) else max(1, len(slices))
    n_missing = max(1, round(int(experts["n_used"]) * (1 - hit_ratio)))
    return max(4096, int(experts["expert_bytes"]) // n_slices // 4096 * 4096), n_missing * n_slices


def measure_speeds(handle: ModelHandle, config: StreamConfig, n_threads: int, plan: Mapping[str, Any]) -> Speeds:
    """Time the drive with reads as the plan needs them, and the processor on the model's weight types: a few seconds."""
    index = handle.index()
    largest = max(index["shards"], key=lambda shard: int(shard["bytes"]))
    whole = int(largest["bytes"]) // 4096 * 4096

    def rate(block: int, depth: int, *, in_order: bool) -> tuple[probe.DriveRate, str]:
        block, depth = min(block, whole), min(depth, _read_depth(config))
        backend = IO_BACKENDS[config.io_backend]
        found = probe.drive_rate(largest["path"], block, depth, sequential=in_order, duration_ms=800, io_backend=backend)
        past = "past" if found.direct else "through"
        return found, f"reads{' in order' * in_order} of {format_bytes(block)}, {depth} at once, {past} the page cache"

    block, depth = int(config.chunk_bytes) or READ_BLOCK_BYTES, _read_depth(config)
    if plan["dense"]["streamed_bytes"]:
        block, depth = layer_reads(index, plan["dense"], block)
    drive, drive_reason = rate(block, depth, in_order=True)
    experts, experts_reason = None, ""
    if plan["experts"]["capacity_bytes"] < plan["experts"]["total_bytes"]:
        hits = planner.hit_ratio(plan["experts"], config.policy)
        experts, experts_reason = rate(*expert_reads(index, plan["experts"], hits), in_order=False)
    try:
        compute = kernel_rate.compute_rate(index, n_threads)
    except LibraryError as error:
        return Speeds(None, str(error), drive, drive_reason, experts, experts_reason)
    return Speeds(compute, compute.reason, drive, drive_reason, experts, experts_reason)
