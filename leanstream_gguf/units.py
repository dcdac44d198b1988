"""Text to bytes and back, and durations for people. Knows nothing of models."""

from __future__ import annotations

import re

from .errors import ArgumentError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_BYTES = 2**62  # the native library counts in 64 bits, and sizes are added up
_MAX_DIGITS = 40  # more cannot be a size; Python refuses to read thousands of them
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """A size in bytes from `900MiB`, `2GiB`, `1.5 GB`, `512M`, `4096` or an int.

    KiB, MiB, GiB and TiB are powers of 1024, and so are the bare letters K, M, G and T; kB, MB, GB and TB are powers of
    1000. A number without a unit is bytes.

    Raises:
        ArgumentError: not a size, negative, or over 2^62. `name` says in the message which setting it was.
    """
    n_bytes = _bytes(value, name)
    if n_bytes > _MAX_BYTES:
        shown = value if isinstance(value, str) else hex(value)
        raise ArgumentError(f"{name} {shown[:_MAX_DIGITS]!r} is more than any machine has")
    return n_bytes


def _bytes(value: int | str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ArgumentError(f"{name} must be an int (bytes) or text such as '2GiB', not {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ArgumentError(f"{name} must not be negative: {value}")
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or (match[3] and not match[2]):
        raise ArgumentError(f"{name} {value!r} is not a size; write for example '900MiB', '2GiB' or a number of bytes")
    number, prefix, binary, byte = match.groups()
    if len(number) > _MAX_DIGITS:
        return _MAX_BYTES + 1
    table = _DECIMAL if byte and not binary else _BINARY
    return int(float(number) * table[prefix.lower()]) if "." in number else int(number) * table[prefix.lower()]


def parse_share(value: str) -> float | None:
    """0.55 for `55%`; None if the text is no percentage.

    Raises:
        ArgumentError: above 100 %.
    """
    match = _SHARE.fullmatch(value.strip())
    if match is None:
        return None
    share = float(match[1]) / 100
    if share > 1:
        raise ArgumentError(f"a share must be between 0% and 100%, not {value!r}")
    return share


def format_bytes(n_bytes: float) -> str:
    """`1.50 GiB`, `900 MiB`, `512 B`: binary units, three significant digits or whole numbers."""
    sign = "-" if n_bytes < 0 else ""
    amount = abs(float(n_bytes))
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1023.5 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    unit = units[0]
    if unit == "B" or amount >= 100 or amount == int(amount):
        return f"{sign}{amount:.0f} {unit}"
    return f"{sign}{amount:.{1 if amount >= 10 else 2}f} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """`850 MiB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """`850 us`, `12.5 ms`, `3.20 s`, `2 min 05 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
