"""GGUF files in a person's folders, and what each needs to run.

Needs come from `leanstream plan` in a process of its own, one model at a time: a damaged file or a crash there cannot
touch the model that is answering, and its memory is not charged to it. They are kept by path, size and time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import __version__, probe

MAX_DEPTH = 6  # publisher/repository/file is three
MAX_MODELS = 500
PLAN_TIMEOUT_S = 180
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NOT_A_MODEL = re.compile(r"(^|[-_.])(mmproj|imatrix|vocab)[-_.]", re.IGNORECASE)


@dataclass(frozen=True)
class FoundModel:
    """A GGUF file, or the first file of a split set whose sizes are added up."""

    path: str
    name: str
    folder: str  # the searched folder it was found in
    file_bytes: int
    n_files: int
    modified: float

    @property
    def key(self) -> str:
        """What its needs are kept under."""
        return f"needs {__version__} {self.file_bytes} {self.modified:.3f} {self.path}"


def default_folders(downloads: Path) -> list[Path]:
    """Where models often lie: our downloads, ./models, ~/models, and where LM Studio keeps its own. Existing ones only."""
    home = Path.home()
    places = [
        downloads,
        Path.cwd() / "models",
        home / "models",
        home / ".lmstudio" / "models",
        home / ".cache" / "lm-studio" / "models",
    ]
    return [place for place in places if place == downloads or place.is_dir()]


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Files below a folder; what cannot be read is left out, links to folders are not followed."""
    pending = [(str(folder), 0)]
    while pending:
        place, depth = pending.pop()
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        if depth < MAX_DEPTH and not entry.name.startswith("."):
                            pending.append((entry.path, depth + 1))
                    elif entry.name.endswith(".gguf") and entry.is_file():
                        yield entry


def find_models(folders: Iterable[Path]) -> list[FoundModel]:
    """All models below these folders, by name; a file that two folders contain is listed once."""
    found: dict[str, FoundModel] = {}
    for folder in folders:
        sizes: dict[str, tuple[int, int]] = {}  # first shard -> (bytes, files)
        firsts: list[tuple[os.DirEntry[str], str]] = []
        for entry in _walk(folder):
            if _NOT_A_MODEL.search(entry.name):
                continue
            shard = _SHARD.search(entry.name)
            first = entry.path if shard is None else _SHARD.sub(f"-00001-of-{shard[2]}.gguf", entry.path)
            n_bytes, n_files = sizes.get(first, (0, 0))
            sizes[first] = (n_bytes + entry.stat().st_size, n_files + 1)
            if first == entry.path:
                firsts.append((entry, re.sub(r"\.gguf$", "", _SHARD.sub(".gguf", entry.name))))
        for entry, name in firsts:
            real = os.path.realpath(entry.path)
            if real not in found and len(found) < MAX_MODELS:
                found[real] = FoundModel(entry.path, name, str(folder), *sizes[entry.path], entry.stat().st_mtime)
    return sorted(found.values(), key=lambda model: model.name.casefold())


class KeyValue(Protocol):
    """Where needs are kept between starts: ConversationStore's preferences."""

    def preference(self, key: str, default: Any = None) -> Any: ...
    def set_preference(self, key: str, value: Any) -> None: ...


def plan_document(path: str, *arguments: str) -> dict[str, Any]:
    """What `leanstream plan --json` says about a file: the plan, or `{"error": ...}`."""
    command = [sys.executable, "-m", "leanstream_gguf", "plan", "-m", path, "--json", *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PLAN_TIMEOUT_S, check=False)
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": {"code": "timeout", "message": f"planning took longer than {PLAN_TIMEOUT_S} s"}}
    except OSError as error:
        return {"error": {"code": "crashed", "message": f"planning could not be started: {error}"}}
    except (IndexError, ValueError):
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": {"code": "crashed", "message": f"planning ended without an answer: {words[-1][:300]}"}}
    return document


def needs_from(document: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that a list of models shows. `own_bytes` are those of the planning process, in both budgets."""
    if "error" in document:
        return {"error": document["error"]}
    experts = document["experts"]
    return {
        "arch": document["arch"],
        "minimum_bytes": document["minimum_budget_bytes"],
        "full_bytes": document["full_budget_bytes"],
        "own_bytes": document["memory"]["baseline_bytes"],
        "n_ctx": document["n_ctx"],
        "n_experts": experts["n_experts"],
        "n_experts_used": experts["n_used"],
    }


_PASSING = ("timeout", "crashed")  # may be otherwise next time: shown, but not kept


class NeedsBook:
    """Needs of models, worked out in the background and kept."""

    def __init__(self, kept: KeyValue, plan: Callable[..., dict[str, Any]] = plan_document) -> None:
        self._kept, self._plan = kept, plan
        self._lock = threading.Lock()
        self._waiting: list[FoundModel] = []
        self._busy: str | None = None  # key of the model being planned
        self._failed: dict[str, dict[str, Any]] = {}  # key -> error, until the program ends
        self._closed = False

    def close(self) -> None:
        """Begin no other plan."""
        with self._lock:
            self._closed = True
            self._waiting.clear()

    def ask(self, models: Iterable[FoundModel]) -> None:
        """Work out what is not known yet."""
        with self._lock:
            if self._closed:
                return
            queued = {model.key for model in self._waiting} | {self._busy} | set(self._failed)
            self._waiting += [model for model in models if model.key not in queued and self._kept.preference(model.key) is None]
            if self._waiting and self._busy is None:
                self._busy = self._waiting[0].key
                threading.Thread(target=self._work, name="leanstream-needs", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._closed:
                    self._busy = None
                    return
                model = self._waiting.pop(0)
                self._busy = model.key
            needs = needs_from(self._plan(model.path, "--memory", "min", "--no-speed"))
            if needs.get("error", {}).get("code") in _PASSING:
                self._failed[model.key] = needs
                continue
            with contextlib.suppress(Exception):  # the store may be closed already
                self._kept.set_preference(model.key, needs)

    def of(self, model: FoundModel) -> dict[str, Any] | None:
        """Its needs for this process, None while they are not known.

        `minimum_bytes` and `full_bytes` count this process in place of the one that planned; `fits` says what the
        memory of this machine allows now: `whole`, `streamed` or `no`.
        """
        kept: dict[str, Any] | None = self._failed.get(model.key) or self._kept.preference(model.key)
        if kept is None or "error" in kept:
            return kept
        more = own_bytes() - int(kept["own_bytes"])
        minimum, full = kept["minimum_bytes"] + more, kept["full_bytes"] + more
        automatic = probe.automatic_budget()
        fits = "whole" if automatic.n_bytes >= full else "streamed" if automatic.n_bytes >= minimum else "no"
        return {**kept, "minimum_bytes": minimum, "full_bytes": full, "fits": fits, "automatic_bytes": automatic.n_bytes}


_own: list[int] = []


def own_bytes() -> int:
    """This process as it was when first asked, before a model was loaded."""
    if not _own:
        _own.append(probe.resident_bytes())
    return _own[0]
