"""Programs of others, unmodified: OpenAI's client, LangChain and `llm` against the server, LangChain with our class inside."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, serving
from support import run_python

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Tiny = Callable[..., Path]
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown fox"}]
SECRET = "the key of the test"
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "title": "answer"}


def need(package: str) -> None:
    """Skip, and say so, where a client is not installed; the dev extra brings it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} IS NOT INSTALLED: its drop-in proof did not run (pip install 'leanstream-gguf[dev]')")


@pytest.fixture(scope="module")
def server(tiny: Tiny, native: None) -> Iterator[Running]:
    with serving(tiny("moe_qwen3"), model_alias="toy", embedding=True, api_key=SECRET) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Running) -> str:
    return server.text(messages=MESSAGES)


# ---- OpenAI's client ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    need("openai")
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=SECRET, max_retries=0) as made:
        yield made


def test_openai_chat(client: Any, expected: str) -> None:
    reply = client.chat.completions.create(model="toy", messages=MESSAGES, temperature=0, max_tokens=8)
    assert reply.choices[0].message.content == expected
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    stream = client.chat.completions.create(
        model="toy", messages=MESSAGES, temperature=0, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == reply.usage


def test_openai_completions_models_and_embeddings(client: Any) -> None:
    assert client.completions.create(model="toy", prompt="the quick", max_tokens=4, temperature=0).choices[0].finish_reason
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    first, second = client.embeddings.create(model="toy", input=["the quick", "brown fox"]).data  # base64 by default
    assert len(first.embedding) == len(second.embedding) > 100
    assert first.embedding != second.embedding


def test_openai_tools_and_structured_output(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "set", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "set"}}
    reply = client.chat.completions.create(
        model="toy", messages=MESSAGES, tools=[tool], tool_choice=choice, temperature=0, max_tokens=60
    )
    call = reply.choices[0].message.tool_calls[0].function
    assert call.name == "set" and "ok" in json.loads(call.arguments)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    reply = client.chat.completions.create(model="toy", messages=MESSAGES, response_format=form, temperature=0, max_tokens=60)
    assert "ok" in json.loads(reply.choices[0].message.content)


def test_openai_raises_its_own_errors(client: Any, server: Running) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="toy", messages=MESSAGES, n=10**9)
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as stranger:
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# ---- LangChain ----------------------------------------------------------------------------------------------------------


def test_langchain_chat_openai(server: Running, expected: str) -> None:
    need("langchain_openai")
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key=SECRET, model="toy", temperature=0, max_tokens=8)  # type: ignore[arg-type, call-arg]
    messages = [("system", "be brief"), ("human", "the quick brown fox")]
    reply = chat.invoke(messages)
    assert reply.content == expected
    assert reply.usage_metadata is not None and reply.usage_metadata["input_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in chat.stream(messages)) == expected
    assert len(chat.batch([messages, messages, messages])) == 3
    shaped = ChatOpenAI(base_url=f"{server.url}/v1", api_key=SECRET, model="toy", temperature=0, max_tokens=60)  # type: ignore[arg-type, call-arg]
    for method in ("json_schema", "function_calling"):
        answer = shaped.with_structured_output(SCHEMA, method=method).invoke(messages)  # type: ignore[arg-type]
        assert isinstance(answer, dict) and isinstance(answer["ok"], bool)


CHAT_LLAMA_CPP = """
import json, sys
import leanstream_gguf
leanstream_gguf.install(memory_budget="min+50%")
from langchain_community.chat_models import ChatLlamaCpp
options = dict(n_ctx=256, n_batch=64, temperature=0.0, max_tokens=8, repeat_penalty=1.1, verbose=False, seed=7)
chat = ChatLlamaCpp(model_path=sys.argv[1], **options)
messages = [("system", "be brief"), ("human", "the quick brown fox")]
text = chat.invoke(messages).content
streamed = "".join(chunk.content for chunk in chat.stream(messages))
llm = chat.client
print(json.dumps({"text": text, "streamed": streamed, "class": type(llm).__module__, "budget": str(llm.stream.budget),
                  "read": llm.stream.stats().needed_bytes}))
"""


def test_langchain_chat_llama_cpp_with_our_class_inside(tiny: Tiny, expected: str) -> None:
    need("langchain_community")
    report = run_python(CHAT_LLAMA_CPP, tiny("moe_qwen3"), timeout_s=180).require()
    assert report["text"] == report["streamed"] == expected
    assert report["class"] == "leanstream_gguf.drop_in"
    assert report["budget"] == "min+50%" and report["read"] > 0


# ---- llm ----------------------------------------------------------------------------------------------------------------


def test_the_llm_command(server: Running, tmp_path: Path) -> None:
    need("llm")
    entry = {"model_id": "local", "model_name": "toy", "api_base": f"{server.url}/v1", "api_key_name": "local"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"local": SECRET}))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    asked = server.text(messages=[{"role": "user", "content": "the quick brown fox"}])
    for options in (["--no-stream"], []):
        command = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "local",
            "-o",
            "temperature",
            "0",
            "-o",
            "max_tokens",
            "8",
            *options,
            "the quick brown fox",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode().strip() == asked.strip()
