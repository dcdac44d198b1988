"""Room on the drive, asked for before anything is written."""

from __future__ import annotations

import os
import shutil

from ..errors import RepackError
from ..units import format_bytes

_MARGIN_BYTES = 64 << 20  # journal, file system


def require_space(path: str, n_bytes: int, already: int = 0) -> None:
    """
    Args:
        already: what an interrupted run has allocated of it.

    Raises:
        RepackError: the folder is missing or has no room.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RepackError(f"the folder of {path} cannot be used: {error.strerror}", path=folder, sys_errno=error.errno) from error
    needed = n_bytes - already + _MARGIN_BYTES
    if free < needed:
        message = f"{folder} has {format_bytes(free)} free; {format_bytes(needed)} are needed"
        raise RepackError(message, path=folder, used=free, limit=needed, remedy="free some space or write to another drive")
