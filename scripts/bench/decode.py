#!/usr/bin/env python3
"""Run a workload: several variants of one model, measured in turn, each in a process of its own.

    decode.py workloads/moe-cache.json --models /path/to/models --stock-libs /path/to/unpatched/build/bin

Prints one JSON line: machine, settings asked for and in force, every sample, and a verdict for each bound. --save also
appends it to results/. Variants with "cap": true run in a memory cgroup of exactly their budget (root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bounds
import files
import io_read
import machine
import page_cache
import ratio
from memcap import MemoryGroup, Watcher, parse_size

HERE = Path(__file__).resolve().parent
_SLACK = 1.01  # a process differs a little in size from the one whose minimum was taken


class Worker:
    """A child process that holds one variant."""

    def __init__(self, job: dict[str, Any], stock_libs: Path | None, group: MemoryGroup | None) -> None:
        environment = dict(os.environ)
        if job["variant"]["engine"] == "stock":
            if stock_libs is None:
                raise SystemExit("this workload compares with unpatched libraries: name them with --stock-libs")
            environment["LLAMA_CPP_LIB_PATH"] = str(stock_libs)
        self.watcher = Watcher(group) if group else None
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=group.enter if group else None,
        )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One request; a dead child or an error answer ends the run."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the child died with code {self._process.wait()} while asked to {do}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{do}: {reply['error']}")
        return reply

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.ask("quit")
        self._process.wait(timeout=60)


def job_of(workload: dict[str, Any], variant: dict[str, Any], source: Path, text: Path) -> dict[str, Any]:
    job: dict[str, Any] = {k: workload[k] for k in ("task", "n_tokens", "n_prompt", "settings") if k in workload}
    # A slow variant may take fewer tokens a sample.
    job |= {k: variant[k] for k in ("n_tokens",) if k in variant}
    return {"model": variant.get("file", str(source)), "text": str(text), "variant": variant, **job}


def resolve_memory(workload: dict[str, Any], model: Path, text: Path) -> None:
    """Turn {"between": x} (0 = the minimum, 1 = everything resident) and shares under a cap into bytes."""
    asking = [v for v in workload["variants"].values() if isinstance(v.get("memory"), dict) or v.get("cap")]
    for variant in (v for v in workload["variants"].values() if v["engine"] != "leanstream" and v.get("cap")):
        variant["memory"] = _bytes_of(variant["memory"], model)
    asking = [v for v in asking if v["engine"] == "leanstream"]
    for variant in asking:
        probe = Worker(job_of(workload, {**variant, "memory": "min"}, model, text), None, None)
        plan = probe.ask("build")["plan"]
        probe.close()
        low, high = int(plan["minimum_budget_bytes"] * _SLACK), int(plan["full_budget_bytes"] * _SLACK)
        memory = variant["memory"]
        if isinstance(memory, dict):
            variant["memory"] = low + int((high - low) * memory["between"])
        elif isinstance(memory, str):
            variant["memory"] = {"min": low, "full": high}.get(memory) or _bytes_of(memory, model)


def _bytes_of(memory: str, model: Path) -> int:
    """ "900MiB", or "80%" of the source's file."""
    return int(float(memory[:-1]) / 100 * model.stat().st_size) if memory.endswith("%") else parse_size(memory)


def check_isolation(workload: dict[str, Any]) -> None:
    """A capped mmap variant must not share the page cache with an uncapped one: it would get its pages for nothing."""
    plain = [v for v in workload["variants"].values() if v["engine"] != "leanstream"]
    if any(v.get("cap") for v in plain) and len(plain) > 1:
        raise SystemExit("a capped stock variant and another stock variant of the same file cannot be in one workload")


@contextlib.contextmanager
def workers(workload: dict[str, Any], model: Path, text: Path, stock_libs: Path | None) -> Iterator[dict[str, Worker]]:
    """All variants, built and in their groups; freed at the end."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Worker] = {}
        for name, variant in workload["variants"].items():
            limit = variant["memory"] if variant.get("cap") else 0
            group = stack.enter_context(MemoryGroup(parse_size(str(limit)))) if limit else None
            worker = Worker(job_of(workload, variant, model, text), stock_libs, group)
            stack.callback(worker.close)
            if worker.watcher:
                stack.enter_context(worker.watcher)
            found[name] = worker
        yield found


def predict(workload: dict[str, Any], model: Path, memory: Any) -> float:
    """What `leanstream plan` says about this budget."""
    settings = workload["settings"]
    command = [sys.executable, "-m", "leanstream_gguf", "plan", "-m", str(model), "--memory", str(memory), "--json"]
    command += ["--ctx", str(settings["n_ctx"]), "--threads", str(settings["n_threads"])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["expected"]["tokens_per_second"])


def measure(workload: dict[str, Any], model: Path, found: dict[str, Worker]) -> dict[str, Any]:
    """Build, check bits, warm up, then sample in turn with the drive's rate beside each round."""
    variants: dict[str, Any] = {}
    warm: dict[str, Any] = {}
    for name, worker in found.items():
        say(f"building {name}")
        variants[name] = {"build": worker.ask("build"), "samples": []}
    for name, worker in found.items():
        say(f"checking and warming {name}")
        variants[name]["check"] = worker.ask("check")
        worker.ask("warm", n=workload["variants"][name].get("warmup_tokens", workload.get("warmup_tokens", 0)))
        for _ in range(workload.get("warmup_samples", 1)):
            warm[name] = worker.ask("sample")
        if worker.watcher:
            variants[name]["limit_hits_when_warm"] = worker.watcher.look()["limit_hits"]
    drive = []
    for i in range(workload["samples"]):
        drive.append(io_read.ceiling(model, 500))
        for name in (bound["of"] for bound in workload.get("bounds", []) if bound["kind"] == "share_of_read_bound"):
            variant = variants[name]
            variant.setdefault("reads_per_second", []).append(io_read.reads_like(Path(workload["variants"][name]["file"]), warm[name]))
        # There and back again, so that no variant always follows the same other.
        for name in list(found) if i % 2 == 0 else list(reversed(found)):
            variants[name]["samples"].append(found[name].ask("sample"))
        say(f"round {i + 1} of {workload['samples']}")
    for name, worker in found.items():
        if worker.watcher:
            hits = variants[name].pop("limit_hits_when_warm")
            variants[name]["memory"] = {**worker.watcher.report(), "limit_hits_when_warm": hits}
    return {"variants": variants, "drive": drive}


def same_bits(workload: dict[str, Any], run: dict[str, Any]) -> bool | None:
    """Whether the variants that claim it gave the same logits; None if none claims it."""
    names = [name for name in workload.get("same_bits", []) if name in run["variants"]]  # --only may leave some out
    return len({run["variants"][name]["check"]["logits_sha256"] for name in names}) == 1 if names else None


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Median speed and counters of each variant, for the eye."""
    rows: dict[str, Any] = {}
    for name, variant in run["variants"].items():
        key = "tokens_per_second" if "tokens_per_second" in variant["samples"][0] else "load_bytes_per_second"
        rows[name] = {key: ratio.spread([s[key] for s in variant["samples"]])}
        total = {k: sum(s["counters"][k] for s in variant["samples"]) for k in variant["samples"][0]["counters"]}
        if total and total.get("n_tokens"):
            uses = total["hits"] + total["misses"]
            rows[name] |= {
                "read_bytes_per_token": total["read_bytes"] / total["n_tokens"],
                "hit_ratio": total["hits"] / uses if uses else None,
                "stall_share": total["stall_ns"] / total["compute_ns"] if total["compute_ns"] else None,
            }
    return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    models = os.environ.get("LEANSTREAM_TEST_MODELS", str(machine.ROOT.parent / "shared" / "models"))
    parser.add_argument("--models", default=models, help="folder of the named models")
    parser.add_argument("--text", help="text to feed (the workload's, in ../data beside the models)")
    parser.add_argument("--work", default="/tmp", help="where synthetic models are written")
    parser.add_argument("--stock-libs", type=Path, help="folder of an unpatched build of the pinned llama.cpp")
    parser.add_argument("--samples", type=int, help="rounds (the workload's)")
    parser.add_argument("--only", help="comma-separated variants to run")
    parser.add_argument("--save", action="store_true", help="append the line to results/NAME.jsonl")
    return parser.parse_args()


def main() -> int:
    """Prepare, measure, judge, print."""
    args = arguments()
    workload = json.loads(args.workload.read_text(encoding="utf-8"))
    asked = json.loads(json.dumps(workload))
    workload["samples"] = args.samples or workload["samples"]
    if args.only:
        workload["variants"] = {k: v for k, v in workload["variants"].items() if k in args.only.split(",")}
    check_isolation(workload)
    model, text = files.model_path(workload, args), files.text_path(workload, args)
    for variant in workload["variants"].values():
        variant["file"] = str(files.variant_path(variant, model, Path(args.work)))
    capped = any(variant.get("cap") for variant in workload["variants"].values())
    paths = {model, *(Path(variant["file"]) for variant in workload["variants"].values())}
    left = max(page_cache.evict(path, allowed_bytes=1 << 20 if capped else 1 << 62) for path in paths)
    resolve_memory(workload, model, text)
    with workers(workload, model, text, args.stock_libs) as found:
        run = measure(workload, model, found)
    for bound in workload.get("bounds", []):
        if bound["kind"] == "prediction":
            memory = workload["variants"][bound["of"]]["memory"]
            path = Path(workload["variants"][bound["of"]]["file"])
            run["variants"][bound["of"]]["predicted_tokens_per_second"] = predict(workload, path, memory)
    result = {
        "benchmark": workload["name"],
        **machine.describe(model),
        "model": {"name": model.name, "bytes": model.stat().st_size},
        "cache_temperature": {"left_in_page_cache_bytes": left, "note": "evicted before the children started"},
        "requested": asked,
        "in_force": {name: variant["memory"] for name, variant in workload["variants"].items() if "memory" in variant},
        "same_bits": same_bits(workload, run),
        "verdicts": bounds.judge(run, workload.get("bounds", [])),
        "summary": summary(run),
        "drive_bytes_per_second": ratio.spread(run["drive"]),
        "variants": run["variants"],
    }
    line = json.dumps(result)
    print(line)
    if args.save:
        with (HERE / "results" / f"{workload['name']}.jsonl").open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    met = all(verdict["met"] for verdict in result["verdicts"])
    return 0 if met and result["same_bits"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
