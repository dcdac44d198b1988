"""Pure decisions: context defaults from the model's shape, budgets from what was asked, expected speed from rates.

Nothing here touches a file, a clock or the native library; measuring is in measure.py. Context defaults never depend on
the budget, because batch shapes change bits and the budget must not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .settings import Budget, CacheBudget

# Bounds that the defaults aim at. They trade prefill speed (one micro-batch reads every streamed byte once) for memory.
DEFAULT_N_BATCH = 512
MAX_N_UBATCH = 512
MIN_N_UBATCH = 32
LOGITS_TARGET_BYTES = 32 << 20  # rows of logits of one batch where the caller wants all of them
OUTPUT_TARGET_BYTES = 4 << 20  # rows of logits reserved where only the last one is wanted
MAX_DEFAULT_N_CTX = 4096
MIN_DEFAULT_N_CTX = 2048


def compute_target_bytes(file_bytes: int) -> int:
    """What the activations of one micro-batch may take: a quarter of the model, from 32 to 160 MiB."""
    return min(160 << 20, max(32 << 20, file_bytes // 4))


def kv_target_bytes(file_bytes: int) -> int:
    """What keys and values of a context of 4096 may take: half of the model, from 64 to 512 MiB."""
    return min(512 << 20, max(64 << 20, file_bytes // 2))


@dataclass(frozen=True)
class Shape:
    """What sizes a model's buffers; n_ff is the widest FFN a token passes, over all experts it uses."""

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_head: int
    n_kv_per_layer: int  # values of K and V for one token in one layer
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    file_bytes: int

    @classmethod
    def from_index(cls, index: Mapping[str, Any]) -> Shape:
        """From ls_model_index_json; missing or per-layer (array) metadata is replaced by a safe upper guess."""
        arch, meta = index["arch"], index.get("metadata", {})
        n_embd = int(index["n_embd"])

        def number(key: str, default: int) -> int:
            value = meta.get(f"{arch}.{key}")
            return int(value) if isinstance(value, (int, float)) and value else default

        n_head = number("attention.head_count", max(1, n_embd // 64))
        n_expert_used = int(index.get("n_expert_used") or 0)
        n_ff_expert = number("expert_feed_forward_length", int(index.get("n_ff") or 4 * n_embd))
        n_ff = max(int(index.get("n_ff") or 0), n_ff_expert * n_expert_used) or 4 * n_embd
        return cls(
            arch=arch,
            n_layer=int(index["n_layer"]),
            n_embd=n_embd,
            n_ff=n_ff,
            n_vocab=int(index["n_vocab"]),
            n_head=n_head,
            n_kv_per_layer=_kv_values(number, n_embd, n_head),
            n_ctx_train=int(index.get("n_ctx_train") or 0),
            n_expert=int(index.get("n_expert") or 0),
            n_expert_used=n_expert_used,
            file_bytes=int(index["file_bytes"]),
        )


def _kv_values(number: Any, n_embd: int, n_head: int) -> int:
    """K and V values of one token in one layer; latent attention keeps one compressed row."""
    if rank := number("attention.kv_lora_rank", 0):
        return int(rank) + int(number("rope.dimension_count", 64))
    n_head_kv = number("attention.head_count_kv", n_head)
    length = number("attention.key_length", n_embd // n_head)
    return int(n_head_kv) * (int(length) + int(number("attention.value_length", length)))


@dataclass(frozen=True)
class ContextDefaults:
    """Values for llama_context_params. `n_outputs_max` 0 means one row of logits for every token of a batch."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_outputs_max: int


def _power_of_two_below(value: int) -> int:
    return 1 << max(0, value.bit_length() - 1)


def kv_bytes(shape: Shape, n_ctx: int) -> int:
    """Keys and values of a context as F16, where every layer keeps all of them."""
    return n_ctx * shape.n_layer * shape.n_kv_per_layer * 2


def default_n_ctx(shape: Shape) -> int:
    """4096 where the keys and values of that many tokens (as F16) stay within kv_target_bytes(), else 2048; never more
    than the model was trained for."""
    fits = kv_bytes(shape, MAX_DEFAULT_N_CTX) <= kv_target_bytes(shape.file_bytes)
    n_ctx = MAX_DEFAULT_N_CTX if fits else MIN_DEFAULT_N_CTX
    return min(n_ctx, shape.n_ctx_train) if shape.n_ctx_train else n_ctx


def activation_bytes(shape: Shape, n_ctx: int, flash_attn: bool) -> int:
    """Estimate of the compute buffer for one token of a micro-batch: residual and projections, FFN, attention scores."""
    scores = 0 if flash_attn else shape.n_head * n_ctx * 5 // 4  # and what their softmax needs besides
    return 4 * (6 * shape.n_embd + 3 * shape.n_ff + scores + n_ctx)


def context_defaults(
    shape: Shape,
    *,
    n_ctx: int | None = None,
    n_batch: int | None = None,
    n_ubatch: int | None = None,
    all_logits: bool = False,
    embedding: bool = False,
    flash_attn: bool = False,
) -> ContextDefaults:
    """Context sizes for a streamed model; whatever the caller sets stays as it is.

    n_ubatch is the largest power of two from 32 to 512 whose activations stay within compute_target_bytes(). n_batch is
    512, or so many that all their logits take 32 MiB where `all_logits` are wanted. Otherwise llama.cpp is told that a
    batch has few outputs (4 MiB worth of rows), because it reserves n_batch rows of logits, over 300 MiB for a vocabulary
    of 150,000.

    Args:
        n_ctx: 0 = the length the model was trained for, as in llama.cpp; None = chosen.
        embedding: every token is an output; no row may be saved.
    """
    n_ctx = default_n_ctx(shape) if n_ctx is None else n_ctx
    n_ctx_real = n_ctx or shape.n_ctx_train or MAX_DEFAULT_N_CTX
    row_bytes = 4 * max(1, shape.n_vocab)
    if n_batch is None:
        n_batch = DEFAULT_N_BATCH
        if all_logits:
            n_batch = max(MIN_N_UBATCH, min(n_batch, _power_of_two_below(LOGITS_TARGET_BYTES // row_bytes)))
    if n_ubatch is None:
        fitting = compute_target_bytes(shape.file_bytes) // activation_bytes(shape, n_ctx_real, flash_attn)
        n_ubatch = max(MIN_N_UBATCH, min(MAX_N_UBATCH, _power_of_two_below(fitting)))
    n_batch = min(n_batch, n_ctx_real)
    n_outputs_max = 0
    if not all_logits and not embedding:
        n_outputs_max = max(1, min(n_batch, OUTPUT_TARGET_BYTES // row_bytes))
    return ContextDefaults(n_ctx, n_batch, min(n_batch, n_ubatch), n_outputs_max)


def budget_bytes(budget: Budget, *, minimum: int, full: int, file_bytes: int, automatic: int) -> int:
    """Bytes for the native library, 0 = no bound.

    Args:
        minimum: the smallest budget that works for this model and context.
        full: the budget from which on everything is resident.
        file_bytes: of all shards, for a share.
        automatic: what `auto` means on this machine.
    """
    if budget.kind == "full":
        return 0
    if budget.kind == "min":
        return minimum
    if budget.kind == "share":
        return max(1, int(budget.share * file_bytes))
    if budget.kind == "span":
        return minimum + int(budget.share * (full - minimum))
    return max(1, automatic) if budget.kind == "auto" else budget.n_bytes


def cache_bytes(cache: CacheBudget | None, *, expert_bytes: int, minimum: int) -> int:
    """Bytes of the expert cache, 0 = decided by the budget (also for models without experts)."""
    if cache is None or expert_bytes == 0:
        return 0
    if cache.kind == "min":
        return max(1, minimum)
    return max(1, int(cache.share * expert_bytes)) if cache.kind == "share" else cache.n_bytes


# ---- expected speed ------------------------------------------------------------------------------------------------------

# Measured hit ratios on held-out text (one model of 32 experts, 4 used), by the share of all experts that is cached.
_HITS = {
    "lru": ((0.0, 0.0), (0.125, 0.24), (0.25, 0.455), (0.5, 0.755), (1.0, 1.0)),
    "lfu": ((0.0, 0.0), (0.125, 0.35), (0.25, 0.545), (0.5, 0.80), (1.0, 1.0)),
    "slru": ((0.0, 0.0), (0.125, 0.24), (0.25, 0.46), (0.5, 0.77), (1.0, 1.0)),
    "lean": ((0.0, 0.0), (0.125, 0.36), (0.25, 0.565), (0.5, 0.815), (1.0, 1.0)),
    "hotcold": ((0.0, 0.0), (0.125, 0.17), (0.25, 0.48), (0.5, 0.77), (1.0, 1.0)),
}


def expected_hit_ratio(cached_share: float, policy: str = "lfu") -> float:
    """Share of expert uses served from a cache of that share of the experts: interpolated from one measured model."""
    share = min(1.0, max(0.0, cached_share))
    for (x0, y0), (x1, y1) in itertools.pairwise(_HITS[policy]):
        if share <= x1:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return 1.0


def hit_ratio(experts: Mapping[str, Any], policy: str) -> float:
    """The same for the experts of a plan."""
    return expected_hit_ratio(experts["capacity_bytes"] / experts["total_bytes"], policy)


OVERLAP_POWER = 6


@dataclass(frozen=True)
class Forecast:
    """Expected time of one generated token and what it is made of, in seconds and bytes."""

    tokens_per_second: float
    compute_seconds: float
    read_seconds: float
    read_bytes_per_token: int
    bound_by: str  # "compute" or "drive"
    hit_ratio: float | None  # assumed, models with experts only


def forecast(
    plan: Mapping[str, Any],
    *,
    compute_seconds: float,
    bytes_per_second: float,
    expert_bytes_per_second: float | None = None,
    policy: str = "lfu",
) -> Forecast:
    """Expected decode speed of a plan.

    Streamed layers are read ahead, so a token takes the longer of compute and reading, and up to an eighth more where the
    two are alike, because neither then hides the other's hiccups (a power mean). Missing experts are known only
    when the layer's router has run, so their reading adds to compute.

    Args:
        compute_seconds: one token with everything resident.
        bytes_per_second: of the drive, for reads of layers as the runtime makes them.
        expert_bytes_per_second: the same for reads of experts; None = as layers.
        policy: of the expert cache, for the hit ratio to assume.
    """
    dense = int(plan["dense"]["streamed_bytes"])
    experts = plan["experts"]
    hits, missing = None, 0.0
    if experts["total_bytes"]:
        hits = hit_ratio(experts, policy)
        missing = (1 - hits) * experts["token_demand_bytes"]
    rate = max(1.0, bytes_per_second)
    dense_seconds, missing_seconds = dense / rate, missing / max(1.0, expert_bytes_per_second or rate)
    overlapped = (compute_seconds**OVERLAP_POWER + dense_seconds**OVERLAP_POWER) ** (1 / OVERLAP_POWER)
    seconds = overlapped + missing_seconds
    read_seconds = dense_seconds + missing_seconds
    bound = "drive" if read_seconds > compute_seconds else "compute"
    return Forecast(1 / seconds, compute_seconds, read_seconds, int(dense + missing), bound, hits)
