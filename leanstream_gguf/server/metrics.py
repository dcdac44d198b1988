"""What the server counts, and the snapshot that /v1/stream/stats, the live panel and /metrics are made of."""

from __future__ import annotations

import asyncio
import bisect
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from .. import probe
from ..errors import LeanStreamError
from ..stats import Memory, Stats
from .host import ModelHost

INTERVAL = 0.5  # seconds between samples
WINDOW = 2.0  # seconds that rates are taken over
HISTORY = 60.0  # seconds that are kept

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Seconds, in Prometheus' cumulative buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        seen = 0
        for bound, count in zip((*_BUCKETS, float("inf")), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {seen}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {seen}"


class Sampler:
    """Samples the host every INTERVAL and keeps the counts of the whole server, over all models."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self.started = time.time()
        self.requests: Counter[tuple[str, int]] = Counter()  # (route, status)
        self.cancelled = 0
        self.first_token = Histogram()
        self.duration = Histogram()
        self.token_gap = Histogram()
        self.samples: deque[dict[str, Any]] = deque(maxlen=int(HISTORY / INTERVAL))
        self._raw: deque[tuple[float, int, int, Stats | None]] = deque()
        self._past = [0, 0]  # prompt and completion tokens of models that are gone
        self._model: Any = None
        self._last = [0, 0]
        self._sequence = 0
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the sampling; streams of samples end too."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self.samples.append(await self.snapshot())
            await asyncio.sleep(INTERVAL)

    async def snapshot(self) -> dict[str, Any]:
        """The state now, rates over the last WINDOW; the object of /v1/stream/stats.

        Taken in a thread: while weights are loaded, the runtime may keep its counters to itself for a moment.
        """
        return await asyncio.to_thread(self._snapshot)

    async def latest(self) -> dict[str, Any]:
        """The last sample, which costs no wait; at most INTERVAL and what a sample takes old."""
        return self.samples[-1] if self.samples else await self.snapshot()

    def tokens(self) -> tuple[int, int]:
        """Prompt and completion tokens of the server's whole life."""
        llm = self.host.llm
        if llm is not self._model:  # another model, or none: its meter starts from 0
            self._past = [past + last for past, last in zip(self._past, self._last, strict=True)]
            self._model, self._last = llm, [0, 0]
        if llm is not None:
            self._last = [llm.meter.prompt_tokens, llm.meter.completion_tokens]
        return self._past[0] + self._last[0], self._past[1] + self._last[1]

    def stream(self) -> tuple[Stats | None, Memory | None]:
        """Counters and memory of the loaded model."""
        llm = self.host.llm
        if llm is None or not llm.stream.active:
            return None, None
        try:
            return llm.stream.stats(), llm.stream.memory()
        except LeanStreamError:  # being closed by the model's thread
            return None, None

    def _snapshot(self) -> dict[str, Any]:
        stats, memory = self.stream()
        load = self.host.loading()
        degraded = self.host.degraded()
        with self._lock:
            return self._report(stats, memory, load, degraded)

    def _report(self, stats: Stats | None, memory: Memory | None, load: Any, degraded: str | None) -> dict[str, Any]:
        prompt, completion = self.tokens()
        now = time.monotonic()
        self._remember(now, prompt, completion, stats)
        self._sequence += 1
        error = self.host.error
        return {
            "time": time.time(),
            "sequence": self._sequence,
            "uptime_seconds": round(time.time() - self.started, 3),
            "state": self.host.state,
            "degraded": degraded,
            "model": self.host.alias,
            "error": error_of(error),
            "load": load,
            "budget_bytes": stats.budget_bytes if stats else 0,
            "memory": memory.to_dict() if memory else None,
            "rss_bytes": probe.resident_bytes(),
            **self._rates(now, completion, stats),
            "queue": {"waiting": self.host.queue.waiting, "running": self.host.queue.running},
            "totals": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "requests": sum(self.requests.values()),
                "errors": sum(n for (route, status), n in self.requests.items() if status >= 500 and route != "/health"),
                "cancelled": self.cancelled,
            },
        }

    def _remember(self, now: float, prompt: int, completion: int, stats: Stats | None) -> None:
        raw = self._raw
        if raw and (raw[-1][3] is None) != (stats is None):
            raw.clear()  # another model: its counters start again
        if raw and stats is not None and raw[-1][3] is not None and stats.n_graphs < raw[-1][3].n_graphs:
            raw.clear()
        if not raw or now - raw[-1][0] >= INTERVAL / 2:
            raw.append((now, prompt, completion, stats))
        while len(raw) > 1 and now - raw[1][0] >= WINDOW:
            raw.popleft()

    def _rates(self, now: float, completion: int, stats: Stats | None) -> dict[str, Any]:
        then, _, completion_then, before = self._raw[0] if self._raw else (now, 0, completion, stats)
        seconds = now - then
        n_tokens = completion - completion_then
        llm = self.host.llm
        rates: dict[str, Any] = {
            "tokens_per_second": round(n_tokens / seconds, 3) if n_tokens and seconds else None,
            "prompt_tokens_per_second": llm.meter.last_prompt_rate if llm else None,
            "hit_ratio": None,
            "read_bytes_per_second": 0.0,
            "stall_share": None,
        }
        if stats is not None and before is not None and seconds:
            since = _difference(stats, before)
            rates |= {
                "hit_ratio": since.hit_ratio,
                "read_bytes_per_second": since.read_bytes / seconds,
                "stall_share": since.stall_share,
            }
        return rates

    # ---- Prometheus -------------------------------------------------------------------------------------------------

    async def prometheus(self) -> str:
        """Prometheus text exposition."""
        return await asyncio.to_thread(self._prometheus)

    def _prometheus(self) -> str:
        stats, memory = self.stream()
        with self._lock:
            prompt, completion = self.tokens()
        state = self.host.state
        lines = ["# TYPE leanstream_requests_total counter"]
        lines += [f'leanstream_requests_total{{route="{r}",status="{s}"}} {n}' for (r, s), n in sorted(self.requests.items())]
        for name, kind, value in (
            ("leanstream_prompt_tokens_total", "counter", prompt),
            ("leanstream_completion_tokens_total", "counter", completion),
            ("leanstream_cancelled_total", "counter", self.cancelled),
            ("leanstream_queue_waiting", "gauge", self.host.queue.waiting),
            ("leanstream_queue_running", "gauge", self.host.queue.running),
            ("leanstream_process_resident_bytes", "gauge", probe.resident_bytes()),
            ("leanstream_ready", "gauge", int(state == "ready")),
            ("leanstream_degraded", "gauge", int(self.host.degraded() is not None)),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        lines += self.first_token.lines("leanstream_time_to_first_token_seconds")
        lines += self.token_gap.lines("leanstream_time_per_output_token_seconds")
        lines += self.duration.lines("leanstream_request_duration_seconds")
        if memory is not None:
            lines.append("# TYPE leanstream_memory_bytes gauge")
            parts = memory.to_dict()
            lines += [f'leanstream_memory_bytes{{purpose="{n.removesuffix("_bytes")}"}} {v}' for n, v in parts.items()]
        text = "\n".join(lines) + "\n"
        return text + (stats.to_prometheus({"model": str(self.host.alias)}, prefix="leanstream_stream") if stats else "")


def _difference(now: Stats, before: Stats) -> Stats:
    """What was counted between two snapshots; gauges in it mean nothing."""
    return Stats(**{item.name: getattr(now, item.name) - getattr(before, item.name) for item in fields(Stats)})


def error_of(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    from .errors import describe

    found: dict[str, Any] = describe(error)[1]["error"]
    return found
