"""Tensor lists and metadata of the architectures that the toy and synthetic models use.

Spreads are chosen so that activations keep their scale, logits are not degenerate and routers disagree:
a projection of n inputs gets gain / sqrt(n), routers a gain of 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .container import Tensor
from .vocab import bpe_metadata, spm_metadata


@dataclass(frozen=True)
class Dims:
    """The sizes of a model. head_dim 0 means n_embd / n_head."""

    n_layer: int = 4
    n_embd: int = 256
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 0
    n_vocab: int = 512
    n_ctx: int = 2048
    n_expert: int = 0
    n_used: int = 0
    n_ff_exp: int = 0
    rope_base: float = 10000.0

    @property
    def d_head(self) -> int:
        return self.head_dim or self.n_embd // self.n_head


# Every type a layer's matrices take in turn, so that neighbours differ in size and kernel.
MIXED = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16")


@dataclass
class Model:
    """A model being described: its metadata and its tensors in file order."""

    name: str
    arch: str
    dims: Dims
    types: tuple[str, ...] = MIXED
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    _turn: int = 0

    def kv(self, **values: Any) -> None:
        """Metadata of the architecture; a double underscore stands for a dot."""
        self.metadata.update({f"{self.arch}.{k.replace('__', '.')}": v for k, v in values.items()})

    def norm(self, name: str, n: int) -> None:
        self.tensors.append(Tensor(f"{name}.weight", (n,), "F32", 0.05, 1.0))

    def bias(self, name: str, *shape: int, std: float = 0.1) -> None:
        self.tensors.append(Tensor(f"{name}.bias", shape, "F32", std))

    def matrix(self, name: str, *shape: int, gain: float = 1.0, kind: str = "") -> None:
        """A projection; its type is the next of `types` unless given."""
        if not kind:
            kind = self.types[self._turn % len(self.types)]
            self._turn += 1
        self.tensors.append(Tensor(f"{name}.weight", shape, kind, gain / math.sqrt(shape[0])))


def begin(name: str, arch: str, dims: Dims, types: tuple[str, ...] = MIXED, spm: bool = False) -> Model:
    """A model with the metadata that every architecture needs."""
    model = Model(name, arch, dims, types)
    model.metadata = {
        "general.architecture": arch,
        "general.name": name,
        "general.description": "random weights: for tests and measurements only, this model says nothing",
        "general.file_type": 1,
        "general.quantization_version": 2,
    }
    model.kv(
        vocab_size=dims.n_vocab,
        context_length=dims.n_ctx,
        embedding_length=dims.n_embd,
        block_count=dims.n_layer,
        feed_forward_length=dims.n_ff,
        attention__head_count=dims.n_head,
        attention__head_count_kv=dims.n_head_kv,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__freq_base=dims.rope_base,
        rope__dimension_count=dims.d_head,
    )
    if dims.head_dim:
        model.kv(attention__key_length=dims.head_dim, attention__value_length=dims.head_dim)
    if dims.n_expert:
        model.kv(expert_count=dims.n_expert, expert_used_count=dims.n_used, expert_feed_forward_length=dims.n_ff_exp)
    model.metadata.update(spm_metadata(dims.n_vocab) if spm else bpe_metadata(dims.n_vocab))
    return model


def embedding(model: Model, tied: bool, kind: str = "Q8_0", out_kind: str = "Q6_K") -> None:
    """Token embedding, output norm and, unless tied, the output matrix."""
    d = model.dims
    # A tied matrix is output too: larger rows would make every token predict itself.
    model.matrix("token_embd", d.n_embd, d.n_vocab, gain=2.0 if tied else math.sqrt(d.n_embd), kind=kind)
    model.norm("output_norm", d.n_embd)
    if not tied:
        model.matrix("output", d.n_embd, d.n_vocab, gain=3.0, kind=out_kind)


def attention(model: Model, i: int, qk_norm: bool = False, bias: tuple[str, ...] = ()) -> None:
    """Norm, q, k, v and output projection; `bias` names those that have one."""
    d, p = model.dims, f"blk.{i}."
    width = d.n_head * d.d_head
    model.norm(p + "attn_norm", d.n_embd)
    for name, n_in, n_out in (
        ("attn_q", d.n_embd, width),
        ("attn_k", d.n_embd, d.n_head_kv * d.d_head),
        ("attn_v", d.n_embd, d.n_head_kv * d.d_head),
        ("attn_output", width, d.n_embd),
    ):
        model.matrix(p + name, n_in, n_out, gain=1.5)
        if name in bias:
            model.bias(p + name, n_out)
    if qk_norm:
        model.norm(p + "attn_q_norm", d.d_head)
        model.norm(p + "attn_k_norm", d.d_head)


def gated_ffn(model: Model, i: int, suffix: str = "", n_ff: int = 0) -> None:
    """Gate, up and down; suffix "_shexp" makes it a shared expert."""
    d, p = model.dims, f"blk.{i}.ffn_"
    n_ff = n_ff or d.n_ff
    model.matrix(f"{p}gate{suffix}", d.n_embd, n_ff, gain=1.5)
    model.matrix(f"{p}up{suffix}", d.n_embd, n_ff, gain=1.5)
    model.matrix(f"{p}down{suffix}", n_ff, d.n_embd, gain=2.0)


def relu2_ffn(model: Model, i: int) -> None:
    """Up and down without a gate, as models with a squared ReLU have them."""
    d, p = model.dims, f"blk.{i}.ffn_"
    model.matrix(f"{p}up", d.n_embd, d.n_ff, gain=1.0)
    model.matrix(f"{p}down", d.n_ff, d.n_embd, gain=1.5)


def experts(model: Model, i: int, merged: bool = False, bias: bool = False, scale: bool = False) -> None:
    """Router and expert tensors of a layer, in every layout that llama.cpp knows."""
    d, p = model.dims, f"blk.{i}.ffn_"
    model.matrix(p + "gate_inp", d.n_embd, d.n_expert, gain=4.0, kind="F32")
    if bias:
        model.bias(p + "gate_inp", d.n_expert)
    first = [("gate_up_exps", 2 * d.n_ff_exp)] if merged else [("gate_exps", d.n_ff_exp), ("up_exps", d.n_ff_exp)]
    kind = model.types[i % len(model.types)]
    down = model.types[(i + 1) % len(model.types)]
    for name, n_in, n_out, tensor_kind in (
        *((name, d.n_embd, n_out, kind) for name, n_out in first),
        ("down_exps", d.n_ff_exp, d.n_embd, down),
    ):
        model.matrix(p + name, n_in, n_out, d.n_expert, gain=2.0, kind=tensor_kind)
        if bias:
            model.bias(p + name, n_out, d.n_expert)
        if scale:
            model.tensors.append(Tensor(f"{p}{name}.scale", (d.n_expert,), "F32", 0.2, 1.0))


def layers(model: Model, ffn: Callable[[Model, int], None], norm_bias: bool = False, **of_attention: Any) -> Model:
    """Append the usual layers to a model that has its embedding: norm, attention, norm, `ffn`.

    Args:
        norm_bias: the norms have biases (LayerNorm), the output's too.
        of_attention: as `attention` takes them.
    """
    n_embd = model.dims.n_embd
    if norm_bias:
        model.bias("output_norm", n_embd)
    for i in range(model.dims.n_layer):
        attention(model, i, **of_attention)
        model.norm(f"blk.{i}.ffn_norm", n_embd)
        if norm_bias:
            model.bias(f"blk.{i}.attn_norm", n_embd)
            model.bias(f"blk.{i}.ffn_norm", n_embd)
        ffn(model, i)
    return model


def mla_attention(model: Model, i: int) -> None:
    """DeepSeek-V2 attention in its older form: low-rank keys and values, wkv_b not split."""
    d, p = model.dims, f"blk.{i}."
    rank, rope, nope, value = DEEPSEEK_RANKS
    model.norm(p + "attn_norm", d.n_embd)
    model.norm(p + "attn_kv_a_norm", rank)
    model.matrix(p + "attn_q", d.n_embd, d.n_head * (nope + rope))
    model.matrix(p + "attn_kv_a_mqa", d.n_embd, rank + rope)
    model.matrix(p + "attn_kv_b", rank, d.n_head * (nope + value), gain=1.5)
    model.matrix(p + "attn_output", d.n_head * value, d.n_embd, gain=1.5)


# DeepSeek-V2: kv_lora_rank, rope part and plain part of a key, value head size.
DEEPSEEK_RANKS = (256, 32, 32, 64)

# Gemma 3n: AltUp streams, embedding size of a layer and Laurel rank are fixed in llama.cpp.
N_ALTUP, N_EMBD_ALTUP, LAUREL_RANK = 4, 256, 64


def altup(model: Model) -> None:
    """The tensors of Gemma 3n that belong to no layer."""
    d = model.dims
    model.matrix("altup_proj", d.n_embd, d.n_embd, N_ALTUP - 1, kind="F16")
    model.matrix("altup_unembd_proj", d.n_embd, d.n_embd, N_ALTUP - 1, kind="F16")
    model.matrix("per_layer_token_embd", N_EMBD_ALTUP * d.n_layer, d.n_vocab, gain=8.0, kind="Q8_0")
    model.matrix("per_layer_model_proj", d.n_embd, N_EMBD_ALTUP * d.n_layer, kind="F16")
    model.norm("per_layer_proj_norm", N_EMBD_ALTUP)


def altup_layer(model: Model, i: int) -> None:
    """The AltUp and Laurel tensors of a Gemma 3n layer."""
    d, p = model.dims, f"blk.{i}."
    model.matrix(p + "inp_gate", d.n_embd, N_EMBD_ALTUP, kind="Q8_0")
    model.matrix(p + "proj", N_EMBD_ALTUP, d.n_embd, kind="Q8_0")
    model.norm(p + "post_norm", d.n_embd)
    model.matrix(p + "altup_correct_coef", N_ALTUP, N_ALTUP, kind="F32")
    model.norm(p + "altup_correct_scale", d.n_embd)
    model.matrix(p + "altup_predict_coef", N_ALTUP, N_ALTUP * N_ALTUP, kind="F32")
    model.matrix(p + "altup_router", d.n_embd, N_ALTUP, kind="F32")
    model.norm(p + "altup_router_norm", d.n_embd)
    model.matrix(p + "laurel_l", d.n_embd, LAUREL_RANK, kind="Q8_0")
    model.matrix(p + "laurel_r", LAUREL_RANK, d.n_embd, kind="Q8_0")
    model.norm(p + "laurel_post_norm", d.n_embd)
