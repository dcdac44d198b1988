"""Trained models, streamed against unstreamed through `leanstream verify`: a 512-token prompt and 64 generated tokens."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import memcap
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


def can_make_groups() -> bool:
    """Whether this user may create a memory cgroup."""
    try:
        with memcap.MemoryGroup(1 << 30):
            return True
    except (OSError, RuntimeError):
        return False


@pytest.mark.skipif(not can_make_groups(), reason="needs the right to create memory cgroups")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["minimum", "half", "full"])
@pytest.mark.parametrize("model", ["zoo_moe", "zoo_relu2"])
def test_answer_in_a_cgroup_of_exactly_the_budget(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, share: float
) -> None:
    path: Path = request.getfixturevalue(model)
    plan = leanstream("plan", "-m", path, "--ctx", "1024", "--memory", "min", "--no-speed")
    low, high = plan["minimum_budget_bytes"], plan["full_budget_bytes"]
    budget = int(low * 1.02 + share * (high - low))
    prompt = "Reading a file in parts keeps memory small. " * 50
    command = [sys.executable, "-m", "leanstream_gguf", "run", "-m", str(path), "-p", prompt, "-n", "64", "--ctx", "1024"]
    out = tmp_path / "out.json"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    script = f"exec {shlex.join(command)} --memory {budget} --json > {out}"
    report = memcap.run(["sh", "-c", script], budget, [])
    assert report["exit_code"] == 0 and report["oom_kills"] == 0, report
    assert report["peak_owned_bytes"] <= budget, report
    assert json.loads(out.read_text())["peak_rss_bytes"] <= budget
