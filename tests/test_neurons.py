"""Layers streamed neuron by neuron and experts read as one record: the same bits at every budget, close to the source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lean_files import make_lean
from support import CONTEXT, assert_same_bytes, logits, sample_tokens, streamed, unstreamed

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("native"),
    pytest.mark.filterwarnings("ignore:the expert cache"),  # too small on purpose
    pytest.mark.filterwarnings("ignore:fidelity threshold"),
]

Tiny = Callable[..., Path]
Logits = npt.NDArray[np.single]

N_PROMPT, N_TOKENS = 24, 36
TOKENS = sample_tokens(N_TOKENS, 512)
SHAPE = {"n_threads": 2, "n_threads_batch": 2, "n_ubatch": 16}
READERS: list[dict[str, Any]] = [
    {"policy": "lru", "io_backend": "pread", "io_threads": 1},
    {"policy": "slru", "io_backend": "pread", "io_threads": 4},
    {"policy": "lfu", "io_backend": "auto", "direct_io": False},
]
NEURONS = ["dense_arcee", "dense_tied", "dense_gemma3", "dense_qwen2"]
# Stock rounds activations to int8 before the down projection, neurons are summed without; a wrong neuron gives more than 0.1.
MAX_KL = 5e-3


@cache
def reference(path: Path) -> Logits:
    with unstreamed(path, **SHAPE) as llm:
        return logits(llm, TOKENS, N_PROMPT)


def kl(p: Logits, q: Logits) -> float:
    """Mean KL divergence of next-token distributions, in nats."""

    def log_softmax(x: Logits) -> npt.NDArray[np.double]:
        shifted = x.astype(np.double) - x.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    log_p, log_q = log_softmax(p), log_softmax(q)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean())


@pytest.fixture(scope="module")
def lean(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`lean(name, **options)`: the lean file of a toy model, written once. Do not change the file."""
    folder = tmp_path_factory.mktemp("lean")
    written: dict[str, Path] = {}

    def get(name: str, **options: Any) -> Path:
        key = f"{name}-{len(written)}" if options else name
        if options or key not in written:
            written[key] = make_lean(tiny(name), folder / f"{key}.lean.gguf", **options)
        return written[key]

    return get


@pytest.mark.parametrize("name", ["dense_arcee", "dense_tied"])
def test_repacked_matrices_beside_streamed_neurons(lean: Callable[..., Path], tiny: Tiny, name: str) -> None:
    from leanstream_gguf import StreamConfig

    with unstreamed(tiny(name), repacked=True, **SHAPE) as llm:
        stock = logits(llm, TOKENS, N_PROMPT)
    with streamed(lean(name, cluster_size=1), "full", stream=StreamConfig(repack=True), **SHAPE) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
        assert kl(stock, expected) < MAX_KL
    few = StreamConfig(repack=True, cache_budget="min")
    with streamed(lean(name, cluster_size=1), "min", stream=few, **SHAPE) as llm:
        plan = llm.stream.plan()
        assert plan["dense"]["streamed_bytes"] == 0
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


@pytest.mark.parametrize("name", NEURONS)
def test_logits_at_every_budget(lean: Callable[..., Path], tiny: Tiny, name: str) -> None:
    from leanstream_gguf import StreamConfig

    path = lean(name, cluster_size=1)  # a rounding block of a K-quant is half a layer here: it must fit without the rest
    with streamed(path, "full", **SHAPE) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
    assert kl(reference(tiny(name)), expected) < MAX_KL
    for reader in READERS:
        with streamed(path, "min", stream=StreamConfig(**reader), **SHAPE) as llm:
            plan = llm.stream.plan()
            low, high = plan["minimum_budget_bytes"], plan["full_budget_bytes"]
            assert "neurons" in plan["mode"]
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)
            assert llm.stream.stats().read_bytes > 0
            for budget in ((low + high) // 2, high, low):
                llm.stream.set_budget(budget)
                assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


@pytest.mark.parametrize("cluster_size", [1, 7])
def test_cluster_size_changes_nothing(lean: Callable[..., Path], cluster_size: int) -> None:
    with streamed(lean("dense_arcee"), "full", **SHAPE) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
    with streamed(lean("dense_arcee", cluster_size=cluster_size), "min", **SHAPE) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


@pytest.mark.parametrize(("name", "dense_layers"), [("moe_qwen3", False), ("moe_bias", False), ("moe_merged", True)])
def test_bundled_experts_give_the_bytes_of_the_source(lean: Callable[..., Path], tiny: Tiny, name: str, dense_layers: bool) -> None:
    with streamed(lean(name), "min", **SHAPE) as llm:
        plan = llm.stream.plan()
        low, high = plan["minimum_budget_bytes"], plan["full_budget_bytes"]
        expected = logits(llm, TOKENS, N_PROMPT) if dense_layers else reference(tiny(name))  # in clusters: other rounding
        assert kl(reference(tiny(name)), expected) < 10 * MAX_KL
        for budget in (low, (low + high) // 2, high):
            llm.stream.set_budget(budget)
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


def test_one_read_for_an_expert(lean: Callable[..., Path]) -> None:
    from leanstream_gguf import StreamConfig

    with streamed(lean("moe_qwen3"), "full", stream=StreamConfig(cache_budget="25%", depth=0), **SHAPE) as llm:
        llm.stream.reset_stats()
        for token in TOKENS:
            llm.eval([token])
        stats = llm.stream.stats()
        assert stats.misses > 0
        assert stats.n_reads == stats.misses + len(TOKENS)  # and one row of the embedding a token


# ---- fidelity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense_arcee", "dense_tied"])
def test_faithful_with_every_neuron_a_candidate_is_exact(lean: Callable[..., Path], name: str) -> None:
    from leanstream_gguf import StreamConfig

    with streamed(lean(name), "full", **SHAPE) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
    config = StreamConfig(fidelity="faithful")
    with streamed(lean(name, faithful=True), "min", stream=config, **SHAPE) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


def test_faithful_candidates_come_from_the_sketch(lean: Callable[..., Path], tiny: Tiny) -> None:
    from leanstream_gguf import StreamConfig

    config = StreamConfig(fidelity="faithful")
    with streamed(lean("dense_arcee", faithful=True, margin=1e9), "full", stream=config, **SHAPE) as llm:
        logits(llm, TOKENS, N_PROMPT)
        everything = llm.stream.stats().neurons_fired
    with streamed(lean("dense_arcee", faithful=True, margin=0.5), "full", stream=config, **SHAPE) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
        assert llm.stream.stats().neurons_fired < everything
        plan = llm.stream.plan()
        low, high = plan["minimum_budget_bytes"], plan["full_budget_bytes"]
        for budget in (low, (low + high) // 2):
            llm.stream.set_budget(budget)
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)
    assert kl(reference(tiny("dense_arcee")), expected) < 4 * MAX_KL


@pytest.mark.parametrize("name", ["dense_tied", "dense_gemma3"])
def test_thresholds_trade_neurons_for_kl(lean: Callable[..., Path], tiny: Tiny, name: str) -> None:
    from leanstream_gguf import StreamConfig

    path = lean(name, thresholds=((0.01, 1e-6), (0.1, 0.05), (0.5, 0.3)))
    fired, divergence = [], []
    for max_kl in (None, 0.1, 10.0):
        with streamed(path, "full", stream=StreamConfig(fidelity="threshold", max_kl=max_kl), **SHAPE) as llm:
            found = logits(llm, TOKENS, N_PROMPT)
            fired.append(llm.stream.stats().neurons_fired)
        divergence.append(kl(reference(tiny(name)), found))
        with streamed(path, "min", stream=StreamConfig(fidelity="threshold", max_kl=max_kl), **SHAPE) as llm:
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), found)
    assert fired[0] > fired[1] > fired[2] > 0
    assert divergence[0] < MAX_KL and divergence[0] < divergence[2]


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {"fidelity": "faithful"}, "layout exact"),
        ({"faithful": True}, {}, "layout faithful"),
        ({}, {"fidelity": "threshold"}, "no measured thresholds"),
        ({"thresholds": ((0.2, 0.1),)}, {"fidelity": "threshold", "max_kl": 0.1}, "KL of 0.2, none up to 0.1"),
        (None, {"fidelity": "threshold"}, "leanstream repack"),
    ],
)
def test_fidelity_that_the_file_does_not_offer(
    lean: Callable[..., Path], tiny: Tiny, options: dict[str, Any] | None, config: dict[str, Any], message: str
) -> None:
    from leanstream_gguf import StreamConfig
    from leanstream_gguf.errors import UnsupportedError

    path = tiny("dense_arcee") if options is None else lean("dense_arcee", **options)
    with pytest.raises(UnsupportedError, match=message), streamed(path, "full", stream=StreamConfig(**config), **SHAPE):
        pass


def test_fidelity_changes_at_the_next_token(lean: Callable[..., Path]) -> None:
    from leanstream_gguf import StreamConfig

    path = lean("dense_arcee", cluster_size=1, thresholds=((0.01, 1e-6), (0.5, 0.3)))
    with streamed(path, "min", stream=StreamConfig(), **SHAPE) as llm:

        def run() -> tuple[Logits, int, int]:
            llm.stream.reset_stats()
            found = logits(llm, TOKENS, N_PROMPT)
            stats = llm.stream.stats()
            return found, stats.read_bytes, stats.neurons_fired

        exact, n_bytes, n_fired = run()
        assert llm.stream.fidelity() == {"name": "exact", "max_kl": None, "kl": None, "thresholds": {}}
        with pytest.warns(match="limit 0.5"):
            llm.stream.set_fidelity("threshold", max_kl=0.5)
        assert (llm.stream.config.fidelity, llm.stream.config.max_kl) == ("threshold", 0.5)
        lossy, n_lossy_bytes, n_lossy_fired = run()
        assert n_lossy_bytes < n_bytes and n_lossy_fired < n_fired and not np.array_equal(lossy, exact)
        llm.stream.set_fidelity("exact")
        assert_same_bytes(run()[0], exact)


def test_thresholds_are_set_by_value_by_layer_and_by_kl(lean: Callable[..., Path]) -> None:
    from leanstream_gguf import StreamConfig

    path = lean("dense_arcee", thresholds=((0.01, 1e-6), (0.5, 0.25)))
    with streamed(path, "full", stream=StreamConfig(fidelity="threshold", max_kl=0.5), **SHAPE) as llm:
        layers = sorted(llm.stream.fidelity()["thresholds"])

        def fired() -> int:
            llm.stream.reset_stats()
            logits(llm, TOKENS, N_PROMPT)
            return llm.stream.stats().neurons_fired

        measured = fired()
        llm.stream.set_thresholds(0)
        everything = fired()
        llm.stream.set_thresholds({layers[0]: 0.25})
        assert llm.stream.fidelity() == {
            "name": "threshold",
            "max_kl": None,
            "kl": None,
            "thresholds": {layer: 0.25 if layer == layers[0] else 0 for layer in layers},
        }
        assert measured < fired() < everything
        llm.stream.set_thresholds(max_kl=0.5)
        assert llm.stream.fidelity()["max_kl"] == llm.stream.config.max_kl == 0.5
        assert fired() == measured
        llm.stream.set_thresholds(0.125, max_kl=0.5)
        assert measured < fired() < everything


def test_thresholds_that_cannot_be(lean: Callable[..., Path]) -> None:
    from leanstream_gguf import StreamConfig
    from leanstream_gguf.errors import ArgumentError, StateError, UnsupportedError

    with streamed(lean("dense_arcee"), "full", **SHAPE) as llm:
        with pytest.raises(UnsupportedError, match="no measured thresholds"):
            llm.stream.set_thresholds(0.1)
        for name in ("threshold", "faithful"):
            with pytest.raises(UnsupportedError):
                llm.stream.set_fidelity(name)
    with streamed(lean("dense_arcee", thresholds=((0.5, 0.25),)), "full", stream=StreamConfig(), **SHAPE) as llm:
        with pytest.raises(StateError, match="not threshold"):
            llm.stream.set_thresholds(0.1)
        with pytest.raises(UnsupportedError, match=r"none up to 0\.1"):
            llm.stream.set_fidelity("threshold", max_kl=0.1)
        llm.stream.set_fidelity("threshold")
        before = llm.stream.fidelity()
        for wrong in (-1.0, float("nan"), float("inf"), "much", {99: 0.1}, {}, {0: "much"}, {"first": 0.1}, None):
            with pytest.raises(ArgumentError):
                llm.stream.set_thresholds(wrong)
        for wrong_kl in (0, -1, float("nan"), True):
            with pytest.raises(ArgumentError):
                llm.stream.set_thresholds(max_kl=wrong_kl)
        with pytest.raises(ArgumentError, match=r"more than the 0\.25"):
            llm.stream.set_thresholds(0.3, max_kl=0.5)
        assert llm.stream.fidelity() == before


def test_fidelity_may_change_from_another_thread(lean: Callable[..., Path]) -> None:
    from leanstream_gguf import StreamConfig

    path, stop = lean("dense_arcee", thresholds=((0.01, 1e-6), (0.5, 0.3))), threading.Event()
    prompt = TOKENS[:N_PROMPT]
    with streamed(path, "min", stream=StreamConfig(), **SHAPE) as llm:

        def answer() -> list[int]:
            return [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(24), strict=False)]

        expected = answer()

        def meddle() -> None:
            while not stop.is_set():
                llm.stream.set_fidelity("threshold", max_kl=0.5)
                llm.stream.set_thresholds({0: 0.1}, max_kl=0.5)
                llm.stream.set_fidelity("exact")

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            for _ in range(4):
                assert len(answer()) == 24
        finally:
            stop.set()
            thread.join()
        assert answer() == expected, "what was computed under another fidelity was used again"


def test_a_lean_file_streams_without_being_asked(lean: Callable[..., Path]) -> None:
    import leanstream_gguf

    with streamed(lean("dense_arcee"), "full", **SHAPE) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
    settings = {**CONTEXT, **SHAPE, "logits_all": True, "verbose": False}
    with leanstream_gguf.Llama(str(lean("dense_arcee")), **settings) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


# ---- damaged files ---------------------------------------------------------------------------------------------------


def damaged(path: Path, tmp_path: Path, old: bytes, new: bytes) -> Path:
    raw = path.read_bytes()
    assert len(old) == len(new) and raw.count(old) >= 1
    copy = tmp_path / "damaged.lean.gguf"
    copy.write_bytes(raw.replace(old, new, 1))
    return copy


def corrupted(path: Path, tmp_path: Path, tensor: str) -> Path:
    from gguf import GGUFReader

    found = next(t for t in GGUFReader(path).tensors if t.name == tensor)
    raw = bytearray(path.read_bytes())
    start = int(found.data_offset)
    for at in range(start, start + int(found.n_bytes), 512):
        raw[at] ^= 0x55
    copy = tmp_path / "corrupt.lean.gguf"
    copy.write_bytes(bytes(raw))
    return copy


@pytest.mark.parametrize(
    ("name", "tensor", "unit"),
    [
        ("dense_arcee", "blk.1.ffn.clusters.lean", "cluster"),
        ("moe_qwen3", "blk.1.ffn_exps.lean", "expert"),
    ],
)
def test_corrupt_data_is_found_at_its_first_read(lean: Callable[..., Path], tmp_path: Path, name: str, tensor: str, unit: str) -> None:
    from leanstream_gguf.errors import FormatError

    path = corrupted(lean(name), tmp_path, tensor)
    with pytest.raises(FormatError, match=f"{unit} [0-9]+ of layer 1 is corrupt") as caught, streamed(path, "min", **SHAPE) as llm:
        llm.eval(TOKENS)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.1.ffn.device_down.lean", b"blk.1.ffn.device_dawn.lean", "device_down.lean or device_up.lean does not fit"),
        (b"leanstream.neurons.n_hot", b"leanstream.neurons.n_hat", "n_hot is missing"),
        (b"blk.1.ffn.perm.lean", b"blk.1.ffn.pern.lean", "perm.lean is missing"),
        (b"leanstream.virtual.offset", b"leanstream.virtual.offsat", "offset is missing"),
    ],
)
def test_edited_files_are_refused(lean: Callable[..., Path], tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    from leanstream_gguf.errors import FormatError

    path = damaged(lean("dense_arcee", device_hot=0.5), tmp_path, old, new)
    with pytest.raises(FormatError, match="repack the model again") as caught, streamed(path, "full", **SHAPE):
        pass
    assert message in str(caught.value)
