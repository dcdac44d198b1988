"""Helpers shared by tests: processes that may crash, streamed and unstreamed models, logits as bytes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TIMEOUT_S = 120
PROMPT = b"The quick brown fox reads the file again, and then something happens to the other lines over there."


@dataclass(frozen=True)
class Outcome:
    """What a Python process did: `value` is the JSON it printed last, None if it printed none."""

    returncode: int
    value: Any
    stderr: str

    def require(self) -> Any:
        """The value, or a failure that shows how the process died."""
        died = f"killed by signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"
        assert self.returncode == 0 and self.value is not None, f"{died}\n{self.stderr[-3000:]}"
        return self.value


def run_python(code: str, *args: str | Path, timeout_s: float = TIMEOUT_S, preload: Path | None = None) -> Outcome:
    """Run `code` in a fresh interpreter with sys.argv[1:] = args; an abort there does not end the test run."""
    command = [sys.executable, "-c", code, *map(str, args)]
    paths = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": paths}
    if preload:
        environment["LD_PRELOAD"] = str(preload)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return Outcome(done.returncode, json.loads(lines[-1]) if lines else None, done.stderr)


_NO_DEVICES = (ctypes.c_void_p * 1)(None)  # a list that ends where it begins


@contextlib.contextmanager
def load_as_streamed(*, repacked: bool, on_device: bool) -> Iterator[None]:
    """llama_cpp.Llama objects built inside hold weights as streaming does: as the file has them unless `repacked`, and with no
    GPU taken for large batches and buffers where no layer is meant for it."""
    import llama_cpp.llama_cpp as low_level

    defaults = low_level.llama_model_default_params

    def changed() -> Any:
        params = defaults()
        params.use_extra_bufts = repacked
        if not on_device:
            params.devices = ctypes.addressof(_NO_DEVICES)
        return params

    low_level.llama_model_default_params = changed
    try:
        yield
    finally:
        low_level.llama_model_default_params = defaults


# Context settings that both sides of a comparison get.
CONTEXT: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "seed": 7}


def unstreamed(path: Path, *, repacked: bool = False, **settings: Any) -> contextlib.closing[Any]:
    """An ordinary llama_cpp.Llama in our libraries, through mmap, weights as in the file, all logits kept; for `with`."""
    importlib.import_module("leanstream_gguf")  # first: it points llama_cpp at the libraries under test
    import llama_cpp

    with load_as_streamed(repacked=repacked, on_device=bool(settings.get("n_gpu_layers"))):
        return contextlib.closing(llama_cpp.Llama(str(path), **{**CONTEXT, "logits_all": True, "verbose": False, **settings}))


def streamed(path: Path, budget: int | str, **settings: Any) -> Any:
    """A leanstream_gguf.Llama under a budget, otherwise built as `unstreamed` is."""
    import leanstream_gguf

    settings = {**CONTEXT, "logits_all": True, "verbose": False, **settings}
    return leanstream_gguf.Llama(str(path), memory_budget=budget, **settings)


def logits(llm: Any, tokens: Sequence[int], n_prompt: int) -> npt.NDArray[np.single]:
    """Teacher-forced logits [n_tokens, n_vocab] from an empty context: the prompt in batches, then one by one."""
    llm.reset()
    llm.eval(list(tokens[:n_prompt]))
    for token in tokens[n_prompt:]:
        llm.eval([token])
    return np.array(llm.scores[: len(tokens)], dtype=np.single)


def sample_tokens(n_tokens: int, n_vocab: int, seed: int = 1) -> list[int]:
    """Ordinary token ids that differ from step to step, so that routing does too."""
    bits = np.asarray(np.random.PCG64(seed).random_raw(n_tokens))
    return [int(b % np.uint64(n_vocab - 20)) + 10 for b in bits]


def assert_same_bytes(got: npt.NDArray[np.single], expected: npt.NDArray[np.single]) -> None:
    """Both arrays hold the same bytes; a failure names the first token and the largest difference."""
    assert got.shape == expected.shape
    if got.tobytes() == expected.tobytes():
        return
    rows = np.nonzero((got.view(np.uint32) != expected.view(np.uint32)).any(axis=1))[0]
    largest = float(np.nanmax(np.abs(got - expected)))
    raise AssertionError(f"{len(rows)} of {len(got)} tokens differ, first {rows[0]}; max |difference| {largest:.3g}")
