"""settings.py: what can be set, checked when it is given."""

from __future__ import annotations

import pickle

import pytest

from leanstream_gguf.errors import ArgumentError
from leanstream_gguf.settings import Budget, CacheBudget, StreamConfig, check_context, env_defaults


@pytest.mark.parametrize(
    ("value", "budget", "text"),
    [
        ("2GiB", Budget("bytes", n_bytes=2 << 30), "2 GiB"),
        (1 << 20, Budget("bytes", n_bytes=1 << 20), "1 MiB"),
        ("55%", Budget("share", share=0.55), "55%"),
        ("min+50%", Budget("span", share=0.5), "min+50%"),
        (" AUTO ", Budget("auto"), "auto"),
        ("min", Budget("min"), "min"),
        ("full", Budget("full"), "full"),
    ],
)
def test_budget(value: str | int, budget: Budget, text: str) -> None:
    assert Budget.parse(value) == budget
    assert str(budget) == text
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize("value", [0, "0", "most", "", -1, None, 1.5, "150%"])
def test_budget_refuses(value: object) -> None:
    with pytest.raises(ArgumentError):
        Budget.parse(value)  # type: ignore[arg-type]


def test_cache_budget() -> None:
    assert CacheBudget.parse("25%") == CacheBudget("share", share=0.25)
    assert CacheBudget.parse("min") == CacheBudget("min")
    assert CacheBudget.parse("44MiB") == CacheBudget("bytes", n_bytes=44 << 20)
    for value in (0, "auto", "full"):
        with pytest.raises(ArgumentError):
            CacheBudget.parse(value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "arc"},
        {"policy": "lru", "policy_params": {"half_life": 4}},
        {"policy": "slru", "policy_params": {"protected_share": 2}},
        {"policy": "lfu", "policy_params": {"half_life": "long"}},
        {"io_threads": -1},
        {"io_threads": True},
        {"io_depth": 1 << 20},
        {"io_backend": "aio"},
        {"ring_slots": 1},
        {"chunk_bytes": 1000},
        {"chunk_bytes": "2GiB"},
        {"chunk_bytes": "128MiB"},
        {"direct_io": 1},
        {"cache_budget": "lots"},
        {"fidelity": "roughly"},
        {"fidelity": "faithful", "max_kl": 0.1},
        {"fidelity": "threshold", "max_kl": 0},
    ],
)
def test_config_refuses_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        StreamConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_ctx": -1},
        {"n_ctx": 1 << 32},
        {"n_ctx": 1.5},
        {"n_batch": 0},
        {"n_batch": -1},
        {"n_ubatch": -1},
        {"n_threads": 100_000},
        {"n_threads_batch": -1},
    ],
)
def test_context_settings_that_llama_cpp_would_wrap_or_crash_on(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        check_context(wrong)


def test_context_settings_of_the_parent_pass() -> None:
    check_context({"n_ctx": 0, "n_batch": 1, "n_ubatch": 0, "n_threads": None, "n_gpu_layers": -1})


def test_config_is_frozen_parsed_and_pickles() -> None:
    config = StreamConfig(cache_budget="25%", chunk_bytes="256KiB", policy="slru", policy_params={"protected_share": 0.5})
    assert config.chunk_bytes == 256 << 10
    assert config.parsed_cache == CacheBudget("share", share=0.25)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.policy = "lfu"  # type: ignore[misc]
    assert config.to_dict()["policy"] == "slru"


def test_environment() -> None:
    assert env_defaults({}) == (None, None)
    assert env_defaults({"LEANSTREAM_MEMORY": "", "LEANSTREAM_CACHE": "min"}) == (None, CacheBudget("min"))
    assert env_defaults({"LEANSTREAM_MEMORY": "1GiB"})[0] == Budget("bytes", n_bytes=1 << 30)
    with pytest.raises(ArgumentError, match="LEANSTREAM_MEMORY"):
        env_defaults({"LEANSTREAM_MEMORY": "plenty"})
