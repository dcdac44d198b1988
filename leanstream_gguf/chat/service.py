"""What the page's routes work on: conversations, folders of models, the demo model."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import demo_model
from ..demo_model import DEMO
from ..errors import ArgumentError, LeanStreamError, ModelNotFoundError, StateError, UnknownIdError
from ..paths import data_folder
from . import discovery
from .store import ConversationStore

DATABASE = "chat.sqlite3"


class DemoDownload:
    """The demo model: whether it is there, and its download."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._started: float | None = None
        self._n_bytes = 0
        self._error: LeanStreamError | None = None
        self._cancelled = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to download; nothing happens if that is in progress or done."""
        with self._lock:
            if self._running() or self._file().is_file():
                return
            self._started, self._n_bytes, self._error, self._cancelled = time.monotonic(), 0, None, False
            self._thread = threading.Thread(target=self._work, name="leanstream-demo", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """End a download in progress; what it had is removed."""
        self._cancelled = True
        thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def _work(self) -> None:
        try:
            demo_model.fetch(DEMO, self.folder, self._progress)
        except LeanStreamError as error:
            self._error = error
        except demo_model.DownloadCancelled:
            pass

    def _progress(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        if self._cancelled:
            raise demo_model.DownloadCancelled

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _file(self) -> Path:
        return self.folder / DEMO.file

    def report(self) -> dict[str, Any]:
        """`state` is absent, downloading, present or failed; bytes and seconds left while downloading."""
        document: dict[str, Any] = {
            "state": "absent",
            "name": DEMO.name,
            "file_bytes": DEMO.file_bytes,
            "license": DEMO.license,
            "source": DEMO.parts[0].requirement.split("==")[0],
            "path": None,
        }
        if self._running():
            done, total = self._n_bytes, DEMO.download_bytes
            elapsed = time.monotonic() - (self._started or 0.0)
            left = (total - done) * elapsed / done if done else None
            return document | {"state": "downloading", "bytes": done, "total_bytes": total, "seconds_left": left}
        if self._file().is_file():
            return document | {"state": "present", "path": str(self._file())}
        if self._error is not None:
            return document | {"state": "failed", "error": self._error.to_dict()}
        return document


class ChatService:
    """Everything behind /chat/api but the model itself, which belongs to the server's host.

    Attributes:
        store: the conversations.
        model_options: settings of every model the page loads, from the command line.
        quit: ends the program, or None where the page must not.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        model_folders: Sequence[Path] = (),
        model_options: Mapping[str, Any] | None = None,
        quit: Callable[[], None] | None = None,
    ) -> None:
        """Open or make the folder of a person's data.

        Args:
            model_folders: searched for models besides those that the page adds; none: places where models often lie.

        Raises:
            StoreError: the folder or the file in it cannot be used.
        """
        discovery.own_bytes()  # before a model makes this process larger
        self.folder = folder or data_folder()
        self.store = ConversationStore(self.folder / DATABASE)
        self.demo = DemoDownload(self.folder / "models")
        self.needs = discovery.NeedsBook(self.store)
        self.given_folders = [path.expanduser().absolute() for path in model_folders]
        self.model_options = dict(model_options or {})
        self.quit = quit

    def close(self) -> None:
        self.needs.close()
        self.demo.cancel()
        self.store.close()

    # ---- models -----------------------------------------------------------------------------------------------------

    def folders(self) -> list[dict[str, Any]]:
        """Where models are looked for: `{"path", "exists", "removable"}`."""
        given = self.given_folders or discovery.default_folders(self.demo.folder)
        added = [Path(path) for path in self.store.preference("folders", [])]
        places = dict.fromkeys([self.demo.folder, *given, *added])
        return [{"path": str(p), "exists": p.is_dir(), "removable": p in added} for p in places]

    def add_folder(self, path: str) -> None:
        """Look for models there too, from now on.

        Raises:
            ModelNotFoundError: there is no such folder. ArgumentError: it is not given from the root.
        """
        folder = Path(path.strip()).expanduser()
        if not folder.is_absolute():
            raise ArgumentError(f"give the whole path of the folder, not {path!r}")
        if not folder.is_dir():
            raise ModelNotFoundError(f"there is no folder {folder}", path=str(folder))
        known: list[str] = self.store.preference("folders", [])
        if str(folder) not in known:
            self.store.set_preference("folders", [*known, str(folder)])

    def remove_folder(self, path: str) -> None:
        """Look there no more.

        Raises:
            UnknownIdError: it was not added here.
        """
        known: list[str] = self.store.preference("folders", [])
        if path not in known:
            raise UnknownIdError(f"{path} is not one of the folders that were added here")
        self.store.set_preference("folders", [item for item in known if item != path])

    def models(self) -> list[discovery.FoundModel]:
        """What the folders hold now; their needs are being worked out afterwards."""
        found = discovery.find_models(Path(item["path"]) for item in self.folders())
        self.needs.ask(found)
        return found

    def find(self, path: str) -> discovery.FoundModel:
        """The model at this path, which must be one that `models()` lists: no other file can be named.

        Raises:
            UnknownIdError: it is not.
        """
        with contextlib.suppress(ValueError):  # a path with a null byte is nobody's
            wanted = os.path.realpath(path)
            for model in self.models():
                if os.path.realpath(model.path) == wanted:
                    return model
        raise UnknownIdError(f"{path} is not in the folders that are searched", remedy="add its folder first")

    def estimate(self, path: str, memory: str) -> dict[str, Any]:
        """Expected tokens per second under a budget: times drive and processor for about three seconds.

        Raises:
            UnknownIdError: not a model that is listed. StateError: it cannot be planned.
        """
        document = discovery.plan_document(self.find(path).path, "--memory", memory)
        if "error" in document:
            raise StateError(str(document["error"]["message"]), path=path)
        return {"expected": document["expected"], "mode": document["mode"], "budget_bytes": document["budget_bytes"]}

    def remember(self, path: str, options: Mapping[str, Any]) -> None:
        """Load this model again at the next start."""
        self.store.set_preference("model", {"path": path, **options})

    def remembered(self) -> dict[str, Any] | None:
        """The model that was used last and how, if its file is still there."""
        kept: dict[str, Any] | None = self.store.preference("model")
        with contextlib.suppress(OSError, TypeError, KeyError):
            if kept and Path(kept["path"]).is_file():
                return kept
        return None
