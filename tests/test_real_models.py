"""Trained models, streamed against unstreamed through `leanstream verify`: a 512-token prompt and 64 generated tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.native, pytest.mark.model, pytest.mark.slow, pytest.mark.usefixtures("native")]

# n_ubatch and n_threads change the bits of llama.cpp itself; both sides of a comparison get the same.
SHAPES = {"ub512-2threads": ("512", "2"), "ub64-1thread": ("64", "1")}


def leanstream(*arguments: str | Path) -> dict[str, Any]:
    """The JSON that a command prints; a failure shows what it said."""
    command = [sys.executable, "-m", "leanstream_gguf", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def verify(path: Path, shape: str, *memory: str) -> dict[str, Any]:
    ubatch, threads = SHAPES[shape]
    settings = ("--ctx", "1024", "--ubatch", ubatch, "--threads", threads)
    result = leanstream("verify", "-m", path, "--prompt-tokens", "512", "-n", "64", *settings, *memory)
    assert result["bit_identical"] is True and result["max_abs_diff"] == 0
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", ["100%", "50%", "25%", "min"])
def test_zoo_moe_at_every_expert_cache(zoo_moe: Path, cache: str, shape: str) -> None:
    verify(zoo_moe, shape, "--memory", "full", "--cache", cache)


@pytest.mark.parametrize("shape", SHAPES)
def test_zoo_moe_at_the_minimum(zoo_moe: Path, shape: str) -> None:
    verify(zoo_moe, shape, "--memory", "min")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory", ["full", "half", "min"])
@pytest.mark.parametrize("model", ["demo_model", "gemma_model", "zoo_relu2"])
def test_dense_with_all_half_and_none_of_the_layers_pinned(
    request: pytest.FixtureRequest, model: str, memory: str, shape: str
) -> None:
    path: Path = request.getfixturevalue(model)
    plan = verify(path, shape, "--memory", "full" if memory == "full" else "min")["plan"]
    if memory == "half":
        middle = (plan["minimum_budget_bytes"] + plan["full_budget_bytes"]) // 2
        plan = verify(path, shape, "--memory", str(middle))["plan"]
    share = plan["dense"]["pinned_bytes"] / plan["dense"]["total_bytes"]
    assert {"full": share == 1, "half": 0.3 < share < 0.7, "min": share < 0.1}[memory], share
