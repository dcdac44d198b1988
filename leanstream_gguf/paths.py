"""Where this package keeps a person's own files: conversations, downloaded models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENV_DATA = "LEANSTREAM_DATA"


def data_folder() -> Path:
    """LEANSTREAM_DATA, or the platform's folder for an application's data. Not created here."""
    if chosen := os.environ.get(ENV_DATA):
        return Path(chosen).expanduser()
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "LeanStream"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "LeanStream"
    return Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "leanstream"


def models_folder() -> Path:
    """Where models that this package downloads go."""
    return data_folder() / "models"
