"""What a caller can set, validated when it is given and not when it is first used.

One source for the class, the command and the environment. Nothing here touches the native library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .errors import ArgumentError
from .units import format_bytes, parse_bytes, parse_share

ENV_MEMORY = "LEANSTREAM_MEMORY"  # default of memory_budget for install() and the command
ENV_CACHE = "LEANSTREAM_CACHE"  # default of StreamConfig.cache_budget there
ENV_DEVICE_MEMORY = "LEANSTREAM_DEVICE_MEMORY"  # default of device_budget for the command and the server

POLICIES: dict[str, dict[str, tuple[float, float]]] = {  # name -> parameter -> (lowest, highest)
    "lean": {"half_life": (1, 2**31), "margin_weight": (0.0, 16.0), "prediction_weight": (0.0, 16.0)},
    "lru": {},
    "lfu": {"half_life": (1, 2**31)},
    "slru": {"protected_share": (0.0, 1.0)},
    "hotcold": {"hot_share": (0.0, 1.0)},
}
MAX_DEPTH = 2  # layers that speculation can look ahead
AUTO = 2**32 - 1  # ls_model_set_speculation: found while running


@dataclass(frozen=True)
class Mode:
    """What the expert cache keeps and what is read ahead, as one system does it; None = found while running."""

    policy: str
    depth: int | None
    stages: int | None


MODES: dict[str, Mode] = {
    "lean": Mode("lean", None, None),
    "serial": Mode("lru", 0, 1),  # choose with the exact context, then load; keep the latest: LLM in a flash
    "early": Mode("lru", 1, 1),  # one guess a layer ahead, not corrected until demand; LRU: Deja Vu
    "hotcold": Mode("hotcold", 0, 1),  # a static hot set, LRU for the rest: PowerInfer-2
}
FIDELITIES: dict[str, int] = {"exact": 0, "faithful": 1, "threshold": 2}  # -> ls_options.fidelity
IO_BACKENDS: dict[str, int] = {"auto": 0, "pread": 1, "uring": 2}  # -> ls_options.io_backend

BudgetKind = Literal["bytes", "share", "span", "auto", "min", "full"]


@dataclass(frozen=True)
class Budget:
    """A memory budget as asked for: it only becomes bytes once model and machine are known.

    `bytes` bounds the process to `n_bytes`; `share` to that part of the model file's bytes; `span` to that part of the way
    from the minimum to everything resident; `auto` takes the memory limit of the machine less a reserve; `min` the
    smallest that works; `full` sets no bound (everything resident).
    """

    kind: BudgetKind
    n_bytes: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, value: Budget | int | str, *, name: str = "memory_budget") -> Budget:
        """From `"2GiB"`, `2 << 30`, `"55%"` (of the model file), `"min+50%"`, `"auto"`, `"min"` or `"full"`.

        Raises:
            ArgumentError: none of these, or zero bytes.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            word = value.strip().lower()
            if word in ("auto", "min", "full"):
                return cls(word)  # type: ignore[arg-type]
            if word.startswith("min+") and (share := parse_share(word[4:])) is not None:
                return cls("span", share=share)
            if (share := parse_share(word)) is not None:
                return cls("share", share=share)
        n_bytes = parse_bytes(value, name=name)
        if n_bytes == 0:
            raise ArgumentError(f"{name} must not be 0; 'full' keeps everything resident, 'min' as little as possible")
        return cls("bytes", n_bytes=n_bytes)

    def __str__(self) -> str:
        if self.kind == "bytes":
            return format_bytes(self.n_bytes)
        prefix = {"share": "", "span": "min+"}.get(self.kind)
        return self.kind if prefix is None else f"{prefix}{self.share * 100:g}%"


@dataclass(frozen=True)
class CacheBudget:
    """The size of the expert cache alone: bytes, a share of all expert bytes, or `min` (one token's demand)."""

    kind: Literal["bytes", "share", "min"]
    n_bytes: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, value: CacheBudget | int | str, *, name: str = "cache_budget") -> CacheBudget:
        """From `"44MiB"`, bytes, `"25%"` (of the experts' bytes) or `"min"`.

        Raises:
            ArgumentError: none of these, or zero bytes.
        """
        if isinstance(value, CacheBudget):
            return value
        if isinstance(value, str):
            if value.strip().lower() == "min":
                return cls("min")
            if (share := parse_share(value)) is not None:
                return cls("share", share=share)
        n_bytes = parse_bytes(value, name=name)
        if n_bytes == 0:
            raise ArgumentError(f"{name} must not be 0; 'min' is the smallest cache, None lets the budget decide")
        return cls("bytes", n_bytes=n_bytes)


def _check_range(name: str, value: int, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ArgumentError(f"{name} must be an int from {lowest} to {highest}, not {value!r}")


MAX_THREADS = 512  # GGML_MAX_N_THREADS
_CONTEXT_RANGES = {  # name -> (lowest, highest); wider values wrap around in llama.cpp's 32-bit fields
    "n_ctx": (0, 2**31 - 1),
    "n_batch": (1, 2**31 - 1),
    "n_ubatch": (0, 2**31 - 1),
    "n_threads": (0, MAX_THREADS),
    "n_threads_batch": (0, MAX_THREADS),
}


# GGML types that llama.cpp offers for keys and values; it aborts on numbers that are no type, and on some that are.
CACHE_TYPES = {0: "F32", 1: "F16", 30: "BF16", 8: "Q8_0", 2: "Q4_0", 3: "Q4_1", 20: "IQ4_NL", 6: "Q5_0", 7: "Q5_1"}


def check_context(settings: Mapping[str, Any]) -> None:
    """Refuse context sizes, thread counts and cache types that llama.cpp would wrap around or crash on; None and other
    names pass.

    Raises:
        ArgumentError: not of the right kind, or out of range.
    """
    for name, (lowest, highest) in _CONTEXT_RANGES.items():
        if settings.get(name) is not None:
            _check_range(name, settings[name], lowest, highest)
    for name in ("type_k", "type_v"):
        if settings.get(name) is not None and settings[name] not in CACHE_TYPES:
            known = ", ".join(f"{number} ({text})" for number, text in CACHE_TYPES.items())
            raise ArgumentError(f"{name} must be one of {known}, not {settings[name]!r}")


def check_policy(name: str, params: Mapping[str, Any]) -> None:
    """Refuse an unknown retention policy or a parameter it does not have.

    Raises:
        ArgumentError: with the names that exist.
    """
    if name not in POLICIES:
        raise ArgumentError(f"unknown cache policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    for key, value in params.items():
        if key not in POLICIES[name]:
            known = ", ".join(sorted(POLICIES[name])) or "none"
            raise ArgumentError(f"policy {name!r} has no parameter {key!r}; it has: {known}")
        lowest, highest = POLICIES[name][key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= highest:
            raise ArgumentError(f"{name} parameter {key} must be a number from {lowest:g} to {highest:g}, not {value!r}")


def check_speculation(depth: int | str, stages: int | str) -> tuple[int, int]:
    """The numbers that the native library takes; `auto` = found while running.

    Raises:
        ArgumentError: out of range.
    """
    if depth != "auto":
        _check_range("speculation depth", depth, 0, MAX_DEPTH)  # type: ignore[arg-type]
    if stages != "auto":
        _check_range("speculation stages", stages, 1, 64)  # type: ignore[arg-type]
    return AUTO if depth == "auto" else int(depth), AUTO if stages == "auto" else int(stages)


@dataclass(frozen=True)
class StreamConfig:
    """How a model is streamed. Every default is safe; only `fidelity` and `device_exact` can change the output.

    Attributes:
        cache_budget: size of the expert cache alone (`"44MiB"`, bytes, `"25%"` of the experts, `"min"`); None lets
            the memory budget decide. Ignored by models without experts.
        mode: `lean`, or an earlier system for comparison: `serial`, `early`, `hotcold`. Sets policy, depth and
            stages where they are not given.
        policy: what the expert cache keeps: `lean`, `lfu`, `lru`, `slru` or `hotcold`.
        policy_params: `{"protected_share": 0.8}` for slru, `{"half_life": 4096}` (uses) for lfu and lean, and more.
        depth: layers to look ahead for experts and neurons to read before they are chosen, 0 = off, at most 2, `auto` = what pays.
        stages: how often such a guess is corrected: 1 = never, `auto` = at every chance.
        io_threads: reading threads, 0 = chosen.
        io_depth: reads in flight with io_uring, 0 = chosen.
        io_backend: `auto`, `pread` or `uring`.
        direct_io: bypass the page cache where the file system allows it.
        ring_slots: layers' worth of read-ahead buffers for streamed dense weights, 0 = chosen, at least 2.
        chunk_bytes: largest single read, a multiple of 4096; 0 = chosen.
        repack: multiply with llama.cpp's repacked kernels, as stock llama.cpp does by default: faster, and the bits of stock's
            default flags. Matrices that every token needs then stay in memory at every budget, so the smallest budget grows by
            them: for repacked files whose neurons stream, or where everything fits. Not for models with experts.
        fidelity: `exact` (default) computes every neuron that fires. The others need a repacked file and cost quality, which
            the file has measured: `faithful` lets a 2-bit sketch of the deciding projection name the candidates, `threshold`
            counts small activations as zero.
        max_kl: for `threshold`: the setting measured for the largest KL divergence up to this one, in nats; None = the
            smallest that the file holds.
        device_exact: with a GPU, True (default) copies every expert that device memory lacks, so that a device budget changes no
            bit. False computes some of a token's missing experts on the host instead, while the others are copied; it rounds
            differently there (KL 0.0017 nats on a 30B-A3B shape, 0.0039 for flash attention switched). For slow buses. Layers with
            biases, or with gate and up in one tensor, stay exact.
        host_cost: with device_exact=False, the time to compute an expert on the host in times to copy it, which decides how many
            that are; 0 = measured while loading, as a power of two. Which ones is a function of this number, the device budget and
            the tokens so far, as long as the experts are in host memory.

    Raises:
        ArgumentError: a value out of range.
    """

    cache_budget: CacheBudget | int | str | None = None
    mode: str = "lean"
    policy: str = ""
    policy_params: Mapping[str, float] = field(default_factory=dict)
    depth: int | str | None = None
    stages: int | str | None = None
    io_threads: int = 0
    io_depth: int = 0
    io_backend: str = "auto"
    direct_io: bool = True
    ring_slots: int = 0
    chunk_bytes: int | str = 0
    repack: bool = False
    fidelity: str = "exact"
    max_kl: float | None = None
    device_exact: bool = True
    host_cost: float = 0.0

    def __post_init__(self) -> None:
        chunk_bytes = parse_bytes(self.chunk_bytes, name="chunk_bytes")
        object.__setattr__(self, "chunk_bytes", chunk_bytes)  # frozen for others
        object.__setattr__(self, "policy_params", dict(self.policy_params))
        if self.cache_budget is not None:
            object.__setattr__(self, "cache_budget", CacheBudget.parse(self.cache_budget))
        self._resolve_mode()
        _check_range("io_threads", self.io_threads, 0, 256)
        _check_range("io_depth", self.io_depth, 0, 1024)
        _check_range("ring_slots", self.ring_slots, 0, 1024)
        if self.ring_slots == 1:
            raise ArgumentError("ring_slots must be 0 (chosen) or at least 2: one is read while the other is computed")
        if chunk_bytes % 4096 or chunk_bytes > 64 << 20:
            raise ArgumentError(f"chunk_bytes must be a multiple of 4096 up to 64 MiB, not {chunk_bytes}")
        if self.io_backend not in IO_BACKENDS:
            raise ArgumentError(f"io_backend must be one of {', '.join(IO_BACKENDS)}, not {self.io_backend!r}")
        for name in ("direct_io", "repack", "device_exact"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_fidelity()
        if isinstance(self.host_cost, bool) or not isinstance(self.host_cost, (int, float)) or not 0 <= self.host_cost <= 1024:
            raise ArgumentError(f"host_cost must be a number from 0 (measured) to 1024, not {self.host_cost!r}")

    def _resolve_mode(self) -> None:
        if self.mode not in MODES:
            raise ArgumentError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        mode = MODES[self.mode]
        object.__setattr__(self, "policy", self.policy or mode.policy)
        for name in ("depth", "stages"):
            if getattr(self, name) is None:
                value = getattr(mode, name)
                object.__setattr__(self, name, "auto" if value is None else value)
        check_policy(self.policy, self.policy_params)
        check_speculation(*self.speculation)

    @property
    def speculation(self) -> tuple[int | str, int | str]:
        """Depth and stages, `auto` where they are found while running."""
        assert self.depth is not None and self.stages is not None
        return self.depth, self.stages

    def _check_fidelity(self) -> None:
        check_fidelity(self.fidelity)
        if self.max_kl is not None:
            check_max_kl(self.max_kl)
        if self.max_kl is not None and self.fidelity != "threshold":
            raise ArgumentError(f"max_kl belongs to fidelity 'threshold', not {self.fidelity!r}")

    @property
    def parsed_cache(self) -> CacheBudget | None:
        """`cache_budget`, which was parsed when it was given."""
        return self.cache_budget if isinstance(self.cache_budget, CacheBudget) else None

    def to_dict(self) -> dict[str, Any]:
        """The fields as given, for reports."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def check_fidelity(name: str) -> None:
    """Refuse a word that is no fidelity.

    Raises:
        ArgumentError: with the words that are.
    """
    if name not in FIDELITIES:
        raise ArgumentError(f"unknown fidelity {name!r}; there are {', '.join(FIDELITIES)}")


def check_max_kl(value: Any) -> None:
    """Refuse what is no KL divergence.

    Raises:
        ArgumentError: not a positive number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ArgumentError(f"max_kl must be a positive number, not {value!r}")


def env_defaults(environ: Mapping[str, str] | None = None) -> tuple[Budget | None, CacheBudget | None]:
    """Budget and cache size named by LEANSTREAM_MEMORY and LEANSTREAM_CACHE, None where unset or empty.

    Raises:
        ArgumentError: a variable holds no size.
    """
    environ = os.environ if environ is None else environ
    memory, cache = environ.get(ENV_MEMORY), environ.get(ENV_CACHE)
    return (
        Budget.parse(memory, name=ENV_MEMORY) if memory else None,
        CacheBudget.parse(cache, name=ENV_CACHE) if cache else None,
    )
