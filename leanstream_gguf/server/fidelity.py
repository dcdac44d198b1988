"""How faithfully a model can be streamed, with the cost of each choice as the file's calibration measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

EXACT: dict[str, Any] = {"name": "exact", "max_kl": None, "exact": True, "quality": None}
_QUALITY = ("kl", "perplexity_change", "recall", "within_noise_floor")


def choices(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a file offers: `exact`, and where it was repacked for them `faithful` and the settings of `threshold`.

    Args:
        metadata: of the GGUF file; docs/lean_format.md has the keys.

    Returns:
        `{"name", "max_kl", "exact", "quality"}` each; quality holds the measured `kl` (nats) and `perplexity_change` (a share).
    """
    record = _record(metadata)
    found = [EXACT]
    if metadata.get("leanstream.layout") == "faithful":
        found.append({"name": "faithful", "max_kl": None, "exact": False, "quality": _quality(record.get("faithful"), record)})
    for setting in record.get("settings", ()):
        found.append({"name": "threshold", "max_kl": setting["max_kl"], "exact": False, "quality": _quality(setting, record)})
    return found


def _record(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get("leanstream.calibration", "{}"))
    except (TypeError, ValueError):
        return {}  # said where the model is loaded
    return found if isinstance(found, dict) else {}


def _quality(measured: Any, record: Mapping[str, Any]) -> dict[str, Any] | None:
    if not isinstance(measured, dict):
        return None
    quality = {name: measured[name] for name in _QUALITY if name in measured}
    return {**quality, "noise_floor": record.get("noise_floor"), "n_tokens": record.get("n_tokens")}
