"""planner.py: defaults from the shape, budgets from wishes, speed from rates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanstream_gguf import planner
from leanstream_gguf.planner import Shape
from leanstream_gguf.settings import POLICIES, Budget, CacheBudget


def shape(**changes: Any) -> Shape:
    """Llama-2-7B, or what is changed of it."""
    values = {
        "arch": "llama",
        "n_layer": 32,
        "n_embd": 4096,
        "n_ff": 11008,
        "n_vocab": 32000,
        "n_head": 32,
        "n_kv_per_layer": 8192,
        "n_ctx_train": 4096,
        "n_expert": 0,
        "n_expert_used": 0,
        "file_bytes": 3_800_000_000,
    }
    return Shape(**{**values, **changes})


def test_defaults_of_a_7b_model_stay_small() -> None:
    sizes = planner.context_defaults(shape())
    assert sizes.n_ctx == 2048  # 512 KiB of keys and values a token
    assert sizes.n_ubatch == 256
    assert sizes.n_ubatch * planner.activation_bytes(shape(), sizes.n_ctx, False) <= planner.compute_target_bytes(shape().file_bytes)
    assert 1 <= sizes.n_outputs_max * 4 * 32000 <= planner.OUTPUT_TARGET_BYTES


def test_a_small_model_gets_small_buffers() -> None:
    small = {"n_layer": 30, "n_embd": 576, "n_ff": 1536, "n_vocab": 49152, "n_head": 9, "n_kv_per_layer": 384}
    sizes = planner.context_defaults(shape(**small, n_ctx_train=8192, file_bytes=98_000_000))
    assert (sizes.n_ctx, sizes.n_ubatch) == (2048, 128)


def test_large_vocabulary_reserves_few_outputs_and_keeps_the_batch() -> None:
    sizes = planner.context_defaults(shape(n_vocab=151936, n_kv_per_layer=512))
    assert sizes.n_ctx == 4096
    assert sizes.n_batch == 512
    assert sizes.n_outputs_max == 6


def test_all_logits_shrink_the_batch_instead() -> None:
    sizes = planner.context_defaults(shape(n_vocab=151936), all_logits=True)
    assert sizes.n_outputs_max == 0
    assert sizes.n_batch == sizes.n_ubatch == 32
    assert planner.context_defaults(shape(n_vocab=512), all_logits=True).n_batch == 512


def test_what_the_caller_sets_stays() -> None:
    sizes = planner.context_defaults(shape(n_vocab=151936), n_ctx=512, n_batch=512, n_ubatch=512, all_logits=True)
    assert (sizes.n_ctx, sizes.n_batch, sizes.n_ubatch) == (512, 512, 512)
    assert planner.context_defaults(shape(), n_ctx=0).n_ctx == 0
    assert planner.context_defaults(shape(), n_ctx=100).n_batch == 100
    assert planner.context_defaults(shape(), embedding=True).n_outputs_max == 0


def test_context_never_exceeds_training() -> None:
    assert planner.default_n_ctx(shape(n_ctx_train=1024)) == 1024
    assert planner.default_n_ctx(shape(n_ctx_train=0, n_kv_per_layer=256)) == 4096


@given(
    n_vocab=st.integers(2, 300_000),
    n_ff=st.integers(64, 60_000),
    n_head=st.integers(1, 128),
    n_ctx_train=st.integers(0, 1 << 20),
    all_logits=st.booleans(),
    flash=st.booleans(),
)
def test_defaults_are_usable_for_any_shape(
    n_vocab: int, n_ff: int, n_head: int, n_ctx_train: int, all_logits: bool, flash: bool
) -> None:
    model = shape(n_vocab=n_vocab, n_ff=n_ff, n_head=n_head, n_ctx_train=n_ctx_train)
    sizes = planner.context_defaults(model, all_logits=all_logits, flash_attn=flash)
    assert 1 <= sizes.n_ubatch <= sizes.n_batch <= max(sizes.n_ctx, 1)
    assert 0 <= sizes.n_outputs_max <= sizes.n_batch
    assert sizes.n_outputs_max > 0 or all_logits


def test_shape_from_index() -> None:
    index = {"arch": "qwen3moe", "n_layer": 12, "n_embd": 512, "n_ff": 0, "n_vocab": 16384, "n_ctx_train": 1024}
    index |= {"n_expert": 32, "n_expert_used": 4, "file_bytes": 10}
    metadata = {"attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 64, "expert_feed_forward_length": 256}
    found = Shape.from_index({**index, "metadata": {f"qwen3moe.{key}": value for key, value in metadata.items()}})
    assert (found.n_ff, found.n_head, found.n_kv_per_layer) == (1024, 8, 512)


def test_shape_without_metadata_is_guessed_high() -> None:
    index = {"arch": "odd", "n_layer": 2, "n_embd": 256, "n_ff": None, "n_vocab": 99, "n_ctx_train": None, "file_bytes": 10}
    found = Shape.from_index(index)
    assert (found.n_ff, found.n_head, found.n_kv_per_layer, found.n_expert) == (1024, 4, 512, 0)


def test_budget_bytes() -> None:
    known = {"minimum": 100, "full": 300, "file_bytes": 1000, "automatic": 777}
    asked = ["full", "min", "55%", "min+50%", "auto", 42]
    assert [planner.budget_bytes(Budget.parse(value), **known) for value in asked] == [0, 100, 550, 200, 777, 42]


def test_cache_bytes() -> None:
    known = {"expert_bytes": 1000, "minimum": 64}
    assert planner.cache_bytes(None, **known) == 0
    assert planner.cache_bytes(CacheBudget.parse("25%"), **known) == 250
    assert planner.cache_bytes(CacheBudget.parse("min"), **known) == 64
    assert planner.cache_bytes(CacheBudget.parse(42), **known) == 42
    assert planner.cache_bytes(CacheBudget.parse(42), expert_bytes=0, minimum=0) == 0


def plan(streamed: int = 0, capacity: int = 0, total: int = 0, demand: int = 0) -> dict[str, Any]:
    experts = {"capacity_bytes": capacity, "total_bytes": total, "token_demand_bytes": demand}
    return {"dense": {"streamed_bytes": streamed}, "experts": experts}


def test_forecast_of_layers_is_the_slower_of_compute_and_drive() -> None:
    resident = planner.forecast(plan(), compute_seconds=0.25, bytes_per_second=1e9)
    assert (resident.tokens_per_second, resident.bound_by, resident.hit_ratio) == (4, "compute", None)
    drive = planner.forecast(plan(streamed=10**9), compute_seconds=0.25, bytes_per_second=1e9)
    assert (drive.tokens_per_second, drive.bound_by) == (pytest.approx(1, rel=1e-3), "drive")
    hidden = planner.forecast(plan(streamed=10**8), compute_seconds=0.25, bytes_per_second=1e9)
    assert (hidden.tokens_per_second, hidden.bound_by) == (pytest.approx(4, rel=1e-2), "compute")
    alike = planner.forecast(plan(streamed=25 * 10**7), compute_seconds=0.25, bytes_per_second=1e9)
    assert 0.88 < alike.tokens_per_second / 4 < 0.92


def test_forecast_of_experts_adds_what_is_missing() -> None:
    found = planner.forecast(plan(capacity=50, total=100, demand=1000), compute_seconds=0.5, bytes_per_second=490, policy="lru")
    assert found.hit_ratio == pytest.approx(0.755)
    assert found.tokens_per_second == pytest.approx(1.0)
    whole = planner.forecast(plan(capacity=100, total=100, demand=1000), compute_seconds=0.5, bytes_per_second=490)
    assert whole.tokens_per_second == 2
    small = planner.forecast(
        plan(capacity=50, total=100, demand=1000), compute_seconds=0.5, bytes_per_second=1e9, expert_bytes_per_second=490, policy="lru"
    )
    assert small.tokens_per_second == pytest.approx(1.0)


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(sorted(POLICIES)))
def test_hit_ratio_grows_with_the_cache(a: float, b: float, policy: str) -> None:
    low, high = (planner.expected_hit_ratio(share, policy) for share in sorted((a, b)))
    assert 0 <= low <= high + 1e-12 <= 1 + 1e-9
