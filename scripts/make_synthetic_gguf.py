#!/usr/bin/env python3
"""Write a GGUF of a real model's shape with random weights, for measuring speed and memory without a download.

The text such a model writes means nothing. Do not judge a mixture of experts by it either: with random weights a model
repeats itself, routing collapses to a few experts, and every cache looks good.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from toygguf.output import write_for
from toygguf.shapes import Dims, Model, begin, embedding, experts, gated_ffn, layers

LLAMA_7B = Dims(n_layer=32, n_embd=4096, n_ff=11008, n_head=32, n_head_kv=32, n_vocab=32000, n_ctx=4096)
QWEN3_30B_A3B = Dims(
    n_layer=48, n_embd=2048, n_ff=6144, n_head=32, n_head_kv=4, head_dim=128, n_vocab=151936, n_ctx=32768,
    n_expert=128, n_used=8, n_ff_exp=768, rope_base=1e6,
)  # fmt: skip


def llama(name: str, dims: Dims, kind: str) -> Model:
    """A dense Llama with its own output matrix."""
    model = begin(name, "llama", dims, (kind,), spm=True)
    embedding(model, tied=False, kind=kind, out_kind="Q6_K")
    return layers(model, gated_ffn)


def qwen3moe(name: str, dims: Dims, kind: str, token_kind: str = "") -> Model:
    """Qwen3 with experts in every layer; the token embedding has the matrices' type unless another is given."""
    model = begin(name, "qwen3moe", dims, (kind,))
    embedding(model, tied=False, kind=token_kind or kind, out_kind="Q6_K")
    return layers(model, experts, qk_norm=True)


SHAPES: dict[str, tuple[Callable[[str, Dims, str], Model], Dims]] = {
    "llama-7b": (llama, LLAMA_7B),
    "qwen3-30b-a3b": (qwen3moe, QWEN3_30B_A3B),
}


def describe(shape: str, kind: str, n_layers: int | None, n_vocab: int | None) -> Model:
    """The model to write: its metadata says in words that it is synthetic."""
    make, dims = SHAPES[shape]
    dims = replace(dims, n_layer=n_layers or dims.n_layer, n_vocab=n_vocab or dims.n_vocab)
    model = make(f"synthetic-{shape}-{dims.n_layer}l-{kind}", dims, kind)
    model.metadata["general.description"] = (
        f"SYNTHETIC: random weights in the shape of {shape} ({dims.n_layer} layers, {kind}); for measurements of speed and "
        "memory only, its text and its expert routing mean nothing"
    )
    model.metadata["general.tags"] = ["synthetic", "random-weights"]
    return model


def main() -> None:
    """Describe, write, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file to write, e.g. llama7b-q4_0.gguf")
    parser.add_argument("--shape", choices=SHAPES, default="llama-7b")
    parser.add_argument("--type", choices=("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16"), default="Q4_0", help="of the matrices (Q4_0)")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer or more layers than the real model")
    parser.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary")
    args = parser.parse_args()
    if args.vocab is not None and args.vocab < 512:
        parser.error("--vocab must be at least 512")
    model = describe(args.shape, args.type, args.layers, args.vocab)
    write_for(parser, args.output, model, args.shape)


if __name__ == "__main__":
    main()
