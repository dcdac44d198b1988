"""cli: every command's documents, exit statuses and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lean_files import make_lean

from leanstream_gguf import cli
from leanstream_gguf.cli import inspect as inspect_command

Tiny = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


def call(*argv: object) -> int:
    return cli.main([str(word) for word in argv])


def document(capture: Capture) -> dict[str, Any]:
    """The last line of standard output."""
    found: dict[str, Any] = json.loads(capture.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_answers_without_loading_anything(command: str) -> None:
    code = f"""
import sys
from leanstream_gguf.cli import main
try:
    main({[command, "--help"] if command else ["--help"]!r})
finally:
    heavy = [name for name in ("llama_cpp", "numpy") if name in sys.modules]
    print("heavy:", heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    # serve has a flag for every setting of llama_cpp.server, and gets them from there
    assert "heavy: []" in done.stdout or command == "serve"
    assert "usage: leanstream" in done.stdout
    assert "--json" in done.stdout or not command


@pytest.mark.parametrize("argv", [[], ["fly"], ["run"], ["plan", "-m"], ["run", "-m", "x", "--temp", "warm"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        call(*argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "code"),
    [
        (["run", "-m", "none.gguf", "-p", "x", "--memory", "lots"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "-n", "0"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "-f", "y"], 2, "argument"),
        (["run", "-m", "none.gguf", "-f", "no such prompt"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--ring-slots", "1"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--memory", "99999999999TiB"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--batch", "-1"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--temp", "nan"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--top-p", "2"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--top-k", "-1"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x", "--seed", "-1"], 2, "argument"),
        (["run", "-m", "none.gguf", "-p", "x\udcff"], 2, "argument"),
        (["plan", "-m", "none.gguf", "--threads", "100000"], 2, "argument"),
        (["verify", "-m", "none.gguf", "--ctx", "4294967296"], 2, "argument"),
        (["verify", "-m", "none.gguf", "--max-kl", "0.1"], 2, "argument"),
        (["verify", "-m", "none.gguf", "--cache", "0"], 2, "argument"),
    ],
)
def test_settings_are_refused_before_the_model_is_touched(argv: list[str], status: int, code: str, capsys: Capture) -> None:
    assert call(*argv, "--json") == status
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == code
    assert captured.err.startswith("leanstream: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("variable", ["LEANSTREAM_MEMORY", "LEANSTREAM_CACHE"])
def test_a_wrong_variable_is_named(variable: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv(variable, "lots")
    assert call("run", "-m", "none.gguf", "-p", "x") == 2
    assert capsys.readouterr().err.startswith(f"leanstream: {variable} 'lots'")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "-m", "x.gguf", "-n", "many"], "invalid int value: 'many'"),
        (["plan"], "-m/--model"),
        (["inspect", "-m", "x.gguf", "--no-such-flag"], "--no-such-flag"),
        (["no-such-command"], "invalid choice"),
    ],
)
def test_wrong_usage_is_json_with_json(argv: list[str], words: str, capsys: Capture) -> None:
    for json_too in (False, True):
        with pytest.raises(SystemExit) as caught:
            call(*argv, *(["--json"] if json_too else []))
        captured = capsys.readouterr()
        assert caught.value.code == 2 and captured.err.startswith("usage: leanstream") and words in captured.err
        if json_too:
            error = json.loads(captured.out)["error"]
            assert error["code"] == "argument" and words in error["message"]
        else:
            assert not captured.out


def test_purposes_of_tensors() -> None:
    def purpose(name: str, *shape: int, tied: bool = False) -> str:
        return inspect_command.purpose_of({"name": name, "shape": shape or (64, 64)}, tied=tied)

    assert purpose("token_embd.weight") == "embedding"
    assert purpose("token_embd.weight", tied=True) == "output"
    assert purpose("per_layer_token_embd.weight", tied=True) == "embedding"
    assert purpose("output.weight") == "output"
    assert purpose("output_norm.weight", 64) == "other"
    assert purpose("blk.0.attn_q.weight") == "attention"
    assert purpose("blk.0.attn_q.bias", 64) == "other"
    assert purpose("blk.0.ffn_down.weight") == "ffn"
    assert purpose("blk.0.ffn_down_exps.weight", 64, 64, 8) == "experts"
    assert purpose("blk.0.ffn_gate_inp.weight") == "other"
    assert purpose("blk.0.ffn_exps.lean", 4096, 8) == "experts"
    assert purpose("blk.0.ffn.clusters.lean", 4096, 8) == "neurons"
    assert purpose("blk.0.ffn_exps.checksums.lean", 8) == purpose("blk.0.ffn.sketch.lean", 64, 8) == "tables"


@pytest.mark.native
@pytest.mark.usefixtures("native")
class TestNative:
    def test_missing_file(self, tmp_path: Path, capsys: Capture) -> None:
        for command in (["run", "-p", "x"], ["plan"], ["inspect"], ["verify"]):
            assert call(command[0], "-m", tmp_path / "none.gguf", *command[1:], "--json") == 3
            captured = capsys.readouterr()
            assert json.loads(captured.out)["error"]["code"] == "not_found"
            assert captured.err.count("\n") == 1

    def test_run_json(self, tiny: Tiny, capsys: Capture) -> None:
        argv = [
            "run",
            "-m",
            tiny("moe_qwen3"),
            "-p",
            "the quick",
            "-n",
            8,
            "--memory",
            "min",
            "--ctx",
            64,
            "--seed",
            3,
            "--threads",
            1,
        ]
        assert call(*argv, "--ignore-eos", "--json") == 0
        found = document(capsys)
        wanted = "tokens tokens_per_second prefill_seconds load_seconds peak_rss_bytes budget_bytes bytes_read hit_ratio mode text"
        assert set(wanted.split()) <= set(found)
        assert found["tokens"] == 8 and "experts" in found["mode"]
        assert found["budget_bytes"] > 0 and found["bytes_read"] > 0 and found["prefill_seconds"] > 0
        assert call(*argv, "--ignore-eos", "--json") == 0
        assert document(capsys)["text"] == found["text"]

    def test_run_prints_text_and_a_summary(self, tiny: Tiny, capsys: Capture) -> None:
        argv = ["run", "-m", tiny("moe_qwen3"), "-p", "the quick", "-n", 8, "--memory", "full", "--ctx", 64]
        assert call(*argv) == 0
        captured = capsys.readouterr()
        assert "tokens/s" in captured.err and "peak memory" in captured.err
        assert captured.out.strip()

    def test_run_refuses_a_prompt_that_does_not_fit(self, tiny: Tiny, capsys: Capture) -> None:
        assert call("run", "-m", tiny("dense_untied"), "-p", "word " * 400, "--memory", "min", "--ctx", 64, "--json") == 2
        assert document(capsys)["error"]["limit"] >= 64

    def test_run_chat(self, tiny: Tiny, capsys: Capture) -> None:
        argv = ["run", "-m", tiny("dense_untied"), "-p", "hello", "-n", 4, "--memory", "min", "--ctx", 256, "--chat", "--json"]
        assert call(*argv) == 0
        assert document(capsys)["prompt_tokens"] > 2

    def test_run_reads_standard_input(self, tiny: Tiny) -> None:
        argv = [sys.executable, "-m", "leanstream_gguf", "run", "-m", tiny("dense_untied"), "-n", "2", "--memory", "min", "--json"]
        root = Path(__file__).parent.parent
        done = subprocess.run(argv, input="the quick", capture_output=True, text=True, check=True, cwd=root)
        assert json.loads(done.stdout)["prompt_tokens"] >= 2

    def test_run_without_standard_input(self, tiny: Tiny, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert call("run", "-m", tiny("dense_untied"), "--json") == 2
        assert "standard input" in document(capsys)["error"]["message"]

    def test_run_stops_at_the_end_of_the_context(self, tiny: Tiny, capsys: Capture) -> None:
        argv = ["run", "-m", tiny("dense_untied"), "-p", "the quick", "-n", 1000, "--memory", "full", "--ctx", 256, "--ignore-eos"]
        assert call(*argv, "--json") == 0
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert found["prompt_tokens"] + found["tokens"] == found["n_ctx"] == 256
        assert "context of 256 tokens is full" in captured.err

    def test_cache_size_counts_in_what_is_reported(self, tiny: Tiny, capsys: Capture) -> None:
        argv = ["run", "-m", tiny("moe_qwen3"), "-p", "the quick", "-n", 2, "--memory", "2GiB", "--cache", "min", "--ctx", 64]
        assert call(*argv, "--json") == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["mode"] == "experts"
        assert "expert cache" in captured.err

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_output_that_cannot_be_written(self, tiny: Tiny) -> None:
        argv = [sys.executable, "-m", "leanstream_gguf", "inspect", "-m", tiny("dense_untied"), "--json"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent, check=False)
        assert done.returncode != 0
        assert "No space left" in done.stderr and "Traceback" not in done.stderr

    def test_doctor_in_a_folder_that_cannot_be_written(self, tmp_path: Path, capsys: Capture) -> None:
        assert call("doctor", "--dir", tmp_path / "none", "--json") == 2
        assert "--no-drive" in document(capsys)["error"]["message"]

    def test_budget_that_is_too_small(self, tiny: Tiny, capsys: Capture) -> None:
        assert call("run", "-m", tiny("moe_qwen3"), "-p", "x", "--memory", "1MiB", "--json") == 5
        error = document(capsys)["error"]
        assert (error["code"], error["used"]) == ("budget", 1 << 20)
        assert error["limit"] > 1 << 20

    def test_plan(self, tiny: Tiny, capsys: Capture) -> None:
        assert call("plan", "-m", tiny("moe_qwen3"), "--memory", "min", "--no-speed", "--json") == 0
        found = document(capsys)
        assert 0 < found["minimum_budget_bytes"] < found["full_budget_bytes"]
        assert {"mode", "memory", "dense", "experts", "n_ctx", "n_ubatch"} <= set(found)
        for memory in ("min", "full", "auto", "min+50%"):
            assert call("plan", "-m", tiny("moe_qwen3"), "--memory", memory, "--no-speed") == 0
        assert "smallest budget" in capsys.readouterr().out

    def test_device_options_where_there_is_no_device(self, tiny: Tiny, capsys: Capture) -> None:
        from leanstream_gguf import probe

        if probe.gpus():
            pytest.skip("this machine has a device; scripts/gpu_table.py tests it")
        assert call("plan", "-m", tiny("moe_qwen3"), "--device-memory", "50%", "--no-speed") == 0
        assert "device: none that this build" in capsys.readouterr().out
        assert call("run", "-m", tiny("moe_qwen3"), "-p", "x", "-n", "2", "--device-memory", "1GiB", "-ngl", "2", "--json") == 0
        captured = capsys.readouterr()
        assert "device_budget is not used" in captured.err
        assert json.loads(captured.out.splitlines()[-1])["tokens"] == 2
        assert call("run", "-m", tiny("moe_qwen3"), "-p", "x", "-n", "2", "-ngl", "2", "--json") == 0
        assert capsys.readouterr().err.startswith("leanstream: warning: n_gpu_layers is not used: llama.cpp finds no GPU")
        assert call("plan", "-m", tiny("moe_qwen3"), "--device-memory", "min", "--no-speed", "--json") == 2
        assert "device_budget" in document(capsys)["error"]["message"]

    @pytest.mark.parametrize(("flags", "template", "hinted"), [([], "x", True), (["--chat"], "x", False), ([], None, False)])
    def test_an_empty_answer_of_a_chat_model(
        self, tiny: Tiny, capsys: Capture, monkeypatch: pytest.MonkeyPatch, flags: list[str], template: str | None, hinted: bool
    ) -> None:
        import llama_cpp

        import leanstream_gguf

        metadata = {"tokenizer.chat_template": template} if template else {}
        monkeypatch.setattr(llama_cpp, "llama_vocab_is_eog", lambda vocab, token: True)
        monkeypatch.setattr(
            leanstream_gguf.Llama, "metadata", property(lambda self: metadata, lambda self, value: None), raising=False
        )
        argv = ["run", "-m", tiny("dense_untied"), "-p", "x", "-n", 3, *flags]
        assert call(*argv) == 0
        captured = capsys.readouterr()
        assert captured.out == "\n" and ("--chat" in captured.err) == hinted
        assert call(*argv, "--json") == 0
        assert "--chat" not in capsys.readouterr().err

    def test_a_cache_for_experts_that_there_are_not(self, tiny: Tiny, capsys: Capture) -> None:
        argv = ["-m", tiny("dense_untied"), "--cache", "1MiB"]
        assert call("run", *argv, "-p", "x", "-n", "2", "--json") == 0
        assert capsys.readouterr().err == "leanstream: warning: cache_budget is not used: this model has no experts\n"
        assert call("plan", *argv, "--no-speed") == 0
        assert "warning: cache_budget is not used" in capsys.readouterr().out
        assert call("plan", "-m", tiny("dense_untied"), "--no-speed", "--json") == 0
        assert document(capsys)["warnings"] == []

    def test_plan_with_speeds(self, tiny: Tiny, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        from leanstream_gguf import kernel_rate

        monkeypatch.setattr(kernel_rate, "WORKING_SET_BYTES", 1 << 20)
        monkeypatch.setattr(kernel_rate, "SECONDS_PER_SHAPE", 0.001)
        assert call("plan", "-m", tiny("dense_untied"), "--memory", "full", "--json") == 0
        found = document(capsys)
        assert found["expected_tokens_per_second"] > 0
        assert found["speeds"]["drive"]["bytes_per_second"] > 0

    def test_inspect(self, tiny: Tiny, capsys: Capture) -> None:
        assert call("inspect", "-m", tiny("moe_qwen3"), "--json") == 0
        found = document(capsys)
        rows = {row["purpose"]: row for row in found["purposes"]}
        assert rows["experts"]["streamable"] and not rows["output"]["streamable"]
        assert sum(row["bytes"] for row in rows.values()) == sum(tensor["bytes"] for tensor in found["tensors"])
        assert found["streamable"] and found["plan"]["minimum_budget_bytes"] > 0
        assert call("inspect", "-m", tiny("moe_qwen3", 3), "--tensors") == 0
        text = capsys.readouterr().out
        assert "00002-of-00003" in text and "blk.0.ffn_up_exps.weight" in text

    @pytest.mark.parametrize("asked", ["1", "30MiB"])
    def test_the_minimum_that_an_error_names_works_and_little_less_does_not(self, tiny: Tiny, asked: str) -> None:
        def budget_of(memory: object) -> tuple[int, dict[str, Any]]:
            """In a process of its own, as at the command line."""
            argv = [
                sys.executable,
                "-m",
                "leanstream_gguf",
                "run",
                "-m",
                tiny("dense_untied"),
                "--memory",
                str(memory),
                "-p",
                "x",
                "-n",
                1,
            ]
            done = subprocess.run([*map(str, argv), "--json"], capture_output=True, text=True)
            return done.returncode, json.loads(done.stdout)

        status, refused = budget_of(asked)
        assert (status, refused["error"]["code"]) == (5, "budget")
        named = refused["error"]["limit"]
        status, found = budget_of(named)
        assert status == 0 and found["budget_bytes"] == named
        assert named <= budget_of("min")[1]["budget_bytes"] + (1 << 20)

    @pytest.mark.parametrize(("name", "purpose", "n_tensors"), [("moe_qwen3", "experts", 12), ("dense_arcee", "neurons", 4)])
    def test_inspect_counts_what_lies_in_records_once(
        self, tiny: Tiny, tmp_path: Path, capsys: Capture, name: str, purpose: str, n_tensors: int
    ) -> None:
        path = make_lean(tiny(name), tmp_path / "x.lean.gguf")
        assert call("inspect", "-m", path, "--json") == 0
        found = document(capsys)
        rows = {row["purpose"]: row for row in found["purposes"]}
        assert rows[purpose]["n_tensors"] == n_tensors and rows[purpose]["streamable"] and "i8" not in rows[purpose]["types"]
        assert sum(row["bytes"] for row in rows.values()) == sum(t["bytes"] for t in found["tensors"] if "bundle" not in t)
        assert sum(row["bytes"] for row in rows.values()) <= path.stat().st_size

    def test_verify(self, tiny: Tiny, capsys: Capture) -> None:
        argv = ["verify", "-m", tiny("moe_qwen3"), "--prompt-tokens", 16, "-n", 4, "--threads", 1]
        assert call(*argv, "--json") == 0
        found = document(capsys)
        assert found["bit_identical"] is True
        assert {"max_abs_diff", "kl_mean", "kl_noise_floor", "n_tokens"} <= set(found)
        assert call(*argv, "--reference", tiny("moe_scales")) == 1
        assert "differ" in capsys.readouterr().out

    def test_doctor(self, tiny: Tiny, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        from leanstream_gguf.cli import doctor

        monkeypatch.setattr(doctor, "BLOCKS", (4096, 65536))
        monkeypatch.setattr(doctor, "DEPTHS", (1, 4))
        monkeypatch.setattr(doctor, "PROBE_FILE_BYTES", 2 << 20)
        assert call("doctor", "--dir", tmp_path, "--json") == 0
        found = document(capsys)
        assert found["libraries"]["llama_cpp_commit"]
        assert isinstance(found["gpus"], list)
        assert len(found["drive"]["random"]) == 4
        assert found["advice"] and found["memory"]["auto_budget_bytes"] > 0
        assert not list(tmp_path.iterdir())
        assert call("doctor", "-m", tiny("moe_qwen3")) == 0
        text = capsys.readouterr().out
        assert "io_uring" in text and "depth 4" in text and "--memory auto: everything resident" in text

    def test_doctor_looks_at_the_model(self, tiny: Tiny, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        from leanstream_gguf import probe
        from leanstream_gguf.cli import doctor

        argv = ["doctor", "--no-drive", "--json", "-m"]
        lean = make_lean(tiny("dense_arcee"), tmp_path / "x.lean.gguf", faithful=True)
        for path in (tiny("moe_qwen3"), lean):
            assert call(*argv, path) == 0
            found = document(capsys)["model"]
            assert (
                0 < found["plan"]["minimum_budget_bytes"] < found["plan"]["full_budget_bytes"] and found["auto"]["mode"] == "resident"
            )
        monkeypatch.setattr(probe, "automatic_budget", lambda: probe.MemoryLimit(1 << 20, "made up"))
        assert call(*argv, tiny("moe_qwen3")) == 0
        found = document(capsys)
        assert "does not fit here" in found["advice"][0] and found["model"]["auto"]["error"]["code"] == "budget"
        streams = {"path": "x", "streamable": True, "auto": {"dense": {"streamed_bytes": 100 << 20}}}
        assert "so this drive allows 2.0 tokens/s" in doctor._model_advice(streams, {"sequential": {"bytes_per_second": 200 << 20}})[0]
        (tmp_path / "broken.gguf").write_bytes(b"GGUF")
        assert call(*argv, tmp_path / "broken.gguf") == 3
        assert call(*argv, tmp_path / "none.gguf") == 3


def test_replay_counts_no_negative_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("replay", tmp_path / "t.trace", "--warmup", "-5", "--json") == 2
    assert "--warmup" in json.loads(capsys.readouterr().out)["error"]["message"]
