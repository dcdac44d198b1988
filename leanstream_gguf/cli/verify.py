"""`leanstream verify`: prove that streaming changes no bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..units import format_bytes
from . import _common


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="prove that streaming changes no bit of the output",
        description="Run the model streamed and, in a process of its own, unstreamed through mmap, with equal threads, batches and "
        "flash attention; feed both the same tokens and compare the raw bytes of their logits. Exit status 0 if they are the same.",
    )
    _common.add_model(parser)
    parser.add_argument("--reference", metavar="FILE", help="compare with this file, the source of a repacked one; default: the model")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="tokens of the prompt; default 512")
    parser.add_argument("-n", "--tokens", type=int, default=64, metavar="N", help="tokens after it, one by one; default 64")
    parser.add_argument("-f", "--file", metavar="FILE", help="prompt text; default: built in")
    parser.add_argument("--all-rows", action="store_true", help="compare every prompt token even if the logits take gigabytes")
    _common.add_memory(parser, default="min")
    _common.add_context(parser)
    _common.add_streaming(parser)
    _common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..measure import ContextWish
    from ..verify import Request, verify

    _common.budget(args)
    _common.stream_config(args)
    ahead = {"mode": args.mode, "policy": args.policy, "depth": _common.depth(args), "stages": args.stages}
    stream = {**ahead, "io_threads": args.io_threads, "io_depth": args.io_depth, "io_backend": args.io_backend}
    request = Request(
        model=args.model,
        reference=args.reference,
        memory=args.memory,
        cache=args.cache,
        fidelity=args.fidelity,
        n_prompt=args.prompt_tokens,
        n_generate=args.tokens,
        text=_text(args.file),
        all_rows=args.all_rows,
        wish=ContextWish(args.ctx, args.batch, args.ubatch, args.threads, args.flash_attn),
        stream={
            **stream,
            "direct_io": not args.buffered,
            "ring_slots": args.ring_slots,
            "repack": args.repack,
            "max_kl": args.max_kl,
        },
    )
    document = verify(request)
    if args.json:
        _common.print_json({"model": args.model, **document})
    else:
        print(summary(args.model, document))
    return 0 if document["passed"] else 1


def _text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read the prompt from {path}: {error}", path=path) from error


def summary(model: str, document: dict[str, Any]) -> str:
    """The result for people."""
    settings, plan, stats = document["settings"], document["plan"], document["stats"]
    how = ", ".join(f"{key} {value}" for key, value in settings.items())
    verdict = "the same bytes" if document["bit_identical"] else f"{document['rows_differing']} of {document['n_rows']} tokens differ"
    lines = [
        f"{model}: {verdict}",
        f"  {document['n_tokens']} tokens, logits of {document['n_rows']} compared; {how}",
        f"  streamed with a budget of {format_bytes(plan['budget_bytes']) if plan['budget_bytes'] else 'no bound'} ({plan['mode']}), "
        f"{format_bytes(stats['read_bytes'])} read",
    ]
    if not document["bit_identical"]:
        lines.append(
            f"  largest difference {document['max_abs_diff']:.3g}, mean KL {document['kl_mean']:.3g} "
            f"(noise floor {document['kl_noise_floor']:.3g}), same likeliest token {document['argmax_equal'] * 100:.1f} %"
        )
    return "\n".join(lines)
