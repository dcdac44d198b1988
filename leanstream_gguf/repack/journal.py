"""Which pieces of an unfinished output are already on disk: `OUT.partial.journal` beside `OUT.partial`.

The first line names the work (a hash of everything the output depends on); each further line is the number of a finished piece.
A line is written only after the piece was synced. A cut last line is ignored: its piece is done again.
"""

from __future__ import annotations

import os
from pathlib import Path


class Journal:
    """Opens or starts the journal of one piece of work."""

    def __init__(self, path: Path, work_id: str) -> None:
        self.path = path
        self.done: set[int] = set()
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        if len(lines) > 1 and lines[0] == work_id:
            self.done = {int(line) for line in lines[1:-1] if line.isdigit()}  # what follows the last newline is cut
            good = "".join(f"{line}\n" for line in [work_id, *map(str, sorted(self.done))])
        else:
            good = f"{work_id}\n"
        self.resumed = bool(self.done)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(good, encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

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
