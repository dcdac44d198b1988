"""The calibration record: a file beside the model that says what its neurons do, and of which model and text that is true."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..repack.gguf_file import Model
from ..repack.storage import Source

VERSION = 1
SUFFIX = ".calibration"
_SAMPLE_BYTES = 4096


def identity(model: Model) -> str:
    """A hash that tells models apart: all headers, and samples of every tensor's data."""
    digest = hashlib.sha256()
    with Source(model.shards) as source:
        for shard in model.shards:
            for key in shard.keys:
                digest.update(key.raw)
            digest.update(shard.table)
            digest.update(str(shard.file_bytes).encode())
        for tensor in model.tensors.values():
            n = min(_SAMPLE_BYTES, tensor.n_bytes)
            for start in {0, (tensor.n_bytes - n) // 2, tensor.n_bytes - n}:
                digest.update(source.read(tensor, start, n).data)
    return digest.hexdigest()


@dataclass
class LayerRecord:
    """One dense feed-forward layer.

    Attributes:
        density: share of neurons that fire (at the setting the bitmaps were made with).
        reuse: share of a token's neurons that fired for the token before too.
        perm: original index of each new position.
        fired: tokens for which each neuron fired, in the original order.
        mean_abs: mean magnitude of each neuron's value.
        sample: bitmaps of tokens that the order was not made from, new order: [n_sample, ceil(n_ff / 8)].
    """

    block: int
    n_ff: int
    activation: str
    density: float
    reuse: float
    perm: npt.NDArray[np.int32]
    fired: npt.NDArray[np.uint32]
    mean_abs: npt.NDArray[np.float32]
    sample: npt.NDArray[np.uint8]

    _ARRAYS = ("perm", "fired", "mean_abs", "sample")

    def numbers(self) -> dict[str, Any]:
        names = ("block", "n_ff", "activation", "density", "reuse")
        return {name: getattr(self, name) for name in names}


@dataclass
class Setting:
    """A lossy setting and what it costs: measured on text that it was not chosen from.

    Attributes:
        max_kl: what was asked for. kl: what was measured, mean over tokens in nats.
        thresholds: by block, of the absolute activation of the deciding projection.
        share: neurons used, of all. recall: share of the squared activation that is kept.
    """

    max_kl: float
    kl: float
    perplexity_change: float
    share: float
    recall: float
    thresholds: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "thresholds": {str(block): value for block, value in self.thresholds.items()}}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Setting:
        return cls(**{**document, "thresholds": {int(block): value for block, value in document["thresholds"].items()}})


@dataclass
class Record:
    """Everything a calibration found out."""

    model_name: str
    model_identity: str
    arch: str
    corpus_name: str
    corpus_sha256: str
    n_tokens: int
    noise_floor: float
    noise_floor_reason: str
    perplexity: float
    gated: bool
    has_zeros: bool
    layers: list[LayerRecord] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    margins: dict[int, float] = field(default_factory=dict)  # of the sketch, by block
    faithful: dict[str, Any] = field(default_factory=dict)  # what the margins cost

    def summary(self) -> dict[str, Any]:
        """Everything but the arrays."""
        plain = {name: value for name, value in self.__dict__.items() if name not in ("layers", "settings", "margins")}
        return {
            "version": VERSION,
            **plain,
            "layers": [layer.numbers() for layer in self.layers],
            "settings": [setting.to_dict() for setting in self.settings],
            "margins": {str(block): value for block, value in self.margins.items()},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all."""
        arrays = {f"{name}.{layer.block}": getattr(layer, name) for layer in self.layers for name in LayerRecord._ARRAYS}
        temporary = Path(f"{os.fspath(path)}.partial")
        with temporary.open("wb") as file:
            np.savez_compressed(file, summary=json.dumps(self.summary()), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """
        Raises:
            CalibrationError: no calibration record, or a damaged one.
        """
        name = os.fspath(path)
        try:
            with np.load(name) as file:
                document = json.loads(str(file["summary"]))
                if document.pop("version") != VERSION:
                    raise CalibrationError(f"{name} was made by another version of this program", path=name, remedy="calibrate again")
                arrays = {key: file[key] for key in file.files if key != "summary"}
            return cls._from(document, arrays)
        except FileNotFoundError as error:
            raise CalibrationError(f"{name}: no such file", path=name, remedy="make one with `leanstream calibrate`") from error
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise CalibrationError(
                f"{name} is no calibration record, or a damaged one", path=name, remedy="calibrate again"
            ) from error

    @classmethod
    def _from(cls, document: dict[str, Any], arrays: dict[str, Any]) -> Record:
        layers = []
        for item in document.pop("layers"):
            found = {name: arrays[f"{name}.{item['block']}"] for name in LayerRecord._ARRAYS}
            layer = LayerRecord(**item, **found)
            if not (np.sort(layer.perm) == np.arange(layer.n_ff)).all():
                raise ValueError("the order is no permutation")
            layers.append(layer)
        settings = [Setting.from_dict(item) for item in document.pop("settings")]
        margins = {int(block): value for block, value in document.pop("margins").items()}
        return cls(**document, layers=layers, settings=settings, margins=margins)

    def check_model(self, model: Model) -> None:
        """
        Raises:
            CalibrationError: the record is of another model.
        """
        if identity(model) != self.model_identity:
            raise CalibrationError(
                f"the calibration record is of another model ({self.model_name}), not of {model.first.path}",
                path=model.first.path,
                remedy="calibrate this model",
            )

    def layer(self, block: int) -> LayerRecord | None:
        return next((layer for layer in self.layers if layer.block == block), None)
