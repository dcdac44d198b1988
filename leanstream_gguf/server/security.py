"""What a request must pass before a route sees it: where it comes from and goes to, its key, its size, its pace.

A page in the user's browser must not be able to use a server on loopback. The Host header must therefore name this
server (a rebound DNS name does not), and Origin and Sec-Fetch-Site must say that the page is ours.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import ssl
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ArgumentError, LeanStreamError
from . import errors
from .errors import AccessError, AuthenticationError, BodyTooLargeError, QueueFullError, TimeoutError_
from .settings import ServerSettings

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})
OTHER_ORIGIN = "pages of other origins may not use this server"
BUFFERED_BODIES = 4  # bodies of the largest size that may be in memory at once
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be this machine."""
    if host.lower().rstrip(".") in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_settings(settings: ServerSettings) -> None:
    """Refuse to listen to the network without a key.

    Raises:
        ArgumentError: not loopback and no api_key, an empty key, or a certificate that cannot be used.
    """
    _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.api_key is not None and not settings.api_key.strip():
        raise ArgumentError("api_key must not be empty")
    if not is_loopback(settings.host) and settings.api_key is None:
        raise ArgumentError(
            f"listening on {settings.host} lets others in, and that needs an API key",
            remedy="add --api_key KEY (or API_KEY in the environment), or listen on 127.0.0.1",
        )


def _check_certificate(certificate: str | None, key: str | None) -> None:
    if certificate is None:
        if key is not None:
            raise ArgumentError("ssl_keyfile needs ssl_certfile beside it")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # what is wrong with their content too
        raise ArgumentError(f"cannot use the certificate {certificate} with the key in {key or certificate}: {error}") from error


def _split_host(value: str) -> str:
    """The name or address of a Host header, without port and brackets; "" if it is malformed."""
    try:
        parts = urlsplit(f"//{value}")
        _ = parts.port
    except ValueError:
        return ""
    if parts.path or parts.query or parts.fragment or "@" in value:
        return ""
    return (parts.hostname or "").rstrip(".")


class Gate:
    """Checks of one server's settings; raises the typed error of the first that fails."""

    def __init__(self, settings: ServerSettings, public: Collection[str]) -> None:
        """
        Args:
            public: paths that need no key: the page's files and /health.
        """
        self.settings = settings
        self.public = public
        self.page = frozenset(public) - {"/health"}
        self.on_loopback = is_loopback(settings.host)
        self.names = frozenset(name.lower() for name in settings.allowed_hosts)
        self.origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        self.key = settings.api_key

    def check(self, scope: Scope) -> None:
        """
        Raises:
            AccessError: Host or Origin. AuthenticationError: no or a wrong key.
        """
        headers = Headers(scope=scope)
        self._check_host(headers.getlist("host"))
        self._check_origin(scope, headers)
        self._check_key(scope, headers)

    def _check_host(self, values: list[str]) -> None:
        if len(values) != 1:
            raise AccessError("the request must have one Host header")
        name = _split_host(values[0])
        if is_loopback(name) or name in self.names or name == self.settings.host.lower():
            return
        if not self.on_loopback:
            try:
                ipaddress.ip_address(name)
                return  # an address cannot be rebound, only a name can
            except ValueError:
                pass
        raise AccessError("the Host header does not name this server", remedy="add the name to allowed_hosts if it is yours")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None:
            own = f"{scope['scheme']}://{headers['host']}".lower()
            if origin.lower() != own and origin.lower() not in self.origins:
                raise AccessError(OTHER_ORIGIN, remedy="add the origin to allowed_origins if it is yours")
            return
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return
        link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and scope["path"] in self.page
        if not link:
            raise AccessError(OTHER_ORIGIN)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if self.key is None or scope["path"] in self.public or (scope["method"] == "OPTIONS" and "origin" in headers):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.key.encode()):
            raise AuthenticationError("the API key is missing or wrong", remedy="send Authorization: Bearer KEY")


class Guard:
    """ASGI middleware, the outermost: gate, body limit, response headers, and the count of every request."""

    def __init__(self, app: ASGIApp, gate: Gate, count: Callable[[str, int, float], None]) -> None:
        """
        Args:
            count: gets (route, status, seconds) of every request.
        """
        self.app = app
        self.gate = gate
        self.count = count
        self.limit = gate.settings.max_body_bytes
        self.buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message)
            await send(message)

        try:
            await self._handle(scope, receive, answer)
        except Exception as error:
            if status:
                raise  # too late for a reply: the connection is closed
            await errors.response(error)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.count(route, status or errors.CLIENT_CLOSED_REQUEST, time.monotonic() - started)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0
        try:
            self.gate.check(scope)
            chunks: list[bytes] = []
            try:
                async with asyncio.timeout(self.gate.settings.request_timeout):
                    self._check_length(scope)
                    while True:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return
                        chunk = message.get("body", b"")
                        held += len(chunk)
                        self.buffered += len(chunk)
                        chunks.append(chunk)
                        self._check_size(held)
                        if not message.get("more_body", False):
                            break
            except TimeoutError:
                raise TimeoutError_(f"the body did not arrive within {self.gate.settings.request_timeout:g} s") from None
            body = b"".join(chunks)
            chunks.clear()
        except LeanStreamError as error:
            self.buffered -= held
            reply = errors.response(error)
            reply.headers["Connection"] = "close"  # what is still coming is not read
            await reply(scope, receive, send)
            return
        try:
            await self.app(scope, _replayed(body, receive), send)
        finally:
            self.buffered -= held

    def _check_length(self, scope: Scope) -> None:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self.limit:
            self._refuse_size(int(length))

    def _check_size(self, held: int) -> None:
        if held > self.limit:
            self._refuse_size(held)
        if self.buffered > BUFFERED_BODIES * self.limit:
            raise QueueFullError("too many large requests at once", remedy="try again later")

    def _refuse_size(self, size: int) -> None:
        raise BodyTooLargeError(f"the body may have {self.limit} bytes", used=size, limit=self.limit, remedy="raise max_body_bytes")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what the connection says."""
    rest: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return rest.pop() if rest else await receive()

    return replay


def _add_headers(message: Message) -> None:
    headers = MutableHeaders(scope=message)
    headers.setdefault("X-Request-Id", uuid.uuid4().hex)
    headers.setdefault("X-Content-Type-Options", "nosniff")
    headers.setdefault("X-Frame-Options", "DENY")
    headers.setdefault("Referrer-Policy", "no-referrer")
    headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
    headers.setdefault("Cache-Control", "no-store")
    if headers.get("content-type", "").startswith("text/html"):
        headers.setdefault("Content-Security-Policy", POLICY)
