"""The application: llama_cpp.server's settings, request types, loader and endpoints around our class, and what guards them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response

from .. import __version__
from . import control, errors, openai, security
from .host import ModelHost
from .metrics import Sampler
from .page import Page
from .settings import ModelSettings, ServerSettings


def create_app(
    settings: ServerSettings,
    models: Iterable[ModelSettings] = (),
    *,
    extra_routers: Sequence[APIRouter] = (),
    page: Path | None = None,
) -> FastAPI:
    """The server as an ASGI application; the first model is loaded in the background when it starts.

    Args:
        models: may be empty; `app.state.host.add()` adds some later.
        extra_routers: routes of the caller, guarded like ours.
        page: folder of static files served at "/"; nothing else of the file system can be read.

    Raises:
        ArgumentError: settings that would let anybody in. ModelNotFoundError: the page has no index.html.
    """
    security.check_settings(settings)
    host = ModelHost(models, max_queue=settings.max_queue)
    sampler = Sampler(host)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        host.start()
        sampler.start()
        try:
            yield
        finally:
            await sampler.stop()
            await host.close()

    # No docs pages: they would load scripts from elsewhere. /openapi.json is there.
    app = FastAPI(
        title="LeanStream", version=__version__, root_path=settings.root_path, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.host, app.state.sampler, app.state.settings = host, sampler, settings
    errors.install(app)
    for router in (openai.router, control.router, *extra_routers):
        app.include_router(router)
    table = Page(page) if page is not None else None
    if table is not None:
        _add_page(app, table)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE", "PUT", "PATCH"],
            allow_headers=["*"],
        )

    def count(route: str, status: int, seconds: float) -> None:
        sampler.requests[route, status] += 1
        sampler.duration.observe(seconds)

    public = {"/health"} | (set(table.files) if table else set())
    app.add_middleware(security.Guard, gate=security.Gate(settings, public), count=count)  # the last one added is the outermost
    return app


def _add_page(app: FastAPI, table: Page) -> None:
    async def file(request: Request) -> Response:
        return table.reply(request)

    for path in table.files:
        app.add_api_route(path, file, methods=["GET", "HEAD"], include_in_schema=False)
