"""`leanstream serve`: an OpenAI-compatible server for streamed models, on llama-cpp-python's server application.

    from leanstream_gguf.server import ModelSettings, ServerSettings, bind, create_app, serve
    settings = ServerSettings(port=8000)
    app = create_app(settings, [ModelSettings(model="model.gguf", memory_budget="2GiB")])
    serve(app, bind(settings))

app.py puts the parts together: settings.py, host.py (which model is loaded, whose turn it is), llama.py (our class with
metering and cancellation), openai.py and control.py (routes), security.py and limits.py (what is refused before a route
sees it), metrics.py, errors.py, sse.py, page.py, runner.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import LibraryError

if TYPE_CHECKING:
    from .app import create_app
    from .host import ModelHost
    from .runner import ServerThread, bind, serve
    from .settings import ModelSettings, ServerSettings

_LAZY = {
    "ModelHost": ".host",
    "ModelSettings": ".settings",
    "ServerSettings": ".settings",
    "ServerThread": ".runner",
    "bind": ".runner",
    "create_app": ".app",
    "serve": ".runner",
}

__all__ = ["ModelHost", "ModelSettings", "ServerSettings", "ServerThread", "bind", "create_app", "serve"]


def require_extra() -> None:
    """Say what to install where the server's dependencies are missing.

    Raises:
        LibraryError: one of them cannot be found.
    """
    for name in ("fastapi", "uvicorn", "pydantic_settings"):
        if importlib.util.find_spec(name) is None:
            raise LibraryError(f"the server needs {name}, which is not installed", remedy="pip install 'leanstream-gguf[server]'")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra()
    return getattr(importlib.import_module(_LAZY[name], __name__), name)
