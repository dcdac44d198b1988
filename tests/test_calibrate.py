"""Calibration: what is counted, what is chosen from it, and that records belong to one model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanstream_gguf.calibrate import lossy, order, record, run, runner, statistics
from leanstream_gguf.errors import ArgumentError, CalibrationError, UnsupportedError

Tiny = Callable[..., Path]


def planted(n_tokens: int, groups: int, size: int, seed: int = 0) -> Any:
    """bool [n_tokens, groups * size]: neurons of a group fire together; groups are scattered over the neurons."""
    rng = np.random.default_rng(seed)
    rates = np.linspace(0.5, 0.02, groups)
    fires = np.repeat(rng.random((n_tokens, groups)) < rates, size, axis=1)
    scatter = rng.permutation(groups * size)
    return fires[:, scatter], scatter // size


def packed(fires: Any) -> Any:
    return np.packbits(fires, axis=1, bitorder="little")


def test_order_puts_neurons_that_fire_together_side_by_side() -> None:
    fires, group = planted(2000, 40, 8)
    perm = order.coactivation_order(packed(fires), fires.shape[1])
    assert (np.sort(perm) == np.arange(fires.shape[1])).all()
    neighbours = group[perm]
    assert np.mean(neighbours[1:] == neighbours[:-1]) > 0.8
    frequency = fires[:, perm].mean(axis=0)
    assert frequency[:40].mean() > 3 * frequency[-40:].mean(), "hot ones first"


def test_neurons_that_never_fire_come_last() -> None:
    fires, _ = planted(300, 10, 3)
    fires = np.concatenate([np.zeros((300, 7), bool), fires], axis=1)
    assert set(order.coactivation_order(packed(fires), 37)[-7:]) == set(range(7))


def test_bits_by_neuron() -> None:
    fires = np.random.default_rng(1).random((50, 4111)) < 0.2
    turned = order.by_neuron(packed(fires), 4111)
    assert (np.unpackbits(turned, axis=1, bitorder="little")[:, :50].astype(bool) == fires.T).all()
    assert (order.count_bits(turned) == fires.sum(axis=0)).all()


def test_histogram_bins() -> None:
    values = np.array([0.0, 1e-12, 2.0**-32, 0.5, 1.0, 1e9], np.float32)
    bins = statistics.bin_of(values)
    assert bins[0] == 0 and bins[-1] == statistics.HISTOGRAM_BINS - 1 and (np.diff(bins) >= 0).all()
    edges = statistics.edge_of(bins)
    assert (edges[2:5] <= values[2:5]).all() and (edges[3:5] >= values[3:5] * 0.93).all()


def test_thresholds_lose_at_most_what_they_may() -> None:
    values = np.random.default_rng(2).standard_normal((400, 64)).astype(np.float32)
    counts = statistics.LayerCounts(64)
    from leanstream_gguf.calibrate.graph_tap import Hidden

    counts.add(Hidden(0, values, values), histogram=True)
    threshold = lossy.thresholds_for({0: counts}, 0.05)[0]
    squares = np.square(values) / np.square(values).sum(axis=1, keepdims=True)
    lost = squares[np.abs(values) < threshold].sum() / len(values)
    assert 0.03 < lost <= 0.05
    assert counts.fired.sum() == values.size


@pytest.mark.parametrize(("factor", "power"), [(5.0, 0.8), (0.2, 1.3), (40.0, 1.0), (2.0, 0.5)])
def test_the_search_ends_close_below_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, factor: float, power: float) -> None:
    """Against a model of KL = factor * loss ** power, bent at its end as real ones are."""
    calls: list[float] = []

    def cost_of(loss: float) -> float:
        return factor * loss**power * (1 + 3 * loss)

    def measured(_runner: Any, _windows: Any, thresholds: dict[int, float], _tick: Any) -> Any:
        calls.append(thresholds[0])
        return runner.Costs(n_tokens=1, kl=cost_of(thresholds[0])), lossy.Used()

    monkeypatch.setattr(lossy, "measure_thresholds", measured)
    monkeypatch.setattr(lossy, "thresholds_for", lambda _counts, loss: {0: loss})
    tried: dict[float, float] = {}
    for max_kl in (0.02, 0.1, 0.05):
        looking = lossy.Search(None, [], {}, lambda n: None, tried)  # type: ignore[arg-type]
        loss = looking.find(max_kl)[0]
        assert 0.7 * lossy.AIM * max_kl <= cost_of(loss) <= lossy.AIM * max_kl
    assert len(calls) <= 12


def test_a_search_without_a_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "measure_thresholds", lambda *_: (runner.Costs(n_tokens=1, kl=1.0), lossy.Used()))
    monkeypatch.setattr(lossy, "thresholds_for", lambda _counts, loss: {0: loss})
    with pytest.raises(CalibrationError, match="costs more"):
        lossy.Search(None, [], {}, lambda n: None).find(0.02)  # type: ignore[arg-type]


def test_gathered_goes_on_where_it_stopped(tmp_path: Path) -> None:
    from leanstream_gguf.calibrate.graph_tap import Hidden

    values = np.maximum(np.random.default_rng(3).standard_normal((8, 20)), 0).astype(np.float32)

    def window(gathered: statistics.Gathered) -> None:
        gathered.counts[5].add(Hidden(5, values, values), histogram=True)
        gathered.put_bits(5, gathered.done, 0, values != 0)
        gathered.window_done()

    def make(work: dict[str, Any]) -> statistics.Gathered:
        return statistics.Gathered(tmp_path / "w", work, {5: 20}, 3, 8)

    first = make({"a": 1})
    window(first)
    window(first)
    again = make({"a": 1})
    assert again.resumed and again.done == 2
    assert (again.layer_bits(5) == packed(np.concatenate([values, values]) != 0)).all()
    assert (again.counts[5].fired == 2 * (values != 0).sum(axis=0)).all()
    assert not make({"a": 2}).resumed
    (tmp_path / "w" / "state.npz").write_bytes(b"cut")
    assert not make({"a": 1}).resumed


def test_costs_of_equal_and_different_rows() -> None:
    rows = np.random.default_rng(4).standard_normal((40, 11)).astype(np.float32)
    same = runner.Costs()
    same.add(rows, rows, list(range(11)) * 3 + [0] * 6)
    assert same.mean_kl == pytest.approx(0, abs=1e-12) and same.perplexity_change == 0 and (same.n_tokens, same.n_targets) == (40, 39)
    other = runner.Costs()
    other.add(np.zeros((1, 2), np.float32), np.array([[0.0, math.log(3)]], np.float32), [0])
    assert other.mean_kl == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-6)
    assert other.perplexity_change == pytest.approx(1.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(" ".join(f"word {i * 7919 % 1000} of the story," for i in range(2500)))
    return str(path)


@pytest.mark.native
@pytest.mark.usefixtures("native")
class TestRuns:
    def calibrate(self, path: Path, out: Path, text: str, **settings: Any) -> record.Record:
        return run.calibrate(run.Request(str(path), str(out), text, **{"n_tokens": 1536, "quiet": True, "n_threads": 1, **settings}))

    def test_squared_relu(self, tiny: Tiny, tmp_path: Path, text: str) -> None:
        out = tmp_path / "r.calibration"
        made = self.calibrate(tiny("dense_arcee"), out, text)
        loaded = record.Record.load(out)
        assert loaded.summary() == made.summary()
        assert [p.name for p in tmp_path.iterdir()] == ["r.calibration"]
        assert made.has_zeros and not made.gated and made.n_tokens == 1536 and made.noise_floor > 0
        for layer in loaded.layers:
            assert layer.activation == "SQR" and 0.1 < layer.density < 0.95 and 0 < layer.reuse <= 1
            assert (np.sort(layer.perm) == np.arange(layer.n_ff)).all()
            assert layer.density == pytest.approx(layer.fired.sum() / (1536 * layer.n_ff))
        assert set(made.margins) == {layer.block for layer in made.layers if layer.density <= 0.6}
        assert made.faithful["share_picked"] >= made.faithful["share_fired"] > 0

    def test_activations_are_the_models_own(self, tiny: Tiny, text: str) -> None:
        """The tap sees what the weights give: the down projection's input recomputed in numpy."""
        from leanstream_gguf.calibrate.graph_tap import Taps
        from leanstream_gguf.repack.gguf_file import read_model
        from leanstream_gguf.repack.requantize import to_float
        from leanstream_gguf.repack.storage import Source

        path = tiny("dense_untied")
        model = read_model(path)
        seen: dict[str, Any] = {}
        with runner.Runner(str(path), n_threads=1) as feeding, Source(model.shards) as source:

            def entering(block: int, x: Any) -> None:
                if block == 1:
                    seen["x"] = np.array(x)

            def hidden(item: Any) -> None:
                if item.block == 1:
                    seen["h"], seen["act"] = np.array(item.values), np.array(item.decided)

            feeding.tap.taps = Taps(hidden=hidden, entering=entering)
            feeding.decode("tapped", [11, 12, 13], 0)
            gate, up = (
                to_float(t.type, source.rows(t, 0, t.n_rows)) for t in (model.tensors[f"blk.1.ffn_{w}.weight"] for w in ("gate", "up"))
            )
        g = seen["x"] @ gate.T
        act = g / (1 + np.exp(-g))
        scale = np.abs(act).max()
        assert np.abs(seen["act"] - act).max() < 0.02 * scale  # llama.cpp rounds x to 8 bits
        expected = act * (seen["x"] @ up.T)
        assert np.abs(seen["h"] - expected).max() < 0.04 * np.abs(expected).max()

    def test_no_zeros_is_explained(self, tiny: Tiny, tmp_path: Path, text: str) -> None:
        with pytest.raises(UnsupportedError, match=r"no neurons that stay at exactly zero.*--max-kl"):
            self.calibrate(tiny("dense_untied"), tmp_path / "r", text)

    @pytest.mark.slow
    def test_thresholds_cost_what_was_asked_for(self, tiny: Tiny, tmp_path: Path, text: str) -> None:
        made = self.calibrate(tiny("dense_untied"), tmp_path / "r", text, max_kl=(0.01, 0.1), n_tokens=2048)
        mild, rough = made.settings
        assert not made.has_zeros and made.gated and not made.margins
        assert 0 < mild.kl < 0.0125 and mild.kl < rough.kl < 0.125
        assert 0 < rough.share < mild.share < 1 and rough.recall < mild.recall < 1
        assert all(layer.density == pytest.approx(rough.share, abs=0.1) for layer in made.layers)

    def test_interrupted_and_resumed_is_the_same(self, tiny: Tiny, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = self.calibrate(tiny("dense_arcee"), tmp_path / "whole", text, sketch=False)
        done = statistics.Gathered.window_done

        def interrupted(self: statistics.Gathered) -> None:
            done(self)
            if self.done == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(statistics.Gathered, "window_done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            self.calibrate(tiny("dense_arcee"), tmp_path / "r", text, sketch=False)
        assert not (tmp_path / "r").exists()
        monkeypatch.setattr(statistics.Gathered, "window_done", done)
        again = self.calibrate(tiny("dense_arcee"), tmp_path / "r", text, sketch=False)
        for a, b in zip(whole.layers, again.layers, strict=True):
            assert a.numbers() == b.numbers() and (a.perm == b.perm).all() and (a.fired == b.fired).all()

    def test_wrong_uses(self, tiny: Tiny, tmp_path: Path, text: str) -> None:
        with pytest.raises(ArgumentError, match="at least 1024"):
            self.calibrate(tiny("dense_arcee"), tmp_path / "r", text, n_tokens=100)
        with pytest.raises(ArgumentError, match="max-kl"):
            self.calibrate(tiny("dense_arcee"), tmp_path / "r", text, max_kl=(-1.0,))
        with pytest.raises(UnsupportedError, match="bundles experts without one"):
            self.calibrate(tiny("moe_qwen3"), tmp_path / "r", text)
        short = tmp_path / "short.txt"
        short.write_text("too short")
        with pytest.raises(CalibrationError, match="tokens"):
            self.calibrate(tiny("dense_arcee"), tmp_path / "r", str(short))
        (tmp_path / "broken").write_bytes(b"PK\3\4 nothing")
        for name in ("broken", "missing"):
            with pytest.raises(CalibrationError):
                record.Record.load(tmp_path / name)


def test_the_built_in_text_is_long_enough() -> None:
    name, text = run.load_text(None)
    assert name == "built in" and len(text) > 7 * run.DEFAULT_N_TOKENS
