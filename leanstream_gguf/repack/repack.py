"""`repack()`: from a model and a calibration record to a checked lean file."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..calibrate.record import LayerRecord, Record
from ..errors import ArgumentError, CalibrationError, UnsupportedError
from . import cost, device
from . import format as f
from .gguf_file import Model, encode_key, read_model
from .layout import DenseFfn, NeuronLayer, find_dense, find_experts, make_layout
from .requantize import DownRows, check_down_type
from .storage import Source
from .writer import Check, Written, output_name, write

DRIVE_SUFFIX = ".partial.drive"


@dataclass(frozen=True)
class Request:
    """What to repack.

    Attributes:
        calibration: record of `leanstream calibrate`; None bundles experts only.
        cluster: neurons in a cluster, 0 = chosen by the cost model.
        alignment: 512 or 4096, 0 = what the output's drive allows.
        down_type: another type for down projections, lossy. from_source: a file of higher precision to make them from.
        device_hot: share of each layer's neurons that the file holds as matrices too, for a device: the hottest.
        drive: JSON file with a drive's rates (of an earlier `repack --json`), instead of measuring the source's drive.
    """

    source: str
    out: str | None = None
    calibration: str | None = None
    layout: str = "exact"
    cluster: int = 0
    alignment: int = 0
    down_type: str | None = None
    from_source: str | None = None
    force: bool = False
    quiet: bool = False
    drive: str | None = None
    device_hot: float = 0.0

    @property
    def out_path(self) -> str:
        return self.out or output_name(self.source)


@dataclass(frozen=True)
class Repacked:
    """What was written, and what was decided for each layer."""

    written: Written
    layout: str
    n_expert_layers: int
    layers: list[dict[str, Any]]
    left_alone: dict[int, str]  # dense layers that stayed as they are, and why
    drive: dict[str, Any] | None


def _check(request: Request) -> None:
    if request.layout not in ("exact", "faithful"):
        raise ArgumentError(f"--layout must be exact or faithful, not {request.layout!r}")
    if request.alignment not in (0, 512, 4096):
        raise ArgumentError(f"--alignment must be 512 or 4096, not {request.alignment}")
    if not 0 <= request.cluster <= 4096:
        raise ArgumentError(f"--cluster must be auto or from 1 to 4096, not {request.cluster}")
    if request.down_type is not None and request.down_type not in f.BY_NAME:
        raise ArgumentError(f"--down-type must be one of {', '.join(sorted(f.BY_NAME))}, not {request.down_type!r}")
    if not 0 <= request.device_hot <= 1:
        raise ArgumentError(f"--device-hot must be a share from 0 to 1 or a percentage, not {request.device_hot}")
    if request.device_hot and request.layout == "faithful":
        raise ArgumentError("--device-hot needs the layout exact: a device computes the whole projection that decides")
    if request.from_source is not None and request.down_type is None:
        raise ArgumentError("--from-source needs --down-type: without it the down projection is copied as it is")


class _Planner:
    """Decides layer by layer."""

    def __init__(self, request: Request, model: Model, record: Record, alignment: int, drive: cost.Drive) -> None:
        self.request, self.model, self.record = request, model, record
        self.alignment, self.drive = alignment, drive
        self.layers: list[NeuronLayer] = []
        self.reports: list[dict[str, Any]] = []
        self.left_alone: dict[int, str] = {}

    def add(self, ffn: DenseFfn) -> None:
        found = self.record.layer(ffn.block)
        reason = ffn.why_not
        if reason is None and (found is None or found.n_ff != ffn.down.ne[0]):
            reason = "the calibration record does not know it"
        if reason is None and found is not None and found.density > cost.DENSE_LIMIT:
            reason = f"{found.density:.0%} of its neurons fire"
        if reason is None and ffn.biases and self.request.layout == "faithful":
            reason = "its deciding projection has a bias, which the layout faithful cannot hold; use exact"
        if reason is not None or found is None:
            self.left_alone[ffn.block] = reason or ""
            return
        self._cut(ffn, found)

    def _cut(self, ffn: DenseFfn, found: LayerRecord) -> None:
        kind = f.BY_NAME[self.request.down_type] if self.request.down_type else ffn.down.type
        faithful = self.request.layout == "faithful"
        changed = kind != ffn.down.type or self.request.from_source is not None

        perm, n_device = device.hottest_first(found.perm, found.fired, kind.n_elements, self.request.device_hot)

        def layer(size: int, n_hot: int) -> NeuronLayer:
            return NeuronLayer(
                ffn.block, ffn.gate, ffn.up, ffn.down, kind, ffn.biases, perm, size, n_hot, self.alignment, faithful, changed, n_device
            )  # fmt: skip

        fires = cost.unpack_sample(found.sample, found.n_ff)[:, np.argsort(found.perm)[perm]]
        record_bytes = layer(1, 0).record_bytes
        best = cost.choose(fires, record_bytes, self.drive)
        used = cost.cluster_cost(fires, self.request.cluster, record_bytes, self.drive) if self.request.cluster else best
        self.layers.append(layer(used.cluster_size, used.n_hot))
        self.reports.append(
            {
                "block": ffn.block,
                "density": found.density,
                "cluster_size": used.cluster_size,
                "record_bytes": record_bytes,
                "stride": used.stride,
                "n_hot": used.n_hot,
                "n_device": n_device,
                "device_share": float(found.fired[perm[:n_device]].sum() / max(1, found.fired.sum())),
                "amplification": used.amplification,
                "amplification_best": best.amplification,
                "reads_per_token": used.n_reads,
                "read_ms_per_token": used.seconds * 1e3,
            }
        )

    def keys(self) -> list[bytes]:
        """Keys of the lean file that come from the calibration."""
        blocks = [layer.block for layer in self.layers]
        reports, record = self.reports, self.record
        entries: list[tuple[str, str, Any]] = [
            ("neurons.density", "f32[]", [report["density"] for report in reports]),
            ("neurons.amplification", "f32[]", [report["amplification"] for report in reports]),
            ("neurons.amplification_best", "f32[]", [report["amplification_best"] for report in reports]),
            ("calibration", "string", json.dumps({**record.summary(), "drive": self.drive.to_dict()}, sort_keys=True)),
        ]
        if self.request.layout == "faithful":
            entries.append(("sketch.margin", "f32[]", [record.margins[block] for block in blocks]))
        if record.settings:
            values = [setting.thresholds.get(block, 0.0) for setting in record.settings for block in blocks]
            entries += [
                ("threshold.max_kl", "f32[]", [setting.max_kl for setting in record.settings]),
                ("threshold.kl", "f32[]", [setting.kl for setting in record.settings]),
                ("threshold.values", "f32[]", values),
            ]
        return [encode_key(f.PREFIX + name, kind, value) for name, kind, value in entries]


def repack(request: Request, check: Check | None = None) -> Repacked:
    """Write a lean file; see `writer.write` for how.

    Args:
        check: called with the path of the finished file before it gets its name.

    Raises:
        UnsupportedError: nothing to rearrange; the message says what to use instead.
        CalibrationError: the record is of another model, damaged, or lacks what the layout needs.
        RepackError, ArgumentError, and what reading the source raises.
    """
    _check(request)
    model = read_model(request.source)
    if model.get(f.PREFIX + "version") is not None:
        raise UnsupportedError(f"{request.source} is a lean file already", remedy="give the source, or unpack it first")
    folder = os.path.dirname(os.path.abspath(request.out_path))
    alignment = request.alignment or cost.drive_alignment(folder)[0]
    experts, planner = find_experts(model), None
    if request.calibration is not None:
        planner = _plan_neurons(request, model, alignment)
    layers = planner.layers if planner else []
    if not experts and not layers:
        raise UnsupportedError(_nothing(request, model, planner))
    keys = planner.keys() if planner and layers else []
    layout = make_layout(model, experts, layers, alignment, keys)
    rows = DownRows()
    if request.down_type:
        check_down_type(f.BY_NAME[request.down_type], layers)
    if request.from_source:
        higher = read_model(request.from_source)
        rows.higher = (higher, Source(higher.shards))
    written = write(layout, request.out_path, down_rows=rows, force=request.force, quiet=request.quiet, check=check)
    Path(request.out_path + DRIVE_SUFFIX).unlink(missing_ok=True)
    return Repacked(
        written=written,
        layout="experts" if not layers else request.layout,
        n_expert_layers=len(experts),
        layers=planner.reports if planner else [],
        left_alone=planner.left_alone if planner else {},
        drive=planner.drive.to_dict() if planner else None,
    )


def _drive(request: Request, alignment: int) -> cost.Drive:
    """The drive's rates. Measured ones are kept beside the unfinished output: measured again they would choose other clusters, and a
    killed run could not go on."""
    if request.drive:
        return cost.Drive.load(request.drive, alignment)
    kept = Path(request.out_path + DRIVE_SUFFIX)
    with contextlib.suppress(ArgumentError):
        if Path(request.out_path + ".partial.journal").exists():
            return cost.Drive.load(str(kept), alignment)
    measured = cost.measure_drive(request.source, alignment)
    kept.write_text(json.dumps(measured.to_dict()), encoding="utf-8")
    return cost.Drive.load(str(kept), alignment)  # rounded, as it will be after a kill


def _plan_neurons(request: Request, model: Model, alignment: int) -> _Planner:
    assert request.calibration is not None
    record = Record.load(request.calibration)
    record.check_model(model)
    if request.layout == "faithful" and not record.margins:
        why = "its activation has no zeros" if not record.has_zeros else "it was made with --no-sketch"
        raise CalibrationError(f"{request.calibration} has no sketch margins ({why}), which the layout faithful needs")
    planner = _Planner(request, model, record, alignment, _drive(request, alignment))
    for ffn in find_dense(model):
        planner.add(ffn)
    if planner.layers and len({layer.gate is None for layer in planner.layers}) > 1:
        raise UnsupportedError(f"{request.source} has layers with and without a gate, which one lean file cannot hold")
    return planner


def _nothing(request: Request, model: Model, planner: _Planner | None) -> str:
    dense = find_dense(model)
    if planner is not None and planner.left_alone:
        reasons = "; ".join(sorted(set(planner.left_alone.values())))
        return f"{request.source} has no layer that is worth cutting into neurons ({reasons}): stream the file as it is"
    if any(ffn.why_not is None for ffn in dense):
        return (
            f"{request.source} has no experts to bundle, and cutting its layers into neurons needs to know which of them fire: run "
            "`leanstream calibrate` first and give the record with --calibration"
        )
    reasons = "; ".join(sorted({ffn.why_not for ffn in dense if ffn.why_not}))
    return f"{request.source} has nothing to repack{f' ({reasons})' if reasons else ''}: stream the file as it is"
