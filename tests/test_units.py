"""units.py: sizes and durations as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanstream_gguf.errors import ArgumentError
from leanstream_gguf.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("900MiB", 900 << 20),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("4096", 4096),
        ("4096B", 4096),
        (".5G", 1 << 29),
        ("7 kB", 7000),
        ("1TiB", 1 << 40),
        (" 3k ", 3072),
        (123, 123),
    ],
)
def test_parse_bytes(text: str | int, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "two GiB", "2 GiB 3", "-1", "1e9", "5iB", "5XiB", "0x10", "1,5G", "5%", None, 1.5, True, -3]
)
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ArgumentError, match="--memory"):
        parse_bytes(text, name="--memory")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["99999999999TiB", "9" * 5000, "9" * 400 + ".5", 1 << 64])
def test_parse_bytes_refuses_what_no_machine_has(value: str | int) -> None:
    with pytest.raises(ArgumentError, match="any machine"):
        parse_bytes(value)


@given(st.integers(min_value=0, max_value=2**50))
def test_whole_bytes_survive(n_bytes: int) -> None:
    assert parse_bytes(str(n_bytes)) == parse_bytes(f"{n_bytes} B") == n_bytes


@given(st.integers(min_value=0, max_value=2**50))
def test_formatted_sizes_parse_and_are_close(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=0.006, abs=1)


def test_parse_share() -> None:
    assert parse_share("55%") == pytest.approx(0.55)
    assert parse_share(" 12.5 % ") == pytest.approx(0.125)
    assert parse_share("100%") == 1
    assert parse_share("2GiB") is None
    with pytest.raises(ArgumentError):
        parse_share("101%")


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 512, 1536, 900 << 20, 3 << 29, 5 << 40)] == [
        "0 B",
        "512 B",
        "1.50 KiB",
        "900 MiB",
        "1.50 GiB",
        "5 TiB",
    ]
    assert format_bytes(-2048) == "-2 KiB"
    assert format_rate(850 << 20) == "850 MiB/s"
    assert [format_seconds(s) for s in (2e-5, 0.0125, 3.2, 125)] == ["20 us", "12.5 ms", "3.20 s", "2 min 05 s"]
