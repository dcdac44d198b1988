#!/usr/bin/env python3
"""What the lossy settings of a calibration record cost on text that the calibration has not seen.

Runs the unmodified model beside itself with every neuron below its layer's threshold zeroed in the graph, and compares the logits:
KL, perplexity, share of neurons used, and the bytes of feed-forward weights that need to be read. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from machine import describe

from leanstream_gguf.calibrate import lossy
from leanstream_gguf.calibrate.record import Record, Setting
from leanstream_gguf.calibrate.run import load_text
from leanstream_gguf.calibrate.runner import N_WINDOW, Runner, compare, tokenise
from leanstream_gguf.probe import cpu_count
from leanstream_gguf.repack.gguf_file import Model, read_model
from leanstream_gguf.repack.layout import find_dense

LIMIT = 1.25  # of the KL that was asked for


def read_share(model: Model, share: float) -> float:
    """Bytes that an exact-layout file reads of the feed-forward weights, over all of them, with this share of neurons used."""
    ffns = [ffn for ffn in find_dense(model) if ffn.why_not is None]
    whole = sum(t.n_bytes for ffn in ffns for t in (ffn.gate, ffn.up, ffn.down) if t is not None)
    deciding = sum((ffn.gate or ffn.up).n_bytes for ffn in ffns)
    return (deciding + share * (whole - deciding)) / whole


def line(setting: Setting, costs: Any, used: Any, model: Model) -> dict[str, Any]:
    return {
        "max_kl": setting.max_kl,
        "kl_calibration": setting.kl,
        "kl": costs.mean_kl,
        "perplexity_change": costs.perplexity_change,
        "share_used": used.share,
        "recall": used.recall,
        "ffn_bytes_share": read_share(model, used.share),
        "bound": {"kl_over_request": costs.mean_kl / setting.max_kl, "at_most": LIMIT, "met": costs.mean_kl <= LIMIT * setting.max_kl},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("record", help="made by `leanstream calibrate --max-kl`")
    parser.add_argument("text", help="held-out text")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text; default 4096")
    parser.add_argument("--name", default="lossy", help="of the result")
    parser.add_argument("--save", action="store_true", help="append the line to results/NAME.jsonl")
    args = parser.parse_args()
    record, model = Record.load(args.record), read_model(args.model)
    record.check_model(model)
    name, text = load_text(args.text)
    result: dict[str, Any] = {"benchmark": args.name, **describe(args.model)}
    result["model"] = {"name": args.model.name, "bytes": model.file_bytes}
    with Runner(str(args.model), n_threads=cpu_count()) as runner:
        windows = tokenise(runner, text, name, "", args.tokens).windows
        noise = compare(runner, windows, "plain", "flash")
        result |= {"calibration": {"text": record.corpus_name, "n_tokens": record.n_tokens}, "text": name}
        result |= {"n_tokens": len(windows) * N_WINDOW, "noise_floor": noise.mean_kl, "settings": []}
        for setting in record.settings:
            costs, used = lossy.measure_thresholds(runner, windows, setting.thresholds, lambda n: None)
            result["settings"].append(line(setting, costs, used, model))
            print(json.dumps(result["settings"][-1]), file=sys.stderr, flush=True)
    print(json.dumps(result))
    if args.save:
        with (Path(__file__).parent / "results" / f"{args.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 0 if all(setting["bound"]["met"] for setting in result["settings"]) else 1


if __name__ == "__main__":
    sys.exit(main())
