"""A GPU, or Mesa's software driver in its place: device budgets change no bit, and what they say of themselves adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import assert_same_bytes, logits, sample_tokens, streamed, unstreamed

pytestmark = [pytest.mark.native, pytest.mark.device, pytest.mark.usefixtures("device")]

Logits = npt.NDArray[np.single]
N_PROMPT, N_TOKENS = 40, 52
TOKENS = sample_tokens(N_TOKENS, 512)
ON_DEVICE: dict[str, Any] = {"n_gpu_layers": -1, "op_offload": False}  # streamed models keep what the host computes there
MiB = 1 << 20


@cache
def resident(path: Path) -> Logits:
    """Logits of the whole model on the device."""
    with unstreamed(path, **ON_DEVICE) as llm:
        return logits(llm, TOKENS, N_PROMPT)


@cache
def device_range(path: Path) -> tuple[int, int]:
    """The least device memory that works, and all that the model can use."""
    with streamed(path, "full", device_budget="auto") as llm:
        device = llm.stream.plan()["device"]
        return device["minimum_budget_bytes"], device["full_budget_bytes"]


def divergence(expected: Logits, got: Logits) -> float:
    """Mean KL in nats."""

    def log_softmax(rows: Logits) -> npt.NDArray[np.double]:
        wide = rows.astype(np.double)
        wide -= wide.max(axis=1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def run_json(*arguments: str | int | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "leanstream_gguf", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_three_budgets(path: Path) -> None:
    low, high = device_range(path)
    assert low < high
    for budget in (low, (low + high) // 2, high):
        with streamed(path, "full", device_budget=budget) as llm:
            assert_same_bytes(logits(llm, TOKENS, N_PROMPT), resident(path))
            stats, device = llm.stream.stats(), llm.stream.plan()["device"]
            assert stats.device_used_bytes == device["used_bytes"] <= budget == stats.device_budget_bytes
            assert (stats.device_copied_bytes > 0) == (stats.device_misses > 0) == (budget < high)
            assert stats.device_host_experts == 0


@pytest.mark.parametrize("name", ["moe_qwen3", "dense_untied"])
def test_three_device_budgets_give_the_bytes_of_the_whole_model(tiny: Callable[..., Path], name: str) -> None:
    check_three_budgets(tiny(name))


@pytest.mark.model
def test_zoo_moe_at_three_device_budgets(zoo_moe: Path) -> None:
    check_three_budgets(zoo_moe)


@pytest.mark.model
def test_zoo_moe_with_little_of_both_memories(zoo_moe: Path) -> None:
    low, _ = device_range(zoo_moe)
    with streamed(zoo_moe, "min", device_budget=low) as llm:
        assert_same_bytes(logits(llm, TOKENS, N_PROMPT), resident(zoo_moe))
        assert llm.stream.stats().read_bytes > 0


KL_TO_HOST = 0.05  # rounding: 0.021 with Mesa's software driver over these random tokens


@pytest.mark.model
def test_zoo_moe_is_close_to_the_host(zoo_moe: Path) -> None:
    with unstreamed(zoo_moe, op_offload=False) as llm:
        host = logits(llm, TOKENS, N_PROMPT)
    assert 0 < divergence(host, resident(zoo_moe)) < KL_TO_HOST


@pytest.mark.model
@pytest.mark.parametrize("host_cost", [0, 1])
def test_zoo_moe_with_experts_computed_on_the_host(zoo_moe: Path, host_cost: float) -> None:
    from leanstream_gguf import StreamConfig

    low, high = device_range(zoo_moe)
    config = StreamConfig(device_exact=False, host_cost=host_cost)
    with streamed(zoo_moe, "full", device_budget=(low + high) // 2, stream=config) as llm:
        got = logits(llm, TOKENS, N_PROMPT)
        stats, device = llm.stream.stats(), llm.stream.plan()["device"]
        assert device["host_cost"] == host_cost if host_cost else device["host_cost"] > 0
        assert stats.device_host_experts > 0 or device["host_cost"] > 2, "nothing was computed on the host"
        assert divergence(resident(zoo_moe), got) < KL_TO_HOST
        assert got[:N_PROMPT].tobytes() == resident(zoo_moe)[:N_PROMPT].tobytes(), "a prompt's experts are copied"


def test_the_command_and_the_plan_speak_of_both_budgets(tiny: Callable[..., Path]) -> None:
    path = tiny("moe_qwen3")
    context = ("--ctx", 256, "--ubatch", 64)
    plan = run_json("plan", "-m", path, "--device-memory", "auto", "--memory", "full", "--no-speed", *context)
    budget = plan["device"]["minimum_budget_bytes"]
    plan = run_json("plan", "-m", path, "--device-memory", budget, "--memory", "full", "--no-speed", *context)
    assert plan["device"]["used_bytes"] <= plan["device"]["budget_bytes"] == budget < plan["device"]["full_budget_bytes"]
    done = run_json("run", "-m", path, "-p", "the quick", "-n", 4, "--device-memory", budget, "--memory", "2GiB", *context)
    assert (done["device"]["budget_bytes"], done["budget_bytes"]) == (budget, 2 << 30)
    assert done["device"]["used_bytes"] <= budget and done["device"]["copied_bytes"] > 0 == done["device"]["host_experts"]


def test_doctor_names_the_device() -> None:
    from leanstream_gguf import probe

    assert probe.gpus()[0]["name"] in json.dumps(run_json("doctor", "--no-drive"))


def test_a_device_budget_that_is_too_small(tiny: Callable[..., Path]) -> None:
    from leanstream_gguf import errors

    low, _ = device_range(tiny("moe_qwen3"))
    with (
        pytest.raises(errors.BudgetError, match="device budget") as caught,
        streamed(tiny("moe_qwen3"), "full", device_budget=low // 2),
    ):
        pass
    assert caught.value.limit == low


def test_the_server_takes_a_device_budget(tiny: Callable[..., Path]) -> None:
    from serving import serving

    path = tiny("moe_qwen3")
    _, high = device_range(path)
    with serving(path, device_budget=high + MiB, n_ctx=256) as running:
        found = running.http.get("/v1/stream/config").json()["device_budget"]
        assert (found["requested"], found["bytes"]) == (str(high + MiB), high + MiB)
        assert found["used_bytes"] <= high + MiB
