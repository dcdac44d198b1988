"""A drive that fails during generation: a typed error, a live process, and a next call as if nothing had happened."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import run_python

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="faults are injected with LD_PRELOAD"),
]

Tiny = Callable[..., Path]
NAMES = ["dense_untied", "moe_qwen3", "moe_dense_lead", "moe_bias"]


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes reads fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("faults") / "read_faults.so"
    source = Path(__file__).parent / "data" / "read_faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


SETUP = """
import ctypes, json, sys
import leanstream_gguf
from leanstream_gguf import StreamConfig, errors

EIO, SHORT, EINTR, END = 1, 2, 3, 4
preloaded = ctypes.CDLL(None)
preloaded.read_faults_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long]
preloaded.read_faults_count.restype = ctypes.c_long
arm, count = preloaded.read_faults_arm, preloaded.read_faults_count

def build(**settings):
    config = StreamConfig(io_backend="pread", io_threads=2)
    settings = {"n_ctx": 256, "n_batch": 32, "n_threads": 2, "n_threads_batch": 2, **settings}
    return leanstream_gguf.Llama(sys.argv[1], memory_budget="min", stream=config, verbose=False, **settings)

def ask(llm, prompt="the quick brown fox jumps over the lazy dog", n=12):
    return llm(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]

def kinds(error):
    return [kind.__name__ for kind in type(error).__mro__]
"""

RECOVER = (
    SETUP
    + """
llm = build()
expected = ask(llm)
report = []
for skip in (0, 1, 5, 17, 40, 80):
    llm.reset()
    arm(EIO, skip, 10**6)
    try:
        ask(llm)
        raised = None
    except errors.LeanStreamError as error:
        raised = {"kinds": kinds(error), "message": str(error), "errno": error.sys_errno, "path": error.path}
    n_faults = count()
    arm(0, 0, 0)
    report.append({"raised": raised, "n_faults": n_faults, "after": ask(llm)})
llm.close()
print(json.dumps({"expected": expected, "report": report}))
"""
)


@pytest.mark.parametrize("name", NAMES)
def test_failed_read_raises_and_the_next_call_is_that_of_a_fresh_run(tiny: Tiny, faults: Path, name: str) -> None:
    result = run_python(RECOVER, tiny(name), preload=faults).require()
    assert any(step["n_faults"] for step in result["report"]), "no read was made to fail"
    for step in result["report"]:
        if step["n_faults"]:
            assert step["raised"] is not None, "a failed read went unnoticed"
            assert "ReadError" in step["raised"]["kinds"], step["raised"]
            assert "OSError" in step["raised"]["kinds"]
            assert step["raised"]["errno"] == 5
            assert name in step["raised"]["path"]
        assert step["after"] == result["expected"]


CONTINUE = (
    SETUP
    + """
llm = build(logits_all=True)
tokens = llm.tokenize(b"the quick brown fox jumps over the lazy dog and then reads the file again")
llm.eval(tokens)
n_kept = llm.n_tokens
arm(EIO, 3, 10**6)
try:
    llm.eval(tokens[:8])
    raised = None
except errors.ReadError as error:
    raised = kinds(error)
arm(0, 0, 0)
kept = llm.n_tokens
llm.eval(tokens[:8])
got = llm.scores[: llm.n_tokens].copy()
fresh = build(logits_all=True)
fresh.eval(tokens)
fresh.eval(tokens[:8])
same = got.tobytes() == fresh.scores[: fresh.n_tokens].tobytes()
print(json.dumps({"raised": raised, "kept": kept == n_kept, "same": same}))
"""
)


@pytest.mark.parametrize("name", NAMES)
def test_context_before_the_failed_batch_survives(tiny: Tiny, faults: Path, name: str) -> None:
    result = run_python(CONTINUE, tiny(name), preload=faults).require()
    assert result["raised"] is not None
    assert result["kept"], "n_tokens counts tokens that were not decoded"
    assert result["same"]


EVERYWHERE = (
    SETUP
    + """
llm = build(logits_all=True)
prompt = llm.tokenize(b"the quick brown fox jumps over the lazy dog")

def run():
    llm.reset()
    llm.eval(prompt)
    for token in (50, 60, 70, 80):
        llm.eval([token])
    return llm.scores[: llm.n_tokens].tobytes()

expected, wrong, n_raised = run(), [], 0
for skip in (*range(0, 14, 2), *range(14, 120, 7)):  # adjacent reads join: a run may have no more than a dozen
    arm(EIO, skip, 10**6)
    try:
        run()
    except errors.ReadError:
        n_raised += 1
    arm(0, 0, 0)
    wrong += [skip for _ in range(2) if run() != expected]
print(json.dumps({"wrong": wrong, "n_raised": n_raised}))
"""
)


@pytest.mark.parametrize("name", ["dense_untied", "dense_gemma3", "dense_looped", *NAMES[1:]])
def test_nothing_of_a_failed_batch_stays_in_the_context(tiny: Tiny, faults: Path, name: str) -> None:
    result = run_python(EVERYWHERE, tiny(name), preload=faults).require()
    assert result["n_raised"] > 3
    assert result["wrong"] == []


TRANSIENT = (
    SETUP
    + """
llm = build()
expected = ask(llm)
texts = {}
for name, mode in (("short", SHORT), ("interrupted", EINTR)):
    llm.reset()
    arm(mode, 2, 25)
    texts[name] = ask(llm)
    texts[name + "_n"] = count()
arm(0, 0, 0)
print(json.dumps({"expected": expected, **texts}))
"""
)


@pytest.mark.parametrize("name", ["dense_untied", "moe_qwen3"])
def test_short_and_interrupted_reads_are_continued(tiny: Tiny, faults: Path, name: str) -> None:
    result = run_python(TRANSIENT, tiny(name), preload=faults).require()
    for kind in ("short", "interrupted"):
        assert result[kind + "_n"] > 0
        assert result[kind] == result["expected"]


LOADING = (
    SETUP
    + """
arm(EIO, int(sys.argv[2]), 10**6)
try:
    build().close()
    raised = None
except errors.LeanStreamError as error:
    raised = kinds(error)
n_faults = count()
arm(0, 0, 0)
print(json.dumps({"raised": raised, "n_faults": n_faults, "after": ask(build())}))
"""
)


@pytest.mark.parametrize("n_skip", [0, 3, 20])
def test_failed_read_while_loading(tiny: Tiny, faults: Path, n_skip: int) -> None:
    result = run_python(LOADING, tiny("moe_dense_lead"), str(n_skip), preload=faults).require()
    if result["n_faults"]:
        assert result["raised"] is not None and "LeanStreamError" in result["raised"]
    assert result["after"]


CONCURRENT = (
    SETUP
    + """
from concurrent.futures import ThreadPoolExecutor
first, second = build(), build()
expected = ask(first)
arm(EIO, 30, 10**6)
def attempt(llm):
    try:
        return ask(llm, n=40)
    except errors.LeanStreamError as error:
        return kinds(error)
with ThreadPoolExecutor(2) as pool:
    outcomes = list(pool.map(attempt, (first, second)))
arm(0, 0, 0)
print(json.dumps({"expected": expected, "outcomes": outcomes, "after": [ask(first), ask(second)]}))
"""
)


def test_two_models_fail_and_recover_together(tiny: Tiny, faults: Path) -> None:
    result = run_python(CONCURRENT, tiny("moe_qwen3"), preload=faults).require()
    for outcome in result["outcomes"]:
        assert isinstance(outcome, list) and "ReadError" in outcome
    assert result["after"] == [result["expected"]] * 2
