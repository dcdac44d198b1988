"""conversation.py: what stays of a conversation that has outgrown the context, and what the terminal says about it."""

from __future__ import annotations

import argparse
import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import streamed

from leanstream_gguf.chat import tui
from leanstream_gguf.chat.store import ConversationStore
from leanstream_gguf.cli import run as run_command
from leanstream_gguf.conversation import chat_prompt, recent, room_for_answer

Tiny = Callable[..., Path]
Capture = pytest.CaptureFixture[str]
QUESTION = "what happens to the other lines over there"


def said(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": str(number)} for number, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "limit", "left_out"),
    [
        (("user", "assistant", "user"), 3, 0),
        (("user", "assistant", "user"), 2, 2),
        (("system", "user", "assistant", "user"), 3, 2),
        (("user", "assistant", "user", "assistant", "user"), 1, 4),
        (("user", "user", "assistant", "user"), 3, 1),
        (("system", "user"), 0, 0),  # the last question always stays: whoever asks says that it is too long
        (("system",), 0, 0),
        ((), 0, 0),
    ],
)
def test_the_oldest_turns_go_first_and_whole(roles: tuple[str, ...], limit: int, left_out: int) -> None:
    messages = said(*roles)
    kept, n_left_out = recent(messages, lambda some: len(some) <= limit)
    assert n_left_out == left_out and len(kept) == len(messages) - left_out
    assert kept == [message for message in messages if message in kept]  # in their order
    assert [message for message in messages if message["role"] == "system"] == [m for m in kept if m["role"] == "system"]


def test_an_answer_gets_room_but_not_half_of_a_small_context() -> None:
    assert (room_for_answer(4096, 128), room_for_answer(256, 1024)) == (128, 64)


@pytest.fixture(scope="module")
def llm(tiny: Tiny, native: None) -> Iterator[Any]:
    with streamed(tiny("moe_qwen3"), "min+50%", logits_all=False) as model:
        yield model


@pytest.mark.native
def test_run_goes_on_when_the_conversation_outgrows_the_context(llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    lines = iter([*[QUESTION] * 8, "x " * 400, QUESTION, ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    args = argparse.Namespace(
        model="toy", memory="min", system="be brief", tokens=6, seed=1, top_k=40, top_p=0.9, temp=0, ignore_eos=False
    )
    assert run_command._interactive(llm, args) == 0
    notes = capsys.readouterr().err
    assert notes.count("tokens/s") == 9, "a question got no answer"
    assert "no longer fits the context of 256 tokens: the oldest 2 messages were left out" in notes
    assert notes.count("the prompt has") == 1  # what is too long by itself is refused, and is no part of the conversation


@pytest.mark.native
def test_the_chat_in_the_terminal_goes_on_too(llm: Any, tmp_path: Path) -> None:
    written: list[str] = []
    store = ConversationStore(tmp_path / "chat.sqlite3")
    terminal = tui.Terminal(store, llm, write=written.append)
    for line in ("/set max_tokens 6", "/set temperature 0", *[QUESTION] * 8):
        assert terminal.handle(line)
    assert any("no longer fits the context of 256 tokens" in text for text in written)
    assert terminal.conversation is not None
    answers = [message for message in terminal.conversation["messages"] if message["role"] == "assistant"]
    assert len(answers) == 8 and all(message["state"] == "complete" for message in answers)
    store.close()


@pytest.mark.native
def test_a_prompt_begins_the_answer(llm: Any) -> None:
    tokens, _ = chat_prompt(llm, said("system", "user"))
    text = llm.detokenize(tokens, special=True).decode()
    assert text == "system: 0\nuser: 1\nassistant: "
