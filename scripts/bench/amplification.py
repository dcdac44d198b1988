#!/usr/bin/env python3
"""Read amplification of a lean file on text that its calibration has not seen, layer by layer.

Runs the source over the text, notes which neurons fire, and counts the bytes of the clusters that hold one (empty cache, one token
at a time) over the bytes of the neurons themselves; against what the cost model predicted for its optimum. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from leanstream_gguf.calibrate.graph_tap import Hidden, Taps
from leanstream_gguf.calibrate.run import load_text
from leanstream_gguf.calibrate.runner import N_WINDOW, Runner, tokenise
from leanstream_gguf.probe import cpu_count
from leanstream_gguf.repack import cost
from leanstream_gguf.repack.format import name_of
from leanstream_gguf.repack.lean_file import LeanFile
from leanstream_gguf.repack.storage import Source

WITHIN = 1.1  # of the optimum
PAGE_LIMIT = 1.6  # where a neuron's record is a page or more


class Counter:
    """Bytes read and bytes needed, by block."""

    def __init__(self, lean: LeanFile) -> None:
        self.lean = lean
        with Source(lean.model.shards) as source:
            self.perms = {block: source.read(lean.tensor(name_of(block, "perm"))).view("<i4") for block in lean.neurons}
        self.read = dict.fromkeys(lean.neurons, 0)
        self.needed = dict.fromkeys(lean.neurons, 0)

    def hidden(self, item: Hidden) -> None:
        place = self.lean.neurons.get(item.block)
        if place is None:
            return
        fires = (item.values != 0)[:, self.perms[item.block]]
        self.read[item.block] += int(np.count_nonzero(cost.touched(fires, place.cluster_size))) * place.clusters.ne[0]
        self.needed[item.block] += int(np.count_nonzero(fires)) * place.record_bytes

    def layers(self) -> list[dict[str, Any]]:
        best = self.lean.model.get("leanstream.neurons.amplification_best")
        found = []
        for i, (block, place) in enumerate(self.lean.neurons.items()):
            measured = self.read[block] / max(1, self.needed[block])
            limited = place.record_bytes >= 4096
            met = measured <= WITHIN * best[i] and (not limited or measured <= PAGE_LIMIT)
            sizes = {"cluster_size": place.cluster_size, "record_bytes": place.record_bytes, "stride": place.clusters.ne[0]}
            found.append({"block": block, **sizes, "amplification": measured, "optimum": best[i], "met": met})
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("lean", type=Path)
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--name", default="amplification", help="of the result")
    parser.add_argument("--save", action="store_true", help="append the line to results/NAME.jsonl")
    args = parser.parse_args()
    counter = Counter(LeanFile(args.lean))
    name, text = load_text(args.text)
    with Runner(str(args.source), n_threads=cpu_count()) as runner:
        windows = tokenise(runner, text, name, "", args.tokens).windows
        runner.tap.taps = Taps(hidden=counter.hidden)
        for window in windows:
            runner.start_window("tapped")
            for first, tokens in runner.pieces(window):
                runner.decode("tapped", tokens, first)
    layers = counter.layers()
    total = sum(counter.read.values()) / max(1, sum(counter.needed.values()))
    result = {"benchmark": args.name, **describe(args.lean), "model": args.source.name, "layout": counter.lean.layout}
    result |= {"text": name, "n_tokens": len(windows) * N_WINDOW, "within": WITHIN, "layers": layers, "amplification": total}
    result["met"] = all(layer["met"] for layer in layers)
    print(json.dumps(result))
    if args.save:
        with (Path(__file__).parent / "results" / f"{args.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
