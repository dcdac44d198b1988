#!/usr/bin/env python3
"""Measure device slots against stock llama.cpp on a machine with a GPU and no network, with one command.

    gpu_table.py                                builds with CUDA, writes the model (16 GiB) and the table
    gpu_table.py --backend vulkan               the same through Vulkan
    gpu_table.py --build build/gpu --model F    what is there already is used

Sources: this folder's, and llama.cpp's in LEANSTREAM_LLAMA_SOURCE or fetched (vendor/fetch.py). The model has the shape of
Qwen3-30B-A3B (48 layers, 128 experts, 8 used) with routing planted as measured on a trained one (make_sparse_gguf.py). Device memory
is what the driver reports (nvidia-smi), less what it reported before. Each variant is a process of its own.

Prints a table and one JSON line; --save appends the line to scripts/bench/results/gpu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "bench" / "results" / "gpu.jsonl"
MiB = 1 << 20
STOCK, EVERYTHING = "stock -ngl 99", "leanstream, all on the device"


class Gpu:
    """What the driver says; only NVIDIA's tells."""

    def __init__(self) -> None:
        self.smi = shutil.which("nvidia-smi")
        self.before = self.used()

    def ask(self, what: str) -> str:
        if not self.smi:
            return ""
        command = [self.smi, f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", "0"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def used(self) -> int:
        """Bytes in use now, 0 where the driver does not tell."""
        text = self.ask("memory.used")
        return int(text) * MiB if text else 0


class Peak(threading.Thread):
    """The most device memory the driver reported while it ran, five times a second."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(daemon=True)
        self.gpu, self.n_bytes = gpu, 0
        command = [gpu.smi or "true", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0", "-lms", "200"]
        self._smi = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def run(self) -> None:
        assert self._smi.stdout
        for line in self._smi.stdout:
            if line.strip().isdigit():
                self.n_bytes = max(self.n_bytes, int(line) * MiB - self.gpu.before)

    def stop(self) -> int:
        self._smi.terminate()
        self._smi.wait()
        self.join()
        return self.n_bytes


class Bench:
    """Runs device_speed for one variant after the other."""

    def __init__(self, program: Path, model: Path, args: argparse.Namespace) -> None:
        self.program, self.model, self.args, self.gpu = program, model, args, Gpu()

    def ask(self, options: list[str], group: Any = None) -> dict[str, Any]:
        """One process; its JSON line with the peak of device memory."""
        peak = Peak(self.gpu)
        peak.start()
        environment = {**os.environ, "GGML_CUDA_REGISTER_HOST": "1"}
        try:
            done = subprocess.run(
                [self.program, *options],
                capture_output=True,
                text=True,
                timeout=self.args.timeout,
                env=environment,
                preexec_fn=group.enter if group else None,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"longer than {self.args.timeout} s"}
        finally:
            n_bytes = peak.stop()
        print(" ".join(options), done.stdout.strip()[:400], done.stderr.strip()[-400:], file=sys.stderr, flush=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
        return {**json.loads(lines[-1]), "device_peak_bytes": n_bytes}

    def run(self, *options: str | int, model: Path | None = None, group: Any = None) -> dict[str, Any]:
        sizes = [
            "--prompt",
            self.args.prompt,
            "--steps",
            self.args.steps,
            "--rounds",
            self.args.rounds,
            "--threads",
            self.args.threads,
        ]
        common = ["--model", model or self.model, "--text", self.args.text, *sizes]
        return self.ask([str(part) for part in [*common, *options]], group)


def build(args: argparse.Namespace) -> Path:
    """The folder of a build with this backend; configures and compiles where there is none."""
    folder = args.build or ROOT / "build" / f"gpu-{args.backend}"
    program: Path = folder / "bin" / "device_speed"
    if not program.exists():
        options = [f"-DGGML_{args.backend.upper()}=ON", "-DLEANSTREAM_PYTHON=OFF", "-DLEANSTREAM_MTMD=OFF", "-DLEANSTREAM_TESTS=ON"]
        if args.backend == "cuda":
            options.append(f"-DCMAKE_CUDA_ARCHITECTURES={args.cuda_arch}")
        subprocess.run(["cmake", "-S", ROOT / "leanstream_gguf" / "native", "-B", folder, "-G", "Ninja", *options], check=True)
        subprocess.run(["cmake", "--build", folder, "--target", "device_speed"], check=True)
    return program


def make_model(args: argparse.Namespace) -> Path:
    """The model that was named, or a synthetic one."""
    if args.model:
        return Path(args.model)
    path: Path = args.work / "qwen3-30b-a3b-Q4_K.gguf"
    if not path.exists():
        command = [sys.executable, HERE / "make_sparse_gguf.py", "--shape", "qwen3-30b-a3b", "--type", "Q4_K", path]
        subprocess.run(command, check=True)
    return path


def cpu_layers(plan: dict[str, Any], file_bytes: int, n_layers: int, budget: int) -> int:
    """--n-cpu-moe with which stock llama.cpp fits the budget: experts of so many layers stay on the host."""
    device, experts = plan["device"], plan["experts"]["total_bytes"] or plan["device"]["slots_bytes"]
    fixed = device["driver_bytes"] + device["kv_bytes"] + device["compute_bytes"]
    over = file_bytes + fixed - budget
    return min(n_layers, max(0, -(-over * n_layers // experts)))


def variants(bench: Bench, everything: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every row after the first two: budgets of device memory, the host's capped, and stock at the same device memory."""
    rows: dict[str, dict[str, Any]] = {}
    args, file_bytes = bench.args, bench.model.stat().st_size
    n_layers = everything["plan"]["device"]["n_moe_layers"]
    on_disk = disk_copy(bench.model, args)
    for share in args.shares:
        budget = file_bytes * share // 100
        rows[f"leanstream {share} %"] = bench.run("--engine", "leanstream", "--device-budget", budget)
        rows[f"leanstream {share} %, not device_exact"] = bench.run("--engine", "leanstream", "--device-budget", budget, "--inexact")
        n = cpu_layers(everything["plan"], file_bytes, n_layers, budget)
        rows[f"stock --n-cpu-moe {n} ({share} %)"] = bench.run("--engine", "stock", "--cpu-moe", n)
        rows[f"stock --n-cpu-moe {n} mmap ({share} %)"] = bench.run("--engine", "stock", "--cpu-moe", n, "--mmap")
    share = args.shares[-1]
    cap = args.host_cap or file_bytes * 35 // 100
    short: list[str | int] = ["--prompt", 32, "--steps", 24, "--rounds", 1]  # reads from disk take their time
    shortest: list[str | int] = ["--prompt", 8, "--steps", 8, "--rounds", 1]  # page faults take more
    from_disk = ["--engine", "leanstream", "--device-budget", file_bytes * share // 100, "--budget", cap, *short]
    rows[f"leanstream {share} %, host {cap / 2**30:.1f} GiB, rest from disk"] = {
        **beside_the_drive(bench, on_disk, from_disk),
        "expected_hash": bench.run("--engine", "stock", "--ngl", 99, *short).get("logits_hash"),
    }
    n = cpu_layers(everything["plan"], file_bytes, n_layers, file_bytes * share // 100)
    rows[f"stock --n-cpu-moe {n} mmap, host {cap / 2**30:.1f} GiB"] = capped(bench, cap, n, on_disk, shortest)
    return rows


def beside_the_drive(bench: Bench, model: Path, options: list[str | int]) -> dict[str, Any]:
    """A row that reads from the drive, with the drive's rate just before and after it: virtual drives change within minutes."""
    evict(model)
    rates = [bench.ask(["--drive", str(model)])]
    row = bench.run(*options, model=model)
    rates.append(bench.ask(["--drive", str(model)]))
    errors = [rate["error"] for rate in rates if "error" in rate]
    if errors:
        return row | {"error": errors[0]}
    return row | {
        "drive_bytes_per_s": [rate["drive_bytes_per_s"] for rate in rates],
        "drive_shapes": [rate["shapes"] for rate in rates],
    }


def capped(bench: Bench, cap: int, n: int, model: Path, sizes: list[str | int]) -> dict[str, Any]:
    """Stock with its file mapping under a memory cgroup, or why not."""
    sys.path.insert(0, str(HERE / "bench"))
    try:
        from memcap import MemoryGroup

        with MemoryGroup(cap) as group:
            evict(model)
            return bench.run("--engine", "stock", "--cpu-moe", n, "--mmap", *sizes, model=model, group=group)
    except (ImportError, OSError, RuntimeError, SystemExit) as error:
        return {"error": f"no memory cgroup: {error}"}


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def disk_copy(model: Path, args: argparse.Namespace) -> Path:
    """The model on a real disk, for reads that count."""
    if not str(model).startswith("/dev/shm"):
        return model
    copy: Path = args.disk / model.name
    if not copy.exists():
        shutil.copyfile(model, copy)
        evict(copy)
    return copy


def divergence(bench: Bench, folder: Path) -> dict[str, Any]:
    """KL of the device's logits to the host's, and the host's own with flash attention on and off (the noise floor)."""
    import numpy as np

    files, file_bytes = {}, bench.model.stat().st_size
    for name, options in {
        "host": ["--engine", "stock", "--ngl", 0, "--flash-attn", 1],
        "host without flash attention": ["--engine", "stock", "--ngl", 0, "--flash-attn", 0],
        "device": ["--engine", "leanstream", "--flash-attn", 1],
        "not device_exact": ["--engine", "leanstream", "--flash-attn", 1, "--device-budget", file_bytes // 2, "--inexact"],
    }.items():
        files[name] = folder / f"{len(files)}.f32"
        small = ["--prompt", 48, "--steps", 32, "--rounds", 1, "--logits", files[name]]
        done = bench.run(*options, *small)
        if "error" in done:
            return done

    def log_softmax(name: str) -> Any:
        rows = np.fromfile(files[name], dtype=np.float32).astype(np.float64).reshape(33, -1)
        rows -= rows.max(axis=1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))

    def kl(expected: str, got: str) -> float:
        p, q = log_softmax(expected), log_softmax(got)
        return float((np.exp(p) * (p - q)).sum(axis=1).mean())

    return {
        "kl_device_to_host": kl("host", "device"),
        "kl_not_device_exact_to_device": kl("device", "not device_exact"),
        "kl_host_without_flash_attention": kl("host", "host without flash attention"),
    }


def medians(rows: dict[str, dict[str, Any]]) -> None:
    """Adds them to every row that ran."""
    for row in rows.values():
        if "error" not in row:
            row["decode"] = statistics.median(row["tokens_per_s"])
            row["prefill"] = statistics.median(row["prompt_tokens_per_s"])


def judge(rows: dict[str, dict[str, Any]], bus: dict[str, Any]) -> None:
    """Adds, for streamed variants, the share of max(compute, copies, reads) plus waits that generation reached."""
    compute = 1 / rows[EVERYTHING]["decode"]
    for row in rows.values():
        if row.get("decode_stats", {}).get("device_syncs"):
            stats = row["decode_stats"]
            copies = stats["device_copied_bytes"] / stats["n_tokens"] / bus["bus_bytes_per_s"]
            waits = stats["device_syncs"] / stats["n_tokens"] * bus["two_waits_s"] / 2
            reads = stats["read_bytes"] / stats["n_tokens"] / max(row.get("drive_bytes_per_s", [float("inf")]))
            bound = max(compute, copies, reads) + waits
            parts = {"compute_s": compute, "copies_s": copies, "reads_s": reads, "waits_s": waits}
            row["bound"] = {**parts, "share": bound * row["decode"]}


def table(rows: dict[str, dict[str, Any]], reference_row: str) -> str:
    lines = ["| variant | prefill tok/s | decode tok/s | device peak | bits | of the bound |", "|---|---|---|---|---|---|"]
    reference = rows[reference_row].get("logits_hash")
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | |")
            continue
        share = f"{row['bound']['share'] * 100:.0f} %" if "bound" in row else ""
        same = "same" if row["logits_hash"] == row.get("expected_hash", reference) else "differ"
        peak = f"{row['device_peak_bytes'] / 2**30:.2f} GiB"
        lines.append(f"| {name} | {row['prefill']:.0f} | {row['decode']:.1f} | {peak} | {same} | {share} |")
    return "\n".join(lines)


def parser(about: str | None) -> argparse.ArgumentParser:
    """Options of every table that is measured on a GPU."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "vulkan"), default="cuda")
    parser.add_argument("--cuda-arch", default="native", help="CMAKE_CUDA_ARCHITECTURES; default the GPU's own")
    parser.add_argument("--build", type=Path, metavar="DIR", help="a build with bin/device_speed; default: made in build/")
    parser.add_argument("--model", metavar="FILE", help="default: a synthetic one, written to --work")
    parser.add_argument("--text", type=Path, default=HERE / "toygguf" / "reference.txt")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm" if Path("/dev/shm").exists() else "."))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk, for reads that count")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=int, default=180, metavar="S", help="for one variant")
    parser.add_argument("--save", action="store_true")
    return parser


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shares", type=int, nargs="+", default=[50, 25], help="device budgets in percent of the file")
    made.add_argument("--host-cap", type=int, metavar="BYTES", help="host memory beside the disk; default 35 %% of the file")
    made.add_argument("--no-divergence", action="store_true", help="skip the comparison with the host")
    return made.parse_args()


def circumstances(bench: Bench) -> dict[str, Any]:
    """When and where: the part of a result that every benchmark of a GPU has."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"gpu": bench.gpu.ask("name"), "driver": bench.gpu.ask("driver_version"), "n_cpus": os.cpu_count()},
        "kernel": platform.release(),
    }


def report(record: dict[str, Any], *, save: bool) -> None:
    """Print the result's line and, if asked, keep it."""
    print(json.dumps(record))
    if save:
        with RESULTS.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")


def main() -> int:
    args = arguments()
    bench = Bench(build(args), make_model(args), args)
    bus = bench.ask(["--bus"])
    print(f"bus: {bus}", flush=True)
    rows = {
        STOCK: bench.run("--engine", "stock", "--ngl", 99),
        EVERYTHING: bench.run("--engine", "leanstream"),
    }
    everything = rows[EVERYTHING]
    if any("error" in row for row in rows.values()):
        print(table(rows, STOCK))
        return 1
    rows |= variants(bench, everything)
    medians(rows)
    judge(rows, bus)
    print(table(rows, STOCK), flush=True)
    record: dict[str, Any] = {
        "benchmark": f"gpu-{args.backend}",
        **circumstances(bench),
        "model": {"name": bench.model.name, "bytes": bench.model.stat().st_size},
        "settings": {key: getattr(args, key) for key in ("prompt", "steps", "rounds", "threads", "shares")},
        "bus": bus,
        "rows": rows,
    }
    if not args.no_divergence:
        with tempfile.TemporaryDirectory() as folder:
            record["divergence"] = divergence(bench, Path(folder))
        print(record["divergence"])
    report(record, save=args.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
