"""verify.py: rows, comparison, and verdicts of real runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from leanstream_gguf import verify
from leanstream_gguf.errors import ArgumentError, UnsupportedError

Tiny = Callable[..., Path]


def test_rows_are_all_or_evenly_spaced_to_the_last() -> None:
    assert verify.prompt_rows(512, 16384, all_rows=False) == list(range(512))
    some = verify.prompt_rows(512, 262144, all_rows=False)
    assert len(some) == 64 and some[-1] == 511
    assert len({b - a for a, b in itertools.pairwise(some)}) == 1
    assert verify.prompt_rows(512, 262144, all_rows=True) == list(range(512))
    assert verify.prompt_rows(5, 1 << 30, all_rows=False) == [4]


def test_prompt_is_long_enough_for_the_default() -> None:
    assert len(verify.default_text().split()) > 600


@pytest.mark.parametrize("wrong", [{"fidelity": "lossy"}, {"n_prompt": 0}, {"n_generate": -1}, {"memory": "lots"}, {"cache": "lots"}])
def test_requests_are_checked_first(wrong: dict[str, object]) -> None:
    with pytest.raises((ArgumentError, UnsupportedError)):
        verify.verify(verify.Request(model="none.gguf", **wrong))  # type: ignore[arg-type]


def write(path: Path, rows: list[list[float]]) -> str:
    np.asarray(rows, dtype=np.single).tofile(path)
    return str(path)


def test_comparison(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[1, 2, 3], [0, 0, 0]])
    assert verify.compare(a, write(tmp_path / "b", [[1, 2, 3], [0, 0, 0]]), 3).bit_identical
    negative_zero = verify.compare(a, write(tmp_path / "c", [[1, 2, 3], [0, -0.0, 0]]), 3)
    assert (negative_zero.bit_identical, negative_zero.max_abs_diff, negative_zero.kl_mean) == (False, 0, 0)
    other = verify.compare(a, write(tmp_path / "d", [[1, 2, 3], [0, 0, np.log(2)]]), 3)
    assert (other.n_rows, other.rows_differing, other.argmax_equal) == (2, 1, 0.5)
    assert other.max_abs_diff == pytest.approx(np.log(2))
    assert other.kl_max == pytest.approx(np.log(4 / 3) - np.log(2) / 3)
    broken = verify.compare(a, write(tmp_path / "e", [[1, 2, 3], [0, np.nan, 0]]), 3)
    assert broken.max_abs_diff != broken.max_abs_diff


@pytest.mark.native
@pytest.mark.usefixtures("native")
class TestRuns:
    @pytest.mark.parametrize("name", ["moe_qwen3", "dense_untied", "moe_bias"])
    def test_streamed_is_identical(self, tiny: Tiny, name: str) -> None:
        wish = verify.ContextWish(n_batch=16, n_ubatch=8, n_threads=1)
        found = verify.verify(verify.Request(str(tiny(name)), n_prompt=40, n_generate=8, wish=wish))
        assert found["passed"] and found["bit_identical"]
        assert (found["max_abs_diff"], found["kl_mean"], found["n_rows"], found["n_tokens"]) == (0, 0, 48, 48)
        assert found["kl_noise_floor"] > 0
        assert found["settings"]["n_ubatch"] == 8

    def test_another_model_differs(self, tiny: Tiny) -> None:
        request = verify.Request(str(tiny("moe_qwen3")), reference=str(tiny("moe_scales")), n_prompt=16, n_generate=2)
        found = verify.verify(request)
        assert not found["passed"]
        assert found["max_abs_diff"] > 0 and found["kl_mean"] > 0

    def test_errors_of_a_run_keep_their_type(self, tiny: Tiny) -> None:
        from leanstream_gguf import BudgetError

        with pytest.raises(BudgetError) as caught:
            verify.verify(verify.Request(str(tiny("moe_qwen3")), memory="1MiB", n_prompt=8, n_generate=0))
        assert caught.value.limit is not None and caught.value.limit > 1 << 20
