"""`leanstream repack`: a file whose experts or neurons can be read one by one."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..units import format_bytes, format_rate
from . import _common

if TYPE_CHECKING:
    from ..repack.repack import Repacked


CLOSE = 2.0  # times the noise floor: what a short run may show of a file that is right


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "repack",
        help="rearrange a model so that one read fetches an expert or a cluster of neurons",
        description="Write a lean file: experts bundled, neurons in clusters (with a record of `leanstream calibrate`). Nothing is "
        "lost: `leanstream unpack` gives the source back byte for byte, and that is checked before the file gets its name. Killed or "
        "out of space, the same command goes on where it stopped.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command; scripts/repack_gguf.py has the same."""
    parser.add_argument("source", metavar="IN.gguf", help="model file; of a split set the first part")
    parser.add_argument("out", nargs="?", metavar="OUT.lean.gguf", help="default: the source's name with .lean.gguf")
    parser.add_argument("--calibration", metavar="FILE", help="record of `leanstream calibrate`; default: the one beside the source")
    parser.add_argument("--layout", choices=("exact", "faithful"), default="exact", help="what the clusters hold; default exact")
    parser.add_argument("--cluster", default="auto", metavar="auto|N", help="neurons in a cluster; default auto: by the drive's rates")
    parser.add_argument("--alignment", type=int, default=0, metavar="N", help="512 or 4096; default: what the drive allows")
    parser.add_argument("--drive", metavar="FILE", help="rates of the drive from an earlier `repack --json`, instead of measuring it")
    parser.add_argument("--down-type", metavar="TYPE", help="lossy: store down projections in another type, such as Q4_0")
    parser.add_argument("--from-source", metavar="FILE", help="with --down-type: make them from this file of higher precision")
    parser.add_argument(
        "--device-hot",
        default="0",
        metavar="SHARE",
        help="store the hottest neurons of each layer (0.25 or 25%%) once more as matrices, which a GPU multiplies with; default none",
    )
    parser.add_argument("--experts-only", action="store_true", help="leave dense layers as they are")
    parser.add_argument(
        "--verify-run",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the new file against the source before it gets its name (it is read back and compared in any case)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _common.add_json(parser)


def _cluster(text: str) -> int:
    if text == "auto":
        return 0
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError(f"--cluster must be auto or a number of neurons, not {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ArgumentError(f"--device-hot must be a share such as 0.25 or 25%, not {text!r}") from None


def _calibration(args: argparse.Namespace) -> str | None:
    from ..calibrate.run import default_path

    if args.experts_only:
        return None
    beside = default_path(args.source)
    return args.calibration or (beside if os.path.exists(beside) else None)


def run(args: argparse.Namespace) -> int:
    from ..repack.repack import Request, repack
    from ..runtime import ModelHandle

    with ModelHandle(args.source):  # says in typed errors what is wrong with a broken file
        pass
    request = Request(
        source=args.source,
        out=args.out,
        calibration=_calibration(args),
        layout=args.layout,
        cluster=_cluster(args.cluster),
        alignment=args.alignment,
        down_type=None if args.down_type is None else args.down_type.upper(),
        from_source=args.from_source,
        drive=args.drive,
        device_hot=_share(args.device_hot),
        force=args.force,
        quiet=args.quiet,
    )
    done = repack(request, _check(args) if args.verify_run else None)
    if args.json:
        _common.print_json(document(done))
    else:
        print(summary(done))
    return 0


def _check(args: argparse.Namespace) -> Any:
    """Runs the new file against the source, before it gets its name."""
    from ..errors import RepackError
    from ..repack.lean_file import LeanFile
    from ..verify import Request, verify

    def check(path: str) -> dict[str, Any]:
        lossy = args.down_type is not None
        layout = LeanFile(path).layout
        fidelity = "faithful" if layout == "faithful" else "exact"
        found = verify(Request(model=path, reference=args.source, fidelity=fidelity, n_prompt=128, n_generate=16))
        close = found["passed"] or (layout != "experts" and found["kl_mean"] <= CLOSE * found["kl_noise_floor"])
        if not close and not lossy:
            message = f"{path} does not compute what {args.source} does: mean KL {found['kl_mean']:.3g}, noise floor "
            raise RepackError(message + f"{found['kl_noise_floor']:.3g}", path=path, remedy="please report this; nothing was renamed")
        return {key: found[key] for key in ("passed", "bit_identical", "kl_mean", "kl_noise_floor", "n_tokens")}

    return check


def document(done: Repacked) -> dict[str, Any]:
    """For --json."""
    written = done.written
    return {
        "path": written.path,
        "bytes": written.n_bytes,
        "source_bytes": written.source_bytes,
        "resumed": written.resumed,
        "write_seconds": written.write_seconds,
        "read_back_seconds": written.verify_seconds,
        "source_sha256": written.sha256,
        "down_errors": {str(block): error for block, error in written.down_errors.items()},
        "verify": written.check,
        "layout": done.layout,
        "n_expert_layers": done.n_expert_layers,
        "layers": done.layers,
        "left_alone": {str(block): why for block, why in done.left_alone.items()},
        "drive": done.drive,
    }


def summary(done: Repacked) -> str:
    """What was done, for people."""
    written = done.written
    rate = format_rate(written.n_bytes / max(1e-9, written.write_seconds))
    lines = [f"{written.path}: {format_bytes(written.n_bytes)} (source {format_bytes(written.source_bytes)}), written at {rate}"]
    lines.append("  read back: gives the source" + (" but for its down projections" if written.down_errors else ", byte for byte"))
    if written.check:
        same = "the same bytes of logits" if written.check["bit_identical"] else f"mean KL {written.check['kl_mean']:.3g}"
        lines.append(f"  run against the source: {same} (noise floor {written.check['kl_noise_floor']:.3g})")
    if done.n_expert_layers:
        lines.append(f"  {done.n_expert_layers} layers of experts bundled")
    if written.down_errors:
        worst = max(written.down_errors.values())
        lines.append(f"  lossy: down projections requantised, relative error at most {worst:.3%} of a layer's norm")
    if done.layers:
        lines.append(layer_table(done.layers))
    if any(layer["n_device"] for layer in done.layers):
        shares = [layer["device_share"] for layer in done.layers]
        lines.append(
            f"  neurons for a device: {min(shares):.0%} to {max(shares):.0%} of a layer's firing ones, on the calibration text"
        )
    for block, why in done.left_alone.items():
        lines.append(f"  layer {block} left as it is: {why}")
    return "\n".join(lines)


def layer_table(layers: list[dict[str, Any]]) -> str:
    """Clusters layer by layer."""
    rows: list[tuple[str, ...]] = [
        (
            str(layer["block"]),
            f"{layer['density']:.2%}",
            str(layer["cluster_size"]),
            str(layer["record_bytes"]),
            str(layer["stride"]),
            str(layer["n_hot"]),
            f"{layer['amplification']:.2f}",
            f"{layer['amplification_best']:.2f}",
        )
        for layer in layers
    ]
    head = ("layer", "fire", "neurons a cluster", "bytes each", "cluster bytes", "hot", "amplification", "at the optimum")
    return _common.table([head, *rows])
