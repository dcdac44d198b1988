"""The toy models by name: one for each tensor layout and code path that streaming has to get right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import shapes
from .container import Tensor, write_gguf, write_split
from .shapes import Dims, Model, attention, begin, embedding, experts, gated_ffn, layers

_DENSE = Dims()
_MOE = Dims(n_expert=16, n_used=4, n_ff_exp=64)
# Types whose blocks of 32 fit an expert of 64 neurons.
_SMALL = ("Q4_0", "Q8_0", "F16")


def _llama(name: str, tied: bool, spm: bool) -> Model:
    model = begin(name, "llama", _DENSE, spm=spm)
    embedding(model, tied, kind="Q8_0" if tied else "Q4_0")
    return layers(model, gated_ffn)


def dense_tied() -> Model:
    """llama, output tied to the embedding, mixed types, SentencePiece."""
    return _llama("dense_tied", tied=True, spm=True)


def dense_untied() -> Model:
    """llama with its own output matrix: the embedding is only looked up by row."""
    return _llama("dense_untied", tied=False, spm=False)


def dense_qwen2() -> Model:
    """qwen2: biases on q, k and v; F16 embedding looked up by row."""
    dims = Dims(n_layer=3)
    model = begin("dense_qwen2", "qwen2", dims, types=("Q8_0", "Q4_1", "BF16"))
    embedding(model, tied=False, kind="F16", out_kind="Q8_0")
    return layers(model, gated_ffn, bias=("attn_q", "attn_k", "attn_v"))


def dense_fused() -> Model:
    """phi3: fused q|k|v and fused gate|up matrices. (llama.cpp treats a model named phi3 in its own way.)"""
    dims = Dims(n_layer=3)
    d, kv = dims.n_embd, dims.n_head_kv * dims.d_head
    model = begin("dense_fused", "phi3", dims)
    embedding(model, tied=False)
    for i in range(dims.n_layer):
        p = f"blk.{i}."
        model.norm(p + "attn_norm", d)
        model.matrix(p + "attn_qkv", d, d + 2 * kv, gain=1.5)
        model.matrix(p + "attn_output", d, d, gain=1.5)
        model.norm(p + "ffn_norm", d)
        model.matrix(p + "ffn_up", d, 2 * dims.n_ff, gain=1.5)
        model.matrix(p + "ffn_down", dims.n_ff, d, gain=2.0)
    return model


def dense_gemma3() -> Model:
    """gemma3: tied, norms after attention and FFN, q and k norms, sliding-window layers, GeGLU."""
    dims = Dims(n_layer=7, head_dim=64, n_head_kv=1)
    model = begin("dense_gemma3", "gemma3", dims, spm=True)
    model.kv(attention__sliding_window=32)
    embedding(model, tied=True)
    for i in range(dims.n_layer):
        attention(model, i, qk_norm=True)
        for norm in ("post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.norm(f"blk.{i}.{norm}", dims.n_embd)
        gated_ffn(model, i)
    return model


def dense_arcee() -> Model:
    """arcee: squared ReLU without a gate."""
    model = begin("dense_arcee", "arcee", _DENSE)
    embedding(model, tied=True)
    return layers(model, shapes.relu2_ffn)


def dense_gemma3n() -> Model:
    """gemma3n: one more embedding per layer, looked up by row; AltUp, Laurel, sparse first layers."""
    dims = Dims(n_layer=3, head_dim=64, n_head_kv=1)
    model = begin("dense_gemma3n", "gemma3n", dims, spm=True)
    model.kv(attention__sliding_window=32)
    embedding(model, tied=True)
    shapes.altup(model)
    for i in range(dims.n_layer):
        attention(model, i, qk_norm=True)
        for norm in ("post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.norm(f"blk.{i}.{norm}", dims.n_embd)
        gated_ffn(model, i)
        shapes.altup_layer(model, i)
    return model


def dense_looped() -> Model:
    """hrm_text: two stacks of two layers, each run several times in one graph."""
    dims = Dims(n_layer=12, n_embd=256)
    model = begin("dense_looped", "hrm_text", dims)
    model.kv(hrm__layers_per_stack=2, hrm__h_cycles=2, hrm__l_cycles=2)
    embedding(model, tied=False)
    model.tensors = [t for t in model.tensors if t.name != "output_norm.weight"]
    model.tensors.append(Tensor("hrm.z_l_init", (dims.n_embd,), "F32", 0.5))
    for i in range(4):
        attention(model, i)
        model.tensors = [t for t in model.tensors if not t.name.endswith("attn_norm.weight")]
        model.matrix(f"blk.{i}.attn_gate", dims.n_embd, dims.n_embd)
        gated_ffn(model, i)
    return model


def _qwen3moe(name: str, dims: Dims, types: tuple[str, ...], scale: bool = False) -> Model:
    model = begin(name, "qwen3moe", dims, types)
    embedding(model, tied=False)
    return layers(model, partial(experts, scale=scale), qk_norm=True)


def moe_qwen3() -> Model:
    """qwen3moe with K-quant experts, separate gate, up and down."""
    return _qwen3moe("moe_qwen3", Dims(n_expert=8, n_used=2, n_ff_exp=256), ("Q4_K", "Q6_K"))


def moe_scales() -> Model:
    """qwen3moe whose expert tensors have per-expert scales."""
    return _qwen3moe("moe_scales", _MOE, _SMALL, scale=True)


def moe_llama() -> Model:
    """llama with experts (Mixtral): 16 small experts, 4 used, tied output."""
    # The llama graph knows no expert_feed_forward_length: n_ff is the size of an expert.
    dims = Dims(n_expert=16, n_used=4, n_ff=64, n_ff_exp=64)
    model = begin("moe_llama", "llama", dims, _SMALL, spm=True)
    embedding(model, tied=True)
    return layers(model, experts)


def moe_bias() -> Model:
    """gpt-oss: biases on router and experts, attention sinks, MXFP4 experts, sliding window."""
    dims = Dims(n_expert=16, n_used=4, n_ff_exp=64)
    model = begin("moe_bias", "gpt-oss", dims, types=("MXFP4", "Q8_0"))
    model.kv(attention__sliding_window=32)
    embedding(model, tied=False)
    for i in range(dims.n_layer):
        attention(model, i, bias=("attn_q", "attn_k", "attn_v", "attn_output"))
        model.norm(f"blk.{i}.post_attention_norm", dims.n_embd)
        model.norm(f"blk.{i}.attn_sinks", dims.n_head)
        experts(model, i, bias=True)
    return model


def _deepseek2(name: str, merged: bool) -> Model:
    dims = Dims(n_layer=5, n_expert=16, n_used=4, n_ff_exp=64, n_head_kv=4)
    rank, rope, nope, value = shapes.DEEPSEEK_RANKS
    model = begin(name, "deepseek2", dims, _SMALL)
    model.kv(
        attention__kv_lora_rank=rank,
        attention__key_length=nope + rope,
        attention__value_length=value,
        rope__dimension_count=rope,
        leading_dense_block_count=2,
        expert_shared_count=1,
        expert_weights_scale=1.0,
    )
    # No q_lora_rank: the loader demands it for all but the "lite" models, so state that there is none.
    model.kv(attention__q_lora_rank=0)
    embedding(model, tied=False)
    for i in range(dims.n_layer):
        shapes.mla_attention(model, i)
        model.norm(f"blk.{i}.ffn_norm", dims.n_embd)
        if i < 2:
            gated_ffn(model, i)
        else:
            experts(model, i, merged=merged)
            gated_ffn(model, i, "_shexp", dims.n_ff_exp)
    return model


def moe_dense_lead() -> Model:
    """deepseek2: two dense layers first, then experts beside a shared expert."""
    return _deepseek2("moe_dense_lead", merged=False)


def moe_merged() -> Model:
    """deepseek2 with gate and up merged into one expert tensor."""
    return _deepseek2("moe_merged", merged=True)


def moe_shared() -> Model:
    """qwen2moe: a gated shared expert in every layer."""
    dims = Dims(n_expert=16, n_used=4, n_ff_exp=64)
    model = begin("moe_shared", "qwen2moe", dims, _SMALL)
    model.kv(expert_shared_feed_forward_length=128)
    embedding(model, tied=False)
    for i in range(dims.n_layer):
        attention(model, i, bias=("attn_q", "attn_k", "attn_v"))
        model.norm(f"blk.{i}.ffn_norm", dims.n_embd)
        experts(model, i)
        model.matrix(f"blk.{i}.ffn_gate_inp_shexp", dims.n_embd, kind="F32")
        gated_ffn(model, i, "_shexp", 128)
    return model


def moe_reglu() -> Model:
    """smallthinker: ReGLU experts, routed from the layer's input before attention."""
    model = begin("moe_reglu", "smallthinker", _MOE, _SMALL)
    model.kv(expert_gating_func=2)
    embedding(model, tied=False)
    return layers(model, experts)


MODELS: dict[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        dense_tied, dense_untied, dense_qwen2, dense_fused, dense_gemma3, dense_gemma3n, dense_arcee, dense_looped,
        moe_qwen3, moe_scales, moe_llama, moe_bias, moe_dense_lead, moe_merged, moe_shared, moe_reglu,
    )
}  # fmt: skip


def write_model(name: str, folder: Path, n_shards: int = 1) -> Path:
    """Write a toy model into `folder`; returns the file to open (the first shard of a split set)."""
    model = MODELS[name]()
    path = folder / f"{name}.gguf"
    if n_shards == 1:
        write_gguf(path, model.metadata, model.tensors, name)
        return path
    return write_split(path, model.metadata, model.tensors, name, n_shards)[0]
