"""Progress of long work: a line that is redrawn on a terminal, or a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ..units import format_bytes, format_rate, format_seconds

_WINDOW_S = 10.0  # the rate is that of the last seconds


class Progress:
    """Counts bytes (or tokens) of one task and prints `what  42%  1.2 of 3.0 GiB  350 MiB/s  5.1 s left`."""

    def __init__(self, what: str, total: int, *, unit: str = "B", stream: TextIO | None = None, quiet: bool = False) -> None:
        self.what, self.total, self.unit = what, max(1, total), unit
        self.done = 0
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._last_print = 0.0 if self._terminal else time.monotonic()
        self._start = time.monotonic()
        self._marks: list[tuple[float, int]] = [(self._start, 0)]

    def skip(self, n: int) -> None:
        """What was done by an earlier run: it counts as done but not for the rate."""
        self.done += n
        self._marks = [(time.monotonic(), self.done)]

    def add(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        self._marks.append((now, self.done))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW_S:
            self._marks.pop(0)
        if not self._quiet and now - self._last_print >= (0.2 if self._terminal else 5.0):
            self._last_print = now
            self._print(self.line())

    def rate(self) -> float:
        """Units a second over the last seconds; 0 before anything was done."""
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def line(self) -> str:
        rate = self.rate()
        if self.unit == "B":
            amount, speed = f"{format_bytes(self.done)} of {format_bytes(self.total)}", format_rate(rate)
        else:
            amount, speed = f"{self.done} of {self.total} {self.unit}", f"{rate:.0f} {self.unit}/s"
        left = f", {format_seconds((self.total - self.done) / rate)} left" if rate > 0 and self.done < self.total else ""
        return f"{self.what}  {min(100, self.done * 100 // self.total):3d} %  {amount}  {speed}{left}"

    def _print(self, text: str) -> None:
        self._stream.write(f"\r{text:<78}" if self._terminal else text + "\n")
        self._stream.flush()

    def finish(self) -> float:
        """Seconds since the start; ends the line."""
        if not self._quiet:
            self._print(self.line())
            if self._terminal:
                self._stream.write("\n")
        return time.monotonic() - self._start
