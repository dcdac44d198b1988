"""A model that is fed text in windows, in up to three contexts: plain, with flash attention, and watched by a GraphTap.

Contexts share the weights. Windows are independent (each starts with an empty KV cache), so that work can stop and go on at
their borders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import loading, planner
from ..errors import ArgumentError, CalibrationError
from ..runtime import ModelHandle
from .graph_tap import GraphTap

N_WINDOW = 512  # tokens of a window

Floats = npt.NDArray[np.float32]
Kind = str  # "plain", "flash", "tapped"


Doubles = npt.NDArray[np.float64]


def normalised(rows: Floats) -> tuple[Floats, Doubles, Doubles]:
    """(exp(row - maximum) in float32, its sums, log of the sums of exp(row)) of logits [n, n_vocab].

    Single precision elements, double precision sums: errors of a KL stay below 1e-6, in a third of the time.
    """
    top = rows.max(axis=1, keepdims=True)
    shares = np.exp(rows - top)
    sums: Doubles = shares.sum(axis=1, dtype=np.float64)
    return shares, sums, np.log(sums) + top[:, 0].astype(np.float64)


class Runner:
    """Owns model and contexts; use as a context manager."""

    def __init__(self, path: str, *, n_threads: int) -> None:
        """
        Raises:
            LeanStreamError: as for loading.
        """
        self.path, self.n_threads = path, n_threads
        with ModelHandle(path) as handle:
            self.shape = planner.Shape.from_index(handle.index())
        self.sizes = planner.context_defaults(self.shape, n_ctx=N_WINDOW, all_logits=True)
        self.tap = GraphTap()
        self._stack = contextlib.ExitStack()
        self._contexts: dict[Kind, Any] = {}
        self._batch: Any = None

    def __enter__(self) -> Runner:
        from llama_cpp import _internals as internals

        with contextlib.ExitStack() as stack:
            params = self._params("tapped")
            context = stack.enter_context(loading.opened(self.path, contextlib.nullcontext(), params, in_file_layout=True))
            self._contexts["tapped"] = context
            self.model = context.model
            batch = internals.LlamaBatch(n_tokens=self.sizes.n_batch, embd=0, n_seq_max=1, verbose=False)
            self._batch = stack.enter_context(contextlib.closing(batch))
            self._stack = stack.pop_all()
        first = self.model.token_bos() if self.model.token_bos() >= 0 else 0
        self.decode("tapped", [first], 0)  # teaches the tap
        self.start_window("tapped")
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.clear()
        self._stack.close()

    def _params(self, kind: Kind) -> Any:
        params = loading.context_params(self.sizes, n_threads=self.n_threads, flash_attn=kind == "flash")
        if kind == "tapped":
            self.tap.attach(params)
        return params

    def _context(self, kind: Kind) -> Any:
        if kind not in self._contexts:
            from llama_cpp import _internals as internals

            context = internals.LlamaContext(model=self.model, params=self._params(kind), verbose=False)
            self._contexts[kind] = self._stack.enter_context(contextlib.closing(context))
        return self._contexts[kind]

    def start_window(self, *kinds: Kind) -> None:
        for kind in kinds:
            self._context(kind).kv_cache_clear()

    def pieces(self, window: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """(position of its first token, tokens) of each batch of a window."""
        for first in range(0, len(window), self.sizes.n_batch):
            yield first, list(window[first : first + self.sizes.n_batch])

    def decode(self, kind: Kind, tokens: Sequence[int], first: int) -> Floats:
        """Logits [n_tokens, n_vocab] of a batch at position `first`; llama.cpp's memory, valid until the next decode.

        Raises:
            LeanStreamError: what a tap raised. RuntimeError: llama.cpp failed.
        """
        context = self._context(kind)
        self._batch.set_batch(tokens, n_past=first, logits_all=True)
        try:
            context.decode(self._batch)
        finally:
            self.tap.raise_error()
        n_vocab = self.model.n_vocab()
        return np.ctypeslib.as_array(context.get_logits(), shape=(len(tokens) * n_vocab,)).reshape(len(tokens), n_vocab)


@dataclass(frozen=True)
class Text:
    """A tokenised corpus in windows."""

    name: str
    sha256: str
    windows: list[list[int]]

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.windows))


def tokenise(runner: Runner, text: str, name: str, sha256: str, n_tokens: int) -> Text:
    """Windows of N_WINDOW tokens, each beginning as the model wants texts to begin, up to n_tokens in all.

    Raises:
        CalibrationError: the text is too short for two windows.
        ArgumentError: fewer than two windows were asked for.
    """
    if n_tokens < 2 * N_WINDOW:
        raise ArgumentError(f"calibration needs at least {2 * N_WINDOW} tokens, not {n_tokens}")
    body = runner.model.tokenize(text.encode(), add_bos=False, special=False)
    lead = [runner.model.token_bos()] if runner.model.add_bos_token() and runner.model.token_bos() >= 0 else []
    step = N_WINDOW - len(lead)
    n_windows = min(len(body) // step, n_tokens // N_WINDOW)
    if n_windows < 2:
        raise CalibrationError(f"the text {name} has only {len(body)} tokens; calibration needs at least {2 * N_WINDOW}")
    return Text(name, sha256, [lead + body[i * step : (i + 1) * step] for i in range(n_windows)])


@dataclass
class Costs:
    """Differences of two runs summed over tokens: KL in nats, log likelihoods of the text."""

    n_tokens: int = 0
    kl: float = 0.0
    n_targets: int = 0
    nll: float = 0.0
    nll_reference: float = 0.0

    def add(self, reference: Floats, other: Floats, targets: Sequence[int]) -> None:
        """Rows [n, n_vocab] of both; targets are the tokens that follow, possibly one fewer than rows."""
        for at in range(0, len(reference), 32):  # copies of 32 rows of 260,000 are 33 MB each
            p, q = reference[at : at + 32], other[at : at + 32]
            shares, sums, log_p = normalised(p)
            log_q = normalised(q)[2]
            self.n_tokens += len(p)
            gaps = np.sum(shares * (p - q), axis=1, dtype=np.float64) / sums
            self.kl += float(np.sum(gaps - log_p + log_q))
            following = np.asarray(targets[at : at + 32], np.int64)
            rows = np.arange(len(following))
            self.n_targets += len(following)
            self.nll_reference += float((log_p[rows] - p[rows, following]).sum())
            self.nll += float((log_q[rows] - q[rows, following]).sum())

    @property
    def mean_kl(self) -> float:
        return self.kl / max(1, self.n_tokens)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / max(1, self.n_targets)))

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is one percent more."""
        return float(np.exp((self.nll - self.nll_reference) / max(1, self.n_targets)) - 1)


def compare(runner: Runner, windows: Sequence[Sequence[int]], first: Kind, second: Kind) -> Costs:
    """Feed both contexts the same windows."""
    costs = Costs()
    for window in windows:
        runner.start_window(first, second)
        for at, tokens in runner.pieces(window):
            reference = np.array(runner.decode(first, tokens, at))
            other = runner.decode(second, tokens, at)
            costs.add(reference, other, window[at + 1 : at + 1 + len(tokens)])
    return costs
