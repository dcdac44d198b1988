"""The files of a workload: named models, synthetic ones that are written where they are missing, lean ones made of both.

In a workload, "model" is a file name, {"synthetic": options of make_synthetic_gguf.py} or {"sparse": options of
make_sparse_gguf.py}; a variant's "lean" holds options of `leanstream repack` (without the dashes), and its "calibrate" those of
`leanstream calibrate`, for models that need a record.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
_MAKERS = {"synthetic": "make_synthetic_gguf.py", "sparse": "make_sparse_gguf.py"}


def options(spec: dict[str, Any]) -> list[str]:
    """{"key": value} as --key value; true is a flag, a list its words."""
    words: list[str] = []
    for key, value in spec.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{key}", *map(str, values)]
    return words


def _label(spec: dict[str, Any]) -> str:
    return "-".join(word.lstrip("-") for word in options(spec))


def model_path(workload: dict[str, Any], args: argparse.Namespace) -> Path:
    """The model's file: named, or a synthetic one that is written where it is missing."""
    model = workload["model"]
    if isinstance(model, str):
        return Path(args.models) / model
    ((kind, spec),) = model.items()
    prefix = "" if kind == "synthetic" else f"synthetic-{kind}-"
    path = Path(args.work) / (prefix + "-".join(str(v) for v in spec.values()) + ".gguf")
    if not path.exists():
        subprocess.run([sys.executable, SCRIPTS / _MAKERS[kind], *options(spec), path], check=True)
    return path


def text_path(workload: dict[str, Any], args: argparse.Namespace) -> Path:
    """The text to feed: beside the models, or the one named on the command line."""
    return Path(args.text) if args.text else Path(args.models).parent / "data" / workload["text"]


def variant_path(variant: dict[str, Any], source: Path, work: Path) -> Path:
    """The file that this variant opens: the source, or a lean file of it, made where it is missing."""
    if "lean" not in variant:
        return source
    record = None
    if "calibrate" in variant:
        record = work / f"{source.stem}-{_label(variant['calibrate'])}.calibration"
        if not record.exists():
            _leanstream("calibrate", "-m", source, "-o", record, *options(variant["calibrate"]), "--quiet")
    out = work / f"{source.stem}-{_label(variant['lean'])}.lean.gguf"
    if not out.exists():
        extra = ["--calibration", record] if record else []
        _leanstream("repack", source, out, *extra, *options(variant["lean"]), "--quiet")
    return out


def _leanstream(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "leanstream_gguf", *map(str, words)], check=True, stdout=sys.stderr)
