"""measure.py and kernel_rate.py: sizes without loading, speeds by timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from leanstream_gguf import kernel_rate, measure

Tiny = Callable[..., Path]


def tensor(name: str, *shape: int, n_bytes: int = 0, kind: str = "q4_K") -> dict[str, object]:
    return {"name": name, "type": kind, "shape": list(shape), "bytes": n_bytes or 4 * shape[0] * shape[1]}


def test_products_of_a_token() -> None:
    experts = tensor("blk.0.ffn_up_exps.weight", 64, 32, 8, n_bytes=8 * 100)
    tensors = [
        tensor("token_embd.weight", 64, 1000),
        tensor("output.weight", 64, 1000),
        tensor("blk.0.attn_q.weight", 64, 64),
        tensor("blk.1.attn_q.weight", 64, 64),
        tensor("blk.0.attn_norm.weight", 64, 1),
        tensor("blk.0.attn_q.bias", 64, 1),
        experts,
    ]
    found = kernel_rate.products({"tensors": tensors, "n_expert": 8, "n_expert_used": 2})
    assert [(p.n_in, p.n_out, p.uses) for p in found] == [(64, 1000, 1), (64, 64, 2), (64, 32, 2)]
    assert found[-1].n_bytes == 100
    tied = kernel_rate.products({"tensors": tensors[:1] + tensors[2:3]})
    assert [(p.n_in, p.n_out) for p in tied] == [(64, 1000), (64, 64)]


def test_reads_of_layers_are_those_of_their_matrices() -> None:
    names = ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight")
    sizes = (3 << 20, 3 << 20, 1 << 19, 1 << 19)
    tensors = [tensor(name, 64, 64, n_bytes=size) for name, size in zip(names, sizes, strict=True)]
    tensors += [tensor("token_embd.weight", 64, 64, n_bytes=9 << 20), tensor("blk.0.ffn_up_exps.weight", 64, 64, 8, n_bytes=9 << 20)]
    dense = {"n_ring_slots": 2, "group_bytes": 7 << 20}
    assert measure.layer_reads({"tensors": tensors}, dense, 1 << 20) == (7 * (1 << 20) // 8, 8)
    assert measure.layer_reads({"tensors": tensors}, {**dense, "n_ring_slots": 3}, 1 << 20)[1] == 16
    assert measure.layer_reads({"tensors": []}, dense, 1 << 20)[1] >= 1


def test_reads_of_experts_are_slices_or_records() -> None:
    names = [f"blk.{block}.ffn_{what}_exps.weight" for block in (0, 1) for what in ("gate", "up", "down")]
    experts = {"n_used": 4, "expert_bytes": 3 * 81920 + 100}
    plain = {"tensors": [tensor(name, 64, 64, 8) for name in names]}
    assert measure.expert_reads(plain, experts, 0.0) == (81920, 12)
    assert measure.expert_reads(plain, experts, 0.5) == (81920, 6)
    assert measure.expert_reads(plain, experts, 1.0) == (81920, 3)
    bundled = {"tensors": [{**found, "bundle": "blk.0.ffn_exps.lean"} for found in plain["tensors"]]}
    assert measure.expert_reads(bundled, experts, 0.5) == (3 * 81920, 2)


@pytest.mark.native
@pytest.mark.usefixtures("native")
class TestNative:
    def test_minimum_is_that_of_a_real_load(self, tiny: Tiny) -> None:
        from support import streamed

        from leanstream_gguf.settings import StreamConfig

        wish = measure.ContextWish(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1)
        with measure.measured(tiny("moe_qwen3"), StreamConfig(), wish) as model:
            dry = model.handle.plan()
            assert model.sizes.n_ubatch == 64
        with streamed(tiny("moe_qwen3"), "min", logits_all=False) as llm:
            real = llm.stream.plan()
        assert real["experts"]["total_bytes"] == dry["experts"]["total_bytes"]
        assert real["memory"]["kv_bytes"] == dry["memory"]["kv_bytes"]
        assert real["memory"]["compute_bytes"] == pytest.approx(dry["memory"]["compute_bytes"], rel=0.2)

    @pytest.mark.parametrize("kind", ["f32", "f16", "q4_0", "q8_0", "q4_K", "q6_K", "mxfp4", "iq4_nl"])
    def test_every_type_can_be_timed(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_rate, "WORKING_SET_BYTES", 1 << 20)
        monkeypatch.setattr(kernel_rate, "SECONDS_PER_SHAPE", 0.001)
        ggml = kernel_rate.Ggml()
        number = ggml.type_id(kind)
        assert number is not None
        n_bytes = ggml.row_size(number, 256) * 64
        seconds = kernel_rate.product_seconds(ggml, kernel_rate.Product(kind, 256, 64, n_bytes, 1), 1)
        assert seconds is not None and 0 < seconds < 0.1

    def test_unknown_type(self) -> None:
        ggml = kernel_rate.Ggml()
        assert ggml.type_id("q99_Z") is None
        assert kernel_rate.product_seconds(ggml, kernel_rate.Product("q99_Z", 256, 64, 100, 1), 1) is None

    def test_rate_of_a_model(self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        from leanstream_gguf.runtime import ModelHandle

        monkeypatch.setattr(kernel_rate, "WORKING_SET_BYTES", 1 << 20)
        monkeypatch.setattr(kernel_rate, "SECONDS_PER_SHAPE", 0.001)
        with ModelHandle(tiny("moe_qwen3")) as handle:
            rate = kernel_rate.compute_rate(handle.index(), 1)
        assert 0 < rate.seconds_per_token < 1
        assert rate.weight_bytes_per_token > 0
