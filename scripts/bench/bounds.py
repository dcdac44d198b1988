"""Judges a run against what its workload demands: one verdict a bound, always with the 95 % interval of a ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ratio

Run = dict[str, Any]  # {"variants": {name: {"build", "samples", "memory"}}, "drive": [bytes per second of each round]}
Verdict = dict[str, Any]


def _series(run: Run, variant: str, key: str) -> list[float]:
    return [float(sample[key]) for sample in run["variants"][variant]["samples"]]


def streamed_bytes(run: Run, variant: str) -> int:
    """Bytes of the model that this variant's plan does not keep in memory."""
    plan = run["variants"][variant]["build"]["plan"]
    experts = plan["experts"]
    missing = max(0, experts["total_bytes"] - experts["capacity_bytes"]) if experts["total_bytes"] else 0
    return int(plan["dense"]["streamed_bytes"]) + missing


def speed_ratio(run: Run, bound: dict[str, Any]) -> Verdict:
    """Speed of one variant over another's, round by round."""
    key = bound.get("metric", "tokens_per_second")
    measured = ratio.ratio(_series(run, bound["of"], key), _series(run, bound["over"], key))
    return ratio.verdict(measured, bound["at_least"])


def share_of_ceiling(run: Run, bound: dict[str, Any]) -> Verdict:
    """Speed over the limit: the slower of compute (the variant named) and streamed bytes at the drive's rate of that round."""
    n_bytes = streamed_bytes(run, bound["of"])
    compute = [1 / speed for speed in _series(run, bound["compute"], "tokens_per_second")]
    limits = [1 / max(seconds, n_bytes / rate) for seconds, rate in zip(compute, run["drive"], strict=True)]
    measured = ratio.ratio(_series(run, bound["of"], "tokens_per_second"), limits)
    extra = {"streamed_bytes": n_bytes, "limit_tokens_per_second": ratio.spread(limits)}
    return {**ratio.verdict(measured, bound["at_least"]), **extra}


def ratio_or_ceiling(run: Run, bound: dict[str, Any]) -> Verdict:
    """Faster than another variant, unless the limit itself is slower."""
    faster = speed_ratio(run, bound)
    limit = share_of_ceiling(run, {**bound, "at_least": 0.0})["limit_tokens_per_second"]["median"]
    other = ratio.spread(_series(run, bound["over"], "tokens_per_second"))["median"]
    return {**faster, "limit_is_slower": limit < other, "met": faster["met"] or limit < other}


def prefill_time(run: Run, bound: dict[str, Any]) -> Verdict:
    """Prefill seconds over the longer of the other variant's and one read of the streamed bytes."""
    n_bytes = streamed_bytes(run, bound["of"])
    others = _series(run, bound["over"], "seconds")
    limits = [max(seconds, n_bytes / rate) for seconds, rate in zip(others, run["drive"], strict=True)]
    measured = ratio.ratio(_series(run, bound["of"], "seconds"), limits)
    return {**ratio.verdict(measured, bound["at_most"], at_least=False), "streamed_bytes": n_bytes}


def load_rate(run: Run, bound: dict[str, Any]) -> Verdict:
    """Rate at which weights were loaded over the drive's rate of that round."""
    measured = ratio.ratio(_series(run, bound["of"], "load_bytes_per_second"), run["drive"])
    return ratio.verdict(measured, bound["at_least"])


def memory_cap(run: Run, bound: dict[str, Any]) -> Verdict:
    """No OOM kill, owned memory within the limit, and the limit never hit while samples were measured."""
    memory = run["variants"][bound["of"]]["memory"]
    hits = memory["limit_hits"] - memory["limit_hits_when_warm"]
    met = memory["within_limit"] and memory["oom_kills"] == 0 and hits == 0
    used = memory["peak_owned_bytes"] / memory["limit_bytes"]
    return {"met": met, "limit_hits_while_measured": hits, "share_of_limit_used": used, "oom_kills": memory["oom_kills"]}


def prediction(run: Run, bound: dict[str, Any]) -> Verdict:
    """What `leanstream plan` predicted over what was measured."""
    measured = ratio.spread(_series(run, bound["of"], "tokens_per_second"))["median"]
    predicted = run["variants"][bound["of"]]["predicted_tokens_per_second"]
    error = predicted / measured - 1
    return {"met": abs(error) <= bound["within"], "predicted": predicted, "measured": measured, "error": error}


def _counted(run: Run, variant: str, key: str) -> int:
    return sum(int(sample["counters"][key]) for sample in run["variants"][variant]["samples"])


def reads_per_miss(run: Run, bound: dict[str, Any]) -> Verdict:
    """Reads for each expert or cluster that was read, ahead or on demand; neighbours that share a read bring it below one."""
    counted = {key: _counted(run, bound["of"], key) for key in ("n_reads", "misses", "n_ahead", "n_ahead_late")}
    found = counted["n_reads"] / (counted["misses"] + counted["n_ahead"] - counted["n_ahead_late"])  # late ones are misses too
    return {"met": found <= bound["at_most"], "reads_per_miss": found}


def share_of_read_bound(run: Run, bound: dict[str, Any]) -> Verdict:
    """Speed over the limit: compute (the variant named), or the reads it counted at the drive's rate for such reads that round."""
    variant = run["variants"][bound["of"]]
    compute = [1 / speed for speed in _series(run, bound["compute"], "tokens_per_second")]
    limits = []
    for seconds, sample, rate in zip(compute, variant["samples"], variant["reads_per_second"], strict=True):
        limits.append(1 / max(seconds, sample["counters"]["n_reads"] / sample["n_tokens"] / rate))
    measured = ratio.ratio(_series(run, bound["of"], "tokens_per_second"), limits)
    return {**ratio.verdict(measured, bound["at_least"]), "limit_tokens_per_second": ratio.spread(limits)}


KINDS: dict[str, Callable[[Run, dict[str, Any]], Verdict]] = {
    "speed_ratio": speed_ratio,
    "share_of_ceiling": share_of_ceiling,
    "ratio_or_ceiling": ratio_or_ceiling,
    "prefill_time": prefill_time,
    "load_rate": load_rate,
    "memory_cap": memory_cap,
    "prediction": prediction,
    "reads_per_miss": reads_per_miss,
    "share_of_read_bound": share_of_read_bound,
}


def judge(run: Run, bounds: list[dict[str, Any]]) -> list[Verdict]:
    """Each bound with its verdict; one that cannot be judged says why and counts as not met."""
    verdicts = []
    for bound in bounds:
        try:
            verdicts.append({**bound, **KINDS[bound["kind"]](run, bound)})
        except (KeyError, ValueError, ZeroDivisionError) as error:
            verdicts.append({**bound, "met": False, "error": f"{type(error).__name__}: {error}"})
    return verdicts
