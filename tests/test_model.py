"""model.py: the class is a drop-in, its own settings are checked, and it cleans up after itself."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import CONTEXT, run_python, streamed, unstreamed

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]
PROMPT = "the quick brown fox jumps over the lazy dog"


def text(llm: Any, n: int = 12, **settings: Any) -> str:
    return llm(PROMPT, **{"max_tokens": n, "temperature": 0, **settings})["choices"][0]["text"]


# ---- drop-in --------------------------------------------------------------------------------------------------------


def test_names_and_signatures_are_a_superset_of_the_parents() -> None:
    import llama_cpp

    import leanstream_gguf

    ours, parent = leanstream_gguf.Llama, llama_cpp.Llama
    assert issubclass(ours, parent)
    assert set(dir(parent)) <= set(dir(ours))
    for name, member in inspect.getmembers(parent, callable):
        if name.startswith("__") and name not in ("__init__", "__call__"):
            continue
        expected, found = inspect.signature(member), inspect.signature(getattr(ours, name))
        for parameter in expected.parameters.values():
            other = found.parameters[parameter.name]
            assert (other.kind, other.default) == (parameter.kind, parameter.default), f"{name}({parameter.name})"
    added = set(inspect.signature(ours).parameters) - set(inspect.signature(parent).parameters)
    assert added == {"memory_budget", "device_budget", "stream"}


def test_without_a_budget_it_is_the_parent(tiny: Tiny) -> None:
    import leanstream_gguf
    from leanstream_gguf import StateError

    path = str(tiny("moe_qwen3"))
    with leanstream_gguf.Llama(path, **CONTEXT, verbose=False) as llm:
        assert not llm.stream.active
        with pytest.raises(StateError, match="memory_budget"):
            llm.stream.stats()
        assert llm.context_params.n_outputs_max == 0
        assert len(llm.scores) == CONTEXT["n_batch"]
        with unstreamed(Path(path)) as plain:
            assert text(llm) == text(plain)


def test_vocab_only_loads_no_weights(tiny: Tiny) -> None:
    import leanstream_gguf

    with leanstream_gguf.Llama(str(tiny("dense_untied")), memory_budget="min", vocab_only=True, verbose=False) as llm:
        assert llm.tokenize(b"the quick")
        assert not llm.stream.active


@pytest.mark.parametrize("name", ["dense_untied", "moe_qwen3"])
def test_pickle_keeps_budget_and_output(tiny: Tiny, name: str) -> None:
    from leanstream_gguf import StreamConfig

    config = StreamConfig(policy="lfu", policy_params={"half_life": 100})
    with streamed(tiny(name), "min", stream=config, logits_all=False) as llm, pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.stream.active
        assert (copy.stream.config, str(copy.stream.budget)) == (config, "min")
        assert copy.context_params.n_ubatch == llm.context_params.n_ubatch
        assert text(copy) == text(llm)


def test_from_pretrained_passes_our_arguments_on(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    import leanstream_gguf

    source = tiny("moe_qwen3")
    hub = types.ModuleType("huggingface_hub")
    hub.utils = types.ModuleType("huggingface_hub.utils")  # type: ignore[attr-defined]
    hub.utils.validate_repo_id = lambda name: None
    hub.hf_hub_download = lambda **wanted: str(source)  # type: ignore[attr-defined]
    hub.HfFileSystem = lambda: types.SimpleNamespace(ls=lambda repo, recursive: [f"{repo}/model.gguf"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", hub.utils)
    settings = {"n_ctx": 128, "verbose": False, "memory_budget": "min"}
    with leanstream_gguf.Llama.from_pretrained("some/repo", "model.gguf", **settings) as llm:
        assert isinstance(llm, leanstream_gguf.Llama)
        assert llm.stream.active


def test_chat_embeddings_and_saved_states_work(tiny: Tiny) -> None:
    with streamed(tiny("dense_untied"), "min", logits_all=False) as llm:
        reply = llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=4)
        assert reply["choices"][0]["message"]["role"] == "assistant"
        expected = text(llm)
        state = llm.save_state()
        llm.load_state(state)
        assert len(llm.scores) == 1
        assert text(llm) == expected
    with streamed(tiny("dense_untied"), "min", logits_all=False, embedding=True) as llm:
        assert len(llm.embed("the quick brown fox")) > 0


def test_logprobs_match(tiny: Tiny) -> None:
    with unstreamed(tiny("moe_qwen3")) as plain, streamed(tiny("moe_qwen3"), "min") as llm:
        found, expected = (m(PROMPT, max_tokens=4, temperature=0, logprobs=3)["choices"][0]["logprobs"] for m in (llm, plain))
        assert found == expected


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "word"),
    [
        ({"memory_budget": "lots"}, "ArgumentError", "memory_budget"),
        ({"memory_budget": 0}, "ArgumentError", "memory_budget"),
        ({"memory_budget": "1MiB"}, "BudgetError", "at least"),
        ({"memory_budget": "min", "stream": {"policy": "lru"}}, "ArgumentError", "StreamConfig"),
        ({"memory_budget": "min", "lora_path": "adapter.gguf"}, "UnsupportedError", "LoRA"),
        ({"memory_budget": "min", "lora_base": "base.gguf"}, "UnsupportedError", "LoRA"),
        ({"memory_budget": "min", "type_v": 2}, "ArgumentError", "context settings"),
        ({"memory_budget": "min", "kv_overrides": {"a": object()}}, "ValueError", "Unknown value type"),
    ],
)
def test_refused_with_a_typed_error(tiny: Tiny, settings: dict[str, Any], kind: str, word: str) -> None:
    import leanstream_gguf

    with pytest.raises(ValueError, match=word) as caught:
        leanstream_gguf.Llama(str(tiny("dense_untied")), verbose=False, **settings)
    assert kind in [cls.__name__ for cls in type(caught.value).__mro__]


def test_use_mlock_is_ignored_with_a_word(tiny: Tiny) -> None:
    from leanstream_gguf import LeanStreamWarning

    with pytest.warns(LeanStreamWarning, match="use_mlock"):
        streamed(tiny("dense_untied"), "min", use_mlock=True).close()


def test_budget_error_names_the_minimum_and_it_works(tiny: Tiny) -> None:
    from leanstream_gguf import BudgetError

    with pytest.raises(BudgetError) as caught:
        streamed(tiny("moe_qwen3"), "1MiB")
    assert caught.value.used == 1 << 20
    assert caught.value.limit is not None
    streamed(tiny("moe_qwen3"), caught.value.limit + (1 << 20)).close()


def test_context_defaults_do_not_depend_on_the_budget(tiny: Tiny) -> None:
    import leanstream_gguf

    found = set()
    for budget in ("min", "full", "auto"):
        with leanstream_gguf.Llama(str(tiny("dense_untied")), memory_budget=budget, verbose=False) as llm:
            found.add((llm.n_ctx(), llm.n_batch, llm.context_params.n_ubatch, llm.context_params.n_outputs_max))
    assert len(found) == 1


def test_more_outputs_than_reserved_is_an_error_and_no_abort(tiny: Tiny) -> None:
    from leanstream_gguf import UnsupportedError

    with streamed(tiny("dense_untied"), "min", logits_all=False) as llm:
        llm._ctx._n_outputs_max = 4
        llm._batch.set_batch(batch=[11, 12, 13, 14, 15, 16], n_past=0, logits_all=True)
        with pytest.raises(UnsupportedError, match="logits_all"):
            llm._ctx.decode(llm._batch)
        assert text(llm)


# ---- live settings --------------------------------------------------------------------------------------------------


def test_live_handle(tiny: Tiny) -> None:
    from leanstream_gguf import ArgumentError

    with streamed(tiny("moe_qwen3"), "min", logits_all=False) as llm:
        before = text(llm)
        stats = llm.stream.stats()
        assert stats.n_tokens > 0 and stats.read_bytes > 0 and stats.hits + stats.misses > 0
        assert "leanstream_read_bytes_total" in stats.to_prometheus({"model": "toy"})
        llm.stream.set_budget("full")
        assert str(llm.stream.budget) == "full"
        assert llm.stream.plan()["mode"] == "resident"
        llm.reset()
        llm.stream.reset_stats()
        assert llm.stream.stats().n_tokens == 0
        assert text(llm) == before
        llm.stream.set_budget("min")
        assert llm.stream.plan()["mode"] != "resident"
        assert llm.stream.memory().total_bytes <= llm.stream.plan()["minimum_budget_bytes"] + (1 << 20)
        llm.stream.set_budget("full", cache="50%")
        assert llm.stream.plan()["mode"] == "experts"
        for wrong in (
            lambda: llm.stream.set_policy("arc"),
            lambda: llm.stream.pin(99, [0]),
            lambda: llm.stream.pin(0, [999]),
            lambda: llm.stream.pin(0, [1 << 40]),
            lambda: llm.stream.pin(0, ["first"]),
            lambda: llm.stream.set_budget(1 << 64),
        ):
            with pytest.raises(ArgumentError):
                wrong()


# ---- life -----------------------------------------------------------------------------------------------------------


def test_close_is_idempotent_and_what_follows_is_an_error(tiny: Tiny) -> None:
    from leanstream_gguf import StateError

    llm = streamed(tiny("moe_qwen3"), "min")
    llm.close()
    llm.close()
    assert not llm.stream.active
    with pytest.raises(StateError, match="closed"):
        llm.stream.stats()


@pytest.mark.parametrize("budget", ["min", None])
def test_use_after_close_is_an_error_and_no_crash(budget: str | None, tiny: Tiny) -> None:
    code = """
import json, sys, leanstream_gguf
llm = leanstream_gguf.Llama(sys.argv[1], memory_budget=sys.argv[2] or None, n_ctx=64, verbose=False)
llm.close()
found = []
calls = llm, llm.tokenize, lambda _: llm.eval([1]), lambda _: llm.n_ctx(), lambda _: llm.save_state(), lambda _: llm.token_eos()
for call in calls:
    try:
        call(b"hi")
    except leanstream_gguf.StateError as error:
        found.append(str(error))
print(json.dumps(found))
"""
    found = run_python(code, tiny("moe_qwen3"), budget or "").require()
    assert len(found) == 6
    assert all("closed" in message for message in found)


def test_closed_while_another_thread_generates(tiny: Tiny) -> None:
    code = """
import json, sys, threading, leanstream_gguf
llm = leanstream_gguf.Llama(sys.argv[1], memory_budget="min", n_ctx=2048, verbose=False)
found, started = [], threading.Event()

def generate():
    try:
        for _ in llm.generate(llm.tokenize(b"the quick"), temp=0):
            started.set()
            if llm.n_tokens > 2000:
                llm.reset()
    except leanstream_gguf.StateError as error:
        found.append(str(error))

thread = threading.Thread(target=generate)
thread.start()
started.wait()
llm.close()
thread.join(60)
print(json.dumps(found))
"""
    assert len(run_python(code, tiny("moe_qwen3")).require()) == 1  # a StateError, wherever the thread was


def test_second_thread_is_refused(tiny: Tiny) -> None:
    from leanstream_gguf import StateError

    with streamed(tiny("moe_qwen3"), "min") as llm:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with llm._ctx._busy:
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait(60)
        with pytest.raises(StateError, match="another thread"):
            llm.eval([1, 2])
        leave.set()
        thread.join()
        assert text(llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_neither_uses_nor_frees_the_model(tiny: Tiny) -> None:
    code = """
import json, os, sys, leanstream_gguf
llm = leanstream_gguf.Llama(sys.argv[1], memory_budget="min", n_ctx=64, verbose=False)
before = llm("the quick", max_tokens=4, temperature=0)["choices"][0]["text"]
child = os.fork()
if child == 0:
    try:
        llm("the quick brown", max_tokens=4)
    except leanstream_gguf.StateError:
        llm.close()
        sys.exit(7)
    os._exit(8)
status = os.waitpid(child, 0)[1]
after = llm("the quick", max_tokens=4, temperature=0)["choices"][0]["text"]
llm.close()
print(json.dumps({"status": os.waitstatus_to_exitcode(status), "same": before == after}))
"""
    assert run_python(code, tiny("moe_qwen3")).require() == {"status": 7, "same": True}


def test_budget_below_the_context_is_refused_before_the_context_is_allocated(tiny: Tiny) -> None:
    code = """
import json, sys, leanstream_gguf
from leanstream_gguf import probe
before = probe.resident_bytes()
try:
    leanstream_gguf.Llama(sys.argv[1], memory_budget="200MiB", n_ctx=1 << 20, verbose=False)
except leanstream_gguf.BudgetError as error:
    print(json.dumps({"limit": error.limit, "grown": probe.peak_resident_bytes() - before}))
"""
    from leanstream_gguf import probe

    found = run_python(code, tiny("dense_untied")).require()
    assert found["limit"] > 500 << 20
    assert found["grown"] < (400 if probe.gpus() else 200) << 20  # a GPU's driver takes its part


def test_large_context_that_fits_loads(tiny: Tiny) -> None:
    with streamed(tiny("dense_untied"), "min") as llm:
        expected = text(llm)
    with streamed(tiny("dense_untied"), "900MiB", n_ctx=1 << 17, logits_all=False) as llm:
        assert llm.stream.memory().kv_bytes > 225 << 20  # over a quarter of the budget: tried without allocating first
        assert text(llm) == expected


@pytest.mark.parametrize("wrong", [{"n_batch": -1}, {"n_ctx": 1 << 32}, {"n_threads": 100_000}, {"n_ubatch": "many"}, {"type_k": 99}])
def test_context_settings_are_checked(wrong: dict[str, Any], tiny: Tiny) -> None:
    from leanstream_gguf import ArgumentError

    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        streamed(tiny("dense_untied"), "min", **wrong)


def test_failed_construction_leaves_nothing_behind(tiny: Tiny) -> None:
    from leanstream_gguf import LeanStreamError, runtime

    for _ in range(3):
        with pytest.raises(LeanStreamError):
            streamed(tiny("moe_qwen3"), "1MiB")
    gc.collect()
    assert runtime._n_live == 0
    with streamed(tiny("moe_qwen3"), "min") as first, streamed(tiny("dense_untied"), "min") as second:
        assert first.stream.memory().baseline_bytes > second.stream.memory().baseline_bytes


def test_deleted_without_close(tiny: Tiny) -> None:
    from leanstream_gguf import runtime

    llm = streamed(tiny("moe_qwen3"), "min")
    llm.itself = llm  # only the collector finds it
    del llm
    gc.collect()
    assert runtime._n_live == 0


def test_closed_while_statistics_are_read(tiny: Tiny) -> None:
    from leanstream_gguf import StateError

    llm = streamed(tiny("moe_qwen3"), "min")
    ended = threading.Event()

    def watch() -> None:
        try:
            while True:
                llm.stream.stats()
        except StateError:
            ended.set()

    thread = threading.Thread(target=watch)
    thread.start()
    llm.close()
    thread.join(timeout=30)
    assert ended.is_set()


def test_nothing_is_printed_at_exit(tiny: Tiny) -> None:
    code = """
import sys, leanstream_gguf
llm = leanstream_gguf.Llama(sys.argv[1], memory_budget="min", n_ctx=64, verbose=False)
llm("the", max_tokens=2)
print("{}")
"""
    outcome = run_python(code, tiny("moe_qwen3"))
    assert (outcome.returncode, outcome.value) == (0, {})
    assert "Traceback" not in outcome.stderr and "Exception" not in outcome.stderr


def test_importing_after_llama_cpp_is_a_clear_error(tmp_path: Path) -> None:
    code = """
import sys, types
fake = types.ModuleType("llama_cpp.llama_cpp"); fake._base_path = "/elsewhere/lib"
sys.modules["llama_cpp.llama_cpp"] = fake
try:
    import leanstream_gguf
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert "LibraryError" in done.stdout and "before llama_cpp" in done.stdout


FORGOTTEN = """
import sys
from leanstream_gguf.server import llama
from leanstream_gguf.server.settings import ModelSettings
made = []
llama.load(ModelSettings(model=sys.argv[1], memory_budget="min", n_ctx=64), made.append)
handle = made[0]._handle  # with this name the interpreter finalizes the handle's memory before the context's, unless they say no
print("{}")
"""


def test_a_model_that_nobody_closed_does_not_abort_at_the_end_of_the_interpreter(tiny: Tiny) -> None:
    assert run_python(FORGOTTEN, tiny("moe_qwen3")).require() == {}


def test_what_llama_cpp_still_uses_outlives_its_handle(tiny: Tiny) -> None:
    llm = streamed(tiny("moe_qwen3"), "min")
    llm._handle.close()  # as a garbage collector might, before the context is freed
    assert llm._handle.closed and not llm.stream.active
    llm._handle.close()
    llm.close()
    assert llm._handle._held is None
