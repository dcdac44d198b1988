"""`leanstream calibrate`: what a model's neurons do on a text, and what leaving some of them out costs."""

from __future__ import annotations

import argparse
from typing import Any

from . import _common


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="record which neurons fire, as `repack` needs it",
        description="Run the model over a text and record for each layer which neurons fire, how strongly and which fire together; "
        "measure llama.cpp's own noise floor on that text. With --max-kl, find thresholds below which neurons can be "
        "skipped at that cost. "
        "Interrupted, it goes on where it stopped when the same command is given again.",
    )
    _common.add_model(parser)
    parser.add_argument("-o", "--out", metavar="FILE", help="where the record goes; default: the model's name with .calibration")
    parser.add_argument("--text", metavar="FILE", help="text to run over, like what the model will be used for; default: built in")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens of it; default 4096")
    parser.add_argument(
        "--max-kl",
        type=float,
        nargs="+",
        default=[],
        metavar="KL",
        help="lossy: find thresholds that cost this mean KL divergence in nats (0.02 is hardly noticed, 0.1 is)",
    )
    parser.add_argument("--no-sketch", action="store_true", help="do not fit the 2-bit sketch that the layout `faithful` needs")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads; default: the processors available")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..calibrate.run import Request, calibrate

    request = Request(
        model=args.model,
        out=args.out,
        text=args.text,
        n_tokens=args.tokens,
        max_kl=tuple(args.max_kl),
        sketch=not args.no_sketch,
        n_threads=args.threads,
        quiet=args.quiet,
    )
    _common.require_other_file(request.out_path, args.model, args.text)
    record = calibrate(request)
    document = {"model": args.model, "record": request.out_path, **record.summary()}
    if args.json:
        _common.print_json(document)
    else:
        print(summary(document))
    return 0


def summary(document: dict[str, Any]) -> str:
    """The record for people."""
    lines = [
        f"{document['record']}: {document['n_tokens']} tokens of {document['corpus_name']}, perplexity {document['perplexity']:.3f}, "
        f"noise floor {document['noise_floor']:.3g} ({document['noise_floor_reason']})"
    ]
    rows: list[tuple[str, ...]] = [
        (str(layer["block"]), str(layer["n_ff"]), layer["activation"], f"{layer['density']:.2%}", f"{layer['reuse']:.0%}")
        for layer in document["layers"]
    ]
    lines.append(_common.table([("layer", "neurons", "activation", "fire", "again at the next token"), *rows]))
    for setting in document["settings"]:
        lines.append("  " + setting_line(setting))
    if faithful := document["faithful"]:
        lines.append(
            f"  2-bit sketch: picks {faithful['share_picked']:.2%} of the neurons, {faithful['recall']:.4%} of the squared "
            f"activation, KL {faithful['kl']:.3g}, perplexity {faithful['perplexity_change']:+.3%}"
        )
        if not faithful["within_noise_floor"]:
            lines.append("  warning: no margin of the sketch keeps the KL within the noise floor; prefer the layout exact")
    return "\n".join(lines)


def setting_line(setting: dict[str, Any]) -> str:
    """One lossy setting and its costs, in a line."""
    return (
        f"lossy, KL {setting['max_kl']:g} asked for: {setting['kl']:.3g} measured, perplexity {setting['perplexity_change']:+.2%}, "
        f"{setting['share']:.1%} of the neurons used, {setting['recall']:.2%} of the squared activation kept"
    )
