"""Records, through llama.cpp's evaluation callback, which FFN neurons fire and which experts are chosen for each token.

Works on any GGUF that llama.cpp loads: dense FFNs with ReLU or ReLU^2 (tensor `ffn_relu`), mixtures of experts (`ffn_moe_topk`)
and the neurons inside ReGLU experts (`ffn_moe_gate`). The model runs unstreamed, batches of 256 tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

N_BATCH = 256

_WANTED = ("ffn_relu", "ffn_moe_topk", "ffn_moe_gate")

Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Trace:
    """What a model did over some windows of text, token after token.

    Attributes:
        neurons: layer -> bool [n_tokens, n_ff], dense layers whose activation has zeros.
        experts: layer -> int32 [n_tokens, n_used], the experts of each token.
        expert_density: layer -> share of the neurons of the chosen experts whose gate is positive (ReGLU experts).
        n_expert: experts of a layer, 0 without.
        n_window: tokens after which the context was emptied.
    """

    neurons: dict[int, Bits]
    experts: dict[int, npt.NDArray[np.int32]]
    expert_density: dict[int, float]
    n_expert: int
    n_window: int


def _rows(tensor: Any, kind: type) -> npt.NDArray[Any]:
    """A tensor of 4-byte elements as [rows, ne0], copied; rows may lie apart, as those of a view do."""
    n_rows, width = tensor.ne[1] * tensor.ne[2], tensor.ne[0]
    step = tensor.nb[1]
    raw = ctypes.string_at(tensor.data, step * (n_rows - 1) + 4 * width)
    return np.ndarray((n_rows, width), kind, raw, strides=(step, 4)).copy()


class _Recorder:
    """Collects the tensors of interest; they are asked for by name."""

    def __init__(self) -> None:
        from leanstream_gguf.calibrate.graph_tap import Tensor

        self.neurons: dict[int, list[Bits]] = defaultdict(list)
        self.experts: dict[int, list[npt.NDArray[np.int32]]] = defaultdict(list)
        self.positive: dict[int, list[float]] = defaultdict(list)
        self._struct = Tensor

    def __call__(self, address: int, ask: bool, _data: int | None) -> bool:
        tensor = self._struct.from_address(address)
        what, _, layer = tensor.name.decode().rpartition("-")
        if what not in _WANTED or not layer.isdigit():
            return not ask
        if not ask:
            self._store(what, int(layer), tensor)
        return True

    def _store(self, what: str, layer: int, tensor: Any) -> None:
        if what == "ffn_moe_topk":
            self.experts[layer].append(_rows(tensor, np.int32))
        elif what == "ffn_moe_gate":
            self.positive[layer].append(float((_rows(tensor, np.float32) > 0).mean()))
        else:
            self.neurons[layer].append(_rows(tensor, np.float32) > 0)


def _number(model: object, key: str) -> int:
    import llama_cpp.llama_cpp as low_level

    text = ctypes.create_string_buffer(64)
    arch = ctypes.create_string_buffer(64)
    low_level.llama_model_meta_val_str(model, b"general.architecture", arch, 64)
    n = low_level.llama_model_meta_val_str(model, arch.value + b"." + key.encode(), text, 64)
    return int(text.value) if n > 0 else 0


def record(path: Path, text: str | Sequence[int], n_tokens: int, n_window: int = 1024, n_threads: int = 2) -> Trace:
    """Run `n_tokens` of `text` (words, or token ids) in windows of `n_window` through the model.

    Raises:
        ValueError: the text is too short.
        leanstream_gguf.LeanStreamError: the model cannot be loaded.
    """
    from leanstream_gguf import loading
    from leanstream_gguf.planner import ContextDefaults

    low_level, internals = loading.low_level, loading.internals
    params = loading.context_params(ContextDefaults(n_window, N_BATCH, N_BATCH, N_BATCH), n_threads=n_threads)
    found = _Recorder()
    callback = low_level.ggml_backend_sched_eval_callback(found)
    params.cb_eval = callback
    with loading.opened(str(path), contextlib.nullcontext(), params) as context:
        model = context.model
        tokens = model.tokenize(text.encode(), add_bos=False, special=False) if isinstance(text, str) else list(text)
        if len(tokens) < n_tokens:
            raise ValueError(f"the text has {len(tokens)} tokens, {n_tokens} were asked for")
        batch = internals.LlamaBatch(n_tokens=N_BATCH, embd=0, n_seq_max=1, verbose=False)
        with contextlib.closing(batch):
            for start in range(0, n_tokens, n_window):
                context.kv_cache_clear()
                for first in range(start, min(start + n_window, n_tokens), N_BATCH):
                    # Outputs of every token: without, the last layer runs for the last token only.
                    part = tokens[first : min(first + N_BATCH, start + n_window, n_tokens)]
                    batch.set_batch(part, n_past=first - start, logits_all=True)
                    context.decode(batch)
        n_expert = _number(model.model, "expert_count")
    return Trace(
        {layer: np.concatenate(parts) for layer, parts in sorted(found.neurons.items())},
        {layer: np.concatenate(parts) for layer, parts in sorted(found.experts.items())},
        {layer: float(np.mean(parts)) for layer, parts in sorted(found.positive.items())},
        n_expert,
        n_window,
    )
