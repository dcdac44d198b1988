"""`leanstream trace`: record what each token needs, what was predicted, and what had arrived."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..units import format_bytes
from . import _common


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="record which experts or neurons each token needs, for `leanstream replay`",
        description="Feed a text token by token and record, per token and layer, the experts or clusters of neurons needed, what "
        "was predicted and how each need was met (in memory, read ahead in time, read ahead but late, missed).",
    )
    _common.add_model(parser)
    parser.add_argument("-f", "--file", required=True, metavar="FILE", help="text to feed")
    parser.add_argument("-n", "--tokens", type=int, default=1024, metavar="N", help="tokens to record; default 1024")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="tokens of the text to leave out at its start; default 0")
    parser.add_argument("-o", "--output", required=True, metavar="TRACE", help="the file to write")
    _common.add_memory(parser)
    _common.add_context(parser)
    _common.add_streaming(parser)
    _common.add_json(parser)
    parser.set_defaults(run=run, seed=0, verbose=False, device_memory=None, gpu_layers=None)  # a device's needs are not traced


def _tokens(llm: Any, args: argparse.Namespace) -> list[int]:
    try:
        text = Path(args.file).read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read the text from {args.file}: {error}", path=args.file) from error
    tokens: list[int] = llm.tokenize(text, add_bos=False)[args.skip : args.skip + args.tokens]
    if not tokens:
        raise ArgumentError(f"{args.file} holds no token behind the first {args.skip}", path=args.file)
    return tokens


def run(args: argparse.Namespace) -> int:
    from ..replay import summary as summarise
    from .run import load

    if args.tokens < 1 or args.skip < 0:
        raise ArgumentError("-n must be at least 1 and --skip at least 0")
    _common.require_other_file(args.output, args.model, args.file)
    llm, _ = load(args)
    with llm:
        tokens = _tokens(llm, args)
        with llm.stream.tracing(args.output, model=Path(args.model).name, text=Path(args.file).name):
            for token in tokens:
                if llm.n_tokens + 1 > llm.n_ctx():
                    llm.reset()  # type: ignore[no-untyped-call]
                llm.eval([token])
        stats = llm.stream.stats().to_dict()
    document = {"model": args.model, "trace": args.output, "trace_bytes": Path(args.output).stat().st_size, "stats": stats}
    document |= summarise(args.output)
    if args.json:
        _common.print_json(document)
    else:
        print(text_of(document))
    return 0


def text_of(document: dict[str, Any]) -> str:
    """The trace for people: its size, and how needs were met by layer."""
    lines = [f"{document['trace']}: {document['n_tokens']} tokens, {format_bytes(document['trace_bytes'])}"]
    rows: list[tuple[str, ...]] = [("layer", "uses", "in memory", "ahead", "late", "missed", "recall", "at twice")]
    recall = {r["block"]: r for r in document["recall"] if r["lead"] == 1}
    for layer in document["layers"]:
        n = max(1, layer["n_uses"])
        met = tuple(f"{layer[key] / n * 100:.1f} %" for key in ("n_hit", "n_ahead", "n_late", "n_missed"))
        known = recall.get(layer["block"])
        guessed = (f"{known['at_k']:.3f}", f"{known['at_2k']:.3f}") if known else ("-", "-")
        rows.append((str(layer["block"]), str(layer["n_uses"]), *met, *guessed))
    lines += [_common.table(rows), "  recall: share of the needed ones among the likeliest, one attention block early"]
    return "\n".join(lines)
