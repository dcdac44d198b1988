"""runtime.py: handles without llama_cpp.Llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]


def test_index_describes_every_tensor(tiny: Tiny) -> None:
    import gguf

    from leanstream_gguf.runtime import ModelHandle

    path = tiny("moe_qwen3")
    expected = {
        t.name: (t.tensor_type.name.lower(), [int(n) for n in t.shape], t.data_offset, t.n_bytes)
        for t in gguf.GGUFReader(path).tensors
    }
    with ModelHandle(path) as handle:
        index = handle.index()
        found = {t["name"]: (t["type"].lower(), t["shape"], t["offset"], t["bytes"]) for t in index["tensors"]}
    assert index["arch"] == "qwen3moe"
    assert index["file_bytes"] == path.stat().st_size
    assert {name: (kind, offset, n) for name, (kind, _, offset, n) in found.items()} == {
        name: (kind, offset, n) for name, (kind, _, offset, n) in expected.items()
    }
    for name, (_, shape, _, _) in expected.items():
        assert found[name][1][: len(shape)] == shape


def test_split_set_is_one_index(tiny: Tiny) -> None:
    from leanstream_gguf.runtime import ModelHandle

    with ModelHandle(tiny("moe_qwen3", 3)) as split, ModelHandle(tiny("moe_qwen3")) as whole:
        assert len(split.index()["shards"]) == 3
        names = [sorted(t["name"] for t in handle.index()["tensors"]) for handle in (split, whole)]
        assert names[0] == names[1]


def test_plan_before_anything_was_loaded_is_a_state_error(tiny: Tiny) -> None:
    from leanstream_gguf import StateError
    from leanstream_gguf.runtime import ModelHandle

    with ModelHandle(tiny("moe_qwen3")) as handle:
        with pytest.raises(StateError):
            handle.plan()
        with pytest.raises(StateError):
            handle.activate(0)
        assert handle.stats().n_tokens == 0
    with pytest.raises(StateError, match="closed"):
        handle.plan()
    handle.close()


def test_only_the_first_of_the_living_is_charged_for_the_process(tiny: Tiny) -> None:
    from leanstream_gguf.runtime import ModelHandle

    with ModelHandle(tiny("moe_qwen3")) as first, ModelHandle(tiny("moe_qwen3")) as second:
        assert first.baseline_bytes > 10 << 20
        assert second.baseline_bytes == 0
    with ModelHandle(tiny("moe_qwen3")) as third:
        assert third.baseline_bytes > 10 << 20


def test_a_file_that_cannot_be_opened_counts_as_nothing(tmp_path: Path) -> None:
    from leanstream_gguf import ModelNotFoundError, runtime

    with pytest.raises(ModelNotFoundError):
        runtime.ModelHandle(tmp_path / "none.gguf")
    assert runtime._n_live == 0
