"""Settings of the server: all of llama_cpp.server's and ours, as flags, variables and YAML, in this order of precedence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from leanstream_gguf import ArgumentError, StreamConfig

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]


def parsed(*arguments: str) -> tuple[Any, list[Any]]:
    """What `leanstream serve ARGUMENTS` would run with."""
    from leanstream_gguf.cli.serve import settings_parser
    from leanstream_gguf.server.settings import load

    args = vars(settings_parser().parse_args(list(arguments)))
    config_file = args.pop("config_file")
    args.pop("json")
    return load(args, config_file)


def test_every_setting_of_llama_cpp_server_and_of_the_stream_is_there() -> None:
    from llama_cpp.server import settings as upstream

    from leanstream_gguf.cli.serve import settings_parser
    from leanstream_gguf.server import ModelSettings, ServerSettings

    ours = set(ModelSettings.model_fields) | set(ServerSettings.model_fields)
    theirs = set(upstream.Settings.model_fields)
    stream = {item.name for item in dataclasses.fields(StreamConfig)}
    assert theirs <= ours and stream <= ours
    flags = {action.dest for action in settings_parser()._actions}
    assert theirs | stream | {"memory_budget"} <= flags
    spelled = {option for action in settings_parser()._actions for option in action.option_strings}
    assert {"--n_ctx", "--n-ctx", "--memory", "-m"} <= spelled


def test_a_model_is_built_with_every_setting_llama_cpp_server_passes() -> None:
    """The loader is theirs: a setting it knows is a field here, or it would raise AttributeError while loading."""
    import re

    from llama_cpp.server.model import LlamaProxy

    from leanstream_gguf.server import ModelSettings

    names = LlamaProxy.load_llama_from_model_settings.__code__.co_names
    fields = [name for name in names if name in ModelSettings.model_fields]
    assert len(fields) > 40 and not [name for name in names if re.fullmatch(r"(n|rope|yarn|lora)_\w+", name) and name not in fields]


def test_defaults_stream_and_stay_local() -> None:
    server, models = parsed("-m", "folder/some-00001-of-00003.gguf")
    assert (server.host, server.port, server.interrupt_requests, server.api_key) == ("127.0.0.1", 8000, False, None)
    (model,) = models
    assert (model.memory_budget, model.alias, model.logits_all, model.n_ctx) == ("auto", "some", False, None)
    assert model.stream_config() == StreamConfig()


def test_flags_of_every_kind() -> None:
    server, models = parsed(
        *(
            "-m",
            "a.gguf",
            "-m",
            "b.gguf",
            "--memory",
            "2GiB",
            "--n-ctx",
            "512",
            "--policy",
            "slru",
            "--depth",
            "1",
            "--stages",
            "auto",
        ),
        *("--policy_params", '{"protected_share": 0.5}', "--direct_io", "false", "--tensor_split", "0.5", "0.5"),
        *(
            "--allowed_hosts",
            "a.example",
            "b.example",
            "--api-key",
            "x",
            "--chunk_bytes",
            "2MiB",
            "--chat_template_kwargs",
            '{"a": 1}',
        ),
    )
    assert server.allowed_hosts == ["a.example", "b.example"] and server.api_key == "x"
    assert [model.alias for model in models] == ["a", "b"]
    for model in models:
        assert (model.memory_budget, model.n_ctx, model.tensor_split) == ("2GiB", 512, [0.5, 0.5])
        assert model.chat_template_kwargs == {"a": 1}
        config = model.stream_config()
        assert (config.policy, config.policy_params, config.direct_io) == ("slru", {"protected_share": 0.5}, False)
        assert (config.chunk_bytes, config.depth, config.stages) == (2 << 20, 1, "auto")


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODEL": "env.gguf",
        "N_CTX": "128",
        "PORT": "9999",
        "LEANSTREAM_MEMORY": "min",
        "LEANSTREAM_CACHE": "25%",
        "LEANSTREAM_POLICY": "lru",
        "LEANSTREAM_MAX_QUEUE": "7",
    }.items():
        monkeypatch.setenv(name, value)
    server, (model,) = parsed()
    assert (server.port, server.max_queue) == (9999, 7)
    assert (model.model, model.n_ctx, model.memory_budget, model.cache_budget, model.policy) == ("env.gguf", 128, "min", "25%", "lru")
    _, (model,) = parsed("-m", "flag.gguf", "--memory", "full")
    assert (model.model, model.memory_budget, model.n_ctx) == ("flag.gguf", "full", 128)


YAML = """
port: 8080
allowed_origins: [https://ours.example]
models:
  - {model: small.gguf, model_alias: small, memory_budget: 900MiB, n_ctx: 256}
  - {model: large.gguf, policy: slru, cache_budget: 44MiB}
"""


def test_a_yaml_file_holds_several_models_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(YAML)
    server, models = parsed("--config_file", str(path), "--n_batch", "32", "--port", "8081")
    assert (server.port, server.allowed_origins) == (8081, ["https://ours.example"])
    assert [(m.alias, m.memory_budget, m.n_ctx, m.n_batch) for m in models] == [
        ("small", "900MiB", 256, 32),
        ("large", "auto", None, 32),
    ]
    assert models[1].stream_config().policy == "slru"
    monkeypatch.setenv("CONFIG_FILE", str(path))
    assert len(parsed()[1]) == 2


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("models: 5", "list of mappings"),
        ("1: 2", "1 is none"),
        ("models: [{2: 3}]", "2 is none"),
        ("[" * 100_000, "neither YAML nor JSON"),
        ("models: [{model: a.gguf}, {model: b/a.gguf}]", "two models are called 'a'"),
        ("request_timeout: .nan", "request_timeout"),
        ("request_timeout: .inf", "request_timeout"),
        ("[1, 2]", "settings by name"),
        ("a: [", "neither YAML nor JSON"),
        ("colour: red", "colour"),
        ("models: [{model: a.gguf, colour: red}]", "colour"),
        ("models: [{}]", "model"),
        ("port: many", "port"),
        ("port: -1", "port"),
        ("models: [{model: a.gguf, memory_budget: much}]", "memory_budget"),
        ("models: [{model: a.gguf, n_ctx: -5}]", "n_ctx"),
        ("models: [{model: a.gguf, policy_params: {half_life: -1}}]", "half_life"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=cause):
        parsed("--config", str(path))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LEANSTREAM_MEMORY", "lots"),
        ("LEANSTREAM_CACHE", "lots"),
        ("LEANSTREAM_POLICY", "fifo"),
        ("LEANSTREAM_MAX_QUEUE", "0"),
        ("LEANSTREAM_ALLOWED_HOSTS", "example.org"),
        ("N_CTX", "many"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ArgumentError, match=f"^{variable} in the environment"):
        parsed("-m", "a.gguf")


def test_repack_is_a_setting_of_the_stream() -> None:
    assert parsed("-m", "a.gguf", "--repack", "true")[1][0].stream_config().repack
    assert not parsed("-m", "a.gguf")[1][0].stream_config().repack


def test_values_that_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="not both"):
        parsed("-m", "a.gguf", "--config", str(Path(__file__).parent / "data" / "two_models.yaml"))


def test_a_device_budget_from_flags_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (model,) = parsed("-m", "a.gguf", "--device_budget", "8GiB", "--device_exact", "false")
    assert (model.device_budget, model.n_gpu_layers, model.stream_config().device_exact) == ("8GiB", None, False)
    monkeypatch.setenv("LEANSTREAM_DEVICE_MEMORY", "50%")
    _, (model,) = parsed("-m", "a.gguf")
    assert model.device_budget == "50%"
    monkeypatch.setenv("LEANSTREAM_DEVICE_MEMORY", "much")
    with pytest.raises(ArgumentError, match="LEANSTREAM_DEVICE_MEMORY"):
        parsed("-m", "a.gguf")
