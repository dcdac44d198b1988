#!/usr/bin/env python3
"""Measure which neurons fire and which experts are used while a model reads a text, as a few KiB of JSON.

    measure_activity.py model.gguf text.txt -o activity.json

Density, skew, overlap of tokens in a row, co-activation, miss ratios of LRU, LFU and Belady caches. Works for models whose
activation has zeros (ReLU, ReLU^2) and for mixtures of experts. scripts/make_sparse_gguf.py plants what this measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from activity.summary import N_REPLAY, summarise
from activity.trace import record


def main() -> None:
    """Record, summarise, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="JSON file (standard output)")
    parser.add_argument("--tokens", type=int, default=16 * N_REPLAY, help="tokens to run (%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="replays of 1,024 tokens to average (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.tokens < args.windows * N_REPLAY:
        parser.error(f"{args.windows} replays need {args.windows * N_REPLAY} tokens")
    try:
        trace = record(args.model, args.text.read_text(encoding="utf-8"), args.tokens, n_threads=args.threads)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not trace.neurons and not trace.experts:
        parser.error(f"{args.model}: neither an activation with zeros nor experts")
    found = {"model": args.model.name, "text": args.text.name, "n_tokens": args.tokens, **summarise(trace, args.windows)}
    # One line for each layer: small, and a changed layer shows in a diff.
    text = json.dumps(found, separators=(",", ":")).replace('{"density"', '\n{"density"').replace('{"rates"', '\n{"rates"') + "\n"
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
