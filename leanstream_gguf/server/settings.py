"""Settings of the server: everything of llama_cpp.server plus ours, from flags, environment and YAML.

The streaming fields are made from StreamConfig itself, so that a setting added there is a flag, a variable and a YAML key
here at once. Ours are read from LEANSTREAM_<NAME>; llama_cpp.server's from their bare names, as it does.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import json
import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from .. import probe
from .._lib import native
from ..errors import ArgumentError, LeanStreamError, ModelNotFoundError
from ..settings import ENV_CACHE, ENV_DEVICE_MEMORY, ENV_MEMORY, Budget, StreamConfig

native()  # before llama_cpp is imported

from llama_cpp.server import settings as upstream  # noqa: E402
from pydantic import AliasChoices, Field, ValidationError, ValidationInfo, create_model, field_validator  # noqa: E402
from pydantic_settings import SettingsConfigDict, SettingsError  # noqa: E402

_ALIASES = {"memory_budget": ENV_MEMORY, "cache_budget": ENV_CACHE}


def _describe(cls: type) -> dict[str, str]:
    """Attribute -> text, from the Attributes section of a docstring."""
    section = (cls.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _readable(hint: Any) -> Any:
    """A field's type without what no flag, variable or YAML can hold."""
    if get_origin(hint) is collections.abc.Mapping:
        return dict[str, Any]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind in (bool, int, float, str, type(None))]
    return functools.reduce(operator.or_, kinds)


def _stream_fields() -> dict[str, Any]:
    """pydantic fields for StreamConfig's, with its types, defaults and descriptions."""
    texts, hints = _describe(StreamConfig), get_type_hints(StreamConfig)
    found: dict[str, Any] = {}
    for item in dataclasses.fields(StreamConfig):
        default: Any = item.default
        if default is dataclasses.MISSING:
            default = item.default_factory()  # type: ignore[operator]
        alias = AliasChoices(item.name, _ALIASES.get(item.name, f"LEANSTREAM_{item.name.upper()}"))
        field = Field(default=default, description=texts.get(item.name), validation_alias=alias)
        found[item.name] = (_readable(hints[item.name]), field)
    return found


_StreamSettings: Any = create_model(
    "_StreamSettings",
    __base__=upstream.ModelSettings,
    __config__=None,
    **_stream_fields(),
)


def _number(value: Any) -> Any:
    """Where a setting is a number or a word, flags and variables give text."""
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


class ModelSettings(_StreamSettings):  # type: ignore[misc]
    """One model: llama_cpp.server's settings and how it is streamed.

    Where the defaults differ from llama_cpp.server's: context sizes that are not given are chosen from the model's shape;
    logits of all tokens are not kept (needed for logprobs only); threads are the processors available; nothing is locked
    in memory; the model's name is the file's, without folder and ending.
    """

    model_config = SettingsConfigDict(protected_namespaces=(), populate_by_name=True, extra="forbid")

    memory_budget: int | str = Field(
        default="auto",
        description="Bound for the whole process: a size, 55% (of the model file), auto, min or full",
        validation_alias=AliasChoices("memory_budget", ENV_MEMORY),
    )
    device_budget: int | str | None = Field(
        default=None,
        description="Bound for GPU memory: a size, 50% (of the model file) or auto (what is free, less a headroom)",
        validation_alias=AliasChoices("device_budget", ENV_DEVICE_MEMORY),
    )
    n_gpu_layers: int | None = Field(
        default=None, ge=-1, description="Layers on the GPU, -1 = all; default 0, or all with device_budget"
    )
    embedding_pooling: str = Field(
        default="auto",
        pattern="^(auto|mean|last)$",
        description="How /v1/embeddings makes one vector of a text where the model does not say: mean or last; auto = mean",
        validation_alias=AliasChoices("embedding_pooling", "LEANSTREAM_EMBEDDING_POOLING"),
    )
    n_ctx: int | None = Field(default=None, ge=0, description="Context length in tokens; 0 = what the model was trained for")
    n_batch: int | None = Field(default=None, ge=1, description="Largest number of tokens in one call")
    n_ubatch: int | None = Field(default=None, ge=1, description="Tokens computed at once")
    n_threads: int = Field(default_factory=probe.cpu_count, ge=1, description="Compute threads; default: the processors available")
    n_threads_batch: int = Field(default_factory=probe.cpu_count, ge=1, description="Compute threads for prompts")
    logits_all: bool = Field(default=False, description="Keep the logits of all tokens; needed for logprobs")
    use_mlock: bool = Field(default=False, description="Ignored: streamed weights are not locked")
    verbose: bool = Field(default=False, description="llama.cpp's log on standard error")

    @field_validator("memory_budget", "device_budget")
    @classmethod
    def _is_a_budget(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if value is not None:
            Budget.parse(value, name=str(info.field_name))
        return value

    def stream_config(self) -> StreamConfig:
        """The StreamConfig of these settings.

        Raises:
            ArgumentError, UnsupportedError: a value it refuses.
        """
        return StreamConfig(**{item.name: _number(getattr(self, item.name)) for item in dataclasses.fields(StreamConfig)})

    def changed(self, changes: Mapping[str, Any]) -> ModelSettings:
        """A copy with some settings changed.

        Raises:
            ArgumentError, UnsupportedError: not a budget, or what StreamConfig refuses.
        """
        copy: ModelSettings = self.model_copy(update=dict(changes))
        for name in ("memory_budget", "device_budget"):
            if getattr(copy, name) is not None:
                Budget.parse(getattr(copy, name), name=name)
        copy.stream_config()
        return copy

    @property
    def alias(self) -> str:
        """The name clients use."""
        return str(self.model_alias or re.sub(r"(-00001-of-\d{5})?\.gguf$", "", Path(self.model).name))


class ServerSettings(upstream.ServerSettings):
    """Address, access and limits. `interrupt_requests` is off: a new request waits for its turn."""

    model_config = SettingsConfigDict(populate_by_name=True)

    host: str = Field(default="127.0.0.1", description="Listen address; any but a loopback one needs an API key")
    port: int = Field(default=8000, ge=0, le=65535, description="Listen port, 0 = a free one")
    interrupt_requests: bool = Field(default=False, description="End a streaming answer when another request arrives")
    allowed_hosts: list[str] = Field(
        default=[],
        description="Names in the Host header to accept besides loopback ones (and IP addresses where not on loopback)",
        validation_alias=AliasChoices("allowed_hosts", "LEANSTREAM_ALLOWED_HOSTS"),
    )
    allowed_origins: list[str] = Field(
        default=[],
        description="Other origins whose pages may call the server, such as https://example.org",
        validation_alias=AliasChoices("allowed_origins", "LEANSTREAM_ALLOWED_ORIGINS"),
    )
    max_body_bytes: int = Field(
        default=16 << 20,
        ge=1024,
        description="Largest request body",
        validation_alias=AliasChoices("max_body_bytes", "LEANSTREAM_MAX_BODY_BYTES"),
    )
    max_queue: int = Field(
        default=256,
        ge=1,
        description="Requests that may wait; more are answered 429",
        validation_alias=AliasChoices("max_queue", "LEANSTREAM_MAX_QUEUE"),
    )
    max_connections: int = Field(
        default=512,
        ge=1,
        description="Open connections; more are closed at once",
        validation_alias=AliasChoices("max_connections", "LEANSTREAM_MAX_CONNECTIONS"),
    )
    request_timeout: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds in which a request's head, and after it its body, must have arrived",
        validation_alias=AliasChoices("request_timeout", "LEANSTREAM_REQUEST_TIMEOUT"),
    )
    shutdown_timeout: int = Field(
        default=30,
        ge=0,
        description="Seconds that running answers get to finish when the server is asked to stop",
        validation_alias=AliasChoices("shutdown_timeout", "LEANSTREAM_SHUTDOWN_TIMEOUT"),
    )


def read_file(path: str) -> dict[str, Any]:
    """A YAML or JSON settings file as llama_cpp.server reads it: server settings and `models`, a list of model settings.

    Raises:
        ModelNotFoundError: no such file. ArgumentError: not YAML or JSON, or no mapping.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no settings file {path}", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read the settings file {path}: {error}", path=path) from error
    try:
        document = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ArgumentError(f"{path} is neither YAML nor JSON: {error}", path=path) from error
    if not isinstance(document, dict):
        raise ArgumentError(f"{path} must hold settings by name, not a {type(document).__name__}", path=path)
    for name in (key for item in (document, *_mappings(document.get("models"))) for key in item):
        if not isinstance(name, str):
            raise ArgumentError(f"{path} must hold settings by name, and {name!r} is none", path=path)
    return document


def _mappings(models: Any) -> list[dict[Any, Any]]:
    return [item for item in models if isinstance(item, dict)] if isinstance(models, list) else []


def load(given: Mapping[str, Any], config_file: str | None = None) -> tuple[ServerSettings, list[ModelSettings]]:
    """Settings from flags, then the file, then the environment, then the defaults.

    Args:
        given: flags by field name, None where unset; server and model settings together. `model` is a path or several; the
            other model flags apply to every model.
        config_file: YAML or JSON; CONFIG_FILE in the environment is used if it is None.

    Raises:
        ArgumentError: an unknown key or a wrong value, by name.
    """
    config_file = config_file or os.environ.get("CONFIG_FILE") or None
    document = read_file(config_file) if config_file else {}
    where = config_file or "the settings"
    models = document.pop("models", None)
    if models is None:
        model_keys = set(ModelSettings.model_fields) & set(document)
        flat = {key: document.pop(key) for key in model_keys}
        models = [flat] if flat else []
    if not isinstance(models, list) or not all(isinstance(item, dict) for item in models):
        raise ArgumentError(f"`models` in {where} must be a list of mappings", path=config_file)
    unknown = sorted(set(document) - set(ServerSettings.model_fields))
    if unknown:
        raise ArgumentError(f"unknown setting in {where}: {', '.join(unknown)}", path=config_file)
    flags = {key: value for key, value in given.items() if value is not None}
    server = _validated(ServerSettings, {**document, **{k: v for k, v in flags.items() if k in ServerSettings.model_fields}})
    model_flags = {key: value for key, value in flags.items() if key in ModelSettings.model_fields}
    paths = model_flags.pop("model", None) or []
    if paths and models:
        raise ArgumentError("name models with --model or in the settings file, not both", path=config_file)
    models = models or [{"model": path} for path in ([paths] if isinstance(paths, str) else paths)]
    if not models and _environ("MODEL"):
        models = [{}]
    if "model_alias" in model_flags and len(models) > 1:
        raise ArgumentError("--model_alias names one model; give several their names in the settings file")
    found = [_validated(ModelSettings, {**item, **model_flags}) for item in models]
    for i, model in enumerate(found):
        if model.alias in {other.alias for other in found[:i]}:
            raise ArgumentError(f"two models are called {model.alias!r}; give one another model_alias", path=config_file)
    return server, found


def _environ(name: str) -> str | None:
    return next((value for key, value in os.environ.items() if key.upper() == name), None)


def _validated(cls: Any, values: Mapping[str, Any]) -> Any:
    """Settings from these values and the environment.

    Raises:
        ArgumentError: a wrong value, by the name under which it was given.
    """
    try:
        found = cls(**values)
    except SettingsError as error:
        raise ArgumentError(f'{", ".join(_not_json(cls))} in the environment must be JSON, such as ["name"]') from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else f"{name}: {first['msg']}"
        variable = None if name in values or name not in cls.model_fields else _variable(cls, name)
        raise ArgumentError(f"{variable} in the environment: {reason}" if variable else reason) from error
    if isinstance(found, ModelSettings):
        _check_streaming(found, values)
    return found


def _check_streaming(found: ModelSettings, values: Mapping[str, Any]) -> None:
    try:
        found.stream_config()
    except LeanStreamError as error:
        for item in dataclasses.fields(StreamConfig):
            with contextlib.suppress(LeanStreamError):
                StreamConfig(**{item.name: _number(getattr(found, item.name))})
                continue
            if item.name not in values and (variable := _variable(ModelSettings, item.name)):
                raise ArgumentError(f"{variable} in the environment: {error}") from error
        raise


def _variable(cls: Any, field: str) -> str | None:
    """The variable that holds a field, if it is set."""
    alias = cls.model_fields[field].validation_alias
    names = {str(name).upper() for name in (alias.choices if isinstance(alias, AliasChoices) else [field])}
    return next((name for name in os.environ if name.upper() in names), None)


def _not_json(cls: Any) -> list[str]:
    """Variables that must hold a list or a mapping and do not."""
    found = []
    for name, field in cls.model_fields.items():
        variable = _variable(cls, name)
        if variable is None or get_origin(field.annotation) not in (list, dict):
            continue
        try:
            json.loads(os.environ[variable])
        except ValueError:
            found.append(variable)
    return found
