"""Streaming changes no bit: every toy model, budget, policy, reader and batch shape against the unstreamed model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import assert_same_bytes, logits, run_python, sample_tokens, streamed, unstreamed
from toygguf.models import MODELS

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("native"),
    pytest.mark.filterwarnings("ignore:the expert cache"),  # too small on purpose
]

Tiny = Callable[..., Path]
Logits = npt.NDArray[np.single]

N_PROMPT, N_TOKENS = 40, 56
TOKENS = sample_tokens(N_TOKENS, 512)
MOE = [name for name in MODELS if name.startswith("moe_")]

# Batch shapes and thread counts change the bits of llama.cpp itself, so each has a reference of its own.
SHAPES = {
    "1thread-ub64": {"n_threads": 1, "n_threads_batch": 1, "n_ubatch": 64},
    "2threads-ub8": {"n_threads": 2, "n_threads_batch": 2, "n_ubatch": 8},
}
# Everything that must not change a bit, varied together.
READERS: dict[str, dict[str, Any]] = {
    "lru-pread1": {"policy": "lru", "io_backend": "pread", "io_threads": 1},
    "lfu-pread4": {"policy": "lfu", "io_backend": "pread", "io_threads": 4},
    "slru-auto": {"policy": "slru", "io_backend": "auto"},
    "small-chunks-buffered": {"chunk_bytes": 4096, "direct_io": False, "ring_slots": 2},
}


@cache
def reference(path: Path, shape: str) -> Logits:
    """Logits of the unstreamed model, computed once a session."""
    with unstreamed(path, **SHAPES[shape]) as llm:
        return logits(llm, TOKENS, N_PROMPT)


def stream_config(reader: str) -> Any:
    from leanstream_gguf import StreamConfig

    return StreamConfig(**READERS[reader])


def budget_range(llm: Any) -> tuple[int, int]:
    """The smallest budget and the one from which on everything is resident."""
    plan = llm.stream.plan()
    return plan["minimum_budget_bytes"], plan["full_budget_bytes"]


# Every reader meets every model, and each batch shape half of them: the full cross adds time and no new pair.
@pytest.mark.parametrize(("reader", "shape"), [(r, list(SHAPES)[i % 2]) for i, r in enumerate(READERS)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_budget(tiny: Tiny, name: str, reader: str, shape: str) -> None:
    path = tiny(name)
    expected = reference(path, shape)
    with streamed(path, "min", stream=stream_config(reader), **SHAPES[shape]) as llm:
        low, high = budget_range(llm)
        assert low < high or name == "dense_looped"  # which holds nearly all its weights from first to last use
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)
        assert llm.stream.stats().read_bytes > 0, "nothing was streamed at the minimum budget"
        for budget in ((low + high) // 2, high, low):
            llm.stream.set_budget(budget)
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["dense_tied", "dense_untied", "dense_fused"])
def test_repacked_weights_give_the_bits_of_stock_s_default_flags(tiny: Tiny, name: str, shape: str) -> None:
    import llama_cpp

    from leanstream_gguf import StreamConfig

    if b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info():
        pytest.skip("stock prefers AMX's kernels to its repacked ones here")
    path = tiny(name)
    with unstreamed(path, repacked=True, **SHAPES[shape]) as llm:
        expected = logits(llm, TOKENS, N_PROMPT)
    assert expected.tobytes() != reference(path, shape).tobytes(), "nothing of this model is repacked"
    with streamed(path, "full", stream=StreamConfig(repack=True), **SHAPES[shape]) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)
        low, _ = budget_range(llm)
        llm.stream.set_budget(low)  # nothing may stream, so it is nearly the same budget
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), expected)
        assert llm.stream.plan()["dense"]["streamed_bytes"] == 0


def test_experts_are_not_repacked(tiny: Tiny) -> None:
    from leanstream_gguf import StreamConfig, UnsupportedError

    with (
        pytest.raises(UnsupportedError, match="leave out repack"),
        streamed(tiny("moe_qwen3"), "full", stream=StreamConfig(repack=True)),
    ):
        pass


@pytest.mark.parametrize("name", ["dense_tied", "moe_qwen3", "moe_dense_lead"])
@pytest.mark.parametrize("budget", ["middle", "full"])
def test_logits_of_a_model_built_with_that_budget(tiny: Tiny, name: str, budget: str) -> None:
    path, shape = tiny(name), "1thread-ub64"
    # A first model carries the process's own memory, so that the numbers of one further model hold for the next.
    with streamed(path, "min", **SHAPES[shape]):
        with streamed(path, "min", **SHAPES[shape]) as llm:
            low, high = budget_range(llm)
        with streamed(path, "full" if budget == "full" else (low + high) // 2, **SHAPES[shape]) as llm:
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(path, shape))


@pytest.mark.parametrize("name", ["moe_qwen3", "moe_bias", "moe_merged"])
@pytest.mark.parametrize("share", ["min", "25%", "50%", "100%"])
def test_logits_at_every_expert_cache(tiny: Tiny, name: str, share: str) -> None:
    from leanstream_gguf import StreamConfig

    path, shape = tiny(name), "2threads-ub8"
    with streamed(path, "full", stream=StreamConfig(cache_budget=share), **SHAPES[shape]) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(path, shape))
        stats = llm.stream.stats()
        assert stats.hits + stats.misses > 0


@pytest.mark.parametrize("name", ["dense_untied", "moe_qwen3", "moe_merged"])
def test_split_set_gives_the_bytes_of_the_whole_file(tiny: Tiny, name: str) -> None:
    shape = "1thread-ub64"
    with streamed(tiny(name, 3), "min", **SHAPES[shape]) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(tiny(name), shape))


@pytest.mark.parametrize("name", MOE)
def test_pinned_experts_change_nothing(tiny: Tiny, name: str) -> None:
    path, shape = tiny(name), "1thread-ub64"
    last = MODELS[name]().dims.n_layer - 1
    with streamed(path, "min", **SHAPES[shape]) as llm:
        low, high = budget_range(llm)
        llm.stream.set_budget((low + high) // 2)
        llm.stream.pin(last, [0, 1])
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(path, shape))
        llm.stream.pin(last, [])
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(path, shape))


def test_policy_changed_while_running(tiny: Tiny) -> None:
    path, shape = tiny("moe_llama"), "1thread-ub64"
    with streamed(path, "min", **SHAPES[shape]) as llm:
        for policy, params in (("lfu", {"half_life": 64}), ("slru", {"protected_share": 0.5}), ("lru", {})):
            llm.stream.set_policy(policy, **params)
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(path, shape))


# ---- several at once ----------------------------------------------------------------------------------------------


def second_context(llm: Any) -> Any:
    """Another llama_context on the model of `llm`, with the same settings."""
    import llama_cpp

    context = llama_cpp.llama_init_from_model(llm.model, llm.context_params)
    assert context, "llama_init_from_model failed"
    return context


def decode_one_by_one(context: Any, n_vocab: int, tokens: list[int]) -> Logits:
    """Logits [n_tokens, n_vocab] of single-token decodes through the C API."""
    import llama_cpp

    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    rows = []
    for token in tokens:
        array = (llama_cpp.llama_token * 1)(token)  # the batch only points to it
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, 1)) == 0
        rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(n_vocab,)).copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", ["moe_qwen3", "moe_llama", "moe_dense_lead", "dense_tied"])
def test_two_contexts_of_one_model_at_the_minimum(tiny: Tiny, name: str) -> None:
    import llama_cpp

    tokens = [sample_tokens(48, 512, seed) for seed in (1, 2)]
    with unstreamed(tiny(name)) as llm:
        expected = [decode_one_by_one(llm.ctx, llm.n_vocab(), t) for t in tokens]
    with streamed(tiny(name), "full") as llm:
        contexts = [llm.ctx, second_context(llm)]
        try:
            for context in contexts:
                decode_one_by_one(context, llm.n_vocab(), [50])
            llm.stream.set_budget("min")  # now that both contexts have been charged
            for _ in range(3):
                with ThreadPoolExecutor(2) as pool:
                    jobs = [pool.submit(decode_one_by_one, c, llm.n_vocab(), t) for c, t in zip(contexts, tokens, strict=True)]
                    got = [job.result(timeout=120) for job in jobs]
                for i in range(2):
                    assert_same_bytes(got[i], expected[i])
        finally:
            llama_cpp.llama_free(contexts[1])


def test_two_streamed_models_and_a_plain_one_in_threads(tiny: Tiny) -> None:
    shape = "1thread-ub64"
    paths = [tiny("moe_qwen3"), tiny("dense_tied"), tiny("moe_bias")]
    expected = [reference(path, shape) for path in paths]
    builders = [lambda p: streamed(p, "min", **SHAPES[shape])] * 2 + [lambda p: unstreamed(p, **SHAPES[shape])]
    start = threading.Barrier(3, timeout=60)

    def work(i: int) -> list[Logits]:
        start.wait()
        with builders[i](paths[i]) as llm:
            return [logits(llm, TOKENS, N_PROMPT) for _ in range(4)]

    with ThreadPoolExecutor(3) as pool:
        for i, got in enumerate(pool.map(work, range(3), timeout=240)):
            for one in got:
                assert_same_bytes(one, expected[i])


LOADING_BESIDE = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import leanstream_gguf, llama_cpp

def plain():
    for _ in range(40):
        llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False, use_mmap=False).close()

def streamed():
    for _ in range(25):
        leanstream_gguf.Llama(sys.argv[1], n_ctx=64, memory_budget="min", verbose=False).close()

threads = [threading.Thread(target=f) for f in (plain, plain, streamed)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_ordinary_models_load_while_a_streamed_one_records_the_log(tiny: Tiny) -> None:
    # llama.cpp has one log callback for the process, and may be inside it when the recording ends
    assert run_python(LOADING_BESIDE, tiny("moe_qwen3")).returncode == 0


def test_models_built_and_closed_in_turn(tiny: Tiny) -> None:
    shape = "1thread-ub64"
    for name in ("moe_qwen3", "dense_tied", "moe_qwen3"):
        for _ in range(3):
            with streamed(tiny(name), "min", **SHAPES[shape]) as llm:
                assert_same_bytes(logits(llm, TOKENS, N_PROMPT), reference(tiny(name), shape))


# ---- changes while generating -------------------------------------------------------------------------------------


GENERATION: dict[str, Any] = {"max_tokens": 48, "temperature": 0.9, "seed": 3}


def generate(llm: Any) -> str:
    return str(llm("the quick brown fox", **GENERATION)["choices"][0]["text"])


def generate_chunks(llm: Any) -> Iterator[Any]:
    return iter(llm("the quick brown fox", stream=True, **GENERATION))


@pytest.mark.parametrize("name", ["dense_untied", "moe_qwen3", "moe_shared", "moe_dense_lead"])
def test_budget_changed_between_tokens(tiny: Tiny, name: str) -> None:
    # Chunks lose letters that are split between tokens, in llama_cpp too.
    with unstreamed(tiny(name), logits_all=False) as llm:
        expected = "".join(chunk["choices"][0]["text"] for chunk in generate_chunks(llm))
    with streamed(tiny(name), "min", logits_all=False) as llm:
        low, high = budget_range(llm)
        budgets = [high, low, (low + high) // 2, low, high]
        text = ""
        for i, chunk in enumerate(generate_chunks(llm)):
            llm.stream.set_budget(budgets[i % len(budgets)])
            text += chunk["choices"][0]["text"]
        assert text == expected


@pytest.mark.parametrize("name", ["dense_untied", "moe_qwen3", "moe_dense_lead"])
def test_budget_changed_from_another_thread(tiny: Tiny, name: str) -> None:
    with unstreamed(tiny(name), logits_all=False) as llm:
        expected = generate(llm)
    with streamed(tiny(name), "min", logits_all=False) as llm:
        low, high = budget_range(llm)
        stop = threading.Event()
        failures: list[BaseException] = []

        def change() -> None:
            try:
                while not stop.is_set():
                    for budget in (high, low, (low + high) // 2):
                        llm.stream.set_budget(budget)
            except BaseException as error:  # reported by the main thread
                failures.append(error)

        worker = threading.Thread(target=change)
        worker.start()
        try:
            texts = [generate(llm) for _ in range(4)]
        finally:
            stop.set()
            worker.join(timeout=60)
        assert not worker.is_alive() and not failures, failures
        assert texts == [expected] * 4


def test_budget_below_the_minimum_changes_nothing(tiny: Tiny) -> None:
    from leanstream_gguf import errors

    with streamed(tiny("moe_qwen3"), "min", logits_all=False) as llm:
        expected = generate(llm)
        low, _ = budget_range(llm)
        with pytest.raises(errors.BudgetError) as caught:
            llm.stream.set_budget(low // 2)
        assert caught.value.limit == pytest.approx(low, rel=0.02)
        assert llm.stream.plan()["budget_bytes"] >= low
        assert generate(llm) == expected


def test_generation_broken_off_leaves_a_clean_model(tiny: Tiny) -> None:
    with streamed(tiny("moe_qwen3"), "min", logits_all=False) as llm:
        expected = generate(llm)
        for i, _ in enumerate(llm("something else entirely", max_tokens=30, stream=True)):
            if i == 5:
                break
        assert generate(llm) == expected
