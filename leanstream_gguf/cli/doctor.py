"""`leanstream doctor`: what this machine offers for streaming, and what would make it faster."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ArgumentError, LeanStreamError, UnsupportedError
from ..units import format_bytes, format_rate
from . import _common

BLOCKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
PROBE_FILE_BYTES = 256 << 20
SLOW_DRIVE = 500e6  # bytes per second below which a dense model that does not fit is slow


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check libraries, processor, memory and drive; give advice",
        description="Check the pinned libraries, processor features and backends, memory and its limits, and measure the drive by "
        "read size and queue depth. With -m, what this machine can do with that model. Exit status 0 unless the libraries or the "
        "model cannot be used.",
    )
    parser.add_argument("-m", "--model", metavar="FILE", help="look at this model, and measure the drive under it")
    parser.add_argument(
        "--dir", metavar="DIR", help="measure the drive of this folder with a temporary file; default: the current one"
    )
    parser.add_argument("--no-drive", action="store_true", help="do not measure the drive")
    _common.add_json(parser)
    parser.set_defaults(run=run)


def libraries() -> dict[str, Any]:
    """Pins and what was loaded.

    Raises:
        LibraryError: they cannot be used.
    """
    from .. import __version__, _lib, link

    _, lib = _lib.native()
    import llama_cpp

    return {
        "leanstream_gguf": __version__,
        "llama_cpp_python": llama_cpp.__version__,
        "llama_cpp_commit": _lib.LLAMA_COMMIT,
        "folder": str(_lib.LIB_DIR),
        "llama_cpp_finds_them": not link.needed(),
        "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
        "io_uring": bool(lib.ls_have_io_uring()),
        "system_info": llama_cpp.llama_print_system_info().decode(),
    }


def processor() -> dict[str, Any]:
    from ..probe import cpu_count, cpu_model

    return {"model": cpu_model(), "architecture": platform.machine(), "usable": cpu_count(), "system": platform.platform()}


def memory() -> dict[str, Any]:
    from .. import probe

    available, automatic = probe.available_memory(), probe.automatic_budget()
    info = probe.meminfo()
    return {
        "total_bytes": info.get("MemTotal", 0),
        "available_bytes": available.n_bytes,
        "available_reason": available.reason,
        "swap_used_bytes": info.get("SwapTotal", 0) - info.get("SwapFree", 0),
        "cgroups": [vars(group) for group in probe.cgroup_limits()],
        "auto_budget_bytes": automatic.n_bytes,
        "auto_budget_reason": automatic.reason,
    }


def model(path: str) -> dict[str, Any]:
    """What this machine can do with a model.

    Raises:
        ModelFileError: it cannot be read, or is broken.
    """
    from ..measure import outlook
    from ..runtime import ModelHandle

    with ModelHandle(path) as handle:
        index = handle.index()
    return {"path": path, **{key: index[key] for key in ("arch", "file_bytes")}, **outlook(path)}


@contextlib.contextmanager
def _probe_file(args: argparse.Namespace) -> Iterator[str]:
    """A file to read: the model, or a temporary one that is removed."""
    if args.model:
        yield args.model
        return
    folder = args.dir or os.getcwd()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".leanstream-doctor-"))
            block = os.urandom(1 << 20)  # incompressible, so that a clever file system cannot cheat
            for _ in range(PROBE_FILE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            remedy = "give --dir a folder that can be written, -m a model to read instead, or --no-drive"
            raise ArgumentError(f"no test file can be written in {folder}: {error.strerror}", path=folder, remedy=remedy) from error
        yield file.name


def drive(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Rates by read size and depth, and what the file system allows."""
    from ..probe import drive_rate, filesystem_of

    rates = []
    with _probe_file(args) as path:
        mount, kind = filesystem_of(path)
        for block in BLOCKS:
            for depth in DEPTHS:
                progress(f"reading {format_bytes(block)} x {depth}")
                rates.append(drive_rate(path, block, depth, duration_ms=200))
        progress("reading in order")
        sequential = drive_rate(path, 1 << 20, 4, sequential=True, duration_ms=400)
    return {
        "mount": mount,
        "file_system": kind,
        "direct_io": all(rate.direct for rate in rates),
        "random": [vars(rate) for rate in rates],
        "sequential": vars(sequential),
    }


def advice(document: dict[str, Any]) -> list[str]:
    """What would make streaming faster or safer here, from the other sections."""
    lines = []
    drive, memory, libraries = document.get("drive"), document["memory"], document.get("libraries")
    if drive and not drive["direct_io"]:
        lines.append(f"{drive['file_system']} refuses direct reads: they go through the page cache; keep models on ext4 or xfs")
    if drive and drive["sequential"]["bytes_per_second"] < SLOW_DRIVE:
        rate = format_rate(drive["sequential"]["bytes_per_second"])
        lines.append(f"the drive reads {rate}: streamed layers will be slow; give more memory or a faster drive")
    if (found := document.get("model")) and found["streamable"]:
        lines += _model_advice(found, drive)
    if memory["swap_used_bytes"] > 256 << 20:
        lines.append(f"{format_bytes(memory['swap_used_bytes'])} are swapped out: use a smaller budget than auto")
    if libraries and not libraries["io_uring"] and platform.system() == "Linux":
        lines.append("io_uring is not available (kernel setting, container policy or build): a pool of reading threads is used")
    if libraries and not libraries["llama_cpp_finds_them"]:
        lines.append("`import llama_cpp` works after `import leanstream_gguf` only; `python -m leanstream_gguf.link` changes that")
    return lines or ["nothing: this machine is fine"]


def _model_advice(found: dict[str, Any], drive: dict[str, Any] | None) -> list[str]:
    auto, name = found["auto"], os.path.basename(found["path"])
    if "error" in auto:
        return [f"{name} does not fit here: {auto['error']['message']}"]
    dense = auto["dense"]["streamed_bytes"]
    if dense and drive:
        most = drive["sequential"]["bytes_per_second"] / dense
        return [f"{name}: --memory auto reads {format_bytes(dense)} for every token, so this drive allows {most:.1f} tokens/s at most"]
    return []


def run(args: argparse.Namespace) -> int:
    from ..probe import gpus

    status = 0
    document: dict[str, Any] = {"processor": processor(), "memory": memory()}
    try:
        document["libraries"] = libraries()
    except LeanStreamError as error:
        document["libraries_error"], status = error.to_dict(), error.exit_status
    if status == 0:
        document["gpus"] = gpus()
        if args.model:
            document["model"] = model(args.model)
            status = 0 if document["model"]["streamable"] else UnsupportedError.exit_status
    if "libraries" in document and not args.no_drive:
        document["drive"] = drive(args, _common.note if not args.json else lambda _: None)
    document["advice"] = advice(document)
    if args.json:
        _common.print_json(document)
    else:
        print(summary(document))
    return status


def summary(document: dict[str, Any]) -> str:
    """The report for people."""
    lines = []
    if "libraries" in document:
        found = document["libraries"]
        lines += [
            f"libraries   leanstream_gguf {found['leanstream_gguf']}, llama-cpp-python {found['llama_cpp_python']}, "
            f"llama.cpp {found['llama_cpp_commit'][:12]} in {found['folder']}",
            f"            GPU offload {'yes' if found['gpu_offload'] else 'no'}, io_uring {'yes' if found['io_uring'] else 'no'}",
            f"            {found['system_info']}",
        ]
    else:
        lines.append(f"libraries   NOT USABLE: {document['libraries_error']['message']}")
    cpu, ram = document["processor"], document["memory"]
    lines += [
        f"processor   {cpu['model']} ({cpu['architecture']}), {cpu['usable']} usable",
        f"memory      {format_bytes(ram['available_bytes'])} usable ({ram['available_reason']})",
        f"            --memory auto is {format_bytes(ram['auto_budget_bytes'])}: {ram['auto_budget_reason']}",
    ]
    if "model" in document:
        lines += _model_lines(document["model"])
    if "drive" in document:
        lines += _drive_lines(document["drive"])
    lines += [_gpu_line(gpu) for gpu in document.get("gpus", ())]
    return "\n".join([*lines, *(f"advice      {text}" for text in document["advice"])])


def _model_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"model       {found['path']}: {found['arch']}, {format_bytes(found['file_bytes'])}"]
    if not found["streamable"]:
        return [*lines, f"            CANNOT BE STREAMED: {found['why_not']['message']}"]
    plan, auto = found["plan"], found["auto"]
    lines.append(
        f"            runs with {format_bytes(plan['minimum_budget_bytes'])} or more, "
        f"everything resident from {format_bytes(plan['full_budget_bytes'])}"
    )
    if "error" not in auto:
        how = "everything resident" if auto["mode"] == "resident" else f"mode {auto['mode']}"
        lines.append(f"            --memory auto: {how}")
    return lines


def _gpu_line(gpu: dict[str, Any]) -> str:
    shared = ", shares the machine's memory" if gpu["integrated"] else ""
    sizes = f"{format_bytes(gpu['free_bytes'])} of {format_bytes(gpu['memory_bytes'])} free"
    automatic = "--device-memory auto is what is free, less 5 % or 256 MiB"
    return f"gpu         {gpu['description']} ({gpu['name']}), {sizes}{shared}; {automatic}"


def _drive_lines(drive: dict[str, Any]) -> list[str]:
    header = ("random reads of", *(f"depth {depth}" for depth in DEPTHS))
    rows: list[tuple[str, ...]] = [header]
    for block in BLOCKS:
        points = [rate for rate in drive["random"] if rate["block_bytes"] == block]
        rows.append(
            (format_bytes(block), *(f"{format_rate(rate['bytes_per_second'])} ({rate['reads_per_second']:.0f}/s)" for rate in points))
        )
    return [
        f"drive       {drive['file_system']} at {drive['mount']}, direct reads {'yes' if drive['direct_io'] else 'NO'}, "
        f"in order {format_rate(drive['sequential']['bytes_per_second'])}",
        _common.table(rows, indent="            "),
    ]
