"""scripts/bench/soak.py, short: many clients at once, some of whom leave, do not make the server fail or grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soak

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

WORKLOAD: dict[str, Any] = {
    "settings": {"n_ctx": 256, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1},
    "clients": 16,
    "seconds": 10.0,
    "warm_up_seconds": 4.0,
    "max_tokens": 8,
    "abandon_every": 5,
    "bounds": {"errors": 0, "growth_bytes": 6 << 20},
}


def test_16_clients_for_a_few_seconds(tiny: Callable[..., Path]) -> None:
    with soak.server(tiny("moe_qwen3"), "min+50%", WORKLOAD["settings"]) as port:
        log = soak.run_clients(port, WORKLOAD)
        stats = soak.get(port, "/v1/stream/stats")
    report = soak.summary(log, WORKLOAD)
    assert report["met"], report
    assert report["answers"] >= 16 and set(report["time_to_first_token_s"]) == {"p50", "p95", "p99"}
    assert stats["totals"]["errors"] == 0 and stats["queue"] == {"waiting": 0, "running": 0}


def test_growth_and_errors_are_seen() -> None:
    log = soak.Log(first_token_s=[0.1], whole_s=[0.2])
    log.memory = [(float(second), 1000 + second * (1 << 20), 0) for second in range(30)]
    assert not soak.summary(log, WORKLOAD)["met"]
    log.memory = [(float(second), 1000, 0) for second in range(30)]
    assert soak.summary(log, WORKLOAD)["met"]
    log.errors["500"] += 1
    assert not soak.summary(log, WORKLOAD)["met"]
