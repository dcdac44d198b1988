"""Whole lean files: what is in them, that they give back their source, and what happens when something goes wrong."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lean_files import make_lean

from leanstream_gguf.errors import ArgumentError, FormatError, RepackError, UnsupportedError
from leanstream_gguf.repack import device, gguf_file, jobs, journal, layout, lean_file, storage, unpack, writer
from leanstream_gguf.repack.format import BY_NAME, PAGE

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]
Tiny = Callable[..., Path]
MOE = ["moe_qwen3", "moe_llama", "moe_merged", "moe_shared", "moe_dense_lead", "moe_reglu"]


def sha256(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def plan(
    source: Path, *, cluster_size: int = 4, faithful: bool = False, alignment: int = 512, down: str | None = None
) -> layout.Layout:
    """A layout with every dense layer in clusters, neurons in a random order."""
    model = gguf_file.read_model(source)
    layers = []
    for ffn in layout.find_dense(model):
        if ffn.why_not is None:
            perm = np.random.default_rng(ffn.block).permutation(ffn.down.ne[0]).astype(np.int32)
            kind = BY_NAME[down] if down else ffn.down.type
            changed = kind != ffn.down.type
            layers.append(
                layout.NeuronLayer(
                    ffn.block, ffn.gate, ffn.up, ffn.down, kind, ffn.biases, perm, cluster_size, 1, alignment, faithful, changed
                )
            )  # fmt: skip
    return layout.make_layout(model, layout.find_experts(model), layers, alignment, [])


def repack(source: Path, out: Path, **settings: Any) -> writer.Written:
    return writer.write(plan(source, **settings), str(out), quiet=True)


@pytest.mark.parametrize("name", MOE)
def test_experts_are_bundled_and_restored(tiny: Tiny, tmp_path: Path, name: str) -> None:
    source, out = tiny(name), tmp_path / "x.lean.gguf"
    model = gguf_file.read_model(source)
    found = layout.find_experts(model)
    assert found
    writer.write(layout.make_layout(model, found, [], 4096, []), str(out), quiet=True)
    lean = lean_file.LeanFile(out)
    for stack in found:
        bundle = lean.tensor(f"blk.{stack.block}.ffn_exps.lean")
        assert bundle.offset % PAGE == 0 and bundle.ne[0] % PAGE == 0 and bundle.ne[1] == stack.n_experts
        raw = out.read_bytes()[bundle.offset : bundle.offset + bundle.n_bytes]
        for part in stack.parts:
            item = lean.virtual[part.name]
            data = source.read_bytes()[part.offset : part.offset + part.n_bytes]
            size = len(data) // stack.n_experts
            for expert in (0, stack.n_experts - 1):
                at = expert * bundle.ne[0] + item.offset
                assert raw[at : at + size] == data[expert * size : (expert + 1) * size]
    done = unpack.unpack(out, tmp_path / "back.gguf", quiet=True)
    assert done.identical and sha256(tmp_path / "back.gguf") == sha256(source)


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize(("name", "cluster_size"), [("dense_arcee", 1), ("dense_arcee", 7), ("dense_untied", 3), ("dense_gemma3", 32)])
def test_neurons_are_restored(tiny: Tiny, tmp_path: Path, name: str, cluster_size: int, faithful: bool) -> None:
    out = tmp_path / "x.lean.gguf"
    repack(tiny(name), out, cluster_size=cluster_size, faithful=faithful)
    lean = lean_file.LeanFile(out)
    assert lean.layout == ("faithful" if faithful else "exact") and lean.neurons
    deciding = "ffn_up" if name == "dense_arcee" else "ffn_gate"
    assert (f"blk.0.{deciding}.weight" in lean.virtual) == faithful
    assert (f"blk.0.ffn.sketch.lean" in lean.model.tensors) == faithful  # noqa: F541
    assert unpack.unpack(out, tmp_path / "back.gguf", quiet=True).identical
    assert sha256(tmp_path / "back.gguf") == sha256(tiny(name))


def test_the_hottest_blocks_of_neighbours_come_first() -> None:
    perm = np.array([7, 1, 5, 3, 0, 2, 4, 6], np.int32)
    fired = np.array([1, 0, 9, 0, 0, 2, 3, 3], np.uint32)
    order, n = device.hottest_first(perm, fired, 2, 0.5)
    assert n == 4 and order.tolist() == [2, 3, 6, 7, 1, 5, 0, 4]
    order, n = device.hottest_first(perm, fired, 1, 0.0)
    assert n == 0 and order.tolist() == perm.tolist()


@pytest.mark.parametrize("name", ["dense_arcee", "dense_untied"])  # without a gate, and with one
def test_matrices_for_a_device_are_blocks_of_the_source(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Found with nothing but the document; the source comes back all the same."""
    source, out = tiny(name), make_lean(tiny(name), tmp_path / "x.lean.gguf", device_hot=0.5)
    model, lean = gguf_file.read_model(source), lean_file.LeanFile(out)
    old, raw = source.read_bytes(), out.read_bytes()

    def rows(data: bytes, tensor: gguf_file.TensorInfo) -> Any:
        return np.frombuffer(data, np.uint8, tensor.n_bytes, tensor.offset).reshape(tensor.n_rows, -1)

    for block, n in zip(lean.neurons, lean.model.get("leanstream.neurons.n_device"), strict=True):
        down, up = model.tensors[f"blk.{block}.ffn_down.weight"], model.tensors[f"blk.{block}.ffn_up.weight"]
        size, n_embd = down.type.n_elements, down.ne[1]
        assert n == down.ne[0] // size // 2 * size and lean.neurons[block].n_device == n
        front = np.frombuffer(raw, "<i4", n, lean.tensor(f"blk.{block}.ffn.perm.lean").offset)
        expected = rows(old, down).reshape(n_embd, -1, down.type.n_bytes)[:, front[::size] // size]
        assert (front.reshape(-1, size) == front[::size, None] + np.arange(size)).all()
        assert (rows(raw, lean.tensor(f"blk.{block}.ffn.device_down.lean")) == expected.reshape(n_embd, -1)).all()
        assert (f"blk.{block}.ffn.device_up.lean" in lean.model.tensors) == (name == "dense_untied")
        if name == "dense_untied":
            assert (rows(raw, lean.tensor(f"blk.{block}.ffn.device_up.lean")) == rows(old, up)[front]).all()
    assert unpack.unpack(out, tmp_path / "back.gguf", quiet=True).identical


def test_records_are_where_the_document_says(tiny: Tiny, tmp_path: Path) -> None:
    """Rows and checksums of one cluster, found with nothing but the document."""
    source, out = tiny("dense_untied"), tmp_path / "x.lean.gguf"
    made = plan(source, cluster_size=3)
    writer.write(made, str(out), quiet=True)
    model, lean = gguf_file.read_model(source), lean_file.LeanFile(out)
    layer = made.neurons[1]
    raw = out.read_bytes()
    clusters, perm = lean.tensor("blk.1.ffn.clusters.lean"), lean.tensor("blk.1.ffn.perm.lean")
    order = np.frombuffer(raw, "<i4", layer.n_ff, perm.offset)
    up = model.tensors["blk.1.ffn_up.weight"]
    record = layer.record_bytes
    for position in (0, 4, layer.n_ff - 1):
        at = clusters.offset + position // 3 * clusters.ne[0] + position % 3 * record
        row_at = up.offset + int(order[position]) * up.row_bytes
        assert raw[at : at + up.row_bytes] == source.read_bytes()[row_at : row_at + up.row_bytes]
    gate = lean.tensor("blk.1.ffn_gate.weight")
    rows = np.frombuffer(raw, np.uint8, gate.n_bytes, gate.offset).reshape(layer.n_ff, -1)
    old = model.tensors["blk.1.ffn_gate.weight"]
    expected = np.frombuffer(source.read_bytes(), np.uint8, old.n_bytes, old.offset).reshape(layer.n_ff, -1)
    assert (rows == expected[order]).all()


@pytest.mark.parametrize("faithful", [False, True])
def test_layers_larger_than_memory_are_cut_in_passes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faithful: bool
) -> None:
    """With limits of a few kilobytes every tensor takes several passes, and the file is the same."""
    source, whole, out = tiny("dense_untied"), tmp_path / "whole.lean.gguf", tmp_path / "x.lean.gguf"
    repack(source, whole, cluster_size=5, faithful=faithful)
    for module in (jobs, storage, lean_file):
        monkeypatch.setattr(module, "WHOLE_BYTES", 20_000)
    for module in (jobs, lean_file):
        monkeypatch.setattr(module, "STRIP_BUDGET", 1)
        monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    repack(source, out, cluster_size=5, faithful=faithful)
    assert out.read_bytes() == whole.read_bytes()
    assert unpack.unpack(out, tmp_path / "back.gguf", quiet=True).identical


def test_the_gguf_package_reads_it(tiny: Tiny, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "x.lean.gguf"
    repack(tiny("dense_arcee"), out, faithful=True)
    reader = gguf.GGUFReader(out)
    assert reader.fields["leanstream.layout"].contents() == "faithful"
    assert reader.fields["general.architecture"].contents() == "arcee"
    names = {tensor.name for tensor in reader.tensors}
    assert {"blk.0.ffn.clusters.lean", "blk.0.ffn.sketch.lean", "blk.0.attn_q.weight"} <= names


def test_stock_refuses_it_and_loads_what_unpack_gives(tiny: Tiny, tmp_path: Path) -> None:
    from support import unstreamed

    out, back = tmp_path / "x.lean.gguf", tmp_path / "back.gguf"
    repack(tiny("dense_arcee"), out)
    with pytest.raises(ValueError):
        unstreamed(out)
    unpack.unpack(out, back, quiet=True)
    with unstreamed(back) as llm:
        assert llm.n_vocab() > 0


def test_split_sets(tiny: Tiny, tmp_path: Path) -> None:
    first = tiny("moe_qwen3", 3)
    out = tmp_path / "x.lean.gguf"
    repack(first, out)
    lean = lean_file.LeanFile(out)
    assert len(lean.sha256) == 3 and lean.model.get("split.count") is None
    done = unpack.unpack(out, tmp_path / "back.gguf", quiet=True)
    for i, path in enumerate(done.paths):
        assert path.endswith(f"back-{i + 1:05d}-of-00003.gguf")
        assert sha256(path) == sha256(str(first).replace("-00001-", f"-{i + 1:05d}-"))


def test_requantised_down(tiny: Tiny, tmp_path: Path) -> None:
    from support import unstreamed

    source, out, back = tiny("dense_arcee"), tmp_path / "x.lean.gguf", tmp_path / "back.gguf"
    done = repack(source, out, down="Q8_0")
    types = {tensor.name: tensor.type.name for tensor in gguf_file.read_model(source).tensors.values()}
    changed = [name for name, kind in types.items() if name.endswith("ffn_down.weight") and kind != "Q8_0"]
    assert changed and all(0 < error < 0.02 for error in done.down_errors.values())
    restored = unpack.unpack(out, back, quiet=True)
    assert not restored.identical and set(restored.requantised) == set(changed)
    assert gguf_file.read_model(back).tensors[changed[0]].type.name == "Q8_0"
    with unstreamed(back) as llm:
        assert llm.n_vocab() > 0


def test_corruption_is_found(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "x.lean.gguf"
    repack(tiny("moe_qwen3"), out)
    lean = lean_file.LeanFile(out)
    bundle = lean.tensor("blk.1.ffn_exps.lean")
    with out.open("r+b") as file:
        file.seek(bundle.offset + 3 * bundle.ne[0] + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(FormatError, match=r"record 3 of blk\.1\.ffn_exps\.lean is corrupt"):
        unpack.unpack(out, tmp_path / "back.gguf", quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.lean.gguf"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("leanstream.neurons.cluster_size", 5),
        ("leanstream.virtual.offset", 1 << 20),
        ("leanstream.version", 9),
        ("leanstream.alignment", 64),
    ],
)
def test_edited_keys_are_found(tiny: Tiny, tmp_path: Path, key: str, value: int) -> None:
    out = tmp_path / "x.lean.gguf"
    repack(tiny("dense_arcee"), out)
    raw = bytearray(out.read_bytes())
    at = raw.index(gguf_file.encode_string(key)) + 8 + len(key)
    at += 16 if raw[at] == 9 else 4  # kind of the elements and their number, or the value at once
    raw[at : at + 4] = value.to_bytes(4, "little")
    out.write_bytes(raw)
    with pytest.raises(FormatError):
        lean_file.LeanFile(out)


def test_wrong_uses(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "x.lean.gguf"
    repack(tiny("moe_qwen3"), out)
    with pytest.raises(ArgumentError, match="exists"):
        repack(tiny("moe_qwen3"), out)
    with pytest.raises(UnsupportedError, match="lean file already"):
        plan(out)
    with pytest.raises(FormatError, match="not a lean file"):
        unpack.unpack(tiny("moe_qwen3"), tmp_path / "y.gguf", quiet=True)
    model = gguf_file.read_model(tiny("dense_fused"))
    with pytest.raises(UnsupportedError, match="nothing to repack"):
        layout.make_layout(model, [], [], 4096, [])
    assert [ffn.why_not for ffn in layout.find_dense(model)] == ["gate and up are fused into one matrix"] * 3


def test_a_full_drive_is_said_before_anything_is_written(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    with pytest.raises(RepackError, match="free") as caught:
        repack(tiny("moe_qwen3"), tmp_path / "x.lean.gguf")
    assert caught.value.limit is not None and caught.value.limit > 1 << 16
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_no_final_name(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole.lean.gguf", tmp_path / "x.lean.gguf"
    repack(tiny("moe_qwen3"), whole)
    write, calls = storage.Output.write, 0

    def failing(self: storage.Output, offset: int, data: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise RepackError("no space left")
        write(self, offset, data)

    monkeypatch.setattr(writer, "SYNC_BYTES", 1)
    monkeypatch.setattr(storage.Output, "write", failing)
    with pytest.raises(RepackError):
        repack(tiny("moe_qwen3"), out)
    assert not out.exists()
    done = repack(tiny("moe_qwen3"), out)
    assert done.resumed and out.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["whole.lean.gguf", "x.lean.gguf"]


def test_a_file_that_reads_back_wrong_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.Output.write

    def flipping(self: storage.Output, offset: int, data: Any) -> None:
        data = bytearray(memoryview(data).cast("B"))
        if len(data) > 4096:
            data[100] ^= 1
        write(self, offset, data)

    monkeypatch.setattr(storage.Output, "write", flipping)
    with pytest.raises(RepackError, match=r"read back|give back"):
        repack(tiny("moe_qwen3"), tmp_path / "x.lean.gguf")
    assert not (tmp_path / "x.lean.gguf").exists()


def test_a_matrix_for_a_device_that_reads_back_wrong_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = jobs.Target.put

    def flipping(self: jobs.Target, name: str, data: Any, at: int = 0) -> None:
        put(self, name, data ^ 1 if name == "blk.1.ffn.device_down.lean" else data, at)

    monkeypatch.setattr(jobs.Target, "put", flipping)
    with pytest.raises(RepackError, match=r"blk\.1\.ffn\.device_down\.lean differs"):
        make_lean(tiny("dense_arcee"), tmp_path / "x.lean.gguf", device_hot=0.5)
    assert not (tmp_path / "x.lean.gguf").exists()


def test_journals(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = journal.Journal(path, "work")
    first.note([0, 1])
    first.close()
    path.write_text(path.read_text() + "1")  # cut while writing 12
    for work, done in (("work", {0, 1}), ("other", set())):
        opened = journal.Journal(path, work)
        assert opened.done == done
        opened.close()
    opened = journal.Journal(path, "other")
    opened.note([3])
    with pytest.raises(RepackError, match="another repack is writing"):
        journal.Journal(path, "other")
    opened.close()
    assert journal.Journal(path, "other", usable=False).done == set(), "an output that is not there was not written"


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_journal_whose_file_is_gone_is_not_believed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    source, out = tiny("moe_qwen3"), tmp_path / "x.lean.gguf"
    partial = Path(f"{out}.partial")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "read_back", stop)
        with pytest.raises(KeyboardInterrupt):
            repack(source, out)
    if harm == "gone":
        partial.unlink()
    else:
        os.truncate(partial, partial.stat().st_size // 2)
    assert not repack(source, out).resumed
    assert out.exists() and not list(tmp_path.glob("*.partial*"))


def test_what_does_not_read_back_is_written_anew(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tiny("moe_qwen3"), tmp_path / "x.lean.gguf"

    def fail(*_: object, **__: object) -> None:
        raise RepackError("a bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "read_back", fail)
        with pytest.raises(RepackError, match="bad sector"):
            repack(source, out)
    assert not repack(source, out).resumed


KILLED = """
import sys, time
sys.path[:0] = [sys.argv[3]]
import test_repack
from leanstream_gguf.repack import jobs, storage, writer
jobs.PIECE_BYTES, writer.SYNC_BYTES = 1 << 16, 1 << 16
write = storage.Output.write
def slow(self, offset, data):
    time.sleep(0.004)
    write(self, offset, data)
storage.Output.write = slow
print("started", flush=True)
from pathlib import Path
done = test_repack.repack(Path(sys.argv[1]), Path(sys.argv[2]))
print("resumed" if done.resumed else "whole", flush=True)
"""


def killed_run(source: Path, out: Path, after_s: float) -> bool:
    """Repack in another process and kill it after a moment; True if it finished before."""
    command = [sys.executable, "-c", KILLED, str(source), str(out), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return "resumed" in process.stdout.read() or process.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("n_kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_and_resumed_gives_the_same_file(tiny: Tiny, tmp_path: Path, n_kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PIECE_BYTES", 1 << 16)
    source, whole, out = tiny("moe_qwen3"), tmp_path / "whole.lean.gguf", tmp_path / "x.lean.gguf"
    repack(source, whole)
    randomness = random.Random(n_kills)
    for _ in range(n_kills):
        if not killed_run(source, out, randomness.uniform(0.01, 0.25)):
            assert not out.exists()
        out.unlink(missing_ok=True)
    repack(source, out)
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.partial*"))
