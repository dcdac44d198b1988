"""Who gets in: Host and Origin, the key, sizes, pace, and paths of the page."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CHAT, WAIT_S, Running, received, serving, until

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]
SECRET = "the key of the test"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "page"
    (folder / "sub").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>page</title>")
    (folder / "sub" / "app.js").write_text("1")
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    return folder


@pytest.fixture(scope="module")
def server(tiny: Tiny, page: Path, native: None) -> Iterator[Running]:
    with serving(tiny("moe_qwen3"), app_options={"page": page}, max_body_bytes=100_000, request_timeout=1.5) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tiny: Tiny, page: Path, native: None) -> Iterator[Running]:
    with serving(tiny("moe_qwen3"), app_options={"page": page}, api_key=SECRET, allowed_origins=["https://ours.example"]) as running:
        yield running


def error_of(reply: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= set(found)
    return found


# ---- where a request comes from and goes to -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]", "a@localhost", ""],
)
def test_dns_rebinding_is_refused(server: Running, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        reply = server.http.get(path, headers={"Host": host})
        assert (reply.status_code, error_of(reply)["code"]) == (403, "forbidden")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:1", "[::1]:80", "LOCALHOST.", "127.8.8.8"])
def test_loopback_names_are_served(server: Running, host: str) -> None:
    assert server.http.get("/health", headers={"Host": host}).status_code == 200


def test_a_request_without_or_with_two_hosts_is_refused(server: Running) -> None:
    assert b" 403 " in server.raw(b"GET /health HTTP/1.0\r\n\r\n").splitlines()[0]
    two = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
    assert two.splitlines()[0].split()[1] in (b"400", b"403")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_other_origins_are_refused(server: Running, origin: str) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("OPTIONS", "/v1/chat/completions"),
        ("POST", "/v1/stream/config"),
    ):
        reply = server.http.request(method, path, headers={"Origin": origin, "Content-Type": "text/plain"}, content=json.dumps(CHAT))
        assert (reply.status_code, error_of(reply)["code"]) == (403, "forbidden")
        assert "access-control-allow-origin" not in reply.headers


def test_the_own_origin_is_served(server: Running) -> None:
    assert server.http.get("/v1/models", headers={"Origin": server.url}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_that_a_foreign_page_makes_without_origin_are_refused(server: Running, site: str) -> None:
    image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
    assert server.http.get("/v1/models", headers=image).status_code == 403
    assert server.http.get("/sub/app.js", headers=image).status_code == 403
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
    assert server.http.get("/", headers=link).status_code == 200
    assert server.http.get("/v1/models", headers=link).status_code == 403


def test_an_allowed_origin_may_call_and_preflight(locked: Running) -> None:
    ours = {"Origin": "https://ours.example"}
    preflight = locked.http.options("/v1/models", headers={**ours, "Access-Control-Request-Method": "GET", "Authorization": ""})
    assert preflight.headers["access-control-allow-origin"] == ours["Origin"]
    assert locked.http.get("/v1/models", headers=ours).headers["access-control-allow-origin"] == ours["Origin"]
    assert locked.http.get("/v1/models", headers={"Origin": "https://theirs.example"}).status_code == 403


# ---- the key ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Basic {SECRET}", f"Bearer {SECRET}x", SECRET])
def test_without_the_key_only_page_and_health_are_served(locked: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    with httpx.Client(base_url=locked.url) as stranger:
        for path in ("/v1/models", "/metrics", "/v1/stream/stats", "/v1/stream/config", "/openapi.json", "/nothing"):
            reply = stranger.get(path, headers=headers)
            assert (reply.status_code, error_of(reply)["type"]) == (401, "authentication_error")
        assert stranger.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 401
        assert stranger.get("/", headers=headers).status_code == 200
        assert stranger.get("/health", headers=headers).status_code == 200
    assert locked.http.get("/v1/models").status_code == 200


def test_listening_to_the_network_needs_a_key() -> None:
    from leanstream_gguf import ArgumentError
    from leanstream_gguf.server import ServerSettings, bind, create_app

    for address in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        for use in (bind, create_app):
            with pytest.raises(ArgumentError, match="API key"):
                use(ServerSettings(host=address, port=0))
    with pytest.raises(ArgumentError, match="empty"):
        create_app(ServerSettings(api_key=" "))


def test_on_the_network_addresses_are_served_and_unknown_names_are_not() -> None:
    with serving(host="0.0.0.0", api_key=SECRET, allowed_hosts=["box.example"]) as running:
        local = f"http://127.0.0.1:{running.port}/health"
        for host, status in (("192.168.1.2:80", 503), ("box.example", 503), ("evil.example", 403)):  # 503: no model
            assert httpx.get(local, headers={"Host": host}).status_code == status


# ---- sizes and pace -----------------------------------------------------------------------------------------------------


def test_a_body_of_100_mb_is_refused_unread(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000000\r\n\r\n"
    assert b" 413 " in server.raw(head).splitlines()[0]


def test_a_chunked_body_is_cut_off_at_the_limit(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head)
        try:
            while sent < 100_000_000:
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        except OSError:
            pass
        assert b" 413 " in received(connection) or sent < 100_000_000
    assert sent < 20_000_000
    assert server.app.state.sampler.requests["other", 413] >= 1
    assert server.chat().status_code == 200


def test_large_bodies_at_once_share_a_bound(server: Running) -> None:
    """Bodies that are still arriving may hold four times the limit together; the fifth is told to wait."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000\r\n\r\n" + b" " * 98000
    holders = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(6)]
    try:
        for holder in holders:
            holder.sendall(head)
        replies = [received(holder) for holder in holders]  # the others run into the timeout
    finally:
        for holder in holders:
            holder.close()
    first = [reply.splitlines()[0].split()[1] for reply in replies]
    assert b"429" in first and set(first) <= {b"429", b"408"}


def test_slow_heads_and_slow_bodies_are_cut_off(server: Running) -> None:
    sent: list[int] = []

    def trickle(connection: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # cut off
            for n, byte in enumerate(data):
                connection.sendall(bytes([byte]))
                sent[:] = [n + 1]
                time.sleep(0.05)

    slow_head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1000
    slow_body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000\r\n\r\n"
    for at_once, data, expected in ((b"", slow_head, b""), (slow_body, b"a" * 1000, b" 408 ")):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(at_once)
            sender = threading.Thread(target=trickle, args=(connection, data))
            sender.start()
            assert expected in received(connection, WAIT_S)
            sender.join()
            assert sent[0] < len(data), "all of it was waited for"
    assert server.chat().status_code == 200


def test_connections_are_bounded(tiny: Tiny) -> None:
    with serving(max_connections=5) as running:
        idle = [socket.create_connection(("127.0.0.1", running.port), 10) for _ in range(12)]
        try:
            until(lambda: sum(_is_closed(one) for one in idle) >= 7, "the connections above the bound are closed")
        finally:
            for one in idle:
                one.close()
        until(lambda: running.http.get("/health").status_code == 503, "there is room again")


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_huge_head_is_refused(server: Running) -> None:
    reply = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n")
    assert reply == b"" or reply.splitlines()[0].split()[1].startswith(b"4")
    assert server.http.get("/health").status_code == 200


# ---- the page -----------------------------------------------------------------------------------------------------------


def test_the_page_is_served_with_a_policy(server: Running) -> None:
    reply = server.http.get("/")
    assert "page" in reply.text and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    assert (reply.headers["x-content-type-options"], reply.headers["x-frame-options"]) == ("nosniff", "DENY")
    assert server.http.get("/", headers={"If-None-Match": reply.headers["etag"]}).status_code == 304
    assert server.http.get("/sub/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/sub/../../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/..%5csecret.txt",
        "/%252e%252e/secret.txt",
        "/link.txt",
        "//etc/passwd",
        "/etc/passwd",
        "/sub",
        "/sub/",
        "/index.html/../../secret.txt",
        "/%00",
        "/.git/config",
        "/v1/models/..%2f..%2fsecret.txt",
    ],
)
def test_no_other_path_can_be_read(server: Running, path: str) -> None:
    reply = server.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert reply.splitlines()[0].split()[1] in (b"404", b"400"), reply[:200]
    assert b"secret\n" not in reply and b"root:" not in reply


def test_requests_cannot_make_the_server_read_files_or_call_others(server: Running) -> None:
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/x.png", "/etc/passwd"):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        reply = server.chat(messages=[{"role": "user", "content": content}])
        assert (reply.status_code, error_of(reply)["type"]) == (400, "invalid_request_error")
    outside = {"type": "object", "properties": {"a": {"$ref": "https://127.0.0.1:1/x"}}}
    schema = server.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": outside}}, max_tokens=4)
    assert schema.status_code in (200, 400)
    assert server.http.post("/v1/stream/load", json={"model": "/etc/passwd"}).status_code == 404
