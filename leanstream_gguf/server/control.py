"""Health, metrics and the live settings of the stream. None of these waits for the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from .. import probe
from ..errors import StateError, UnsupportedError
from ..settings import POLICIES, Budget, CacheBudget, check_fidelity, check_policy, check_speculation
from ..stream import StreamHandle
from . import fidelity
from .host import ModelHost
from .llama import ServedLlama
from .metrics import INTERVAL, Sampler, error_of
from .requests import ConfigChange, LoadRequest
from .sse import EventStream

router = APIRouter()


def _host(request: Request) -> ModelHost:
    host: ModelHost = request.app.state.host
    return host


def _sampler(request: Request) -> Sampler:
    sampler: Sampler = request.app.state.sampler
    return sampler


@router.get("/health", summary="Whether requests are answered", tags=["Stream"])
async def health(request: Request) -> Response:
    host, latest = _host(request), await _sampler(request).latest()
    state = host.state
    degraded = await asyncio.to_thread(host.degraded) if state == "ready" else None
    body: dict[str, Any] = {"status": "degraded" if state == "ready" and degraded else state, "reason": degraded, "model": host.alias}
    if state == "loading":
        load = latest["load"] or {}
        body |= {"reason": "the model is being loaded", "progress": load.get("progress"), "seconds_left": load.get("seconds_left")}
    elif state != "ready":
        reasons = {"empty": "no model is loaded", "stopping": "the server is stopping", "failed": str(host.error)}
        body |= {"reason": reasons[state], "error": error_of(host.error)}
    return JSONResponse(body, 200 if state == "ready" else 503)


@router.get("/metrics", summary="Prometheus metrics", tags=["Stream"], response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    return Response(await _sampler(request).prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/stream/stats", summary="State, memory and rates now", tags=["Stream"])
async def stats(request: Request) -> dict[str, Any]:
    return await _sampler(request).snapshot()


@router.get("/v1/stream/history", summary="The last minute", tags=["Stream"])
async def history(request: Request) -> dict[str, Any]:
    return {"interval": INTERVAL, "samples": list(_sampler(request).samples)}


@router.get("/v1/stream/events", summary="State, memory and rates as server-sent events", tags=["Stream"], response_class=Response)
async def events(request: Request, interval: float = Query(default=INTERVAL, ge=0.1, le=10, allow_inf_nan=False)) -> Response:
    sampler, host = _sampler(request), _host(request)

    async def source() -> AsyncIterator[dict[str, Any] | str]:
        while not host.stopping:
            yield await sampler.snapshot()
            await asyncio.sleep(interval)
        yield await sampler.snapshot()

    return EventStream(source())


# ---- live settings ------------------------------------------------------------------------------------------------------


def _device_budget(host: ModelHost, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The bound for device memory, which holds until the model is loaded again; None where nothing runs on a device."""
    if "device" not in plan:
        return None
    device, settings = plan["device"], host.sources.get(host.alias or "")
    requested = "auto" if settings is None or settings.device_budget is None else str(settings.device_budget)
    names = {
        "bytes": "budget_bytes",
        "minimum_bytes": "minimum_budget_bytes",
        "full_bytes": "full_budget_bytes",
        "used_bytes": "used_bytes",
    }
    return {"requested": requested, "device": device["name"], **{name: device[key] for name, key in names.items()}}


def _config(host: ModelHost) -> dict[str, Any]:
    llm = host.llm
    if llm is None or not llm.stream.active:
        nothing = dict.fromkeys(("budget", "device_budget", "policy", "fidelity", "thresholds"))
        return {"model": host.alias, "active": False, **nothing}
    plan, config = llm.stream.plan(), llm.stream.config
    assert config is not None
    offered = fidelity.choices(plan.get("lean"), llm.file_metadata())
    steps = [choice for choice in offered if choice["name"] == "threshold"]
    return {
        "model": host.alias,
        "active": True,
        "budget": {
            "requested": str(llm.stream.budget),
            "bytes": plan["budget_bytes"],
            "minimum_bytes": plan["minimum_budget_bytes"],
            "full_bytes": plan["full_budget_bytes"],
            "automatic_bytes": probe.automatic_budget().n_bytes,
            "cache": None if config.parsed_cache is None else plan["experts"]["capacity_bytes"],
        },
        "device_budget": _device_budget(host, plan),
        "policy": {"name": llm.policy[0], "params": llm.policy[1], "available": POLICIES},
        "fidelity": {"name": config.fidelity, "max_kl": config.max_kl, "available": offered, "live": True},
        "thresholds": {"max_kl": config.max_kl, "available": steps, "values": llm.stream.fidelity()["thresholds"]} if steps else None,
        "speculation": llm.stream.speculation(),
        "mode": plan["mode"],
    }


def _apply(llm: ServedLlama, change: ConfigChange) -> None:
    """Check everything, then change the budget, which may be refused, then what cannot be."""
    stream: StreamHandle = llm.stream
    budget = None if change.budget is None else Budget.parse(change.budget, name="budget")
    cache = None if change.cache is None else CacheBudget.parse(change.cache, name="cache")
    policy = change.policy or llm.policy[0]
    if change.policy is not None or change.policy_params:
        check_policy(policy, change.policy_params)
    speculation = stream.speculation()
    ahead = {name: getattr(change, name) for name in ("depth", "stages") if getattr(change, name) is not None}
    wanted = {name: "auto" if speculation[name] is None else speculation[name] for name in ("depth", "stages")} | ahead
    check_speculation(wanted["depth"], wanted["stages"])
    if budget is not None or cache is not None:
        stream.set_budget(budget or stream.budget or "full", cache=cache)
    if change.policy is not None or change.policy_params:
        llm.set_policy(policy, change.policy_params)
    if ahead:
        stream.set_speculation(**wanted)


def _fidelity(llm: ServedLlama, change: ConfigChange) -> dict[str, Any]:
    """The fidelity that a change asks for; {} where it asks for none or for the one in force.

    Raises:
        UnsupportedError: the file does not offer it. ArgumentError: no fidelity.
    """
    if change.fidelity is None and change.thresholds is None:
        return {}
    config = llm.stream.config
    assert config is not None
    max_kl = change.thresholds.max_kl if change.thresholds is not None else None
    wanted = {"fidelity": change.fidelity or "threshold"}
    check_fidelity(wanted["fidelity"])
    offered = fidelity.choices(llm.stream.plan().get("lean"), llm.file_metadata())
    limit = float("inf") if max_kl is None else max_kl * (1 + 1e-6)
    if not any(choice["name"] == wanted["fidelity"] and (choice["max_kl"] or 0) <= limit for choice in offered):
        at_most = "" if max_kl is None else f" with a KL of at most {max_kl:g}"
        names = ", ".join(f"{choice['name']} {choice['max_kl']:g}" if choice["max_kl"] else choice["name"] for choice in offered)
        raise UnsupportedError(
            f"this file offers no fidelity {wanted['fidelity']!r}{at_most}, only {names}", remedy="calibrate and repack the model"
        )
    changes: dict[str, Any] = {**wanted, "max_kl": max_kl if wanted["fidelity"] == "threshold" else None}
    return changes if any(getattr(config, name) != value for name, value in changes.items()) else {}


@router.get("/v1/stream/config", summary="Budget, policy and fidelity in force", tags=["Stream"])
async def get_config(request: Request) -> dict[str, Any]:
    return await asyncio.to_thread(_config, _host(request))


@router.post("/v1/stream/config", summary="Change them while the model runs", tags=["Stream"])
async def set_config(request: Request, change: ConfigChange) -> dict[str, Any]:
    host = _host(request)
    llm, alias = host.llm, host.alias
    if llm is None or alias is None or not llm.stream.active:
        raise StateError("no model is loaded", remedy="wait for it, or choose one with POST /v1/stream/load")
    wanted = await asyncio.to_thread(_fidelity, llm, change)
    settings = host.sources[alias].changed(wanted)  # refused before anything is changed
    await asyncio.to_thread(_apply, llm, change)
    if wanted:
        await asyncio.to_thread(llm.stream.set_fidelity, wanted["fidelity"], wanted["max_kl"])
    if change.budget is not None:
        settings = settings.changed({"memory_budget": change.budget})
    host.sources[alias] = settings  # also for a later load
    return await asyncio.to_thread(_config, host)


@router.post("/v1/stream/load", summary="Load another configured model", tags=["Stream"], status_code=202)
async def load(request: Request, body: LoadRequest) -> dict[str, Any]:
    budgets = body.model_dump(include={"memory_budget", "device_budget"}, exclude_none=True)
    await _host(request).switch(body.model, budgets or None)
    return {"model": body.model, "state": "loading"}


@router.post("/v1/stream/unload", summary="Free the loaded model", tags=["Stream"])
async def unload(request: Request) -> dict[str, Any]:
    await _host(request).unload()
    return {"state": _host(request).state}
