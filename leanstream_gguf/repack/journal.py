"""Which pieces of an unfinished output are already on disk: `OUT.partial.journal` beside `OUT.partial`.

The first line names the work (a hash of everything the output depends on); each further line is the number of a finished piece.
A line is written only after the piece was synced. A cut last line is ignored: its piece is done again. It is locked while it is in
use, so that two runs cannot write one file.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import RepackError

try:
    import fcntl
except ImportError:  # Windows does not let two processes write one file either
    fcntl = None  # type: ignore[assignment]


class Journal:
    """Opens or starts the journal of one piece of work.

    Args:
        usable: the unfinished output is there, as long as it must be; what a journal says of another one is worth nothing.

    Raises:
        RepackError: another run holds it.
    """

    def __init__(self, path: Path, work_id: str, *, usable: bool = True) -> None:
        self.path = path
        self._file = path.open("a+", encoding="utf-8")
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise
        self.done: set[int] = set()
        self._file.seek(0)
        lines = self._file.read().split("\n") if usable else []
        if len(lines) > 1 and lines[0] == work_id:
            self.done = {int(line) for line in lines[1:-1] if line.isdigit()}  # what follows the last newline is cut
            good = "".join(f"{line}\n" for line in [work_id, *map(str, sorted(self.done))])
        else:
            good = f"{work_id}\n"
        self.resumed = bool(self.done)
        if good != "\n".join(lines):
            self._file.truncate(0)
            self._file.write(good)
            self._file.flush()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            out = str(self.path).removesuffix(".partial.journal")
            raise RepackError(f"another repack is writing {out}", path=out, remedy="wait for it, or choose another name") from error
        if not self.path.exists() or os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
            out = str(self.path).removesuffix(".partial.journal")
            raise RepackError(f"another repack has just finished {out}", path=out)

    def note(self, pieces: list[int]) -> None:
        """These pieces are on disk."""
        self._file.write("".join(f"{piece}\n" for piece in pieces))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(pieces)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
