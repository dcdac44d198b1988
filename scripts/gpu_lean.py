#!/usr/bin/env python3
"""Measure repacked files beside a GPU, on a machine without network, with one command: neurons that the file holds for the device
are summed there, the others that fire on the host.

    gpu_lean.py --layers 12 --vocab 42668       a third of AFM-4.5B's layers and vocabulary; written, calibrated and repacked first
    gpu_lean.py --model F --calibration R       the same with a model and a record that are there already
    gpu_lean.py --make-only                     write, calibrate and repack; no GPU is used

Build and options are those of gpu_table.py. Calibrating and repacking need the installed package (or this build's libraries in
leanstream_gguf/ with cffi and llama-cpp-python at hand). Rows: stock with all layers on the device and on the host; the file repacked
with and without neurons for the device, at several budgets of device memory; and on the host alone.

Prints a table and one JSON line; --save appends the line to scripts/bench/results/gpu.jsonl.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from gpu_table import HERE, ROOT, Bench, build, circumstances, medians, parser, report, table

PACKAGE_SPINS = "2000"  # GOMP_SPINCOUNT as the package sets it
EVERYTHING = "lean, {hot} % hot, everything on the device"


def leanstream(*arguments: object) -> None:
    """One command of the package in this tree."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "leanstream_gguf", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


def make_files(args: Namespace) -> dict[str, Path]:
    """{"source", "hot", "cold"}: the model, and repacked with and without neurons for a device."""
    source = Path(args.model) if args.model else args.work / "afm.gguf"
    if not source.exists():
        sizes = [word for name in ("layers", "vocab") if (n := getattr(args, name)) for word in (f"--{name}", str(n))]
        subprocess.run([sys.executable, HERE / "make_sparse_gguf.py", "--shape", "afm-4.5b", *sizes, source], check=True)
    record = Path(args.calibration) if args.calibration else source.with_suffix(".calibration")
    if not record.exists():
        leanstream("calibrate", "-m", source, "-o", record, "--tokens", 1024, "--no-sketch", "--threads", args.threads)
    files = {"source": source}
    for name, share in (("hot", args.hot), ("cold", 0)):
        files[name] = args.work / f"{source.stem}-{name}.lean.gguf"
        if not files[name].exists():
            leanstream("repack", source, files[name], "--calibration", record, "--device-hot", f"{share}%", "--no-verify-run")
    return files


def with_spinning(bench: Bench, model: Path) -> dict[str, Any]:
    """Compute threads of the host that wait a millisecond before they sleep: between two layers they have to be woken otherwise."""
    os.environ["GOMP_SPINCOUNT"] = "1000000"
    try:
        return bench.run("--engine", "leanstream", model=model)
    finally:
        os.environ["GOMP_SPINCOUNT"] = PACKAGE_SPINS


def run_rows(bench: Bench, files: dict[str, Path], hot: int) -> dict[str, dict[str, Any]]:
    rows = {"stock -ngl 99": bench.run("--engine", "stock", "--ngl", 99)}
    everything = bench.run("--engine", "leanstream", model=files["hot"])
    rows[EVERYTHING.format(hot=hot)] = everything
    if "error" not in everything:
        device = everything["plan"]["device"]
        low, high = device["minimum_budget_bytes"], device["full_budget_bytes"]
        for name, budget in (("half way to the least", (low + high) // 2), ("the least", low)):
            label = f"lean, {hot} % hot, {name}: {budget / 2**30:.2f} GiB"
            rows[label] = bench.run("--engine", "leanstream", "--device-budget", budget, model=files["hot"])
    rows[f"lean, {hot} % hot, threads spin"] = with_spinning(bench, files["hot"])
    rows["lean, nothing hot, everything else on the device"] = bench.run("--engine", "leanstream", model=files["cold"])
    rows["lean on the host"] = bench.run("--engine", "leanstream", "--ngl", 0, model=files["cold"])
    rows["stock on the host"] = bench.run("--engine", "stock", "--ngl", 0)
    return rows


def arguments() -> Namespace:
    made: ArgumentParser = parser(__doc__)
    made.add_argument("--layers", type=int, help="of the model that is written; default the shape's 36")
    made.add_argument("--vocab", type=int, help="likewise; default 128004")
    made.add_argument("--calibration", metavar="FILE", help="of the model; default: made")
    made.add_argument("--hot", type=int, default=25, help="percent of the neurons that are for the device (25)")
    made.add_argument("--make-only", action="store_true")
    return made.parse_args()


def main() -> int:
    args = arguments()
    os.environ["GOMP_SPINCOUNT"] = PACKAGE_SPINS
    files = make_files(args)
    if args.make_only:
        return 0
    bench = Bench(build(args), files["source"], args)
    bus = bench.ask(["--bus", "--drive", str(files["cold"])])
    rows = run_rows(bench, files, args.hot)
    medians(rows)
    print(table(rows, EVERYTHING.format(hot=args.hot)), flush=True)
    record = {
        "benchmark": f"gpu-{args.backend}-lean",
        **circumstances(bench),
        "model": {"name": files["source"].name, "bytes": {name: path.stat().st_size for name, path in files.items()}},
        "settings": {key: getattr(args, key) for key in ("prompt", "steps", "rounds", "threads", "hot", "layers", "vocab")},
        "bus": bus,
        "rows": rows,
    }
    report(record, save=args.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
