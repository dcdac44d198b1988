"""Where model files may lie: behind links as in download caches, under odd names, on file systems without direct I/O."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same_bytes, logits, sample_tokens, streamed, unstreamed

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("native"),
    pytest.mark.filterwarnings("ignore:the expert cache"),  # too small on purpose
]

Tiny = Callable[..., Path]
TOKENS = sample_tokens(20, 512)


def check(path: Path, plain: Path) -> None:
    """The streamed model at `path` gives the logits of the unstreamed one at `plain`."""
    with unstreamed(plain) as llm:
        expected = logits(llm, TOKENS, 16)
    with streamed(path, "min") as llm:
        assert_same_bytes(logits(llm, TOKENS, 16), expected)


def test_split_set_behind_links_as_in_a_download_cache(tiny: Tiny, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    first = tiny("moe_qwen3", 3)
    for i, shard in enumerate(sorted(first.parent.glob("moe_qwen3-*.gguf"))):
        blob = blobs / f"{i:064x}"
        blob.write_bytes(shard.read_bytes())
        (snapshot / shard.name).symlink_to(blob)
    check(snapshot / first.name, tiny("moe_qwen3"))


def test_name_with_spaces_and_other_letters(tiny: Tiny, tmp_path: Path) -> None:
    odd = tmp_path / "mein schönes 模型 (1).gguf"
    odd.symlink_to(tiny("dense_untied"))
    check(odd, tiny("dense_untied"))


@pytest.mark.parametrize("name", ["no\udcffutf8.gguf", "zero\0byte.gguf"])
def test_name_that_llama_cpp_cannot_take(name: str, tmp_path: Path) -> None:
    from leanstream_gguf import ArgumentError

    with pytest.raises(ArgumentError, match="path"):
        streamed(tmp_path / name, "min")


def test_relative_path_outlives_a_change_of_directory(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("dense_untied")
    with unstreamed(path) as llm:
        expected = logits(llm, TOKENS, 16)
    monkeypatch.chdir(path.parent)
    with streamed(Path(path.name), "min") as llm:
        monkeypatch.chdir(tmp_path)
        assert_same_bytes(logits(llm, TOKENS, 16), expected)


def test_read_only_file(tiny: Tiny, tmp_path: Path) -> None:
    copy = tmp_path / "read-only.gguf"
    copy.write_bytes(tiny("dense_untied").read_bytes())
    copy.chmod(0o444)
    before = copy.stat()
    check(copy, tiny("dense_untied"))
    assert (copy.stat().st_mtime_ns, copy.stat().st_size) == (before.st_mtime_ns, before.st_size)


@pytest.mark.skipif(not sys.platform.startswith("linux") or not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs")
def test_file_system_without_direct_reads(tiny: Tiny) -> None:
    copy = Path("/dev/shm") / f"leanstream-test-{os.getpid()}.gguf"
    try:
        copy.write_bytes(tiny("moe_llama").read_bytes())
        check(copy, tiny("moe_llama"))
    finally:
        copy.unlink(missing_ok=True)
