"""The server as its clients see it: OpenAI's endpoints, health, metrics, live settings, loading and the end."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lean_files import make_lean
from serving import CHAT, LETTERS, Running, held, serving, until
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


def test_policy_and_cache_change_live(server: Running) -> None:
    reply = server.http.post("/v1/stream/config", json={"policy": "slru", "policy_params": {"protected_share": 0.5}}).json()
    assert (reply["policy"]["name"], reply["policy"]["params"]) == ("slru", {"protected_share": 0.5})
    assert server.http.post("/v1/stream/config", json={"policy": "lfu"}).json()["policy"] == {
        **reply["policy"],
        "name": "lfu",
        "params": {},
    }
    assert server.chat().status_code == 200


def test_looking_ahead_changes_live_and_changes_no_word(server: Running) -> None:
    expected = server.text(max_tokens=40)
    assert server.http.post("/v1/stream/config", json={"depth": 0, "stages": 1}).json()["speculation"]["depth"] == 0
    assert server.text(max_tokens=40) == expected
    assert server.http.post("/v1/stream/config", json={"depth": 99}).status_code == 400
    assert server.http.post("/v1/stream/config", json={"depth": "auto"}).json()["speculation"]["depth"] is None
    assert server.text(max_tokens=40) == expected


def test_what_a_file_offers_is_listed_with_its_measured_cost() -> None:
    from leanstream_gguf.server.fidelity import choices

    plain = choices(None, {})
    assert [(item["name"], item["exact"], item["quality"]) for item in plain] == [("exact", True, None)]
    record = {
        "noise_floor": 4e-4,
        "n_tokens": 4096,
        "faithful": {"kl": 5e-4, "perplexity_change": 0.002, "share_fired": 0.05, "within_noise_floor": False},
        "settings": [{"max_kl": 0.01, "kl": 0.009, "perplexity_change": 0.01, "share": 0.1, "recall": 0.9, "thresholds": {"0": 1.0}}],
    }
    metadata = {"leanstream.calibration": json.dumps(record)}
    (faithful,) = choices({"layout": "faithful", "thresholds": []}, metadata)
    assert (faithful["name"], faithful["quality"]["kl"], faithful["quality"]["noise_floor"]) == ("faithful", 5e-4, 4e-4)
    lean = {"layout": "exact", "thresholds": [{"max_kl": 0.0099999998, "kl": 0.009}, {"max_kl": 0.5, "kl": 0.3}]}
    _, first, second = choices(lean, metadata)
    assert (first["name"], first["max_kl"], first["quality"]["perplexity_change"]) == ("threshold", 0.0099999998, 0.01)
    assert second["quality"] == {"kl": 0.3, "noise_floor": 4e-4, "n_tokens": 4096}
    assert choices(lean, {"leanstream.calibration": "no JSON"})[1]["quality"]["kl"] == 0.009


def test_fidelity_is_switched_while_the_model_runs(tiny: Tiny, tmp_path: Path) -> None:
    path = make_lean(tiny("dense_arcee"), tmp_path / "lean.gguf", thresholds=((0.01, 1e-6), (0.5, 0.3)))
    with serving(path, model_alias="lean") as running:
        exact = running.text(max_tokens=40)
        loaded = running.host.llm

        def switch(**change: Any) -> dict[str, Any]:
            reply = running.http.post("/v1/stream/config", json=change)
            found: dict[str, Any] = running.http.get("/v1/stream/config").json()
            assert reply.status_code == 200 and reply.json()["fidelity"] == found["fidelity"], reply.text
            assert running.host.llm is loaded, "the model was loaded again"
            return found

        offered = switch()["fidelity"]["available"]
        assert [item["name"] for item in offered] == ["exact", "threshold", "threshold"]
        config = switch(thresholds={"max_kl": 0.5})
        assert (config["fidelity"]["name"], config["fidelity"]["live"]) == ("threshold", True)
        assert list(config["thresholds"]["values"].values()) == pytest.approx([0.3] * len(config["thresholds"]["values"]))
        assert loaded is not None and loaded.stream.fidelity()["name"] == "threshold" and running.chat().status_code == 200
        assert switch(fidelity="exact")["fidelity"] == {"name": "exact", "max_kl": None, "available": offered, "live": True}
        assert running.text(max_tokens=40) == exact
        for wrong in ({"fidelity": "faithful"}, {"thresholds": {"max_kl": 0.001}}):
            refused = running.http.post("/v1/stream/config", json=wrong)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unsupported")


def test_stats_stream_and_history_show_the_same_object(server: Running) -> None:
    with server.http.stream("GET", "/v1/stream/events?interval=0.1") as reply:
        lines = (line for line in reply.iter_lines() if line)
        first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
    assert set(first) == set(second) == set(server.stats())
    assert second["sequence"] > first["sequence"]
    assert first["memory"]["total_bytes"] <= first["budget_bytes"]
    samples = server.http.get("/v1/stream/history").json()["samples"]
    assert samples and set(samples[-1]) == set(first)


def test_rates_are_those_of_the_answer(server: Running) -> None:
    seen: list[dict[str, Any]] = []
    worker = threading.Thread(target=lambda: server.text(max_tokens=240, n=3, repeat_penalty=1.0))
    worker.start()
    while worker.is_alive():
        seen.append(server.stats())
        worker.join(0.2)
    busy = [item for item in seen if item["queue"]["running"] and item["tokens_per_second"]]
    assert busy and all(0 < item["tokens_per_second"] < 1e5 for item in busy)
    assert any(item["hit_ratio"] is not None and 0 <= item["hit_ratio"] <= 1 for item in busy)
    assert any(item["read_bytes_per_second"] > 0 for item in busy)


# ---- what llama-cpp-python can do, and OpenAI's clients expect ----------------------------------------------------------


def test_several_answers_and_prompts(server: Running) -> None:
    chat = server.chat(n=3, temperature=1.5, seed=5, max_tokens=6).json()
    assert [choice["index"] for choice in chat["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in chat["choices"]]
    assert len(set(texts)) > 1
    again = server.chat(temperature=1.5, seed=6, max_tokens=6).json()
    assert again["choices"][0]["message"]["content"] == texts[1]  # each choice has the next seed
    body = {"prompt": ["the quick", "brown fox"], "n": 2, "max_tokens": 3, "temperature": 0}
    replies = server.http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in replies["choices"]] == [0, 1, 2, 3]
    assert replies["usage"]["completion_tokens"] <= 12
    chunks = events(server.http.post("/v1/completions", json={**body, "stream": True}).text)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}


def test_grammar_schema_and_tools_shape_the_answer(server: Running) -> None:
    assert server.text(grammar='root ::= "yes" | "no"') in ("yes", "no")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for form in ({"type": "json_object", "schema": schema}, {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}):
        assert isinstance(json.loads(server.text(response_format=form, max_tokens=60))["ok"], bool)
    tool = {"type": "function", "function": {"name": "set", "description": "sets", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "set"}}
    message = server.chat(tools=[tool], tool_choice=choice, max_tokens=60).json()["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    call = message["message"]["tool_calls"][0]["function"]
    assert call["name"] == "set" and isinstance(json.loads(call["arguments"])["ok"], bool)
    streamed_calls = events(server.chat(tools=[tool], tool_choice=choice, max_tokens=60, stream=True).text)
    parts = [delta["tool_calls"][0] for chunk in streamed_calls if (delta := chunk["choices"][0]["delta"]).get("tool_calls")]
    assert "".join(part["function"]["arguments"] for part in parts) == call["arguments"]


def test_messages_as_todays_clients_send_them(server: Running) -> None:
    parts = [{"type": "text", "text": "the quick "}, {"type": "text", "text": "brown fox"}]
    plain = server.text()
    assert server.text(messages=[{"role": "user", "content": parts}]) == plain
    assert server.text(max_tokens=None, max_completion_tokens=8) == plain
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert server.chat(messages=history).status_code == 200


def test_extras_go_there_and_back(server: Running) -> None:
    tokens = server.http.post("/extras/tokenize", json={"input": "the quick brown"}).json()["tokens"]
    assert server.http.post("/extras/tokenize/count", json={"input": "the quick brown"}).json() == {"count": len(tokens)}
    assert "the quick brown" in server.http.post("/extras/detokenize", json={"tokens": tokens}).json()["text"]


def test_embeddings_are_one_vector_each(tiny: Tiny) -> None:
    with serving(tiny("dense_tied"), embedding=True) as running:
        texts = ["the quick brown fox", "reading files"]
        reply = running.http.post("/v1/embeddings", json={"input": texts}).json()
        vectors = [item["embedding"] for item in reply["data"]]
        assert [len(vector) for vector in vectors] == [running.host.llm.n_embd()] * 2
        assert vectors[0] != vectors[1] and sum(x * x for x in vectors[0]) == pytest.approx(1)
        vectors = [running.http.post("/v1/embeddings", json={"input": texts[0]}).json()["data"][0]["embedding"]]
        packed = running.http.post("/v1/embeddings", json={"input": texts[0], "encoding_format": "base64"}).json()
        data = base64.b64decode(packed["data"][0]["embedding"])
        assert struct.unpack(f"<{len(vectors[0])}f", data) == pytest.approx(vectors[0], abs=1e-6)
        before = running.text()  # the same model answers, too, before and after
        running.http.post("/v1/embeddings", json={"input": texts})
        assert running.text() == before


def test_embeddings_of_a_model_loaded_without_them(server: Running) -> None:
    reply = server.http.post("/v1/embeddings", json={"input": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "unsupported")


def test_logprobs_where_all_logits_are_kept(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3"), logits_all=True) as running:
        for stream in (False, True):
            reply = running.chat(logprobs=True, top_logprobs=2, stream=stream)
            parts = events(reply.text) if stream else [reply.json()]
            found = [entry for part in parts for entry in (part["choices"][0]["logprobs"] or {}).get("content", [])]
            assert found and all(entry["logprob"] <= 0 and entry["top_logprobs"] for entry in found)


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"chat_format": "nonsense"}, "argument"), ({"lora_path": "/nowhere"}, "unsupported"), ({"n_ctx": 7}, None)],
)
def test_settings_that_only_loading_can_refuse(tiny: Tiny, settings: dict[str, Any], code: str | None) -> None:
    with serving(tiny("moe_qwen3"), **settings) as running:
        error = running.stats()["error"]
        assert (error["code"] if error else None) == code
        assert running.chat().status_code == {"argument": 400, "unsupported": 422, None: 200}[code]


def test_a_vocabulary_alone_tokenizes_and_refuses_the_rest(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3"), vocab_only=True) as running:
        assert running.http.post("/extras/tokenize", json={"input": "the"}).json()["tokens"]
        assert running.chat().json()["error"]["code"] == "unsupported"
        assert running.http.get("/v1/stream/config").json()["active"] is False
        assert running.http.get("/health").status_code == 200


def test_an_unexpected_error_has_the_same_shape_and_gives_nothing_away(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from leanstream_gguf.server import generation

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a secret")

    for name in ("complete", "stream"):
        monkeypatch.setattr(generation, name, broken)
    for stream in (False, True):
        reply = server.chat(stream=stream)
        assert reply.status_code == 500
        assert reply.json()["error"] | {"message": ""} == {"message": "", "type": "server_error", "param": None, "code": "internal"}
        assert "secret" not in reply.text and "x-request-id" in reply.headers


def test_a_body_of_several_mb_is_served(server: Running) -> None:
    reply = server.http.post("/extras/tokenize/count", json={"input": "the quick " * 200_000}, timeout=120)
    assert reply.status_code == 200 and reply.json()["count"] > 200_000


# ---- turns, cancellation ------------------------------------------------------------------------------------------------

LONG = {"max_tokens": 240, "n": 16, "repeat_penalty": 1.0, "stream": True, "grammar": LETTERS}


def head_of(data: bytes, path: str = "/v1/chat/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def watch_cancel(monkeypatch: pytest.MonkeyPatch, server: Running) -> list[int]:
    """Tokens generated by the time each cancellation reached the model."""
    from leanstream_gguf.server.llama import Job

    at: list[int] = []
    cancel = Job.cancel

    def recorded(job: Job) -> None:
        at.append(server.host.llm.meter.completion_tokens)
        cancel(job)

    monkeypatch.setattr(Job, "cancel", recorded)
    return at


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation_within_a_token(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    at = watch_cancel(monkeypatch, server)
    meter = server.host.llm.meter
    start, cancelled = meter.completion_tokens, server.stats()["totals"]["cancelled"]
    data = json.dumps({**CHAT, **LONG, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head_of(data) + data)
        until(lambda: meter.completion_tokens > start + 5, "it generates")
    until(lambda: not server.host.queue.running, "the turn ends")
    assert len(at) == 1
    assert meter.completion_tokens - at[0] <= 1
    assert meter.completion_tokens - start < 16 * 240
    assert server.stats()["totals"]["cancelled"] == cancelled + 1
    assert server.text() == server.text()


def test_leaving_during_a_long_prompt_does_not_wait_for_its_end(tiny: Tiny) -> None:
    with serving(tiny("dense_untied"), n_ctx=4096, n_batch=4096, n_ubatch=4096) as running:
        stop = running.host.llm.stop
        data = json.dumps({"prompt": "word " * 1200, "max_tokens": 1}).encode()
        n_graphs = running.host.llm.stream.stats().n_graphs
        with socket.create_connection(("127.0.0.1", running.port), 10) as connection:
            connection.sendall(head_of(data, "/v1/completions") + data)
            until(lambda: running.host.queue.running, "it has its turn")
        until(lambda: not running.host.queue.running, "the turn ends")
        assert running.host.llm.meter.completion_tokens == 0 and not stop.is_set
        assert running.host.llm.stream.stats().n_graphs - n_graphs <= 1
        assert running.chat().status_code == 200


def test_clients_take_turns(server: Running) -> None:
    """One client with many requests does not keep another waiting behind all of them."""
    done: list[str] = []

    def ask(user: str) -> None:
        server.chat(user=user, max_tokens=8)
        done.append(user)

    blocker = threading.Thread(target=lambda: server.chat(user="first"))
    many = [threading.Thread(target=ask, args=("greedy",)) for _ in range(6)]
    one = threading.Thread(target=ask, args=("modest",))
    with held(server):
        blocker.start()
        until(lambda: server.host.queue.running, "the model is busy")
        for thread in many:
            thread.start()
        until(lambda: server.host.queue.waiting == 6, "they wait")
        one.start()
        until(lambda: server.host.queue.waiting == 7, "it waits too")
    for thread in (blocker, *many, one):
        thread.join()
    assert done.index("modest") <= 1


def test_a_full_queue_is_told_to_come_back(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3"), max_queue=1) as running:
        waiting = [threading.Thread(target=running.chat) for _ in range(2)]
        with held(running):
            for n, thread in enumerate(waiting):
                thread.start()
                until(lambda n=n: running.host.queue.running + running.host.queue.waiting == n + 1, "it waits")
            reply = running.chat()
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in reply.headers
        for thread in waiting:
            thread.join()


def test_a_client_that_reads_nothing_does_not_hold_the_model(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from leanstream_gguf.server import sse

    monkeypatch.setattr(sse, "SEND_SECONDS", 600.0)  # it is not dropped for that before the test has looked
    with serving(tiny("moe_qwen3"), model_alias="x" * 40_000) as running:  # every chunk names it: more than sockets hold
        data = json.dumps({**CHAT, "max_tokens": 200, "stream": True, "grammar": LETTERS}).encode()
        counts = running.app.state.sampler.requests
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(head_of(data) + data)
            until(lambda: running.host.llm.meter.completion_tokens, "it has its turn")
            assert running.chat(user="other").status_code == 200  # after its turn, which its pace does not lengthen
            until(lambda: counts["/v1/chat/completions", 200], "the other's is counted, which comes after its last byte")
            assert counts["/v1/chat/completions", 200] == 1  # the first still waits to be read


def test_interrupt_requests_works_as_in_llama_cpp_server(tiny: Tiny) -> None:
    with serving(tiny("moe_qwen3"), interrupt_requests=True) as running:
        replies: list[Any] = []
        first = threading.Thread(target=lambda: replies.append(running.chat(**LONG | {"max_tokens": 50})))
        first.start()
        until(lambda: running.host.queue.running, "the model is busy")
        assert running.chat(user="other").status_code == 200
        first.join()
        assert replies[0].text.rstrip().endswith("data: [DONE]")
        assert running.stats()["totals"]["completion_tokens"] < 16 * 50


def test_a_server_without_a_model_says_so() -> None:
    with serving() as empty:
        assert empty.http.get("/health").json()["status"] == "empty"
        reply = empty.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_model")
