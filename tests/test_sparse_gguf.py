"""Planted sparsity: synthetic files run through llama.cpp and behave in caches as the measured models did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activity import replay
from activity.summary import N_REPLAY, clusters_touched, expert_bits, expert_uses, overlaps
from activity.trace import Trace, record
from hypothesis import given
from hypothesis import strategies as st
from make_sparse_gguf import REFERENCE, SHAPES, describe, measured, scaled
from toygguf.container import write_gguf
from toygguf.latents import bpe_tokens
from toygguf.quantize import TYPES, dequantize, quantize
from toygguf.shapes import Dims
from toygguf.vocab import bpe_metadata

import leanstream_gguf

ROOT = Path(__file__).resolve().parents[1]
# Not the text that the generator fits its thresholds to.
TEXT = (Path(leanstream_gguf.__file__).parent / "verify_prompt.txt").read_text(encoding="utf-8")


def write(folder: Path, shape: str, dims: Dims, kind: str = "Q4_0") -> Path:
    path = folder / f"{shape}.gguf"
    model = describe(shape, kind, dims, REFERENCE.read_text(encoding="utf-8"))
    write_gguf(path, model.metadata, model.tensors, shape, progress=lambda done, total: None)
    return path


# ---- replay ----------------------------------------------------------------------------------------------------------


def best_possible(uses: Sequence[int], capacity: int) -> int:
    """Fewest misses over all choices of what to keep, by trying them all."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for unit in uses:
        following: dict[frozenset[int], int] = {}
        for kept, misses in states.items():
            options = [kept] if unit in kept else [kept, *(kept - {out} | {unit} for out in kept)]
            if unit not in kept and len(kept) < capacity:
                options.append(kept | {unit})
            for option in options:
                cost = misses + (unit not in kept)
                following[option] = min(following.get(option, cost), cost)
        states = following
    return min(states.values())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 4))
def test_no_choice_beats_belady(uses: list[int], capacity: int) -> None:
    misses = {name: round(policy(uses, capacity) * len(uses)) for name, policy in replay.POLICIES.items()}
    assert misses["belady"] == best_possible(uses, capacity) <= min(misses["lru"], misses["lfu"])


def test_replay_of_a_known_sequence() -> None:
    uses = [1, 1, 2, 3, 1, 2]
    assert replay.lru(uses, 2) == pytest.approx(5 / 6)  # 1 2 3 1 2 miss
    assert replay.lfu(uses, 2) == pytest.approx(4 / 6)  # 1 stays: 1 2 3 2 miss


# ---- planting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_quantised_values_are_what_the_gguf_package_reads(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.Generator(np.random.PCG64(1)).standard_normal((32, 512)).astype(np.float32)
    values[:, 256:288], values[:, 288:320] = 0.0, 0.25
    raw = quantize(kind, values)
    ours = dequantize(kind, raw)
    assert np.array_equal(ours, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert float(np.sqrt(((ours - values) ** 2).mean())) < {"Q4_0": 0.1, "Q4_K": 0.1, "Q6_K": 0.03}.get(kind, 0.01)


def test_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    import llama_cpp

    model = describe("afm-4.5b", "Q4_0", replace(scaled(SHAPES["afm-4.5b"].dims, 0.1), n_layer=1, n_vocab=2000), TEXT)
    write_gguf(tmp_path / "vocab.gguf", model.metadata, [], "vocab")
    llm = llama_cpp.Llama(str(tmp_path / "vocab.gguf"), vocab_only=True, verbose=False)
    text = TEXT + " it's 12,345 (naive) words?  And  \n\n more."
    expected = llm.tokenize(text.encode(), add_bos=False, special=False)
    llm.close()
    assert bpe_tokens(text, bpe_metadata(2000)["tokenizer.ggml.tokens"], 2000) == expected


def misses_of(trace: Trace, layer: int) -> dict[str, list[float]]:
    used = trace.neurons[layer][:N_REPLAY]
    return replay.miss_ratios(np.nonzero(used)[1], used.shape[1])


def compare(name: str, found: dict[str, list[float]], expected: dict[str, list[float]], within: float) -> None:
    for policy, ratios in expected.items():
        for share, got, wanted in zip(replay.SHARES, found[policy], ratios, strict=True):
            assert got == pytest.approx(wanted, abs=within), f"{name}: {policy} with {share:.0%} of the units"


@pytest.fixture(scope="module")
def relu2(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A file of zoo-relu2-83m's shape, traced over a text other than the reference."""
    dims = Dims(n_layer=16, n_embd=512, n_ff=2560, n_head=8, n_head_kv=4, n_vocab=2048, n_ctx=2048)
    return record(write(tmp_path_factory.mktemp("relu2"), "afm-4.5b", dims), TEXT, N_REPLAY, n_threads=2)


@pytest.fixture(scope="module")
def statistics() -> dict[str, Any]:
    return measured("zoo-relu2-83m")


def test_density_and_overlap_of_every_layer(relu2: Trace, statistics: dict[str, Any]) -> None:
    assert sorted(relu2.neurons) == list(range(16))
    for layer, expected in enumerate(statistics["neurons"]):
        used = relu2.neurons[layer]
        assert float(used.mean()) == pytest.approx(expected["density"], rel=0.2), layer
        assert overlaps(used, relu2.n_window)[0] == pytest.approx(expected["overlap"][0], abs=0.05), layer


@pytest.mark.parametrize("layer", [1, 4, 9, 12])
def test_caches_of_neurons_miss_as_measured(relu2: Trace, statistics: dict[str, Any], layer: int) -> None:
    compare(f"layer {layer}", misses_of(relu2, layer), statistics["neurons"][layer]["misses"], within=0.06)


@pytest.mark.parametrize("layer", [4, 12])
def test_neurons_fire_together_as_measured(relu2: Trace, statistics: dict[str, Any], layer: int) -> None:
    for size, (together, apart) in statistics["neurons"][layer]["touched"].items():
        found, _ = clusters_touched(relu2.neurons[layer], int(size))
        assert found == pytest.approx(together, rel=0.15)
        assert found < apart


def test_caches_of_experts_miss_as_measured(tmp_path: Path) -> None:
    expected = measured("zoo-moe-169m")
    experts = {"n_expert": 32, "n_used": 4, "n_ff_exp": 32}
    dims = Dims(n_layer=12, n_embd=512, n_ff=256, n_head=8, n_head_kv=4, n_vocab=2048, n_ctx=2048, rope_base=1e6, **experts)
    trace = record(write(tmp_path, "qwen3-30b-a3b", dims), TEXT, N_REPLAY, n_threads=2)
    compare("experts", replay.miss_ratios(*expert_uses(trace, 0, N_REPLAY)), expected["misses"], within=0.05)
    for layer, wanted in enumerate(expected["experts"]):
        used = expert_bits(trace.experts[layer], trace.n_expert)
        assert overlaps(used, trace.n_window)[0] == pytest.approx(wanted["overlap"][0], abs=0.06), layer


@pytest.mark.parametrize(
    ("shape", "kind"), [("nemotron-mini-4b", "Q8_0"), ("smallthinker-4b", "Q4_K"), ("smallthinker-4b", "F16"), ("afm-4.5b", "Q6_K")]
)
def test_every_shape_and_type_fires_as_measured(shape: str, kind: str, tmp_path: Path, statistics: dict[str, Any]) -> None:
    dims = replace(scaled(SHAPES[shape].dims, 0.2), n_layer=4, n_vocab=2048)
    if dims.n_expert:
        dims = replace(dims, n_expert=16)
    trace = record(write(tmp_path, shape, dims, kind), TEXT, 512, n_threads=2)
    expected = [statistics["neurons"][i]["density"] for i in (0, 5, 10, 15)]
    found = trace.expert_density if dims.n_expert else {i: float(used.mean()) for i, used in trace.neurons.items()}
    assert [found[i] for i in range(4)] == pytest.approx(expected, rel=0.3)


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "make_sparse_gguf.py", *args]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, check=False)


def test_the_file_says_that_it_is_synthetic(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "small.gguf"
    done = run(out, "--shape", "afm-4.5b", "--scale", "0.1", "--layers", "2", "--vocab", "1024")
    assert done.returncode == 0, done.stderr
    fields = gguf.GGUFReader(out).fields
    assert "SYNTHETIC" in fields["general.description"].contents()
    assert "zoo-relu2-83m" in fields["general.description"].contents()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--scale", "1000"], "--scale must be between"),
        (["--experts", "4"], "has no experts"),
        (["--shape", "qwen3-30b-a3b", "--used", "128"], "fewer used experts"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--text", "short.txt"], "too short"),
    ],
)
def test_what_cannot_be_planted_is_refused(options: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    options = [str(tmp_path / o) if o.endswith(".txt") else o for o in options]
    done = run(tmp_path / "x.gguf", *options)
    assert done.returncode == 2 and reason in done.stderr
    assert not list(tmp_path.glob("x.gguf*"))


@pytest.mark.parametrize("name", ["zoo-relu2-83m", "zoo-moe-169m"])
def test_committed_statistics_are_small_and_complete(name: str) -> None:
    path = ROOT / "scripts" / "activity" / "measured" / f"{name}.json"
    found = json.loads(path.read_text())
    assert path.stat().st_size < 32 << 10
    for layer in found.get("neurons", []):
        assert len(layer["rates"]) == len(found["ranks"]) and len(layer["overlap"]) == len(found["lags"])
        assert set(layer["misses"]) == set(replay.POLICIES)
    assert found["n_replay"] == N_REPLAY
