"""Loading in the background, switching, failing, and the end: as a process, with signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CHAT, LETTERS, serving, until

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]


# ---- loading ------------------------------------------------------------------------------------------------------------


def test_while_it_loads_health_says_so_and_requests_wait(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from leanstream_gguf.server import host

    gate, load = threading.Event(), host.load

    def slow(*args: Any) -> Any:
        gate.wait(60)
        return load(*args)

    monkeypatch.setattr(host, "load", slow)
    with serving(tiny("moe_qwen3"), model_alias="toy", wait=False) as running:
        reply = until(lambda: r if (r := running.http.get("/health")).json()["status"] == "loading" else None, "it loads")
        assert (reply.status_code, reply.json()["model"]) == (503, "toy")
        assert running.http.get("/v1/models").json()["data"][0]["state"] == "loading"
        assert running.stats()["load"]["phase"] == "opening"
        assert running.http.post("/v1/stream/config", json={"budget": "full"}).json()["error"]["code"] == "state"
        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(running.chat()))
        asking.start()
        until(lambda: running.host.queue.waiting, "the request waits")
        gate.set()
        asking.join()
        assert replies[0].status_code == 200
        assert running.http.get("/health").json()["status"] == "ready"


def test_progress_counts_the_bytes_that_are_read(tiny: Tiny) -> None:
    from leanstream_gguf.server.host import Loading

    with serving(tiny("dense_untied"), memory_budget="full") as running:
        loading = Loading("toy", llm=running.host.llm)
        report = loading.progress()
        assert report["total_bytes"] > 0 and report["phase"] == "reading weights"
        assert report["progress"] == pytest.approx(1, abs=0.05)


def test_switching_frees_one_model_and_loads_the_other(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3"), tiny("dense_untied")) as running:
        assert [item["id"] for item in running.http.get("/v1/models").json()["data"]] == ["moe_qwen3", "dense_untied"]
        first = running.host.llm
        by_request = running.chat(model="dense_untied").json()  # asking for a model loads it, as in llama_cpp.server
        assert by_request["model"] == "dense_untied" and running.host.alias == "dense_untied"
        assert not first.stream.active
        assert running.http.post("/v1/stream/load", json={"model": "moe_qwen3"}).status_code == 202
        until(lambda: running.stats()["model"] == "moe_qwen3" and running.stats()["state"] == "ready", "it is loaded")
        unknown = running.chat(model="gpt-4")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert running.http.post("/v1/stream/unload").json() == {"state": "empty"}
        assert running.stats()["memory"] is None
        assert running.chat(model="moe_qwen3").status_code == 200


def test_a_single_model_answers_to_any_name(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3")) as running:
        assert running.chat(model="gpt-3.5-turbo").json()["model"] == "moe_qwen3"


def test_a_model_that_cannot_be_loaded_is_a_typed_error_and_can_be_retried(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.gguf"
    whole = tiny("moe_qwen3").read_bytes()
    broken.write_bytes(whole[: len(whole) * 3 // 4])
    with serving(broken, tiny("dense_untied")) as running:
        health = running.http.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["error"]["code"]) == (503, "failed", "truncated")
        assert "broken cannot be loaded" in caplog.text  # whoever started it sees it on stderr
        reply = running.chat(model="broken")
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "truncated")
        assert running.chat(model="dense_untied").status_code == 200  # the others work
        broken.write_bytes(whole)
        running.http.post("/v1/stream/load", json={"model": "broken"})
        until(lambda: running.stats()["state"] == "ready" and running.stats()["model"] == "broken", "it is loaded")
        assert running.chat(model="broken").status_code == 200


def test_a_budget_that_is_too_small_names_the_least_and_another_can_be_given(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3"), memory_budget=1 << 20) as running:
        error = running.stats()["error"]
        assert error["code"] == "budget" and error["limit"] > 1 << 20
        running.http.post("/v1/stream/load", json={"model": "moe_qwen3", "memory_budget": error["limit"] + (8 << 20)})
        until(lambda: running.stats()["state"] == "ready", "it is loaded")
        assert running.chat().status_code == 200


def test_a_failed_read_is_an_error_of_its_type_and_shows_as_degraded(tiny: Tiny, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(tiny("dense_untied").read_bytes())
    with serving(copy, memory_budget="min") as running:
        assert running.chat().status_code == 200
        with copy.open("r+b") as file:
            file.truncate(copy.stat().st_size // 8)
        reply = running.chat(messages=[{"role": "user", "content": "something else"}])
        assert reply.status_code == 503 and reply.json()["error"]["code"] in ("read", "changed")
        health = running.http.get("/health").json()
        assert health["status"] == "degraded" and "read failed" in health["reason"]
        streamed = running.chat(stream=True)
        assert streamed.status_code == 503


# ---- turns, as a unit ---------------------------------------------------------------------------------------------------


def test_turns_alternate_between_clients_and_keep_each_clients_order() -> None:
    from leanstream_gguf.server.queueing import FairQueue

    async def run() -> list[str]:
        queue, order = FairQueue(100), []

        async def use(client: str, name: str) -> None:
            async with queue.turn(client):
                order.append(name)
                await asyncio.sleep(0)

        async with queue.turn("holder"):
            tasks = [asyncio.create_task(use("a", f"a{i}")) for i in range(4)]
            tasks += [asyncio.create_task(use("b", f"b{i}")) for i in range(2)] + [asyncio.create_task(use("c", "c0"))]
            await asyncio.sleep(0.01)
            assert queue.waiting == 7
            tasks[1].cancel()
            await asyncio.sleep(0.01)
            assert queue.waiting == 6
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (queue.running, queue.waiting) == (0, 0)
        return order

    assert asyncio.run(run()) == ["a0", "b0", "c0", "a2", "b1", "a3"]


def test_a_turn_that_arrives_with_a_cancellation_is_handed_on() -> None:
    from leanstream_gguf.server.queueing import FairQueue

    async def run() -> None:
        queue = FairQueue(10)

        async def use() -> None:
            async with queue.turn("a"):
                await asyncio.sleep(0)

        async with queue.turn("holder"):
            first, second = asyncio.create_task(use()), asyncio.create_task(use())
            await asyncio.sleep(0.01)
        first.cancel()  # its turn is set, it has not run yet
        await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 5)
        assert (queue.running, queue.waiting) == (0, 0)

    asyncio.run(run())


# ---- the command and its end --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(*arguments: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`leanstream serve` on a free port, and its URL."""
    line = [sys.executable, "-m", "leanstream_gguf", "serve", "--port", "0", "--json", *map(str, arguments)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def ready(url: str) -> None:
    def is_ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    until(is_ready, "the server is ready")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM there")
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_running_answer_is_finished_and_others_are_refused(tiny: Tiny, by: signal.Signals) -> None:
    with command("-m", tiny("moe_qwen3"), "--memory", "full", "--n_ctx", "256") as (process, url):
        ready(url)
        body = {**CHAT, "max_tokens": 60, "stream": True, "grammar": LETTERS}
        with httpx.Client(base_url=url, timeout=60) as http, http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(by)
            text = "\n".join(lines)
        assert text.rstrip().endswith("data: [DONE]")
        assert '"finish_reason": "length"' in text or '"finish_reason": "stop"' in text
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM there")
def test_an_answer_that_takes_too_long_is_cut_off(tiny: Tiny) -> None:
    with command("-m", tiny("moe_qwen3"), "--n_ctx", "4096", "--shutdown_timeout", "1") as (process, url):
        ready(url)
        with httpx.Client(base_url=url, timeout=60) as http, contextlib.suppress(httpx.HTTPError):
            body = {**CHAT, "max_tokens": 4000, "n": 16, "stream": True, "grammar": LETTERS}
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                next(reply.iter_raw())
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--host", "0.0.0.0"], 2, "API key"),
        (["--memory", "much"], 2, "memory_budget"),
        (["--policy", "fifo"], 2, "fifo"),
        (["--config_file", "nowhere.yaml"], 3, "nowhere.yaml"),
        (["--host", "203.0.113.7", "--api_key", "x"], 2, "cannot listen"),
        (["--ssl_certfile", "nowhere.pem"], 2, "nowhere.pem"),
        (["--ssl_certfile", __file__, "--ssl_keyfile", __file__], 2, "cannot use the certificate"),
        (["--ssl_keyfile", __file__], 2, "ssl_certfile"),
    ],
)
def test_settings_that_cannot_work_end_with_one_line(
    tiny: Tiny, arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from leanstream_gguf import cli

    assert cli.main(["serve", "-m", str(tiny("moe_qwen3")), "--port", "0", *arguments]) == status
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and text in error


def test_a_port_in_use_is_a_typed_error() -> None:
    from leanstream_gguf import ArgumentError
    from leanstream_gguf.server import ServerSettings, bind

    with bind(ServerSettings(port=0)) as listener, pytest.raises(ArgumentError, match="choose another"):
        bind(ServerSettings(port=listener.getsockname()[1]))
