#!/usr/bin/env python3
"""Many clients against `leanstream serve` in a memory cgroup of exactly its budget: errors, growth of memory, time to first token.

    soak.py workloads/soak.json --model models/SmolLM2-135M-Instruct.Q4_1.gguf --save

Prints one JSON line; --save also appends it to results/. Needs the right to create cgroups unless --no-cap is given.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import page_cache
from memcap import MemoryGroup, Watcher

HERE = Path(__file__).resolve().parent
START_S = 180.0
TIMEOUT_S = 300.0
MAX_REPEATS = 12
TOPICS = [
    "rivers",
    "clocks",
    "bread",
    "winter",
    "maps",
    "letters",
    "engines",
    "gardens",
    "stars",
    "bridges",
    "music",
    "salt",
    "paper",
    "trains",
    "mirrors",
    "islands",
]


@dataclass
class Log:
    """What the clients saw, and memory over time. Appends from threads are safe one by one."""

    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_abandoned: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, resident, owned by the cgroup


@contextlib.contextmanager
def server(model: Path, memory: str | int, settings: dict[str, Any], group: MemoryGroup | None = None) -> Iterator[int]:
    """`leanstream serve` on a free port, ready; gives the port."""
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [
        sys.executable,
        "-m",
        "leanstream_gguf",
        "serve",
        "-m",
        str(model),
        "--memory",
        str(memory),
        "--port",
        "0",
        "--json",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter if group else None)
    assert process.stdout is not None
    try:
        port = int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1])
        end = time.monotonic() + START_S
        while get(port, "/v1/stream/stats")["state"] != "ready":
            if time.monotonic() > end:
                raise RuntimeError(f"not ready after {START_S:g} s: {get(port, '/health')}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def get(port: int, path: str) -> Any:
    return request(port, "GET", path)


def post(port: int, path: str, body: Any) -> Any:
    return request(port, "POST", path, json.dumps(body))


def request(port: int, method: str, path: str, body: str | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def ask(port: int, body: dict[str, Any], log: Log, *, abandon: bool) -> None:
    """One streamed chat; abandoned after its first piece if asked to."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            log.errors[f"{reply.status} {reply.read()[:200].decode('utf-8', 'replace')}"] += 1
            return
        n_pieces, last = 0, ""
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            last = line[6:].strip().decode()
            if '"error"' in last:
                log.errors[last[:200]] += 1
                return
            if '"content"' in last:
                n_pieces += 1
                if n_pieces == 1:
                    log.first_token_s.append(time.monotonic() - start)
                    if abandon:
                        log.n_abandoned += 1
                        return
        if last != "[DONE]":
            log.errors["the stream ended early"] += 1
            return
        log.n_tokens += n_pieces
        log.whole_s.append(time.monotonic() - start)
    except (OSError, http.client.HTTPException) as error:
        log.errors[type(error).__name__] += 1
    finally:
        connection.close()


def warm_up(port: int, workload: dict[str, Any]) -> None:
    """Fill the context once: all of the KV cache, which the budget charges from the start, is in memory then."""
    n_ctx, count = workload["settings"]["n_ctx"], 0
    repeats = MAX_REPEATS
    while count < n_ctx - 64 and repeats < n_ctx:
        repeats += 8
        count = post(port, "/extras/tokenize/count", {"input": question("instruments", "instruments", repeats)})["count"]
    content = question("instruments", "instruments", repeats - 16)
    log = Log()
    ask(port, {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 8}, log, abandon=False)
    if log.errors:
        raise RuntimeError(f"the first request failed: {dict(log.errors)}")


def question(first: str, second: str, repeats: int) -> str:
    return f"Tell me about {first} and {second}. " + "Be brief. " * repeats


def client(number: int, port: int, workload: dict[str, Any], log: Log, end: float) -> None:
    """Ask until `end`; the questions depend on the client's number only."""
    dice = random.Random(number)
    n_asked = 0
    while time.monotonic() < end:
        n_asked += 1
        text = question(dice.choice(TOPICS), dice.choice(TOPICS), dice.randrange(MAX_REPEATS))
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": dice.randint(1, workload["max_tokens"]),
            "seed": dice.randrange(1 << 30),
            "stream": True,
            "user": f"client {number}",
        }
        ask(port, body, log, abandon=n_asked % workload["abandon_every"] == 0)


def run_clients(port: int, workload: dict[str, Any], group: MemoryGroup | None = None) -> Log:
    """All clients at once for the workload's time, memory sampled every half second."""
    warm_up(port, workload)
    log, start = Log(), time.monotonic()
    end = start + workload["seconds"]
    threads = [threading.Thread(target=client, args=(n, port, workload, log, end)) for n in range(workload["clients"])]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        owned = 0
        if group is not None:
            now = group.snapshot()
            owned = now["anon_bytes"] + now["shmem_bytes"] + now["kernel_bytes"]
        log.memory.append((time.monotonic() - start, get(port, "/v1/stream/stats")["rss_bytes"], owned))
        time.sleep(0.5)
    return log


def growth(log: Log, warm_up_s: float) -> dict[str, Any]:
    """Memory after the warm-up: median of the first and last quarter of that time, and their difference.

    What the cgroup owns (anonymous, shared, kernel) where there is one; else resident memory, which also counts pages of
    program files that the system maps and drops as it likes.
    """
    after = [owned or resident for seconds, resident, owned in log.memory if seconds >= warm_up_s]
    resident = [resident for seconds, resident, _ in log.memory if seconds >= warm_up_s]
    quarter = max(1, len(after) // 4)
    first, last = statistics.median(after[:quarter]), statistics.median(after[-quarter:])
    return {
        "first_bytes": int(first),
        "last_bytes": int(last),
        "growth_bytes": int(last - first),
        "resident_growth_bytes": int(statistics.median(resident[-quarter:]) - statistics.median(resident[:quarter])),
        "course_bytes": after[:: max(1, len(after) // 20)],
        "samples": len(after),
    }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def summary(log: Log, workload: dict[str, Any]) -> dict[str, Any]:
    """Counts and percentiles, and whether the workload's bounds hold."""
    memory = growth(log, workload["warm_up_seconds"])
    n_errors = sum(log.errors.values())
    return {
        "answers": len(log.whole_s),
        "abandoned": log.n_abandoned,
        "errors": n_errors,
        "error_kinds": dict(log.errors),
        "tokens_per_second": round(log.n_tokens / workload["seconds"], 2),
        "time_to_first_token_s": {f"p{int(share * 100)}": percentile(log.first_token_s, share) for share in (0.5, 0.95, 0.99)},
        "answer_s": {f"p{int(share * 100)}": percentile(log.whole_s, share) for share in (0.5, 0.95)},
        "memory_after_warm_up": memory,
        "met": n_errors <= workload["bounds"]["errors"] and memory["growth_bytes"] <= workload["bounds"]["growth_bytes"],
    }


def soak(workload: dict[str, Any], model: Path, *, capped: bool) -> dict[str, Any]:
    """Find the budget in bytes, then run under it."""
    with server(model, workload["memory"], workload["settings"]) as port:
        budget = int(get(port, "/v1/stream/config")["budget"]["bytes"])
    page_cache.evict(model)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(MemoryGroup(budget)) if capped else None
        watcher = stack.enter_context(Watcher(group)) if group else None
        port = stack.enter_context(server(model, budget, workload["settings"], group))
        log = run_clients(port, workload, group)
        stats = get(port, "/v1/stream/stats")
        report = {
            "budget_bytes": budget,
            **summary(log, workload),
            "server": {k: stats[k] for k in ("totals", "memory", "state", "degraded")},
        }
        if watcher is not None:
            cap = watcher.report()
            report["cap"] = {name: cap[name] for name in cap if name != "limit_hits_course"}
            report["met"] = report["met"] and cap["within_limit"]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="instead of the workload's; the warm-up shrinks with it")
    parser.add_argument("--no-cap", action="store_true", help="without a memory cgroup")
    parser.add_argument("--save", action="store_true", help="append the line to results/")
    args = parser.parse_args()
    workload = json.loads(args.workload.read_text(encoding="utf-8"))
    if args.seconds:
        workload["warm_up_seconds"] *= args.seconds / workload["seconds"]
        workload["seconds"] = args.seconds
    result = {"benchmark": workload["name"], **machine.describe(args.model), "requested": workload}
    result |= soak(workload, args.model, capped=not args.no_cap)
    line = json.dumps(result)
    print(line)
    if args.save:
        with (HERE / "results" / f"{workload['name']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
