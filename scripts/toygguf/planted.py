"""Turns a model description with random weights (shapes.py) into one whose neurons and routers fire as measured.

Planted are the token codes, layer 0's attention, the rows that decide (up of an ungated FFN, gate of ReGLU experts, routers)
and zeros wherever another tensor would write to the planted dimensions. All else stays random, scaled so that what it adds to
the residual stream stays small beside the planted part; the last norm turns that around, so that logits hang on the FFNs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .blocks import LAYOUTS, Bytes
from .container import Plant, Tensor
from .latents import (
    N_CODE,
    N_CONST,
    N_GROUPS,
    N_HEADS,
    N_PLANTED,
    Floats,
    Rope,
    amplitudes,
    bpe_tokens,
    latents,
    offset,
    output_scale,
    token_codes,
)
from .planting import Neurons, Reference, Shape, plant_neurons, plant_router, shuffled, solve_shape, unit_rates
from .quantize import quantize
from .shapes import Model

Statistics = dict[str, Any]

_OTHERS = 0.03  # energy of all that attention and FFNs add, over that of the planted dimensions
_EMBEDDED = 0.005  # the same of the random part of a token's embedding
_N_POWER = 256  # neurons whose output is measured for the scale of the down projection
_SKIPPED = 64  # tokens of the reference text before the averages have settled
_KEY = 12.0  # spread of the score over the pairs of a head, see latents.py


def _grid(std: float) -> float:
    """To the next half power of two: few different spreads need few random pools."""
    return float(2.0 ** (round(2.0 * math.log2(std)) / 2.0))


def _fixed(kind: str, values: Floats) -> Plant:
    """Rows that are zero but for their first columns."""
    raw = quantize(kind, values)

    def plant(first: int, rows: Bytes) -> None:
        rows[:] = 0
        part = raw[first : first + len(rows)]
        rows[: len(part), : part.shape[1]] = part

    return plant


def _zeros(kind: str, n_rows: int) -> Plant:
    """Output rows to the planted dimensions write nothing; `n_rows` is the height of one matrix of a stack."""

    def plant(first: int, rows: Bytes) -> None:
        if kind == "Q4_0":
            # Its random quants have a mean of -1/2: every other scale is negated, or layers would add up in one direction.
            rows.reshape(len(rows), -1, LAYOUTS[kind].n_bytes)[:, ::2, 1] ^= 0x80
        rows[(first + np.arange(len(rows))) % n_rows < N_PLANTED] = 0

    return plant


def _starts(rows_of: Callable[[], Bytes]) -> Plant:
    """Random rows with a planted beginning, computed when it is first needed."""

    def plant(first: int, rows: Bytes) -> None:
        part = rows_of()[first : first + len(rows)]
        rows[:, : part.shape[1]] = part

    return plant


def _values(values: Sequence[float] | Floats) -> Plant:
    raw = np.asarray(values, "<f4").view(np.uint8).reshape(1, -1)

    def plant(_first: int, rows: Bytes) -> None:
        rows.reshape(-1)[:] = raw.reshape(-1)

    return plant


class Planter:
    """Plants one model.

    Args:
        model: described with a BPE vocabulary; n_embd at least 512, at least five heads.
        neurons, experts: measured statistics (activity/summary.py) of a sparse and of a mixture-of-experts model.
        text: reference text, some thousand characters.
        interleaved: whether rotary pairs are neighbours (llama, arcee) or half a head apart (neox).
        gated: ReGLU experts, planted gate rows; else the up rows of a dense FFN if the model has no experts.
    """

    def __init__(
        self, model: Model, text: str, neurons: Statistics | None, experts: Statistics | None, *, interleaved: bool, gated: bool
    ) -> None:
        dims = model.dims
        if dims.n_embd < 2 * N_PLANTED or dims.n_head < N_HEADS or dims.d_head < N_CODE:
            raise ValueError(f"{model.name}: planting needs n_embd >= {2 * N_PLANTED}, {N_HEADS} heads of {N_CODE} or more")
        if neurons is None and not dims.n_expert:
            raise ValueError(f"{model.name}: a dense model needs the statistics of a sparse one")
        self.model, self.dims, self.gated = model, dims, gated
        self._neurons, self._experts = neurons, experts
        n_rot = int(model.metadata[f"{model.arch}.rope.dimension_count"])
        self.rope = Rope(dims.d_head, n_rot, dims.rope_base, interleaved)
        tokens = bpe_tokens(text, model.metadata["tokenizer.ggml.tokens"], dims.n_vocab)
        if len(tokens) < 8 * _SKIPPED:
            raise ValueError(f"the reference text is too short: {len(tokens)} tokens")
        self.codes = token_codes(model.name, dims.n_vocab)
        self.codes -= self.codes[tokens].mean(axis=0)
        self.codes *= math.sqrt(N_CODE) / np.linalg.norm(self.codes, axis=1, keepdims=True)
        self.reference = Reference(latents(self.codes, self.rope, tokens)[_SKIPPED:])
        self.energy = N_CONST + float((self.reference.z**2).sum(axis=1).mean())
        self.rms = math.sqrt(self.energy / dims.n_embd)
        self._shapes: dict[int, Shape] = {}  # by measured layer
        self._rows = functools.lru_cache(maxsize=1)(self._rows_uncached)

    # ---- statistics ------------------------------------------------------------------------------------------------

    def _depth(self, layer: int, n_measured: int) -> int:
        """The measured layer at the same depth; the first and the last stay what they are."""
        return round(layer * (n_measured - 1) / max(1, self.dims.n_layer - 1))

    def _neuron_layer(self, layer: int) -> tuple[dict[str, Any], Shape]:
        assert self._neurons is not None
        at = self._depth(layer, len(self._neurons["neurons"]))
        found = self._neurons["neurons"][at]
        if at not in self._shapes:
            self._shapes[at] = solve_shape(found, self._neurons["ranks"], self._neurons["lags"], self.reference.z)
        return found, self._shapes[at]

    def _seed(self, layer: int) -> str:
        return f"{self.model.name}/{layer}"

    def _plant_rows(self, layer: int, kind: str, n: int, order: bool) -> Neurons:
        found, shape = self._neuron_layer(layer)
        assert self._neurons is not None
        rates = unit_rates(found["rates"], self._neurons["ranks"], n, found["density"])
        if order:
            rates = rates[shuffled(self._seed(layer), n)]
        return plant_neurons(self._seed(layer), kind, rates, shape, self.reference, self.rms)

    def _rows_uncached(self, layer: int, kind: str, n: int) -> Bytes:
        return self._plant_rows(layer, kind, n, order=True).rows

    def _router(self, layer: int) -> Floats:
        statistics, n = self._experts, self.dims.n_expert
        assert statistics is not None
        found = statistics["experts"][self._depth(layer, len(statistics["experts"]))]
        n_measured = len(found["rates"])
        ranks = (np.arange(n_measured) + 0.5) / n_measured
        rates = unit_rates(found["rates"], list(ranks), n, self.dims.n_used / n)
        early = self.model.arch == "smallthinker" and layer == 0  # routes before any attention: knows this token only
        z = self.reference.z if not early else np.where(np.arange(self.reference.z.shape[1]) < N_CODE, self.reference.z, np.float32(0))
        shape = solve_shape({**found, "overlap": _same_excess(found, rates)}, list(ranks), statistics["lags"], self.reference.z)
        rates = rates[shuffled(f"{self._seed(layer)}/experts", n)]
        rows = plant_router(f"{self._seed(layer)}/router", rates, self.dims.n_used, shape, z)
        return np.pad(rows, ((0, 0), (0, self.dims.n_embd - N_PLANTED)))

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def _spread(self, inputs: float) -> float:
        """Standard deviation of the weights of one of the 2 n_layer outputs whose inputs have this sum of squares."""
        energy = _OTHERS * self.energy / (2 * self.dims.n_layer)
        return _grid(math.sqrt(energy / (self.dims.n_embd - N_PLANTED) / max(inputs, 1e-9)))

    def _ffn_power(self, layer: int) -> float:
        """Sum of squares of what goes into the down projection (all chosen experts together)."""
        d = self.dims
        if self._neurons is None or (d.n_expert and not self.gated):
            return d.n_ff_exp * 1.9 / d.n_used  # SiLU of normal inputs of spread 1.5 times another of these
        planted = self._plant_rows(layer, "F32", _N_POWER, order=False)
        if self.gated:
            return planted.power[1] * d.n_ff_exp / _N_POWER * 1.5**2 / d.n_used
        return planted.power[2] * d.n_ff / _N_POWER

    def _first_attention(self, name: str, tensor: Tensor) -> Tensor:
        d, rope = self.dims, self.rope
        embedded = N_CONST + N_CODE + _EMBEDDED * self.energy
        rms = math.sqrt(embedded / d.n_embd)
        key = math.sqrt(_KEY * math.sqrt(d.d_head))
        if name == "attn_v":
            columns = np.zeros((tensor.shape[1], N_PLANTED), np.float32)
            for row in range(tensor.shape[1]):
                if row % d.d_head < N_CODE:
                    columns[row, N_CONST + row % d.d_head] = 1.0
            return replace(tensor, plant=_fixed(tensor.type, columns))
        if name == "attn_output":
            std = self._spread(d.n_head * N_CODE / rms**2)
            return replace(tensor, std=std, plant=self._first_output(tensor, rms))
        wanted = np.zeros((tensor.shape[1] // d.d_head, d.d_head))
        if name == "attn_k":
            wanted[:] = rope.place(np.full(rope.n_rot // 2, key), np.zeros(rope.n_rot // 2))
        else:
            for head in range(N_HEADS):
                wanted[head] = self._query(head, key)
        half = (wanted.reshape(-1, 1) * rms / N_CONST).astype(np.float32)
        n = N_CONST // 2
        columns = np.hstack([half.repeat(n, 1), -half.repeat(n, 1), np.zeros((len(half), N_PLANTED - N_CONST), np.float32)])
        return replace(tensor, plant=_fixed(tensor.type, columns))

    def _query(self, head: int, key: float) -> Any:
        rope, d_head = self.rope, self.dims.d_head
        length = amplitudes(rope, head) * math.sqrt(d_head) / key
        if self._normed_queries():
            # The norm fixes the length: what is not needed goes to the slowest pair, which turns too little to matter.
            rest = key**2 / 2 * d_head - float((length[:-1] ** 2).sum())
            length = np.append(length[:-1], math.sqrt(max(rest, 0.0)))
        turned = rope.speeds * offset(head)
        return rope.place(length * np.cos(turned), -length * np.sin(turned))

    def _first_output(self, tensor: Tensor, rms: float) -> Plant:
        d = self.dims
        values = np.zeros((N_PLANTED, tensor.shape[0]), np.float32)
        for head in range(N_HEADS):
            to = N_CONST + N_CODE * (head + 1) + np.arange(N_CODE)
            values[to, head * d.d_head + np.arange(N_CODE)] = rms * output_scale(self.rope, head)
        raw = quantize(tensor.type, values)

        def plant(first: int, rows: Bytes) -> None:
            part = raw[first : first + len(rows)]
            rows[: len(part)] = part

        return plant

    def _normed_queries(self) -> bool:
        return any(t.name.endswith("attn_q_norm.weight") for t in self.model.tensors)

    def _embedding(self, tensor: Tensor) -> Tensor:
        constants = np.repeat(np.float32([1, -1]), N_CONST // 2)[None, :]
        n_late = N_CODE * (N_GROUPS - 1)

        def plant(first: int, rows: Bytes) -> None:
            codes = self.codes[first : first + len(rows)]
            values = np.hstack([constants.repeat(len(codes), 0), codes, np.zeros((len(codes), n_late), np.float32)])
            raw = quantize(tensor.type, values)
            rows[:, : raw.shape[1]] = raw

        std = math.sqrt(_EMBEDDED * self.energy / (self.dims.n_embd - N_PLANTED))
        return replace(tensor, std=_grid(std), plant=plant)

    def _norm(self, name: str, tensor: Tensor) -> Tensor:
        n = tensor.shape[0]
        if name == "output_norm":
            small = math.sqrt((_OTHERS + _EMBEDDED) * self.energy / (self.dims.n_embd - N_PLANTED)) / self.rms
            return replace(tensor, plant=_values(np.where(np.arange(n) < N_PLANTED, 0.05, 1.0 / small).astype(np.float32)))
        head = name in ("attn_q_norm", "attn_k_norm")
        return replace(tensor, plant=_values(np.full(n, math.sqrt(_KEY * math.sqrt(n) / 2) if head else 1.0, np.float32)))

    def _tensor(self, tensor: Tensor) -> Tensor:
        """The tensor as it is to be written."""
        parts = tensor.name.split(".")
        name, what = parts[-2], parts[-1]
        layer = int(parts[1]) if parts[0] == "blk" else -1
        first_attention = layer == 0 and name.startswith("attn_")
        if what == "bias":
            return replace(tensor, plant=_values(np.zeros(math.prod(tensor.shape), np.float32)))
        if name.endswith("norm"):
            return self._norm(name, tensor) if layer <= 0 or name not in ("attn_q_norm", "attn_k_norm") else tensor
        if name == "token_embd":
            return self._embedding(tensor)
        if first_attention:
            return self._first_attention(name, tensor)
        if name == "attn_output":
            return replace(tensor, std=self._spread(0.8 * tensor.shape[0]), plant=_zeros(tensor.type, tensor.shape[1]))
        if name in ("ffn_down", "ffn_down_exps"):
            return replace(tensor, std=self._spread(self._ffn_power(layer)), plant=_zeros(tensor.type, tensor.shape[1]))
        if name == "ffn_gate_inp" and self._experts is not None:
            return replace(tensor, plant=_starts(functools.partial(self._router_rows, layer)))
        if name == ("ffn_gate_exps" if self.gated else "ffn_up"):
            # Almost blind to what is not planted: noise there would move every threshold.
            n, std = math.prod(tensor.shape[1:]), _grid(self.rms / (8.0 * math.sqrt(N_PLANTED)))
            return replace(tensor, std=std, plant=_starts(functools.partial(self._rows, layer, tensor.type, n)))
        return tensor

    def _router_rows(self, layer: int) -> Bytes:
        return quantize("F32", self._router(layer))

    def plant(self) -> None:
        """Give the model's tensors their planted contents; nothing is written yet."""
        self.model.tensors = [self._tensor(tensor) for tensor in self.model.tensors]


def _same_excess(found: dict[str, Any], rates: Any) -> list[float]:
    """Measured overlaps carried over to other rates: what is above chance keeps its share of what could be."""
    measured = np.asarray(found["rates"])
    before = float((measured**2).sum() / measured.sum())
    after = float((rates**2).sum() / rates.sum())
    return [after + (1.0 - after) * (overlap - before) / (1.0 - before) for overlap in found["overlap"]]
