"""The commands calibrate, repack, unpack and inspect on a toy model, and the cost model behind the cluster sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanstream_gguf import cli
from leanstream_gguf.errors import ArgumentError, CalibrationError, UnsupportedError
from leanstream_gguf.repack import cost, repack

Tiny = Callable[..., Path]
DRIVE = cost.Drive((4096, 65536, 1048576), (30000.0, 13000.0, 1000.0), 512, "made up")


def last_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_drive_times() -> None:
    seconds = DRIVE.seconds(np.array([100, 4096, 65536, 2 << 20]))
    assert seconds[0] == seconds[1] == 1 / 30000
    assert seconds[2] == pytest.approx(1 / 13000) and seconds[3] == pytest.approx(2 / 1000)


def test_drive_files(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"drive": DRIVE.to_dict()}))
    assert cost.Drive.load(str(path), 512) == DRIVE
    for broken in ("{", "[]", "{}", '{"sizes": [2, 1], "reads_per_second": [1, 1]}', '{"sizes": [1], "reads_per_second": [0]}'):
        path.write_text(broken)
        with pytest.raises(ArgumentError, match="no drive's rates"):
            cost.Drive.load(str(path), 512)


def test_runs_and_touched() -> None:
    fires = np.zeros((2, 10), bool)
    fires[0, [0, 1, 9]] = True
    fires[1, [3, 4]] = True
    assert cost.touched(fires, 3).tolist() == [[True, False, False, True], [False, True, False, False]]
    assert sorted(cost.runs(cost.touched(fires, 3)).tolist()) == [1, 1, 1]
    assert sorted(cost.runs(fires).tolist()) == [1, 2, 2]
    assert not len(cost.runs(np.zeros((3, 5), bool)))


def test_stretches_are_read_in_pieces_that_the_runtime_has_buffers_for() -> None:
    assert sorted(cost.reads(np.array([1, 40]), 4096).tolist()) == [4096, 8 * 4096, 65536, 65536]
    assert cost.reads(np.array([3]), 163840).tolist() == [163840] * 3, "a cluster is never cut"


def test_a_large_cluster_that_nearly_every_token_touches_is_not_taken_for_one_long_read() -> None:
    """Measured on the AFM shape: 12 % of the neurons fire; clusters of 64 took twice the time of clusters of 6."""
    rng = np.random.default_rng(3)
    heat = rng.permutation(np.linspace(0.5, 8, 4096) ** 2)
    fires = rng.random((200, 4096)) < 0.12 * heat / heat.mean()
    fires = fires[:, np.argsort(-fires.sum(axis=0), kind="stable")]
    drive = cost.Drive((4096, 65536, 262144, 1048576), (44000.0, 14500.0, 7600.0, 1700.0), 512, "measured")
    assert cost.choose(fires, 1280, drive).cluster_size < 16


def test_cost_of_a_cluster_size_is_what_a_replay_by_hand_gives() -> None:
    rng = np.random.default_rng(1)
    fires = rng.random((60, 100)) < 0.05
    found = cost.cluster_cost(fires, 4, 700, DRIVE)
    n_bytes = sum(len({j // 4 for j in np.nonzero(row)[0]}) * 3072 for row in fires)
    assert found.stride == 3072
    assert found.n_bytes == pytest.approx(n_bytes / 60)
    assert found.amplification == pytest.approx(n_bytes / (fires.sum() * 700))


def test_large_records_are_read_alone_and_small_ones_together() -> None:
    rng = np.random.default_rng(2)
    scattered = rng.random((200, 512)) < 0.03
    large = cost.choose(scattered, 4352, DRIVE)
    assert large.cluster_size == 1 and large.stride == 4608 and large.amplification < 1.07
    together = np.repeat(rng.random((200, 64)) < 0.05, 8, axis=1)  # groups of 8 always fire together
    assert cost.choose(together, 700, DRIVE).cluster_size == 8
    slow = cost.Drive((4096, 1048576), (100.0, 99.0), 512, "a disk that seeks")
    assert cost.choose(scattered, 640, slow).cluster_size > cost.choose(scattered, 640, DRIVE).cluster_size


def test_hot_clusters_are_the_leading_ones_that_half_of_the_tokens_touch() -> None:
    fires = np.zeros((100, 40), bool)
    fires[:60, :6] = True
    fires[:, 20] = True
    assert cost.cluster_cost(fires, 2, 256, DRIVE).n_hot == 3


@pytest.fixture(scope="module")
def calibrated(tiny_once: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("calibrated")
    text = folder / "t.txt"
    text.write_text(" ".join(f"word {i * 7919 % 1000} of the story," for i in range(1500)))
    model, out = tiny_once("dense_arcee"), folder / "r.calibration"
    arguments = ["calibrate", "-m", str(model), "-o", str(out), "--text", str(text), "--tokens", "1024", "--threads", "1", "--quiet"]
    assert cli.main(arguments) == 0
    return model, out


@pytest.fixture(scope="module")
def tiny_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from toygguf.models import write_model

    return lambda name: write_model(name, tmp_path_factory.mktemp("models"))


@pytest.mark.native
@pytest.mark.usefixtures("native")
class TestCommands:
    def test_a_stopped_repack_keeps_the_drive_it_measured(
        self, calibrated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another measurement would choose other clusters, and what is written would be of no use."""
        from leanstream_gguf.repack import writer

        model, record = calibrated
        out = tmp_path / "x.lean.gguf"
        command = ["repack", str(model), str(out), "--calibration", str(record), "--no-verify-run", "--quiet", "--json"]
        rates = iter([DRIVE, cost.Drive((4096, 1048576), (100.0, 99.0), 512, "a disk that seeks")])
        monkeypatch.setattr(cost, "measure_drive", lambda *_: next(rates))

        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(writer, "read_back", stop)
            assert cli.main(command) == 130
        assert cli.main(command) == 0
        done = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert done["resumed"] and done["drive"]["reason"] == DRIVE.reason
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x.lean.gguf"]

    def test_files_that_are_read_are_not_written_over(
        self, calibrated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model, text = tmp_path / "m.gguf", tmp_path / "t.txt"
        model.write_bytes(calibrated[0].read_bytes())
        text.write_text("some words " * 400)
        before = model.read_bytes(), text.read_bytes()
        for out in (model, text):
            for command in (["trace", "-f", str(text), "-n", "4"], ["calibrate", "--text", str(text), "--tokens", "1024"]):
                assert cli.main([*command, "-m", str(model), "-o", str(out), "--json"]) == 2
                assert "would be lost" in json.loads(capsys.readouterr().out)["error"]["message"]
        assert (model.read_bytes(), text.read_bytes()) == before
        assert cli.main(["calibrate", "-m", str(model), "-o", str(tmp_path), "--tokens", "1024", "--json"]) == 2

    def test_an_output_that_cannot_be_written_is_a_json_error(
        self, calibrated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "no such folder" / "x.lean.gguf"
        command = ["repack", str(calibrated[0]), str(out), "--calibration", str(calibrated[1]), "--quiet", "--json"]
        assert cli.main(command) == 8
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "write"

    @pytest.mark.parametrize("layout", ["exact", "faithful"])
    def test_there_and_back(
        self, calibrated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
    ) -> None:
        model, record = calibrated
        out, back = tmp_path / "x.lean.gguf", tmp_path / "back.gguf"
        command = [
            "repack",
            str(model),
            str(out),
            "--calibration",
            str(record),
            "--layout",
            layout,
            "--quiet",
            "--json",
            "--no-verify-run",
        ]
        assert cli.main(command) == 0
        done = last_json(capsys)
        assert done["layout"] == layout and len(done["layers"]) + len(done["left_alone"]) == 4
        assert cli.main(["inspect", "-m", str(out), "--json"]) == 0
        lean = last_json(capsys)["lean"]
        assert [layer["cluster_size"] for layer in lean["layers"]] == [layer["cluster_size"] for layer in done["layers"]]
        for layer in lean["layers"]:
            assert layer["amplification"] <= 1.1 * layer["amplification_best"]
        assert lean["source"]["name"] == "dense_arcee.gguf" and lean["calibration"]["n_tokens"] == 1024
        assert cli.main(["inspect", "-m", str(out)]) == 0
        assert "read amplification" in capsys.readouterr().out
        assert cli.main(["unpack", str(out), str(back), "--quiet"]) == 0
        assert "the same bytes" in capsys.readouterr().out and back.read_bytes() == model.read_bytes()

    def test_neurons_for_a_device(self, calibrated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, record = calibrated
        out = tmp_path / "x.lean.gguf"
        command = ["repack", str(model), str(out), "--calibration", str(record), "--device-hot", "50%", "--quiet", "--no-verify-run"]
        assert cli.main(command) == 0
        assert "neurons for a device" in capsys.readouterr().out
        assert cli.main(["inspect", "-m", str(out)]) == 0
        assert "50% of the neurons are there for a device too" in capsys.readouterr().out

    def test_experts_need_no_record(self, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "x.lean.gguf"
        assert cli.main(["repack", str(tiny("moe_qwen3")), str(out), "--quiet", "--verify-run"]) == 0
        assert "layers of experts bundled" in capsys.readouterr().out
        assert cli.main(["inspect", "-m", str(out)]) == 0
        assert "each expert one read" in capsys.readouterr().out

    def test_a_file_that_computes_something_else_gets_no_name(
        self, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from leanstream_gguf import verify

        found = {"passed": False, "bit_identical": False, "kl_mean": 1e-5, "kl_noise_floor": 1e-3, "n_tokens": 1}
        monkeypatch.setattr(verify, "verify", lambda request: found)
        assert cli.main(["repack", str(tiny("moe_qwen3")), str(tmp_path / "x.lean.gguf"), "--quiet"]) == 8
        assert "does not compute what" in capsys.readouterr().err
        assert not (tmp_path / "x.lean.gguf").exists()

    @pytest.mark.parametrize(
        ("arguments", "status", "words"),
        [
            (["--cluster", "none"], 2, "--cluster"),
            (["--drive", __file__, "--calibration", "missing"], 3, "leanstream calibrate"),
            (["--alignment", "100"], 2, "--alignment"),
            (["--down-type", "Q9"], 2, "--down-type"),
            (["--from-source", "x.gguf"], 2, "--down-type"),
            (["--device-hot", "hot"], 2, "--device-hot"),
            (["--device-hot", "101%"], 2, "--device-hot"),
            (["--device-hot", "0.1", "--layout", "faithful"], 2, "the layout exact"),
            (["--calibration", "missing"], 3, "leanstream calibrate"),
            (["--experts-only"], 4, "leanstream calibrate"),
        ],
    )
    def test_wrong_arguments(
        self, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
    ) -> None:
        out = tmp_path / "x.lean.gguf"
        assert cli.main(["repack", str(tiny("dense_untied")), str(out), "--quiet", *arguments]) == status
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
        assert list(tmp_path.iterdir()) == []

    def test_a_record_of_another_model(self, calibrated: tuple[Path, Path], tiny: Tiny, tmp_path: Path) -> None:
        request = repack.Request(str(tiny("dense_untied")), str(tmp_path / "x"), str(calibrated[1]), quiet=True)
        with pytest.raises(CalibrationError, match=r"of another model \(dense_arcee\.gguf\)"):
            repack.repack(request)

    def test_nothing_to_repack(self, tiny: Tiny, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="fused"):
            repack.repack(repack.Request(str(tiny("dense_fused")), str(tmp_path / "x")))

    def test_requantising_says_what_it_costs(
        self, calibrated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model, record = calibrated
        command = ["repack", str(model), str(tmp_path / "x.lean.gguf"), "--calibration", str(record), "--quiet", "--no-verify-run"]
        assert cli.main([*command, "--down-type", "q4_0", "--from-source", str(model)]) == 0
        assert "lossy: down projections requantised, relative error" in capsys.readouterr().out
        assert cli.main(["unpack", str(tmp_path / "x.lean.gguf"), str(tmp_path / "y.gguf"), "--quiet"]) == 0
        assert "in another type" in capsys.readouterr().out
