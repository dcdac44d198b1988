#!/usr/bin/env python3
"""Write a synthetic GGUF whose neurons fire and whose experts are chosen as in a model that was really trained.

    make_sparse_gguf.py afm.gguf --shape afm-4.5b                        # ungated ReLU^2, 2.6 GiB
    make_sparse_gguf.py moe.gguf --shape qwen3-30b-a3b --type Q4_K       # 128 experts, 8 used
    make_sparse_gguf.py small.gguf --shape afm-4.5b --scale 0.2 --layers 16

Density, skew, co-activation and overlap of tokens in a row come from activity/measured/*.json (measure_activity.py), layer by
layer at the same depth, and show on any ordinary text. The text such a model writes means nothing. What it is good for:
measuring speed, memory, reads and cache policies. What it is not: which neurons fire is decided by the first layer's output
and hardly changes from there on, so a predictor that looks at an earlier layer does better than on a real model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from make_synthetic_gguf import QWEN3_30B_A3B, qwen3moe
from toygguf.output import write_for
from toygguf.planted import Planter
from toygguf.quantize import TYPES
from toygguf.shapes import Dims, Model, begin, embedding, experts, layers, relu2_ffn

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "activity" / "measured"
REFERENCE = HERE / "toygguf" / "reference.txt"


def _token_type(kind: str) -> str:
    return "F16" if kind in ("F16", "F32") else "Q8_0"  # token codes must survive


def _begin(name: str, arch: str, dims: Dims, kind: str) -> Model:
    model = begin(name, arch, dims, (kind,))
    embedding(model, tied=False, kind=_token_type(kind), out_kind="Q6_K")
    return model


def arcee(name: str, dims: Dims, kind: str) -> Model:
    """AFM: squared ReLU without a gate."""
    return layers(_begin(name, "arcee", dims, kind), relu2_ffn)


def nemotron(name: str, dims: Dims, kind: str) -> Model:
    """Nemotron: the same with layer norms and half of each head rotated."""
    model = _begin(name, "nemotron", dims, kind)
    model.kv(attention__layer_norm_epsilon=1e-5, rope__dimension_count=dims.d_head // 2)
    return layers(model, relu2_ffn, norm_bias=True)


def smallthinker(name: str, dims: Dims, kind: str) -> Model:
    """SmallThinker: ReGLU experts, routed from the layer's input."""
    model = _begin(name, "smallthinker", dims, kind)
    model.kv(expert_gating_func=2)
    return layers(model, experts)


def _qwen3moe(name: str, dims: Dims, kind: str) -> Model:
    return qwen3moe(name, dims, kind, _token_type(kind))


@dataclass(frozen=True)
class Shape:
    """A real model's shape, and what is planted in it."""

    make: Callable[[str, Dims, str], Model]
    dims: Dims
    interleaved: bool = False
    gated: bool = False
    neurons: bool = True
    routed: bool = False


SHAPES = {
    "afm-4.5b": Shape(
        arcee, Dims(n_layer=36, n_embd=2560, n_ff=18432, n_head=20, n_head_kv=4, n_vocab=128004, n_ctx=65536), interleaved=True
    ),
    "nemotron-mini-4b": Shape(nemotron, Dims(n_layer=32, n_embd=3072, n_ff=9216, n_head=24, n_head_kv=8, n_vocab=256000, n_ctx=4096)),
    "smallthinker-4b": Shape(
        smallthinker,
        Dims(
            n_layer=32, n_embd=1536, n_ff=768, n_head=12, n_head_kv=2, head_dim=128, n_vocab=151936, n_ctx=32768,
            n_expert=32, n_used=4, n_ff_exp=768, rope_base=1.5e6,
        ),
        gated=True, routed=True,
    ),
    "smallthinker-21b": Shape(
        smallthinker,
        Dims(
            n_layer=52, n_embd=2560, n_ff=768, n_head=28, n_head_kv=4, head_dim=128, n_vocab=151936, n_ctx=16384,
            n_expert=64, n_used=6, n_ff_exp=768, rope_base=1.5e6,
        ),
        gated=True, routed=True,
    ),
    "qwen3-30b-a3b": Shape(_qwen3moe, QWEN3_30B_A3B, neurons=False, routed=True),
}  # fmt: skip


def _multiple(value: float, of: int, least: int) -> int:
    return max(least, round(value / of) * of)


def scaled(dims: Dims, scale: float) -> Dims:
    """All widths times `scale`, in whole blocks; layers, experts and vocabulary stay."""
    if scale == 1.0:
        return dims
    n_embd = _multiple(dims.n_embd * scale, 256, 512)
    d_head = dims.d_head if n_embd >= 8 * dims.d_head else 64
    n_head = n_embd // d_head
    wanted = max(1, round(n_head * dims.n_head_kv / dims.n_head))
    n_head_kv = max(n for n in range(1, wanted + 1) if n_head % n == 0)
    n_ff_exp = _multiple(dims.n_ff_exp * scale, 256, 256) if dims.n_ff_exp else 0
    return replace(
        dims, n_embd=n_embd, n_ff=_multiple(dims.n_ff * scale, 256, 256), n_ff_exp=n_ff_exp, n_head=n_head, n_head_kv=n_head_kv,
        head_dim=d_head if dims.head_dim else 0,
    )  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    """Committed statistics of a real model."""
    found: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def describe(shape: str, kind: str, dims: Dims, text: str) -> Model:
    """The model to write, planted; its metadata says in words that it is synthetic and where its statistics are from."""
    spec = SHAPES[shape]
    model = spec.make(f"synthetic-sparse-{shape}-{dims.n_layer}l-{dims.n_embd}-{kind}", dims, kind)
    neurons = measured("zoo-relu2-83m") if spec.neurons else None
    routing = measured("zoo-moe-169m") if spec.routed else None
    sources = " and ".join(s["model"] for s in (neurons, routing) if s)
    model.metadata["general.description"] = (
        f"SYNTHETIC: random weights in the shape of {shape} ({dims.n_layer} layers, n_embd {dims.n_embd}, {kind}) with planted "
        f"sparsity: density, skew, co-activation and reuse as measured on {sources}; for measurements of speed, memory and caches "
        "only, its text means nothing"
    )
    model.metadata["general.tags"] = ["synthetic", "random-weights", "planted-sparsity"]
    Planter(model, text, neurons, routing, interleaved=spec.interleaved, gated=spec.gated).plant()
    return model


def arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--shape", choices=SHAPES, default="afm-4.5b")
    parser.add_argument("--type", choices=[kind for kind in TYPES if kind != "F32"], default="Q4_0", help="of the matrices (Q4_0)")
    parser.add_argument("--scale", type=float, default=1.0, help="widths over those of the real model (1)")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer or more layers than the real model")
    parser.add_argument("--experts", type=int, metavar="N", help="experts in a layer")
    parser.add_argument("--used", type=int, metavar="N", help="experts used by a token")
    parser.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary")
    parser.add_argument("--text", type=Path, default=REFERENCE, help="ordinary text over which the densities hold (%(default)s)")
    return parser, parser.parse_args()


def chosen_dims(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Dims:
    """The sizes asked for; what cannot be is refused."""
    if not 0.01 <= args.scale <= 16:
        parser.error("--scale must be between 0.01 and 16")
    dims = scaled(SHAPES[args.shape].dims, args.scale)
    wanted = {"n_layer": args.layers, "n_expert": args.experts, "n_used": args.used, "n_vocab": args.vocab}
    if dims.n_expert == 0 and (args.experts or args.used):
        parser.error(f"{args.shape} has no experts")
    dims = replace(dims, **{key: value for key, value in wanted.items() if value is not None})
    if dims.n_layer < 1 or dims.n_vocab < 512 or (dims.n_expert and not 1 <= dims.n_used < dims.n_expert):
        parser.error("at least one layer, 512 tokens, and fewer used experts than there are")
    return dims


def main() -> None:
    """Plant, write, report."""
    parser, args = arguments()
    try:
        model = describe(args.shape, args.type, chosen_dims(parser, args), args.text.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    write_for(parser, args.output, model, args.shape)


if __name__ == "__main__":
    main()
