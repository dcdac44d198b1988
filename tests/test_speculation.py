"""Reading ahead of a layer's choice of experts: it moves reads, is counted, and changes no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import assert_same_bytes, logits, sample_tokens, streamed, unstreamed

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("native"),
    pytest.mark.filterwarnings("ignore:the expert cache"),  # too small on purpose
]

Tiny = Callable[..., Path]
N_PROMPT, N_TOKENS = 8, 72
TOKENS = sample_tokens(N_TOKENS, 512)
SHAPE = {"n_threads": 2, "n_threads_batch": 2, "n_ubatch": 8}


def run(path: Path, **config: Any) -> tuple[npt.NDArray[np.single], dict[str, Any], dict[str, Any]]:
    """Logits, statistics and what speculation found, with half of the experts cached unless told otherwise."""
    from leanstream_gguf import StreamConfig

    config = {"cache_budget": "50%", **config}
    with streamed(path, "full", stream=StreamConfig(**config), **SHAPE) as llm:
        return logits(llm, TOKENS, N_PROMPT), llm.stream.stats().to_dict(), llm.stream.speculation()


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> Callable[[Path], npt.NDArray[np.single]]:
    known: dict[Path, npt.NDArray[np.single]] = {}

    def of(path: Path) -> npt.NDArray[np.single]:
        if path not in known:
            with unstreamed(path, **SHAPE) as llm:
                known[path] = logits(llm, TOKENS, N_PROMPT)
        return known[path]

    return of


@pytest.mark.parametrize("name", ["moe_qwen3", "moe_bias", "moe_merged", "moe_dense_lead"])
@pytest.mark.parametrize("mode", ["lean", "serial", "early", "hotcold"])
def test_every_mode_gives_the_same_bytes(tiny: Tiny, expected: Any, name: str, mode: str) -> None:
    for cache in ("50%", "min"):
        found, stats, speculation = run(tiny(name), mode=mode, cache_budget=cache)
        assert_same_bytes(found, expected(tiny(name)))
        if mode in ("serial", "hotcold"):
            assert stats["n_ahead"] == 0 and speculation["recall"] == []


# Each policy and each depth once: the full cross adds time and no new pair that matters.
@pytest.mark.parametrize(
    ("policy", "depth", "stages"),
    [("lean", 1, 1), ("lean", 2, "auto"), ("lfu", 2, 1), ("lru", 1, "auto"), ("slru", "auto", 1), ("hotcold", 2, "auto")],
)
def test_every_depth_and_policy_gives_the_same_bytes(tiny: Tiny, expected: Any, policy: str, depth: Any, stages: Any) -> None:
    path = tiny("moe_qwen3")
    found, _, _ = run(path, policy=policy, depth=depth, stages=stages)
    assert_same_bytes(found, expected(path))


def test_experts_are_read_ahead_and_accounted_for(tiny: Tiny) -> None:
    _, stats, speculation = run(tiny("moe_qwen3"), depth=2)
    assert stats["n_ahead"] > 0, "nothing was read ahead"
    assert stats["n_ahead_used"] > 0 and stats["ahead_used_bytes"] > 0
    assert stats["n_ahead_used"] + stats["n_ahead_wasted"] <= stats["n_ahead"]
    assert stats["n_ahead_late"] <= stats["n_ahead_used"]
    assert stats["ahead_bytes"] <= stats["read_bytes"]
    assert {r["lead"] for r in speculation["recall"]} == {1, 2, 3}
    assert (speculation["depth"], speculation["stages"], speculation["lead"]) == (2, None, 3)


def test_guesses_are_far_better_than_chance(tiny: Tiny) -> None:
    _, _, speculation = run(tiny("moe_qwen3"), depth=1, stages="auto")
    late, early = speculation["recall"]
    assert (late["lead"], early["lead"]) == (1, 2)
    assert late["at_k"] > 0.5, "random routers are nearly known one attention block early"
    assert late["at_k"] >= early["at_k"] - 0.02, "a later guess is no worse"


def test_set_while_running(tiny: Tiny, expected: Any) -> None:
    from leanstream_gguf import StreamConfig
    from leanstream_gguf.errors import ArgumentError

    path = tiny("moe_qwen3")
    with streamed(path, "full", stream=StreamConfig(cache_budget="50%", depth=0), **SHAPE) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected(path))
        assert llm.stream.stats().n_ahead == 0
        llm.stream.set_speculation(2)
        assert llm.stream.speculation()["depth"] == 2
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected(path))
        assert llm.stream.stats().n_ahead > 0
        llm.stream.set_speculation(0)
        before = llm.stream.stats().n_ahead
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected(path))
        assert llm.stream.stats().n_ahead == before
        for wrong in ((3, "auto"), (-1, "auto"), ("deep", "auto"), (1, 0), (True, 1)):
            with pytest.raises(ArgumentError):
                llm.stream.set_speculation(*wrong)
        assert llm.stream.speculation()["depth"] == 0


def test_settings_may_change_from_another_thread(tiny: Tiny, expected: Any) -> None:
    from leanstream_gguf import StreamConfig

    path, stop = tiny("moe_qwen3"), threading.Event()

    with streamed(path, "full", stream=StreamConfig(cache_budget="50%"), **SHAPE) as llm:

        def meddle() -> None:
            i = 0
            while not stop.is_set():
                llm.stream.set_speculation(("auto", 0, 1, 2)[i % 4], ("auto", 1)[i % 2])
                llm.stream.set_policy(("lean", "lru", "lfu", "slru", "hotcold")[i % 5])
                i += 1

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            for _ in range(3):
                assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected(path))
        finally:
            stop.set()
            thread.join()


def test_everything_resident_guesses_nothing(tiny: Tiny) -> None:
    _, stats, speculation = run(tiny("moe_qwen3"), cache_budget="100%", depth=2)
    assert stats["n_ahead"] == 0 and speculation["recall"] == []


def test_flow_control_settles_within_32_tokens(tiny: Tiny) -> None:
    from leanstream_gguf import StreamConfig

    with streamed(tiny("moe_qwen3"), "full", stream=StreamConfig(cache_budget="50%"), **SHAPE) as llm:
        for token in TOKENS[:32]:
            llm.eval([token])
        found = llm.stream.speculation()
        assert found["settled"] and all(ns > 0 for ns in found["token_ns"])
