"""What `leanstream inspect` says of a lean file."""

from __future__ import annotations

import json
from typing import Any

from ..repack.lean_file import LeanFile
from ..units import format_bytes
from .calibrate import setting_line
from .repack import layer_table


def document(path: str) -> dict[str, Any]:
    """Clusters and bundles layer by layer, the source, and the calibration's settings.

    Raises:
        FormatError: the file is damaged or was edited.
    """
    lean = LeanFile(path)

    def numbers(name: str) -> list[float]:
        values: list[float] | None = lean.model.get(f"leanstream.neurons.{name}")
        return list(values) if values else [float("nan")] * len(lean.neurons)

    density, amplification, best = numbers("density"), numbers("amplification"), numbers("amplification_best")
    layers = [
        {
            "block": place.block,
            "density": density[i],
            "cluster_size": place.cluster_size,
            "record_bytes": place.record_bytes,
            "stride": place.clusters.ne[0],
            "n_clusters": place.clusters.ne[1],
            "n_hot": place.n_hot,
            "n_device": place.n_device,
            "amplification": amplification[i],
            "amplification_best": best[i],
        }
        for i, place in enumerate(lean.neurons.values())
    ]
    bundles = [tensor for name, tensor in lean.model.tensors.items() if name.endswith(".ffn_exps.lean")]
    calibration = lean.model.get("leanstream.calibration")
    return {
        "layout": lean.layout,
        "source": {"name": lean.model.get("leanstream.source.name"), "bytes": lean.source_bytes, "sha256": lean.sha256},
        "layers": layers,
        "experts": [{"bundle": tensor.name, "n_experts": tensor.ne[1], "record_bytes": tensor.ne[0]} for tensor in bundles],
        "requantised": sorted(lean.requantised()),
        "calibration": json.loads(calibration) if calibration else None,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    source = found["source"]
    text = [f"  lean file, layout {found['layout']}, made from {source['name']} ({format_bytes(sum(source['bytes']))})"]
    if found["experts"]:
        sizes = sorted({item["record_bytes"] for item in found["experts"]})
        what = " or ".join(format_bytes(size) for size in sizes)
        text.append(f"  {len(found['experts'])} layers of experts, each expert one read of {what}")
    if found["layers"]:
        text.append("  read amplification: bytes of the clusters a token touches over bytes of its firing neurons, empty cache")
        text.append(layer_table(found["layers"]))
        if n_device := sum(layer["n_device"] for layer in found["layers"]):
            n = sum(layer["cluster_size"] * layer["n_clusters"] for layer in found["layers"])
            text.append(f"  {n_device / n:.0%} of the neurons are there for a device too")
    if found["requantised"]:
        text.append(f"  lossy: {len(found['requantised'])} down projections are not in the source's type")
    for setting in (found["calibration"] or {}).get("settings", ()):
        text.append("  " + setting_line(setting))
    return text
