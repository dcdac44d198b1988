"""Write the lean files of the native tests: make_lean.py FOLDER. Without the built package it writes none."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]


def main(folder: Path) -> None:
    """Write NAME_KIND.gguf for each."""
    try:
        from lean_files import make_lean
    except Exception as error:  # whatever keeps the package from loading
        print(f"no lean files: {error}")
        return
    from toygguf.models import write_model

    sources = folder / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    for name, kind, options in (
        ("dense_arcee", "lean", {}),
        ("dense_arcee", "faithful", {"faithful": True, "margin": 0.5}),
        ("dense_arcee", "device", {"device_hot": 0.5}),
        ("dense_tied", "lean", {}),
        ("dense_tied", "device", {"device_hot": 0.5}),
        ("moe_merged", "lean", {}),
        ("moe_qwen3", "lean", {}),
    ):
        make_lean(write_model(name, sources), folder / f"{name}_{kind}.gguf", cluster_size=1, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
