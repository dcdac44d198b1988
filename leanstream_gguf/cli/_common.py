"""What the sub-commands share: options, output, and errors as one line, as JSON and as an exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from typing import Any

from ..errors import ArgumentError, LeanStreamError, LeanStreamWarning, RepackError
from ..settings import (
    ENV_CACHE,
    ENV_DEVICE_MEMORY,
    ENV_MEMORY,
    FIDELITIES,
    IO_BACKENDS,
    MAX_DEPTH,
    MODES,
    POLICIES,
    Budget,
    CacheBudget,
    StreamConfig,
)

INTERRUPTED = 130


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", required=True, metavar="FILE", help="GGUF file, or the first file of a split set")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, errors included")


def add_memory(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """--memory and --cache, with the environment as their default."""
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        default=os.environ.get(ENV_MEMORY) or default,
        help="bound for the whole process: a size, 55%% (of the model file), auto (the machine's or cgroup's limit less a "
        f"reserve), min or full; default {default}, or {ENV_MEMORY}",
    )
    group.add_argument(
        "--cache",
        metavar="SIZE",
        default=os.environ.get(ENV_CACHE) or None,
        help=f"size of the expert cache alone: a size, 25%% (of the experts) or min; default: what is left, or {ENV_CACHE}",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """--gpu-layers and --device-memory, as Llama's n_gpu_layers and device_budget."""
    group = parser.add_argument_group("device (where llama.cpp was built for a GPU)")
    group.add_argument(
        "-ngl", "--gpu-layers", type=int, metavar="N", help="layers on the device, -1 = all; default 0, or all with --device-memory"
    )
    group.add_argument(
        "--device-memory",
        metavar="SIZE",
        default=os.environ.get(ENV_DEVICE_MEMORY) or None,
        help="bound for device memory: a size, 50%% (of the model file) or auto (what is free, less a headroom); default auto, or "
        f"{ENV_DEVICE_MEMORY}",
    )
    text = "compute some of the experts that device memory lacks on the host, with other rounding; default: copy them all"
    group.add_argument("--no-device-exact", action="store_true", help=text)


def device_budget(args: argparse.Namespace) -> Budget | None:
    given = args.device_memory
    return None if given is None else Budget.parse(given, name=_source(given, "--device-memory", ENV_DEVICE_MEMORY))


def gpu_layers(args: argparse.Namespace) -> int:
    """--gpu-layers with its default."""
    if args.gpu_layers is not None:
        return int(args.gpu_layers)
    return 0 if args.device_memory is None else -1


def add_context(parser: argparse.ArgumentParser) -> None:
    """Options that shape the context; unset ones are chosen from the model's shape."""
    group = parser.add_argument_group("context (unset: chosen from the model's shape, never from the budget)")
    group.add_argument("--ctx", type=int, metavar="N", help="context length in tokens; 0 = what the model was trained for")
    group.add_argument("--batch", type=int, metavar="N", help="largest number of tokens in one call")
    group.add_argument("--ubatch", type=int, metavar="N", help="tokens computed at once; each of them reads all streamed bytes once")
    group.add_argument("--threads", type=int, metavar="N", help="compute threads; default: the processors available")
    group.add_argument("--flash-attn", action="store_true", help="use flash attention (smaller buffers, other rounding)")


def add_streaming(parser: argparse.ArgumentParser) -> None:
    """Options that change how bytes are read and kept, which never changes the output, and the one that can."""
    group = parser.add_argument_group("streaming (none of these changes the output)")
    group.add_argument(
        "--mode", choices=list(MODES), default="lean", help="default lean; the others are earlier systems, for comparison"
    )
    group.add_argument("--policy", choices=sorted(POLICIES), default="", help="what the expert cache keeps; default: the mode's")
    depths = ["auto", *map(str, range(MAX_DEPTH + 1))]
    group.add_argument("--depth", choices=depths, help="layers to look ahead for experts to read, 0 = off; default: the mode's")
    group.add_argument("--stages", type=_stages, metavar="N", help="how often such a guess is corrected, 1 = never, or auto")
    group.add_argument("--io-threads", type=int, default=0, metavar="N", help="reading threads; default chosen")
    group.add_argument("--io-depth", type=int, default=0, metavar="N", help="reads in flight with io_uring; default chosen")
    group.add_argument("--io-backend", choices=sorted(IO_BACKENDS), default="auto", help="how to read; default auto")
    group.add_argument("--buffered", action="store_true", help="read through the page cache instead of bypassing it")
    group.add_argument("--ring-slots", type=int, default=0, metavar="N", help="read-ahead buffers for layers; default chosen")
    group.add_argument("--repack", action="store_true", help="llama.cpp's repacked kernels; matrices that every token needs stay")
    group = parser.add_argument_group("fidelity (all but exact need a repacked file and cost quality, as measured in it)")
    group.add_argument("--fidelity", choices=list(FIDELITIES), default="exact", help="which neurons are computed; default exact")
    group.add_argument("--max-kl", type=float, metavar="NATS", help="with threshold: the measured setting up to this KL divergence")


def _stages(text: str) -> int | str:
    return text if text == "auto" else int(text)


def depth(args: argparse.Namespace) -> int | str | None:
    """--depth as StreamConfig takes it."""
    return args.depth if args.depth in (None, "auto") else int(args.depth)


def stream_config(args: argparse.Namespace) -> StreamConfig:
    """The StreamConfig of `add_streaming()` and `--cache`.

    Raises:
        ArgumentError: a value out of range.
    """
    return StreamConfig(
        cache_budget=None if args.cache is None else CacheBudget.parse(args.cache, name=_source(args.cache, "--cache", ENV_CACHE)),
        mode=args.mode,
        policy=args.policy,
        depth=depth(args),
        stages=args.stages,
        io_threads=args.io_threads,
        io_depth=args.io_depth,
        io_backend=args.io_backend,
        direct_io=not args.buffered,
        ring_slots=args.ring_slots,
        repack=args.repack,
        fidelity=args.fidelity,
        max_kl=args.max_kl,
        device_exact=not getattr(args, "no_device_exact", False),
    )


def budget(args: argparse.Namespace) -> Budget:
    """The budget of `add_memory()`.

    Raises:
        ArgumentError: not a budget; the message names the flag or the variable.
    """
    return Budget.parse(args.memory, name=_source(args.memory, "--memory", ENV_MEMORY))


def _source(value: str, flag: str, variable: str) -> str:
    """Where a value came from: the flag's default is the variable's."""
    return variable if value == os.environ.get(variable) else flag


def note(text: str) -> None:
    """A line for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: dict[str, Any]) -> None:
    """One line, so that the last line of standard output is the document."""
    print(json.dumps(document), flush=True)


def table(rows: list[tuple[str, ...]], *, indent: str = "  ") -> str:
    """Columns padded to their widest cell; the first is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _show_warning(message: Warning | str, *_: object) -> None:
    note(f"leanstream: warning: {message}")


def guarded(args: argparse.Namespace) -> int:
    """Run the chosen command; an error is one line on standard error (and JSON with --json), never a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", LeanStreamWarning)
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            return int(args.run(args) or 0)
    except LeanStreamError as error:
        if getattr(args, "json", False):
            print_json({"error": error.to_dict()})
        note(f"leanstream: {' '.join(str(error).split())}")
        return error.exit_status
    except KeyboardInterrupt:
        note("leanstream: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads: keep the interpreter from complaining at exit
        return 0
    except OSError as error:  # of the output: what is wrong with a model is a LeanStreamError
        where = os.fspath(error.filename2 or error.filename or "the output")
        named = RepackError(f"{where}: {error.strerror or error}", path=where, sys_errno=error.errno)
        if getattr(args, "json", False):
            with contextlib.suppress(OSError):  # it may be standard output that takes no more
                print_json({"error": named.to_dict()})
        note(f"leanstream: {named}")
        return named.exit_status


def require_other_file(out: str, *inputs: str | None) -> None:
    """
    Raises:
        ArgumentError: `out` is one of the files that are read, or a folder.
    """
    if os.path.isdir(out):
        raise ArgumentError(f"{out} is a folder; name a file", path=out)
    for path in inputs:
        if path is not None and os.path.exists(out) and os.path.exists(path) and os.path.samefile(out, path):
            raise ArgumentError(f"{out} is read by this command and would be lost; choose another name", path=out)
