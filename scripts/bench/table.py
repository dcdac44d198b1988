#!/usr/bin/env python3
"""The README's table of measurements, made from the last line of each file in results/.

table.py            print the table
table.py --write    put it between the markers in README.md
table.py --check    exit 1 if README.md does not hold it
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- measurements: scripts/bench/table.py -->", "<!-- end of measurements -->"

# benchmark, variant, what the reader should know it as
ROWS = [
    ("dense-7b-80", "resident", "Llama-7B shape, Q4_0, 3.6 GiB: everything resident"),
    ("dense-7b-80", "streamed", "the same in 80 % of the file's size"),
    ("dense-7b-80", "stock_capped", "stock llama.cpp, mmap, under the same 80 % cap"),
    ("dense-7b-55", "streamed", "the same in 55 %"),
    ("dense-7b-55", "stock_capped", "stock llama.cpp, mmap, under the same 55 % cap"),
    ("moe-cache", "resident", "zoo-moe-169m, mixture of experts: everything resident"),
    ("moe-cache", "cache50", "the same with half of the experts cached"),
    ("moe-cache", "cache25", "the same with a quarter of the experts cached"),
    ("resident-moe", "stock", "stock llama.cpp, same flags, everything resident"),
    ("resident-moe", "stock_repacked", "stock llama.cpp with its default repacking"),
    ("moe-large-25", "resident", "Qwen3-30B-A3B shape, 12 of its layers, Q4_K, 4.0 GiB: everything resident"),
    ("moe-large-25", "lean", "the same with a quarter of the experts cached"),
    ("moe-large-25", "serial", "the same, read when chosen (mode `serial`)"),
    ("moe-large-25", "hotcold", "the same, a fixed hot set and LRU (mode `hotcold`)"),
    ("afm-resident", "exact", "AFM-4.5B shape, 12 of its layers, Q4_0, 0.9 GiB, repacked into neurons: everything resident"),
    ("afm-resident", "stock_repacked", "stock llama.cpp with its default repacking, the source"),
    ("afm-80", "streamed", "repacked into neurons, in 80 % of the source's size"),
    ("afm-65", "streamed", "the same in 65 %, fidelity `faithful`"),
    ("afm-80", "stock_capped", "stock llama.cpp, mmap, the source under the 80 % cap"),
]


def last_line(benchmark: str) -> dict[str, Any] | None:
    path = HERE / "results" / f"{benchmark}.jsonl"
    if not path.exists():
        return None
    line: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    return line


def row(benchmark: str, variant: str, what: str) -> str | None:
    line = last_line(benchmark)
    if line is None:
        return None
    found = line["summary"][variant]
    speed = found["tokens_per_second"]
    hits = found.get("hit_ratio")
    cells = [
        what,
        f"{speed['median']:.3g} ({speed['p25']:.3g}-{speed['p75']:.3g})",
        f"{found['read_bytes_per_token'] / 1e6:.3g} MB" if found.get("read_bytes_per_token", 0) > 1e5 else "-",
        f"{hits:.0%}" if hits is not None else "-",
        f"`{benchmark}` {line['commit'][:7]}",
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """Markdown: header, rows, and the machine of the lines."""
    rows = [text for spec in ROWS if (text := row(*spec))]
    machines = {
        json.dumps([m["processor"], m["n_cpus"], line["drive"]["file_system"]]): m
        for spec in ROWS
        if (line := last_line(spec[0]))
        for m in [line["machine"]]
    }
    notes = [f"{m['processor']}, {m['n_cpus']} cores, {m['memory_mib'] // 1024} GiB, virtual disk" for m in machines.values()]
    head = ["| | tokens/s, median (quartiles) | read per token | hits | result, commit |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", f"Machine: {'; '.join(notes)}; 2 threads, batch 1, text fed token by token."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"
    if args.write:
        README.write_text(wanted, encoding="utf-8")
    elif args.check:
        if text != wanted:
            print("README.md does not hold the measurements of scripts/bench/results: run scripts/bench/table.py --write")
            return 1
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
