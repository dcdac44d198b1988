"""`leanstream serve`: the OpenAI-compatible server. Its flags are made from the settings, when they are needed."""

from __future__ import annotations

import argparse
import types
from typing import Any, Literal, Union, get_args, get_origin

from . import _common

_DESCRIPTION = """\
Serve GGUF models to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, and /health,
/metrics, /v1/stream/config (budget and policy, live), /v1/stream/stats. Listens on 127.0.0.1:8000 unless told otherwise.
"""
_EPILOG = """\
Every setting is a flag (--n_ctx or --n-ctx), an environment variable (llama_cpp.server's by name, N_CTX; ours as
LEANSTREAM_POLICY, LEANSTREAM_MEMORY) and a key of the YAML or JSON file of --config_file, which may hold several models:

  port: 8080
  models:
    - {model: small.gguf, model_alias: small, memory_budget: 900MiB}
    - {model: large.gguf, model_alias: large, memory_budget: auto, policy: slru}

examples:
  leanstream serve -m model.gguf --memory 2GiB
  leanstream serve -m model.gguf --host 0.0.0.0 --api_key SECRET
"""


def add_parser(commands: Any) -> None:
    # The flags come from pydantic models that import llama_cpp: only this command waits for that. "\0" as the prefix makes
    # argparse hand over everything, also what starts with a dash.
    parser = commands.add_parser("serve", help="serve models to OpenAI's clients", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def _scalar(annotation: Any) -> tuple[Any, bool]:
    """(argparse type, whether it is a list) of a field; the first of several kinds that can be read from text."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        kinds = [_scalar(kind) for kind in get_args(annotation) if kind is not type(None)]
        return next((kind for kind in kinds if kind[0] is str), kinds[0])
    if origin is Literal:
        return str, False
    if origin is list:
        return _scalar(get_args(annotation)[0])[0], True
    if annotation is bool:
        return _boolean, False
    return (_mapping if origin is dict else annotation), False


def _boolean(text: str) -> bool:
    from llama_cpp.server.cli import _parse_bool_arg

    return bool(_parse_bool_arg(text))


def _mapping(text: str) -> dict[str, Any]:
    from llama_cpp.server.cli import _parse_json_object_arg

    return dict(_parse_json_object_arg(text))


_boolean.__name__, _mapping.__name__ = "true or false", "JSON object"  # for argparse's messages


def _add_flags(parser: argparse.ArgumentParser, model: Any, title: str, done: set[str]) -> None:
    group = parser.add_argument_group(title)
    for name, field in model.model_fields.items():
        if name in done:
            continue
        done.add(name)
        kind, several = _scalar(field.annotation)
        text = (field.description or "").replace("%", "%%")
        if field.default not in (None, [], {}) and field.default_factory is None and not field.is_required():
            text += f" (default: {field.default})".replace("%", "%%")
        names = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
        group.add_argument(*names, dest=name, type=kind, nargs="*" if several else None, metavar=name.upper(), help=text)


def settings_parser(prog: str = "leanstream serve") -> argparse.ArgumentParser:
    """The command's real parser: a flag for every setting; unset ones are None."""
    from ..server.settings import ModelSettings, ServerSettings

    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [-m FILE]... [--memory SIZE] [--config_file FILE] [--SETTING VALUE]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", "--model", action="append", metavar="FILE", help="GGUF file; may be given several times")
    parser.add_argument("--config_file", "--config-file", "--config", metavar="FILE", help="settings as YAML or JSON")
    parser.add_argument("--memory", dest="memory_budget", metavar="SIZE", help="the same as --memory_budget")
    done = {"model"}
    _add_flags(parser, ServerSettings, "server", done)
    _add_flags(parser, ModelSettings, "model", done)
    _common.add_json(parser)
    return parser


def run(outer: argparse.Namespace) -> int:
    from ..server import require_extra

    require_extra()
    args = settings_parser().parse_args(outer.arguments)
    outer.json = args.json  # for errors that guarded() prints
    from ..server import bind, create_app, serve
    from ..server.runner import url_of
    from ..server.settings import load

    given = {name: value for name, value in vars(args).items() if name not in ("json", "config_file")}
    settings, models = load(given, args.config_file)
    app = create_app(settings, models)
    listener = bind(settings)
    url = url_of(listener, secure=settings.ssl_certfile is not None)
    if args.json:
        _common.print_json({"url": url, "models": list(app.state.host.sources)})
    _common.note(f"leanstream: listening on {url}/v1, models: {', '.join(app.state.host.sources) or 'none'}")
    return serve(app, listener)
