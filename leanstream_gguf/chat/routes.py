"""The page's own API, under /chat/api: conversations, models on this machine, the demo model, preferences.

Host and Origin checks, the API key, body limits and the form of errors are the server's, as for every other route.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from .. import __version__, probe
from ..errors import StateError, UnknownIdError
from ..server.settings import ModelSettings
from .service import ChatService

PREFIX = "/chat/api"
MAX_TEXT = 4_000_000  # characters of one message
PREFERENCES = ("theme", "defaults", "panel", "sidebar")  # what the page may keep


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def given(self) -> dict[str, Any]:
        """The fields that the request had."""
        return self.model_dump(exclude_unset=True)


class Attachment(_Body):
    name: str = Field(max_length=255)
    text: str = Field(max_length=MAX_TEXT)


class Sampling(_Body):
    """Sampling settings of a conversation; unset ones are the page's defaults."""

    temperature: float | None = Field(default=None, ge=0, le=5)
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=100_000)
    repeat_penalty: float | None = Field(default=None, ge=0, le=5)
    max_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    seed: int | None = Field(default=None, ge=0, lt=2**32)


class NewConversation(_Body):
    title: str = Field(default="", max_length=300)
    system: str = Field(default="", max_length=MAX_TEXT)
    settings: Sampling = Sampling()


class ConversationChange(_Body):
    title: str = Field(default="", max_length=300)
    system: str = Field(default="", max_length=MAX_TEXT)
    settings: Sampling = Sampling()
    leaf_id: str = Field(default="", max_length=64)


class NewMessage(_Body):
    role: Literal["user", "assistant"]
    content: str = Field(max_length=MAX_TEXT)
    parent_id: str | None = Field(default=None, max_length=64)
    attachments: list[Attachment] = Field(default=[], max_length=32)
    meta: dict[str, Any] = {}
    state: Literal["complete", "writing", "stopped", "failed"] = "complete"


class MessageChange(_Body):
    content: str = Field(default="", max_length=MAX_TEXT)
    meta: dict[str, Any] = {}
    state: Literal["complete", "writing", "stopped", "failed"] = "complete"


class Folder(_Body):
    path: str = Field(min_length=1, max_length=4096)


class Load(_Body):
    path: str = Field(min_length=1, max_length=4096)
    memory_budget: str = Field(default="auto", max_length=32)
    n_ctx: int | None = Field(default=None, ge=0, le=2**24)


class Estimate(_Body):
    path: str = Field(min_length=1, max_length=4096)
    memory: str = Field(default="auto", max_length=32)


def make_router(service: ChatService) -> APIRouter:
    """All routes, for `create_app(extra_routers=[...])`."""
    router = APIRouter(prefix=PREFIX, tags=["chat page"], include_in_schema=False)
    _add_page(router, service)
    _add_conversations(router, service)
    _add_models(router, service)
    return router


def _add_page(router: APIRouter, service: ChatService) -> None:
    @router.get("/state")
    def state() -> dict[str, Any]:
        return {
            "version": __version__,
            "data_folder": str(service.folder),
            "can_quit": service.quit is not None,
            "memory_bytes": probe.automatic_budget().n_bytes,
            "preferences": {key: service.store.preference(key) for key in PREFERENCES},
        }

    @router.put("/preferences/{key}", status_code=204)
    def set_preference(key: str, value: dict[str, Any]) -> None:
        if key not in PREFERENCES:
            raise UnknownIdError(f"there is no preference {key!r}")
        service.store.set_preference(key, value)

    @router.post("/quit", status_code=202)
    def quit_program() -> dict[str, str]:
        if service.quit is None:
            raise StateError("this server was not started by `leanstream chat`")
        service.quit()
        return {"state": "stopping"}


def _add_conversations(router: APIRouter, service: ChatService) -> None:
    store = service.store

    @router.get("/conversations")
    def conversations(q: str = "") -> dict[str, Any]:
        return {"conversations": store.conversations(q[:500])}

    @router.post("/conversations", status_code=201)
    def create(body: NewConversation) -> dict[str, Any]:
        return store.create(body.title, body.system, body.settings.given())

    @router.get("/conversations/{conversation_id}")
    def conversation(conversation_id: str) -> dict[str, Any]:
        return store.conversation(conversation_id)

    @router.patch("/conversations/{conversation_id}")
    def change(conversation_id: str, body: ConversationChange) -> dict[str, Any]:
        return store.update(conversation_id, **body.given())

    @router.delete("/conversations/{conversation_id}", status_code=204)
    def delete(conversation_id: str) -> None:
        store.delete(conversation_id)

    @router.get("/conversations/{conversation_id}/export")
    def export(conversation_id: str, form: str = "md") -> Response:
        name, media_type, text = store.export(conversation_id, form)
        ascii_name = name.encode("ascii", "ignore").decode().lstrip("-.") or "conversation"
        return Response(text, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{ascii_name}"'})

    @router.post("/conversations/{conversation_id}/messages", status_code=201)
    def add_message(conversation_id: str, body: NewMessage) -> dict[str, Any]:
        return store.add_message(conversation_id, **body.model_dump())

    @router.patch("/messages/{message_id}")
    def change_message(message_id: str, body: MessageChange) -> dict[str, Any]:
        return store.update_message(message_id, **body.given())


def _add_models(router: APIRouter, service: ChatService) -> None:
    @router.get("/models")
    def models(request: Request) -> dict[str, Any]:
        host = request.app.state.host
        aliases = {settings.model: alias for alias, settings in list(host.sources.items())}
        found = service.models()
        return {
            "models": [
                {
                    "path": model.path,
                    "name": model.name,
                    "folder": model.folder,
                    "file_bytes": model.file_bytes,
                    "n_files": model.n_files,
                    "alias": aliases.get(model.path),
                    "needs": service.needs.of(model),
                }
                for model in found
            ],
            "folders": service.folders(),
            "demo": service.demo.report(),
        }

    @router.get("/loaded")
    def loaded(request: Request) -> dict[str, Any]:
        host = request.app.state.host
        llm = host.llm
        if llm is None:
            return {"model": None}
        settings = host.sources.get(host.alias)
        return {"model": host.alias, "path": settings.model if settings else None, "n_ctx": llm.n_ctx()}

    @router.post("/models/load", status_code=202)
    async def load(request: Request, body: Load) -> dict[str, Any]:
        model = await run_in_threadpool(service.find, body.path)
        options = {k: v for k, v in body.given().items() if k != "path" and v is not None}
        settings = ModelSettings(**{**service.model_options, "model": model.path, "memory_budget": body.memory_budget, **options})
        settings.stream_config()
        host = request.app.state.host
        alias = host.add(settings)
        await host.switch(alias, {"memory_budget": body.memory_budget})
        await run_in_threadpool(service.remember, model.path, options)
        return {"model": alias, "state": host.state}

    @router.post("/models/estimate")
    def estimate(body: Estimate) -> dict[str, Any]:
        return service.estimate(body.path, body.memory)

    @router.post("/folders", status_code=204)
    def add_folder(body: Folder) -> None:
        service.add_folder(body.path)

    @router.post("/folders/remove", status_code=204)
    def remove_folder(body: Folder) -> None:
        service.remove_folder(body.path)

    @router.post("/demo", status_code=202)
    def start_demo() -> dict[str, Any]:
        service.demo.start()
        return service.demo.report()

    @router.post("/demo/cancel")
    def cancel_demo() -> dict[str, Any]:
        service.demo.cancel()
        return service.demo.report()
