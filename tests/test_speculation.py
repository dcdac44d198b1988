"""Reading ahead of a layer's choice of experts or neurons: it moves reads, is counted, and changes no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lean_files import make_lean
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
    assert {r["lead"] for r in speculation["recall"]} >= {1, 2, 3}
    assert (speculation["depth"], speculation["stages"], speculation["lead"]) == (2, None, 3)


def test_guesses_are_far_better_than_chance(tiny: Tiny) -> None:
    _, _, speculation = run(tiny("moe_qwen3"), depth=1, stages="auto")
    late, early = speculation["recall"][:2]
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


# ---- clusters of neurons ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lean(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`lean(name, **options)`: a toy model in clusters of one neuron, written once."""
    folder = tmp_path_factory.mktemp("lean")
    written: dict[str, Path] = {}

    def get(name: str, **options: Any) -> Path:
        key = "-".join([name, *map(str, options)])
        if key not in written:
            written[key] = make_lean(tiny(name), folder / f"{key}.lean.gguf", **{"cluster_size": 1, "n_hot": 0, **options})
        return written[key]

    return get


def set_share(llm: Any, share: float) -> None:
    """A budget between the least and everything."""
    plan = llm.stream.plan()
    low, high = plan["minimum_budget_bytes"], plan["full_budget_bytes"]
    llm.stream.set_budget(int(low + share * (high - low)))
    llm.stream.reset_stats()


def run_neurons(path: Path, share: float, **config: Any) -> tuple[npt.NDArray[np.single], dict[str, Any], dict[str, Any]]:
    from leanstream_gguf import StreamConfig

    with streamed(path, "full", stream=StreamConfig(**config), **SHAPE) as llm:
        set_share(llm, share)
        return logits(llm, TOKENS, N_PROMPT), llm.stream.stats().to_dict(), llm.stream.speculation()


LEAN_FILES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense_arcee", {}, {}),
    ("dense_arcee", {"faithful": True, "margin": 0.1}, {"fidelity": "faithful"}),
    ("dense_arcee", {"cluster_size": 3}, {}),
    ("dense_tied", {"thresholds": ((0.5, 0.1),)}, {"fidelity": "threshold"}),
]


@pytest.mark.filterwarnings("ignore:fidelity threshold")
@pytest.mark.parametrize(("name", "options", "config"), LEAN_FILES)
def test_neurons_read_ahead_change_no_bit(lean: Any, name: str, options: dict[str, Any], config: dict[str, Any]) -> None:
    path = lean(name, **options)
    expected, stats, speculation = run_neurons(path, 1, depth=2, **config)
    assert stats["n_ahead"] == 0 and speculation["neurons_recall"] == [], "everything is in memory"
    found, stats, speculation = run_neurons(path, 0.8, depth=0, **config)
    assert_same_bytes(found, expected)
    assert stats["n_ahead"] == 0 and speculation["neurons_recall"] == [], "it is switched off"
    n_ahead = 0
    settings: list[tuple[float, dict[str, Any]]] = [
        (0, {"depth": 2}),
        (0.8, {"depth": 1}),
        (0.8, {"depth": 2, "stages": 1}),
        (0.8, {}),
    ]
    for share, ahead in settings:
        found, stats, _ = run_neurons(path, share, **ahead, **config)
        assert_same_bytes(found, expected)
        n_ahead += stats["n_ahead"]
        assert stats["n_ahead_used"] + stats["n_ahead_wasted"] <= stats["n_ahead"]
        assert stats["n_ahead_late"] <= stats["n_ahead_used"]
        assert stats["ahead_bytes"] <= stats["needed_bytes"]
    assert n_ahead > 0 or options.get("cluster_size") == 3, "nothing was read ahead"  # those leave no room beside demand


def test_neurons_are_guessed_better_than_by_chance(lean: Any) -> None:
    _, _, speculation = run_neurons(lean("dense_arcee"), 0.8, depth=2)
    assert {r["lead"] for r in speculation["neurons_recall"]} == {1, 2, 3}
    late = speculation["neurons_recall"][0]
    assert late["at_k"] > 0.75 and late["at_2k"] >= late["at_k"], "of random neurons half fire"
    assert all(0 <= layer["at_k"] <= layer["at_2k"] <= 1 and layer["n"] > 0 for layer in late["layers"])


def test_neurons_settings_may_change_from_another_thread(lean: Any) -> None:
    path, stop = lean("dense_arcee"), threading.Event()
    expected, _, _ = run_neurons(path, 1)
    with streamed(path, "full", **SHAPE) as llm:
        set_share(llm, 0.4)

        def meddle() -> None:
            i = 0
            while not stop.is_set():
                llm.stream.set_speculation(("auto", 0, 1, 2)[i % 4], ("auto", 1)[i % 2])
                llm.stream.set_policy(("lean", "lru", "lfu", "slru", "hotcold")[i % 5])
                if i % 7 == 0:
                    set_share(llm, (0.1, 0.4, 0.9, 1)[i // 7 % 4])
                i += 1

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            for _ in range(3):
                assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)
        finally:
            stop.set()
            thread.join()


def test_flow_control_settles_for_neurons(lean: Any) -> None:
    with streamed(lean("dense_arcee"), "full", **SHAPE) as llm:
        set_share(llm, 0.5)
        for token in TOKENS[:32]:
            llm.eval([token])
        found = llm.stream.speculation()
        assert found["settled"] and all(ns > 0 for ns in found["token_ns"])
