"""Malformed and foreign files: one test per attack.

Each is opened in a process of its own, by the class and by the command: one typed error with cause and remedy, an exit
code that is not zero, and no abort.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import run_python
from toygguf.container import Tensor, header, write_gguf
from toygguf.models import MODELS

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Copy = Callable[[str], Path]
Tiny = Callable[..., Path]

OPEN = """
import contextlib, io, json, sys
import leanstream_gguf
from leanstream_gguf import cli, errors

def by_class(path):
    try:
        leanstream_gguf.Llama(path, memory_budget="min", n_ctx=64, verbose=False).close()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "message": str(error), "path": getattr(error, "path", None)}

def by_command(*argv):
    text = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(text):
        try:
            code = cli.main(list(argv))
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "stderr": text.getvalue()}

path = sys.argv[1]
result = {
    "class": by_class(path),
    "run": by_command("run", "-m", path, "-p", "hi", "-n", "1", "--memory", "min"),
    "inspect": by_command("inspect", "-m", path),
}
print(json.dumps(result))
"""


def refuse(path: Path, kind: str, *words: str, inspect_too: bool = True) -> dict[str, Any]:
    """Opening `path` raises `kind`, the message has every word, the commands exit non-zero without a traceback."""
    result = run_python(OPEN, path).require()
    assert result["class"] is not None, "the file was accepted"
    message = result["class"]["message"]
    assert kind in result["class"]["kinds"], f"{result['class']['kinds'][0]}: {message}"
    for word in words:
        assert word.lower() in message.lower(), f"{word!r} is not in: {message}"
    for command in ("run", "inspect") if inspect_too else ("run",):
        assert result[command]["code"] not in (0, None), f"{command} succeeded"
        assert "Traceback" not in result[command]["stderr"]
        assert result[command]["stderr"].strip(), f"{command} failed without a word"
    return result


def toy(name: str = "dense_untied") -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata and tensors of a toy model, to be bent."""
    model = MODELS[name]()
    return model.metadata, model.tensors


def test_an_intact_file_is_accepted(tiny: Tiny) -> None:
    result = run_python(OPEN, tiny("dense_untied")).require()
    assert result["class"] is None
    assert result["run"]["code"] in (0, None), result["run"]["stderr"]
    assert result["inspect"]["code"] in (0, None), result["inspect"]["stderr"]


# ---- cut short ----------------------------------------------------------------------------------------------------


def test_truncated_in_tensor_data(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    os.truncate(path, path.stat().st_size * 2 // 3)
    refuse(path, "TruncatedError", "download")


def test_truncated_by_one_byte(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    os.truncate(path, path.stat().st_size - 33)
    refuse(path, "TruncatedError", "download")


def test_truncated_in_header(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    os.truncate(path, 5000)
    refuse(path, "FormatError", "cut", "download")


def test_truncated_in_magic(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    os.truncate(path, 11)
    refuse(path, "TruncatedError", "download")


def test_half_downloaded_part_file(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    os.truncate(path, path.stat().st_size // 2)
    part = path.rename(path.with_name(path.name + ".part"))
    refuse(part, "TruncatedError", ".part", "download")


def test_preallocated_download_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf.part"
    path.write_bytes(bytes(1 << 20))
    refuse(path, "FormatError")


@pytest.mark.parametrize("version", [1, 4])
def test_other_gguf_version(version: int, scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<I", version))
    refuse(path, "FormatError", f"version {version}")


def test_zero_length(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    refuse(path, "TruncatedError", "empty")


# ---- not GGUF -----------------------------------------------------------------------------------------------------


def test_big_endian(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + struct.pack(">IQQ", *struct.unpack("<IQQ", raw[4:24])) + raw[24:])
    refuse(path, "EndianError", "endian", "convert")


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("This is a text about models, and no model.\n" * 50)
    refuse(path, "FormatError", "GGUF")


def test_web_page_saved_as_model(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!doctype html><html><body>401 Unauthorized</body></html>")
    refuse(path, "FormatError", "GGUF", "download")


def test_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "pointer.gguf"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4294967296\n")
    refuse(path, "FormatError", "GGUF")


def test_zip_file(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x" * 5000)
    refuse(path, "FormatError", "zip")


def test_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    table = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path.write_bytes(struct.pack("<Q", len(table)) + table + bytes(8))
    refuse(path, "FormatError", "safetensors", "convert")


def test_short_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"hello")
    refuse(path, "FormatError")


# ---- unreadable ---------------------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing.gguf", "ModelNotFoundError", "nothing.gguf")


def test_dangling_link(tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "gone.gguf")
    refuse(link, "ModelNotFoundError")


def test_directory(tmp_path: Path) -> None:
    refuse(tmp_path, "ModelUnreadableError", str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    refuse(path, "ModelUnreadableError")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(scratch_copy: Copy) -> None:
    path = scratch_copy("dense_untied")
    path.chmod(stat.S_IWUSR)
    refuse(path, "ModelUnreadableError", "permission")


# ---- split sets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tiny: Tiny, tmp_path: Path) -> list[Path]:
    """A private copy of a split set of three."""
    first = tiny("dense_untied", 3)
    copies = []
    for shard in sorted(first.parent.glob("dense_untied-*.gguf")):
        copies.append(tmp_path / shard.name)
        copies[-1].write_bytes(shard.read_bytes())
    return copies


def test_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    refuse(shards[0], "ShardError", shards[1].name)


def test_truncated_shard_is_named(shards: list[Path]) -> None:
    os.truncate(shards[2], shards[2].stat().st_size // 2)
    refuse(shards[0], "TruncatedError", shards[2].name)


def test_second_shard_given(shards: list[Path]) -> None:
    refuse(shards[1], "ShardError", "first")


def test_shard_of_another_set(shards: list[Path], tiny: Tiny) -> None:
    other = tiny("moe_llama", 3)
    shards[1].write_bytes(other.with_name("moe_llama-00002-of-00003.gguf").read_bytes())
    refuse(shards[0], "LeanStreamError", inspect_too=False)


def test_shards_swapped(shards: list[Path]) -> None:
    second = shards[1].read_bytes()
    shards[1].write_bytes(shards[2].read_bytes())
    shards[2].write_bytes(second)
    refuse(shards[0], "ShardError", shards[1].name)


def test_renamed_first_shard(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("model.gguf"))
    refuse(renamed, "ShardError", "00001-of-00003")


def test_shards_joined_with_cat(shards: list[Path], tmp_path: Path) -> None:
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(shard.read_bytes() for shard in shards))
    refuse(joined, "JoinedShardsError", "cat", "gguf-split")


# ---- hostile headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1 << 60, (1 << 64) - 1, 1 << 33])
@pytest.mark.parametrize("field", ["n_tensors", "n_kv"])
def test_huge_count_in_header(scratch_copy: Copy, field: str, count: int) -> None:
    path = scratch_copy("dense_untied")
    with path.open("r+b") as file:
        file.seek(8 if field == "n_tensors" else 16)
        file.write(struct.pack("<Q", count))
    refuse(path, "FormatError", "header")


def patched(path: Path, old: bytes, new: bytes) -> Path:
    """Replace the one occurrence of `old` in the file."""
    raw = path.read_bytes()
    assert raw.count(old) == 1 and len(old) == len(new)
    path.write_bytes(raw.replace(old, new))
    return path


def table_entry(name: str) -> tuple[bytes, bytes]:
    """Bytes of a tensor's entry in the table of dense_untied, up to and with its offset."""
    metadata, tensors = toy()
    raw = header(metadata, tensors)
    start = raw.index(struct.pack("<Q", len(name)) + name.encode())
    n_dims = len(next(t for t in tensors if t.name == name).shape)
    split = start + 8 + len(name) + 4 + 8 * n_dims + 4
    return raw[start:split], raw[split : split + 8]


@pytest.mark.parametrize("offset", [1 << 40, (1 << 64) - 32, 1 << 63])
def test_tensor_offset_out_of_range(scratch_copy: Copy, offset: int) -> None:
    entry, old = table_entry("blk.2.ffn_up.weight")
    refuse(patched(scratch_copy("dense_untied"), entry + old, entry + struct.pack("<Q", offset)), "FormatError")


def test_tensor_offset_misaligned(scratch_copy: Copy) -> None:
    entry, old = table_entry("blk.2.ffn_up.weight")
    moved = struct.pack("<Q", struct.unpack("<Q", old)[0] + 1)
    refuse(patched(scratch_copy("dense_untied"), entry + old, entry + moved), "FormatError")


def test_tensors_overlap(scratch_copy: Copy) -> None:
    entry, old = table_entry("blk.2.ffn_up.weight")
    refuse(patched(scratch_copy("dense_untied"), entry + old, entry + struct.pack("<Q", 0)), "FormatError")


@pytest.mark.parametrize("size", [1 << 62, (1 << 64) - 1, 0])
def test_tensor_dimension_overflows(scratch_copy: Copy, size: int) -> None:
    entry, _ = table_entry("blk.2.ffn_up.weight")
    dims = struct.pack("<QQ", 256, 512)
    refuse(patched(scratch_copy("dense_untied"), entry, entry.replace(dims, struct.pack("<QQ", 256, size))), "FormatError")


def test_tensor_type_unknown(scratch_copy: Copy) -> None:
    entry, _ = table_entry("blk.2.ffn_up.weight")
    refuse(patched(scratch_copy("dense_untied"), entry, entry[:-4] + struct.pack("<I", 9999)), "FormatError")


def test_tensor_of_too_many_dimensions(scratch_copy: Copy) -> None:
    entry, _ = table_entry("blk.2.ffn_up.weight")
    many = entry.replace(struct.pack("<IQQ", 2, 256, 512), struct.pack("<IQQ", 1 << 30, 256, 512))
    refuse(patched(scratch_copy("dense_untied"), entry, many), "FormatError")


def test_duplicate_tensor_name(tmp_path: Path) -> None:
    metadata, tensors = toy()
    write_gguf(tmp_path / "twice.gguf", metadata, [*tensors, tensors[-1]], "twice")
    refuse(tmp_path / "twice.gguf", "FormatError")


def test_duplicate_tensor_in_two_shards(shards: list[Path]) -> None:
    _, tensors = toy()
    split = {key: metadata_value(shards[1], key) for key in ("split.no", "split.count", "split.tensors.count")}
    per_shard = -(-len(tensors) // 3)
    write_gguf(shards[1], split, [tensors[0], *tensors[per_shard + 1 : 2 * per_shard]], "dense_untied")
    refuse(shards[0], "FormatError", tensors[0].name)


def metadata_value(path: Path, key: str) -> Any:
    """A split.* value of a shard, typed as the writer needs it."""
    from toygguf.container import I32, U16

    raw = path.read_bytes()
    at = raw.index(key.encode()) + len(key) + 4
    return I32(struct.unpack_from("<i", raw, at)[0]) if "tensors" in key else U16(struct.unpack_from("<H", raw, at)[0])


@pytest.mark.parametrize("alignment", [0, 3, 1 << 31])
def test_alignment_is_no_power_of_two(tmp_path: Path, alignment: int) -> None:
    metadata, tensors = toy()
    write_gguf(tmp_path / "odd.gguf", {**metadata, "general.alignment": alignment}, tensors, "odd")
    refuse(tmp_path / "odd.gguf", "FormatError")


def test_string_longer_than_the_file(scratch_copy: Copy) -> None:
    old = struct.pack("<Q", len("dense_untied")) + b"dense_untied"
    new = struct.pack("<Q", 1 << 61) + b"dense_untied"
    refuse(patched(scratch_copy("dense_untied"), old, new), "FormatError")


def test_array_longer_than_the_file(scratch_copy: Copy) -> None:
    key = b"tokenizer.ggml.token_type" + struct.pack("<II", 9, 5)
    path = scratch_copy("dense_untied")
    refuse(patched(path, key + struct.pack("<Q", 512), key + struct.pack("<Q", 1 << 61)), "FormatError")


# ---- right container, wrong content -------------------------------------------------------------------------------


def test_no_architecture(tmp_path: Path) -> None:
    metadata, tensors = toy()
    del metadata["general.architecture"]
    write_gguf(tmp_path / "nameless.gguf", metadata, tensors, "nameless")
    refuse(tmp_path / "nameless.gguf", "FormatError", "general.architecture")


def test_no_tensors(tmp_path: Path) -> None:
    metadata, _ = toy()
    write_gguf(tmp_path / "vocabulary.gguf", metadata, [], "vocabulary")
    refuse(tmp_path / "vocabulary.gguf", "ModelFileError", inspect_too=False)


def test_missing_tensor(tmp_path: Path) -> None:
    metadata, tensors = toy()
    kept = [t for t in tensors if t.name != "blk.1.ffn_up.weight"]
    write_gguf(tmp_path / "gap.gguf", metadata, kept, "gap")
    refuse(tmp_path / "gap.gguf", "ModelFileError", inspect_too=False)


@pytest.mark.parametrize("arch", ["graniteswitch", "kimi-k3"])
def test_architecture_that_bypasses_the_hooks_is_refused_by_name(tmp_path: Path, arch: str) -> None:
    metadata, tensors = toy()
    renamed = {key.replace("llama.", f"{arch}.", 1) if key.startswith("llama.") else key: v for key, v in metadata.items()}
    write_gguf(tmp_path / "refused.gguf", {**renamed, "general.architecture": arch}, tensors, "refused")
    refuse(tmp_path / "refused.gguf", "UnsupportedError", arch, inspect_too=False)


def test_unknown_architecture_is_not_called_truncated(tmp_path: Path) -> None:
    metadata, tensors = toy()
    write_gguf(tmp_path / "future.gguf", {**metadata, "general.architecture": "quantum9"}, tensors, "future")
    refuse(tmp_path / "future.gguf", "UnsupportedError", "quantum9", inspect_too=False)


LORA = """
import json, sys
import leanstream_gguf

def attempt(**settings):
    try:
        llm = leanstream_gguf.Llama(sys.argv[1], lora_path=sys.argv[2], n_ctx=64, verbose=False, **settings)
        llm("the quick", max_tokens=2)
    except Exception as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}

print(json.dumps({"plain": attempt(), "streamed": attempt(memory_budget="min")}))
"""


def test_lora_on_a_streamed_weight_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.gguf"
    metadata = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    factors = [
        Tensor("blk.1.ffn_up.weight.lora_a", (256, 4), "F32", 0.05),
        Tensor("blk.1.ffn_up.weight.lora_b", (4, 512), "F32", 0.05),
    ]
    write_gguf(adapter, metadata, factors, "adapter")
    result = run_python(LORA, tiny("dense_untied"), adapter).require()
    assert result["plain"] is None, result["plain"]
    assert result["streamed"] is not None, "a LoRA on a streamed weight was accepted"
    assert "UnsupportedError" in result["streamed"]["kinds"], result["streamed"]
    assert "lora" in result["streamed"]["message"].lower()
