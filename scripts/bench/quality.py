#!/usr/bin/env python3
"""What a way of streaming costs in quality: KL to the source's logits and change of perplexity on a text, one JSON line.

    quality.py workloads/quality-relu2.json --models /path/to/models --save

Every variant runs the same windows of the same tokens, teacher-forced, each window in a process of its own: a batch of
`n_prompt` tokens, then `n_single` tokens one by one, because the two take different ways through the kernels. The noise floor is
the source itself with flash attention switched.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import files
import machine
import numpy as np
import numpy.typing as npt

from leanstream_gguf import verify

HERE = Path(__file__).resolve().parent
F64 = npt.NDArray[np.float64]
BOUNDS = ("kl_over_floor", "kl_at_most", "perplexity_change", "read_share")


def log_softmax(rows: npt.NDArray[np.float32]) -> F64:
    """Of each row [n, n_vocab]."""
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


class Tally:
    """KL to the source and log loss of one variant, summed over windows."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.loss: list[float] = []
        self.same = True
        self.stats: dict[str, int] = {}
        self.single_seconds = 0.0

    def add(self, rows: Path, source: Path, n_vocab: int, tokens: list[int]) -> None:
        """Logits float32 [n_tokens, n_vocab] of a window; row i predicts token i + 1."""
        mine, theirs = (np.memmap(path, np.float32, "r").reshape(-1, n_vocab) for path in (rows, source))
        self.same = self.same and mine.tobytes() == theirs.tobytes()
        for first in range(0, len(mine), 64):
            part = log_softmax(mine[first : first + 64])
            reference = log_softmax(theirs[first : first + 64])
            self.kl += [float(x) for x in (np.exp(reference) * (reference - part)).sum(axis=1)]
            following = tokens[first + 1 : first + 65]
            self.loss += [-float(part[i, token]) for i, token in enumerate(following)]

    def result(self) -> dict[str, Any]:
        spread = float(np.std(self.kl) / np.sqrt(len(self.kl)))
        return {
            "kl_mean": float(np.mean(self.kl)), "kl_standard_error": spread, "kl_max": max(self.kl), "same_bytes": self.same,
            "perplexity": float(np.exp(np.mean(self.loss))), "n_tokens": len(self.kl), "counters": self.stats,
            "single_seconds": self.single_seconds,
        }  # fmt: skip


def windows(workload: dict[str, Any], tokens: list[int]) -> Iterator[list[int]]:
    """Token windows evenly spread over the text."""
    n = workload["n_prompt"] + workload["n_single"]
    step = max(n, len(tokens) // workload["windows"])
    for i in range(workload["windows"]):
        part = tokens[i * step : i * step + n]
        if len(part) < n:
            raise SystemExit(f"the text has {len(tokens)} tokens, too few for {workload['windows']} windows of {n}")
        yield part


def tokenize(model: Path, text: Path) -> list[int]:
    """The text's tokens, by the model's vocabulary alone."""
    from leanstream_gguf import loading

    params = loading.low_level.llama_model_default_params()
    params.vocab_only = True
    found = loading.internals.LlamaModel(path_model=str(model), params=params, verbose=False)
    try:
        return [int(t) for t in found.tokenize(text.read_bytes(), add_bos=False, special=False)]
    finally:
        found.close()


def job(workload: dict[str, Any], variant: dict[str, Any], tokens: list[int], out: Path) -> dict[str, Any]:
    """A verify job for one window; every row of the prompt is wanted."""
    n_prompt = workload["n_prompt"]
    n_batch = workload["settings"]["n_batch"]
    return {
        "model": variant["file"], "out": str(out), "text": "", "tokens": tokens, "n_prompt": n_prompt,
        "n_generate": workload["n_single"], "prompt_rows": list(range(n_prompt)), "n_ctx": -(-len(tokens) // 256) * 256,
        "n_batch": n_batch, "n_ubatch": n_batch, "n_threads": workload["settings"]["n_threads"],
        "flash_attn": bool(variant.get("flash_attn")), "memory": variant.get("memory"), "cache": None,
        "stream": variant.get("stream", {}),
    }  # fmt: skip


def run(workload: dict[str, Any], text: Path, source: Path) -> dict[str, Tally]:
    """All windows through all variants; the source comes first."""
    variants = {"source": {"file": str(source)}, "noise_floor": {"file": str(source), "flash_attn": True}, **workload["variants"]}
    tallies = {name: Tally() for name in variants}
    with tempfile.TemporaryDirectory(prefix="leanstream-quality-", dir=workload.get("scratch")) as folder:
        for i, tokens in enumerate(windows(workload, tokenize(source, text))):
            for name, variant in variants.items():
                out = Path(folder) / f"{name}.f32"
                done = verify._work(job(workload, variant, tokens, out))
                tallies[name].add(out, Path(folder) / "source.f32", done["n_vocab"], tokens)
                tallies[name].single_seconds += done["decode_seconds"]
                for key in ("read_bytes", "needed_bytes", "n_reads", "hits", "misses", "n_tokens"):
                    if "stats" in done:
                        tallies[name].stats[key] = tallies[name].stats.get(key, 0) + int(done["stats"][key])
            print(f"window {i + 1} of {workload['windows']}", file=sys.stderr, flush=True)
    return tallies


def judge(found: dict[str, dict[str, Any]], bound: dict[str, Any]) -> dict[str, Any]:
    """A bound with its verdict: {"kind", "of", "at_most"}, with "over" for a share of bytes."""
    of, source, floor = found[bound["of"]], found["source"], found["noise_floor"]
    value = {
        "kl_over_floor": lambda: of["kl_mean"] / floor["kl_mean"],
        "kl_at_most": lambda: of["kl_mean"],
        "perplexity_change": lambda: abs(of["perplexity"] / source["perplexity"] - 1),
        "read_share": lambda: of["counters"]["read_bytes"] / found[bound["over"]]["counters"]["read_bytes"],
    }[bound["kind"]]()
    return {**bound, "value": value, "met": value <= bound["at_most"]}


def main() -> int:
    """Prepare the files, run, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    models = os.environ.get("LEANSTREAM_TEST_MODELS", str(machine.ROOT.parent / "shared" / "models"))
    parser.add_argument("--models", default=models, help="folder of the named models")
    parser.add_argument("--text", help="text to run (the workload's, in ../data beside the models)")
    parser.add_argument("--work", default="/tmp", help="where lean files are written")
    parser.add_argument("--windows", type=int, help="windows (the workload's)")
    parser.add_argument("--save", action="store_true", help="append the line to results/NAME.jsonl")
    args = parser.parse_args()
    workload = json.loads(args.workload.read_text(encoding="utf-8"))
    asked = json.loads(json.dumps(workload))
    workload["windows"] = args.windows or workload["windows"]
    source, text = files.model_path(workload, args), files.text_path(workload, args)
    for variant in workload["variants"].values():
        variant["file"] = str(files.variant_path(variant, source, Path(args.work)))
    found = {name: tally.result() for name, tally in run(workload, text, source).items()}
    verdicts = [judge(found, bound) for bound in workload["bounds"]]
    result = {
        "benchmark": workload["name"], **machine.describe(source),
        "model": {"name": source.name, "bytes": source.stat().st_size},
        "requested": asked, "windows": workload["windows"], "verdicts": verdicts, "variants": found,
    }  # fmt: skip
    line = json.dumps(result)
    print(line)
    if args.save:
        with (HERE / "results" / f"{workload['name']}.jsonl").open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    return 0 if all(verdict["met"] for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
