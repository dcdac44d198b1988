"""Toy and synthetic models: readable by the gguf package, deterministic, of the spread they claim."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from make_synthetic_gguf import describe
from toygguf.blocks import LAYOUTS, random_blocks
from toygguf.container import BlockPool, Tensor, tensor_chunks
from toygguf.models import MODELS, write_model

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("name", MODELS)
def test_gguf_package_reads_every_tensor(name: str, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write_model(name, tmp_path))
    expected = {t.name: t for t in MODELS[name]().tensors}
    assert {t.name for t in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        assert tuple(int(n) for n in tensor.shape) == expected[tensor.name].shape
        assert tensor.tensor_type.name == expected[tensor.name].type
        assert tensor.n_bytes == expected[tensor.name].n_bytes


def test_same_bytes_every_time(tmp_path: Path) -> None:
    first = write_model("moe_bias", tmp_path).read_bytes()
    assert write_model("moe_bias", tmp_path).read_bytes() == first


def test_split_set_holds_the_same_tensors(tmp_path: Path) -> None:
    whole = {t.name: bytes(t.data) for t in gguf.GGUFReader(write_model("moe_llama", tmp_path)).tensors}
    first = write_model("moe_llama", tmp_path, n_shards=3)
    assert first.name == "moe_llama-00001-of-00003.gguf"
    shards = sorted(tmp_path.glob("moe_llama-*.gguf"))
    assert len(shards) == 3
    parts = [t for shard in shards for t in gguf.GGUFReader(shard).tensors]
    assert {t.name: bytes(t.data) for t in parts} == whole


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_have_the_spread_they_claim(kind: str) -> None:
    blocks = random_blocks(kind, 4096, "seed", std=0.0625)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(values).all()
    # MXFP4 scales are powers of two, so its spread is only right within that step.
    assert math.isclose(float(values.std()), 0.0625, rel_tol=0.42 if kind == "MXFP4" else 0.15)
    assert abs(float(values.mean())) < 0.01


def test_pooled_tensor_has_its_full_length() -> None:
    tensor = Tensor("t.weight", (4096, 16384), "Q4_0", 0.01)
    chunks = list(tensor_chunks(tensor, "seed", BlockPool()))
    assert sum(chunk.nbytes for chunk in chunks) == tensor.n_bytes
    assert max(chunk.nbytes for chunk in chunks) <= 8 << 20


@pytest.mark.parametrize(("shape", "kind"), [("llama-7b", "Q4_0"), ("qwen3-30b-a3b", "Q4_K")])
def test_synthetic_shapes_say_that_they_are_synthetic(shape: str, kind: str) -> None:
    model = describe(shape, kind, 1, 600)
    assert "SYNTHETIC" in model.metadata["general.description"]
    assert len(model.metadata["tokenizer.ggml.tokens"]) == 600
    assert all(t.n_bytes for t in model.tensors)


def test_synthetic_llama_7b_has_the_size_of_the_real_one() -> None:
    total = sum(t.n_bytes for t in describe("llama-7b", "Q4_0", None, None).tensors)
    assert 3.4 * 2**30 < total < 3.7 * 2**30
