"""How faithfully a model can be streamed, with the cost of each choice as the file's calibration measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_QUALITY = ("kl", "perplexity_change", "recall", "within_noise_floor")


def choices(lean: Mapping[str, Any] | None, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a file offers: `exact` or, with layout faithful, `faithful`, and the settings of `threshold` that it holds.

    Args:
        lean: of the plan; None where the file is not rearranged.
        metadata: of the GGUF file; its calibration record (docs/lean_format.md) has costs that the plan does not repeat.

    Returns:
        `{"name", "max_kl", "exact", "quality"}` each; quality holds the measured `kl` (nats) and `perplexity_change` (a share).
    """
    record = _record(metadata)
    if lean is not None and lean["layout"] == "faithful":
        return [_choice("faithful", None, _quality(record.get("faithful"), record))]
    measured = {setting["max_kl"]: setting for setting in record.get("settings", ())}
    found = [_choice("exact", None, None)]
    for setting in (lean or {}).get("thresholds", ()):
        more: dict[str, Any] = next((known for max_kl, known in measured.items() if abs(max_kl - setting["max_kl"]) < 1e-6), {})
        found.append(_choice("threshold", setting["max_kl"], _quality({**more, **setting}, record)))
    return found


def _choice(name: str, max_kl: float | None, quality: dict[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "max_kl": max_kl, "exact": name == "exact", "quality": quality}


def _record(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get("leanstream.calibration", "{}"))
    except (TypeError, ValueError):
        return {}  # not ours to judge: what it says is for people
    return found if isinstance(found, dict) else {}


def _quality(measured: Any, record: Mapping[str, Any]) -> dict[str, Any] | None:
    if not isinstance(measured, dict):
        return None
    quality = {name: measured[name] for name in _QUALITY if name in measured}
    return {**quality, "noise_floor": record.get("noise_floor"), "n_tokens": record.get("n_tokens")}
