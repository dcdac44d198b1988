"""The server as its clients see it: OpenAI's endpoints, health, metrics, live settings, loading and the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import CHAT, Running, serving, until
from support import streamed

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def server(tiny: Tiny, native: None) -> Iterator[Running]:
    with serving(tiny("moe_qwen3"), model_alias="toy") as running:
        yield running


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]


# ---- OpenAI's endpoints -------------------------------------------------------------------------------------------------


def test_chat_gives_what_the_class_gives(server: Running, tiny: Tiny) -> None:
    reply = server.chat().json()
    with streamed(tiny("moe_qwen3"), "min", logits_all=False) as llm:
        expected = llm.create_chat_completion(CHAT["messages"], temperature=0, max_tokens=8, repeat_penalty=1.1)
    assert reply["choices"][0]["message"] == expected["choices"][0]["message"]
    assert reply["usage"] == expected["usage"]
    assert reply["model"] == "toy"


def test_a_stream_holds_the_same_text_and_its_usage(server: Running) -> None:
    whole = server.chat().json()
    reply = server.chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.rstrip().endswith("data: [DONE]")
    chunks = events(reply.text)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_health_metrics_and_models(server: Running) -> None:
    server.chat()
    assert server.http.get("/health").json() == {"status": "ready", "reason": None, "model": "toy"}
    listed = server.http.get("/v1/models").json()["data"]
    assert [(item["id"], item["loaded"]) for item in listed] == [("toy", True)]
    text = server.http.get("/metrics").text
    for name in (
        "leanstream_completion_tokens_total",
        "leanstream_time_to_first_token_seconds_bucket",
        'leanstream_memory_bytes{purpose="kv"}',
        "leanstream_stream_hit_ratio",
        "leanstream_stream_read_bandwidth",
        "leanstream_queue_waiting",
    ):
        assert any(line.startswith(name) for line in text.splitlines()), name


def test_the_budget_moves_while_an_answer_is_written_and_changes_no_word(server: Running) -> None:
    settings = {"max_tokens": 200, "repeat_penalty": 1.0}
    expected = server.text(**settings)
    config = server.http.get("/v1/stream/config").json()["budget"]
    lowest, highest = config["minimum_bytes"], config["full_bytes"]
    moved: list[int] = []

    def move() -> None:
        until(lambda: server.stats()["queue"]["running"], "the answer begins")
        for budget in (highest, lowest, (lowest + highest) // 2, lowest):
            reply = server.http.post("/v1/stream/config", json={"budget": budget})
            moved.append(reply.json()["budget"]["bytes"])

    mover = threading.Thread(target=move)
    mover.start()
    assert server.text(**settings) == expected
    mover.join()
    assert moved == [highest, lowest, (lowest + highest) // 2, lowest]


def test_a_server_without_a_model_says_so() -> None:
    with serving() as empty:
        assert empty.http.get("/health").json()["status"] == "empty"
        reply = empty.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_model")
