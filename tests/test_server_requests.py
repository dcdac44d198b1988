"""Malformed requests: made from the server's own OpenAPI schema, each is answered 4xx and leaves it serving."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import CHAT, Running, serving

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "the quick", "max_tokens": 4},
    "/v1/embeddings": {"input": "the quick"},
    "/extras/tokenize": {"input": "the quick"},
    "/extras/tokenize/count": {"input": "the quick"},
    "/extras/detokenize": {"tokens": [20, 21]},
    "/v1/stream/config": {"policy": "lru"},
    "/v1/stream/load": {"model": "toy"},
}
SAMPLES: list[Any] = [
    *(None, True, -1, 10**30, -(10**30), 0.5, 1e300, "", "text", "\x00"),
    *([], [1], ["a", 1], [[]], {}, {"a": {}}, [None], {"type": "other"}),
]


@pytest.fixture(scope="module")
def server(tiny: Tiny, native: None) -> Iterator[Running]:
    with serving(tiny("moe_qwen3"), model_alias="toy", embedding=True, max_body_bytes=1_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def resolved(schema: dict[str, Any], node: Any) -> Any:
    while isinstance(node, dict) and "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        node = schema["components"]["schemas"][name]
    return node


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    return None


def may_accept(schema: dict[str, Any], node: Any, value: Any) -> bool:
    """Whether a lenient reader of the schema could take the value; False is a promise that it is malformed."""
    node = resolved(schema, node)
    for key in ("anyOf", "oneOf"):
        if key in node:
            return any(may_accept(schema, option, value) for option in node[key])
    if "enum" in node or "const" in node:
        return value in node.get("enum", [node.get("const")])
    kind = node.get("type")
    if kind == "null":
        return value is None
    if kind in ("integer", "number"):
        number = _number(value)
        if number is None or (kind == "integer" and not number.is_integer()):
            return False
        return node.get("minimum", -math.inf) <= number <= node.get("maximum", math.inf)
    if kind == "boolean":
        return isinstance(value, bool) or value in (0, 1, "true", "text")
    if kind == "string":
        return isinstance(value, str)
    if kind == "array":
        fits = isinstance(value, list) and node.get("minItems", 0) <= len(value) <= node.get("maxItems", 1 << 30)
        return fits and all(may_accept(schema, node.get("items", {}), item) for item in value)
    if kind == "object":
        return isinstance(value, dict) and all(name in value for name in node.get("required", ()))
    return True


def targets(schema: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """(path, field, its schema) of every JSON body the server takes."""
    found = []
    for path, methods in schema["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body:
            node = resolved(schema, body["content"]["application/json"]["schema"])
            found += [(path, name, field) for name, field in node["properties"].items()]
    return found


def assert_refused(reply: httpx.Response, what: Any) -> None:
    assert 400 <= reply.status_code < 500, f"{reply.status_code} for {what}: {reply.text[:300]}"
    assert set(reply.json()["error"]) >= {"message", "type", "param", "code"}


def test_every_body_of_the_schema_is_covered(schema: dict[str, Any]) -> None:
    assert {path for path, _, _ in targets(schema)} == set(VALID)


def test_200_wrong_fields_are_refused(server: Running, schema: dict[str, Any]) -> None:
    refused: list[Any] = []
    values = st.recursive(st.sampled_from(SAMPLES), lambda inner: st.lists(inner, max_size=2), max_leaves=3)

    @settings(max_examples=260, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32), among_others=st.booleans(), bad=values)
    def check(seed: int, among_others: bool, bad: Any) -> None:
        choices = [target for target in targets(schema) if not may_accept(schema, target[2], bad)]
        path, name, _ = random.Random(seed).choice(choices)
        body = {**VALID[path], name: bad}
        if among_others and "stream" not in path:
            body = {"user": "somebody", **body}
        assert_refused(server.http.post(path, json=body), (path, name, bad))
        refused.append((path, name, bad))

    check()
    assert len(refused) >= 200
    assert len({(path, name) for path, name, _ in refused}) > 40


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(sorted(VALID)), cut=st.floats(0, 0.98), junk=st.binary(max_size=12), where=st.floats(0, 1))
def test_broken_json_is_refused(server: Running, path: str, cut: float, junk: bytes, where: float) -> None:
    whole = json.dumps(VALID[path]).encode()
    short = whole[: int(len(whole) * cut)]
    at = int(len(short) * where)
    data = short[:at] + junk + short[at:]
    try:
        json.loads(data)
        return  # still JSON by chance
    except ValueError:
        pass
    reply = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert_refused(reply, (path, data))


def chat(**body: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({**CHAT, **body}).encode()


def text(**body: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "a", **body}).encode()


def config(**body: Any) -> tuple[str, bytes]:
    return "/v1/stream/config", json.dumps(body).encode()


def formatted(schema: Any) -> tuple[str, bytes]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


NASTY: dict[str, tuple[str, bytes]] = {
    "nan": text(temperature=math.nan),
    "infinite bias": text(logit_bias={"5": -math.inf}),
    "lone surrogate": text(prompt="\ud800"),
    "surrogate in the model's name": chat(model="\udfff"),
    "deep arrays": ("/v1/completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep schema": formatted(nested(300)),
    "huge n": text(n=10**9),
    "huge n in chat": chat(n=10**18),
    "huge best_of": text(best_of=10**6),
    "many prompts": text(prompt=["a"] * 1000),
    "huge max_tokens": text(max_tokens=1e300),
    "token that does not exist": text(prompt=[1, 2, 2_000_000_000]),
    "negative token": text(prompt=[-5]),
    "bias for no token": text(logit_bias={"99999999": 1}),
    "bias for a word": text(logit_bias={"word": 1}),
    "detokenize nothing": ("/extras/detokenize", b'{"tokens": [2147483647]}'),
    "detokenize a negative": ("/extras/detokenize", b'{"tokens": [-1]}'),
    "grammar that is none": text(grammar="root ::= ("),
    "grammar without root": text(grammar='top ::= "a"'),
    "grammar that calls itself": text(grammar='root ::= root "a"'),
    "grammar of parentheses": text(grammar="root ::= " + "(" * 200_000),
    "endless schema": formatted({"type": "array", "items": {}, "minItems": 10**9}),
    "schema that is no object": formatted(5),
    "unknown tool": chat(
        tools=[{"type": "function", "function": {"name": "a", "parameters": {}}}],
        tool_choice={"type": "function", "function": {"name": "b"}},
    ),
    "empty prompt": text(prompt=""),
    "no messages": chat(messages=[]),
    "unknown role": chat(messages=[{"role": "ghost", "content": "a"}]),
    "too long a prompt": text(prompt="word " * 5000),
    "too long a stream": text(prompt="word " * 5000, stream=True),
    "too long a text to embed": ("/v1/embeddings", json.dumps({"input": "word " * 5000}).encode()),
    "nothing to embed": ("/v1/embeddings", b'{"input": []}'),
    "other dimensions": ("/v1/embeddings", b'{"input": "a", "dimensions": 3}'),
    "empty stop": text(stop=""),
    "logprobs without logits": text(logprobs=5),
    "no policy": config(policy="fifo"),
    "policy parameter out of range": config(policy="slru", policy_params={"protected_share": 5}),
    "no budget": config(budget="much"),
    "thresholds of an exact model": config(thresholds={"a": 1}),
    "lossy without a file for it": config(fidelity="lossy"),
    "unknown setting": config(colour=1),
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_requests_are_refused(server: Running, name: str) -> None:
    path, data = NASTY[name]
    assert_refused(server.http.post(path, content=data, headers={"Content-Type": "application/json"}), name)


def test_a_budget_below_the_minimum_changes_nothing(server: Running) -> None:
    def config() -> dict[str, Any]:
        found: dict[str, Any] = server.http.get("/v1/stream/config").json()
        del found["budget"]["automatic_bytes"]  # the machine's free memory
        return found

    before = config()
    reply = server.http.post("/v1/stream/config", json={"budget": 1000, "policy": "lru"})
    assert reply.status_code == 507
    error = reply.json()["error"]
    assert (error["code"], error["limit"]) == ("budget", before["budget"]["minimum_bytes"])
    assert config() == before


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "BREW"])
def test_other_methods_are_refused(server: Running, method: str) -> None:
    assert_refused(server.http.request(method, "/v1/chat/completions"), method)


def test_it_still_serves(server: Running) -> None:
    assert server.chat().status_code == 200
    assert server.stats()["totals"]["errors"] <= 1  # the budget that is too small is a 507
