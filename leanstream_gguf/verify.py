"""Compares a streamed run with an unstreamed one, bit by bit: `leanstream verify`.

The reference runs llama.cpp through mmap in a process of its own, with weights in the file's layout and equal n_threads,
n_batch, n_ubatch and flash attention; models larger than memory therefore verify too. It also chooses the tokens, which
both runs are then fed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import ArgumentError, InternalError, from_dict
from .measure import ContextWish
from .planner import ContextDefaults, Shape
from .settings import Budget, StreamConfig, check_fidelity

DEFAULT_N_PROMPT = 512
DEFAULT_N_GENERATE = 64
ROWS_TARGET_BYTES = 64 << 20  # logits of a prompt that are compared, unless all are asked for
NOISE_FLOOR = 1e-3  # where flash attention on and off give the same bytes, or were not compared
NOISE_AUTO_BYTES = 1 << 30  # up to this file size the noise floor is measured even if nothing differs


@dataclass(frozen=True)
class Request:
    """What to verify. `reference` None compares with the same file."""

    model: str
    reference: str | None = None
    memory: str = "min"
    cache: str | None = None
    fidelity: str = "exact"
    n_prompt: int = DEFAULT_N_PROMPT
    n_generate: int = DEFAULT_N_GENERATE
    text: str | None = None
    all_rows: bool = False
    wish: ContextWish = field(default_factory=ContextWish)
    stream: dict[str, Any] = field(default_factory=dict)


def default_text() -> str:
    """The built-in prompt: about 700 words of plain English."""
    return resources.files(__package__).joinpath("verify_prompt.txt").read_text(encoding="utf-8")


def prompt_rows(n_prompt: int, n_vocab: int, *, all_rows: bool) -> list[int]:
    """Positions of the prompt whose logits are compared: all, or evenly spaced ones that end with the last."""
    fitting = n_prompt if all_rows else max(1, ROWS_TARGET_BYTES // (4 * n_vocab))
    if fitting >= n_prompt:
        return list(range(n_prompt))
    return sorted({(i + 1) * n_prompt // fitting - 1 for i in range(fitting)})


def _check(request: Request) -> None:
    check_fidelity(request.fidelity)
    if request.n_prompt < 1 or request.n_generate < 0:
        raise ArgumentError("at least one prompt token is needed, and no negative number of tokens")
    Budget.parse(request.memory, name="--memory")
    StreamConfig(cache_budget=request.cache, fidelity=request.fidelity, **request.stream)


def _sizes(request: Request, shape: Shape) -> ContextDefaults:
    n_tokens = request.n_prompt + request.n_generate
    n_ctx = request.wish.n_ctx or -(-n_tokens // 256) * 256
    if n_tokens > n_ctx:
        raise ArgumentError(f"{n_tokens} tokens do not fit into a context of {n_ctx}", used=n_tokens, limit=n_ctx)
    return replace(request.wish, n_ctx=n_ctx).sizes(shape)


def _jobs(request: Request, out: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(reference job, streamed job, bytes of the file), without tokens."""
    from .runtime import ModelHandle

    with ModelHandle(request.model) as handle:
        index = handle.index()
        shape = Shape.from_index(index)
    if request.reference is None and "leanstream.version" in index["metadata"]:
        text = "a repacked file cannot be run unstreamed"
        raise ArgumentError(text, path=request.model, remedy="give the file it was made from with --reference")
    sizes = _sizes(request, shape)
    common: dict[str, Any] = {
        "text": request.text if request.text is not None else default_text(),
        "tokens": [],
        "n_prompt": request.n_prompt,
        "n_generate": request.n_generate,
        "prompt_rows": prompt_rows(request.n_prompt, shape.n_vocab, all_rows=request.all_rows),
        "n_ctx": sizes.n_ctx,
        "n_batch": sizes.n_batch,
        "n_ubatch": max(1, min(sizes.n_ubatch, sizes.n_batch)),
        "n_threads": request.wish.threads,
        "flash_attn": request.wish.flash_attn,
        "repacked": bool(request.stream.get("repack")),
    }
    plain = {**common, "model": request.reference or request.model, "out": str(out / "reference.f32")}
    streamed = {**common, "model": request.model, "out": str(out / "streamed.f32")}
    streamed |= {"memory": request.memory, "cache": request.cache, "stream": {**request.stream, "fidelity": request.fidelity}}
    return plain, streamed, shape.file_bytes


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a fresh interpreter.

    Raises:
        LeanStreamError: what the worker raised; InternalError if it died.
    """
    command = [sys.executable, "-m", "leanstream_gguf.verify_worker"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise InternalError(f"the {'streamed' if 'memory' in job else 'reference'} run failed, {how}: {last[0]}")
    result: dict[str, Any] = json.loads(lines[-1])
    if "error" in result:
        raise from_dict(result["error"])
    return result


@dataclass(frozen=True)
class Difference:
    """How two logits files differ, over all rows; KL in nats from the first to the second."""

    n_rows: int
    rows_differing: int
    max_abs_diff: float
    kl_mean: float
    kl_max: float
    kl_error: float  # standard error of kl_mean
    argmax_equal: float

    @property
    def bit_identical(self) -> bool:
        return self.rows_differing == 0


def compare(first: str, second: str, n_vocab: int) -> Difference:
    """Compare float32 [n_rows, n_vocab] files row by row.

    Raises:
        InternalError: their sizes disagree.
    """
    import numpy as np

    if Path(first).stat().st_size != Path(second).stat().st_size:
        raise InternalError("the two runs wrote different amounts of logits")
    a, b = (np.memmap(path, dtype=np.single, mode="r").reshape(-1, n_vocab) for path in (first, second))
    differing, largest, divergences, equal = 0, 0.0, [], 0
    for left, right in zip(a, b, strict=True):
        if left.tobytes() == right.tobytes():
            divergences.append(0.0)
            equal += 1
            continue
        differing += 1
        gap = float(np.max(np.abs(left.astype(np.float64) - right)))
        largest = gap if gap > largest or gap != gap else largest
        p, q = _log_softmax(left), _log_softmax(right)
        divergences.append(float(np.sum(np.exp(p) * (p - q))))
        equal += int(left.argmax() == right.argmax())
    mean = sum(divergences) / len(divergences)
    error = float(np.std(divergences)) / len(divergences) ** 0.5
    return Difference(len(a), differing, largest, mean, max(divergences), error, equal / len(a))


def _log_softmax(row: Any) -> Any:
    import numpy as np

    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def verify(request: Request) -> dict[str, Any]:
    """Run both and compare.

    Returns:
        {passed, bit_identical, max_abs_diff, kl_mean, kl_max, kl_error, kl_noise_floor, n_tokens, n_rows, rows_differing,
        argmax_equal, settings, and what the streamed run did}. `passed` means: the same bytes; where neurons are streamed
        one by one, a KL no larger than what flash attention changes in the reference, within two standard errors; with
        fidelity `threshold`, a KL of at most 1.25 times what was asked for.

    Raises:
        LeanStreamError: a run could not be made.
    """
    _check(request)
    with tempfile.TemporaryDirectory(prefix="leanstream-verify-") as folder:
        plain, streamed, file_bytes = _jobs(request, Path(folder))
        reference = _work(plain)
        result = _work({**streamed, "tokens": reference["tokens"]})
        difference = compare(plain["out"], streamed["out"], reference["n_vocab"])
        floor, reason = NOISE_FLOOR, "not measured: nothing differs"
        if not difference.bit_identical or file_bytes <= NOISE_AUTO_BYTES:
            floor, reason = _noise_floor(plain, reference, Path(folder))
    return {
        "passed": difference.bit_identical or _close_enough(request, difference, floor, result["plan"]),
        "bit_identical": difference.bit_identical,
        **asdict(difference),
        "kl_noise_floor": floor,
        "kl_noise_floor_reason": reason,
        "n_tokens": request.n_prompt + request.n_generate,
        "settings": {key: streamed[key] for key in ("n_ctx", "n_batch", "n_ubatch", "n_threads", "flash_attn")},
        "memory": request.memory,
        "fidelity": request.fidelity,
        "plan": result["plan"],
        "stats": result["stats"],
        "peak_rss_bytes": result["peak_rss_bytes"],
        "streamed_seconds": {key: result[f"{key}_seconds"] for key in ("prefill", "decode")},
        "reference_seconds": {key: reference[f"{key}_seconds"] for key in ("prefill", "decode")},
    }


def _close_enough(request: Request, difference: Difference, floor: float, plan: dict[str, Any]) -> bool:
    """Whether logits that differ are as close as the file and the fidelity promise."""
    lean = plan.get("lean") or {"n_neuron_layers": 0, "thresholds": []}
    if not lean["n_neuron_layers"]:
        return False
    limit = floor
    if request.fidelity == "threshold":
        limit = 1.25 * (request.stream.get("max_kl") or min(setting["max_kl"] for setting in lean["thresholds"]))
    return difference.kl_mean <= limit + 2 * difference.kl_error


def _noise_floor(plain: dict[str, Any], reference: dict[str, Any], folder: Path) -> tuple[float, str]:
    """Mean KL between the reference and the same run with flash attention switched, and where it comes from."""
    other = {**plain, "tokens": reference["tokens"], "flash_attn": not plain["flash_attn"], "out": str(folder / "noise.f32")}
    _work(other)
    measured = compare(plain["out"], other["out"], reference["n_vocab"]).kl_mean
    if measured == 0:
        return NOISE_FLOOR, "flash attention on and off give the same bytes"
    return measured, "unstreamed, flash attention on against off"
