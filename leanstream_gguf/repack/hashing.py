"""SHA-256 of the source's shards, computed on a thread of its own while the source is read anyway."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from .gguf_file import Header

_BLOCK = 8 << 20


class SourceHashes:
    """Starts at once; `result()` waits. Reads in order, so that it and the copy share the page cache."""

    def __init__(self, shards: Sequence[Header]) -> None:
        self._shards = list(shards)
        self._digests: list[str] = []
        self._error: OSError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="leanstream-hash", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for shard in self._shards:
                self._digests.append(self._digest(shard.path))
        except OSError as error:
            self._error = error

    def _digest(self, path: str) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_BLOCK))
        with open(path, "rb", buffering=0) as file:
            while (n := file.readinto(buffer)) and not self._stopped.is_set():
                digest.update(buffer[:n])
        return digest.hexdigest()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def result(self) -> list[str]:
        """Hex digests in the order of the shards.

        Raises:
            OSError: the source could not be read.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digests
