"""drop_in.py: programs that cannot be edited stream."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def restored(native: None) -> Iterator[None]:
    import leanstream_gguf

    yield
    leanstream_gguf.uninstall()


def test_install_rebinds_and_uninstall_restores(tiny: Tiny) -> None:
    import llama_cpp

    import leanstream_gguf

    original = llama_cpp.Llama
    leanstream_gguf.install("min")
    leanstream_gguf.install("full")  # again: only the defaults change
    assert llama_cpp.Llama is llama_cpp.llama.Llama is not original
    with llama_cpp.Llama(str(tiny("moe_qwen3")), n_ctx=64, verbose=False) as llm:
        assert str(llm.stream.budget) == "full"
        assert llm("the", max_tokens=2)["choices"]
    with llama_cpp.Llama(str(tiny("moe_qwen3")), n_ctx=64, verbose=False, memory_budget="min") as llm:
        assert str(llm.stream.budget) == "min"
    leanstream_gguf.uninstall()
    leanstream_gguf.uninstall()
    assert llama_cpp.Llama is llama_cpp.llama.Llama is original


def test_defaults_come_from_the_environment(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    import leanstream_gguf

    monkeypatch.setenv("LEANSTREAM_MEMORY", "min")
    monkeypatch.setenv("LEANSTREAM_CACHE", "50%")
    leanstream_gguf.install()
    with llama_cpp.Llama(str(tiny("moe_qwen3")), n_ctx=64, verbose=False) as llm:
        assert str(llm.stream.budget) == "min"
        experts = llm.stream.plan()["experts"]
        assert experts["capacity_bytes"] == pytest.approx(experts["total_bytes"] / 2, rel=0.1)


def test_without_anything_the_budget_is_automatic(tiny: Tiny) -> None:
    import llama_cpp

    import leanstream_gguf

    leanstream_gguf.install()
    with llama_cpp.Llama(str(tiny("dense_untied")), n_ctx=64, verbose=False) as llm:
        assert str(llm.stream.budget) == "auto"


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    import leanstream_gguf

    original = llama_cpp.Llama
    monkeypatch.setenv("LEANSTREAM_MEMORY", "plenty")
    with pytest.raises(leanstream_gguf.ArgumentError, match="LEANSTREAM_MEMORY"):
        leanstream_gguf.install()
    assert llama_cpp.Llama is original


PROGRAM = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=64, verbose=False)
print(type(llm).__module__, llm.stream.budget, sys.argv[2])
"""


def test_a_program_run_from_outside(tiny: Tiny, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parent.parent
    environment = {**os.environ, "LEANSTREAM_MEMORY": "min", "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    for how in ([str(program)], ["-m", "program"]):
        command = [sys.executable, "-m", "leanstream_gguf.drop_in", *how, str(tiny("moe_qwen3")), "word"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.split() == ["leanstream_gguf.drop_in", "min", "word"]
    done = subprocess.run(command[:3], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "program.py" in done.stderr
