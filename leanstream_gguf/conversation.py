"""A conversation as a prompt: in the model's chat template, and short enough for the context. For the terminal; the server leaves
what to do with a long one to its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Llama

Messages = list[dict[str, str]]


def chat_prompt(llm: Llama, messages: Messages) -> tuple[list[int], list[str]]:
    """Tokens of a conversation in the model's own template (ChatML where the file has none), and stop texts."""
    from llama_cpp import llama_chat_format

    template = llm.metadata.get("tokenizer.chat_template") or llama_chat_format.CHATML_CHAT_TEMPLATE
    bos, eos = (llm._model.token_get_text(t) if t != -1 else "" for t in (llm.token_bos(), llm.token_eos()))
    formatter = llama_chat_format.Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
    reply = formatter(messages=messages)  # type: ignore[arg-type]  # plain dicts are what it takes
    text = reply.prompt
    add_bos = bool(llm._model.add_bos_token()) and not (bos and text.startswith(bos))
    stop = [reply.stop] if isinstance(reply.stop, str) else list(reply.stop or [])
    return llm.tokenize(text.encode(), add_bos=add_bos, special=True), stop


def recent(messages: Messages, fits: Callable[[Messages], bool]) -> tuple[Messages, int]:
    """The conversation without as many of its oldest turns as it takes to fit, and how many messages that are.

    A turn is a question and what follows it. The system message and the last turn always stay.
    """
    n_head = 1 if messages and messages[0]["role"] == "system" else 0
    starts = [i for i, message in enumerate(messages) if message["role"] == "user" and i >= n_head]
    for start in starts:
        kept = messages[:n_head] + messages[start:]
        if start == starts[-1] or fits(kept):
            return kept, start - n_head
    return messages, 0


def room_for_answer(n_ctx: int, max_tokens: int) -> int:
    """Tokens of the context that a prompt should leave.

    A quarter of the context, so that not every question after the first one that is too long has all of the prompt computed again.
    """
    return min(max_tokens, n_ctx // 4)


def left_out(n_messages: int, n_ctx: int) -> str:
    """What to tell the person."""
    what = "message was" if n_messages == 1 else f"{n_messages} messages were"
    return f"the conversation no longer fits the context of {n_ctx} tokens: the oldest {what} left out"
