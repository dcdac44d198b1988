"""Traces of a toy model, and retention policies replayed over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lean_files import make_lean
from support import sample_tokens, streamed

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("native"),
    pytest.mark.filterwarnings("ignore:the expert cache"),  # too small on purpose
]

Tiny = Callable[..., Path]
N_TOKENS = 48
POLICIES = ("lru", "lfu", "slru", "hotcold", "lean")


@pytest.fixture
def trace(tiny: Tiny, tmp_path: Path) -> Path:
    """48 tokens of a toy model with half of its experts cached."""
    from leanstream_gguf import StreamConfig

    path = tmp_path / "toy.trace"
    with streamed(tiny("moe_qwen3"), "full", stream=StreamConfig(cache_budget="50%")) as llm:
        with llm.stream.tracing(path, model="toy"):
            for token in sample_tokens(N_TOKENS, 512):
                llm.eval([token])
        llm.eval([1])  # not recorded any more
    return path


def test_trace_holds_every_token_layer_and_use(trace: Path) -> None:
    from leanstream_gguf import replay

    found = replay.summary(trace)
    assert found["n_tokens"] == N_TOKENS
    layers = found["layers"]
    assert found["n_units"] == sum(layer["n_units"] for layer in layers)
    for layer in layers:
        assert layer["n_uses"] == layer["n_hit"] + layer["n_ahead"] + layer["n_late"] + layer["n_missed"]
        assert layer["n_uses"] % N_TOKENS == 0 and layer["n_uses"] > 0
    assert {r["lead"] for r in found["recall"]} >= {1, 2, 3}
    assert all(0 <= r["at_k"] <= r["at_2k"] <= 1 for r in found["recall"])
    assert b'"model": "toy"' in trace.read_bytes()[:400]


def test_trace_of_a_resident_model_is_all_hits(tiny: Tiny, tmp_path: Path) -> None:
    from leanstream_gguf import replay

    path = tmp_path / "toy.trace"
    with streamed(tiny("moe_qwen3"), "full") as llm, llm.stream.tracing(path):
        for token in sample_tokens(16, 512):
            llm.eval([token])
    found = replay.summary(path)
    assert found["n_tokens"] == 16
    assert all(layer["n_uses"] == layer["n_hit"] > 0 for layer in found["layers"])
    assert {r["lead"] for r in found["recall"]} >= {1, 2, 3}


@pytest.mark.parametrize("faithful", [False, True])
def test_trace_of_neurons_is_replayed(tiny: Tiny, tmp_path: Path, faithful: bool) -> None:
    from leanstream_gguf import StreamConfig, replay

    options: dict[str, Any] = {"faithful": True, "margin": 0.1} if faithful else {}
    lean = make_lean(tiny("dense_arcee"), tmp_path / "toy.lean.gguf", cluster_size=1, n_hot=0, **options)
    path = tmp_path / "neurons.trace"
    with streamed(lean, "full", stream=StreamConfig(fidelity="faithful" if faithful else "exact", depth=2)) as llm:
        plan = llm.stream.plan()
        low, high = plan["minimum_budget_bytes"], plan["full_budget_bytes"]
        llm.stream.set_budget(low + (high - low) * 3 // 10)
        with llm.stream.tracing(path):
            for token in sample_tokens(N_TOKENS, 512):
                llm.eval([token])
    found = replay.summary(path)
    assert found["n_tokens"] == N_TOKENS and len(found["layers"]) == plan["lean"]["n_neuron_layers"]
    for layer in found["layers"]:
        assert layer["n_uses"] == layer["n_hit"] + layer["n_ahead"] + layer["n_late"] + layer["n_missed"] > 0
    assert any(layer["n_missed"] for layer in found["layers"])  # what comes ahead of its need depends on the machine's load
    assert {r["lead"] for r in found["recall"]} >= {1, 2, 3}
    n_units = found["n_units"]
    for n in (n_units // 2, n_units):
        optimum = replay.replay(path, "belady", n)["n_misses"]
        misses = {policy: replay.replay(path, policy, n)["n_misses"] for policy in POLICIES}
        assert all(value >= optimum > 0 for value in misses.values())
        assert n < n_units or set(misses.values()) == {optimum}


def test_optimum_is_least_and_everything_fits_once(trace: Path) -> None:
    from leanstream_gguf import replay

    n_units = replay.summary(trace)["n_units"]
    for n in (n_units // 4, n_units // 2, n_units):
        optimum = replay.replay(trace, "belady", n)["n_misses"]
        misses = {policy: replay.replay(trace, policy, n)["n_misses"] for policy in POLICIES}
        assert all(value >= optimum for value in misses.values())
        if n == n_units:
            assert set(misses.values()) == {optimum}


def test_command_prints_table_and_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from leanstream_gguf.cli import main

    assert main(["replay", str(trace), "--shares", "25%,50%", "--warmup", "8"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*POLICIES, "belady", "gap closed by lean"))
    assert main(["replay", str(trace), "--shares", "25%,50%", "--policies", "lru,belady", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["misses"]["belady"][0] <= document["misses"]["lru"][0]
    assert document["gap_closed_by_lean"] == [None, None]


def test_plot_is_drawn_or_says_what_is_missing(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    from leanstream_gguf.cli import main

    picture = tmp_path / "curve.svg"
    status = main(["replay", str(trace), "--shares", "50%", "--plot", str(picture)])
    if importlib.util.find_spec("matplotlib"):
        assert status == 0 and picture.stat().st_size > 1000
    else:
        assert status == 4 and "leanstream-gguf[plot]" in capsys.readouterr().err and not picture.exists()


def test_trace_command(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from leanstream_gguf import replay
    from leanstream_gguf.cli import main

    text, out = tmp_path / "a.txt", tmp_path / "a.trace"
    text.write_text("The quick brown fox reads the file again. " * 20)
    base = ["trace", "-m", str(tiny("moe_qwen3")), "-f", str(text), "-n", "24", "-o", str(out), "--memory", "full", "--cache", "50%"]
    assert main([*base, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["n_tokens"] == 24 == replay.summary(out)["n_tokens"]
    assert main([*base, "--skip", "100000"]) == 2  # nothing is left of the text
    assert main(["trace", "-m", str(tiny("dense_tied")), "-f", str(text), "-o", str(out), "--memory", "full"]) == 1
    assert "experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["missing.trace"], 3),
        ([__file__], 3),  # no trace
        (["{trace}", "--policies", "arc"], 2),
        (["{trace}", "--shares", "0%"], 2),
        (["{trace}", "--shares", "half"], 2),
    ],
)
def test_wrong_input(trace: Path, args: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    from leanstream_gguf.cli import main

    assert main(["replay", *(a.format(trace=trace) for a in args)]) == status
    assert capsys.readouterr().err.count("leanstream:") == 1


def test_one_trace_at_a_time(tiny: Tiny, tmp_path: Path) -> None:
    from leanstream_gguf.errors import LeanStreamError

    def begin(llm: Any, name: str) -> None:
        with llm.stream.tracing(tmp_path / name):
            pass

    with (
        streamed(tiny("moe_qwen3"), "full") as llm,
        llm.stream.tracing(tmp_path / "a.trace"),
        pytest.raises(LeanStreamError, match="being recorded"),
    ):
        begin(llm, "b.trace")


def test_trace_that_cannot_be_written(tiny: Tiny, tmp_path: Path) -> None:
    from leanstream_gguf.errors import LeanStreamError

    with streamed(tiny("moe_qwen3"), "full") as llm:
        tracing = llm.stream.tracing(tmp_path / "no" / "such.trace")
        with pytest.raises(LeanStreamError, match="cannot write"):
            tracing.__enter__()
