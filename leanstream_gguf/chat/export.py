"""A conversation as a file: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from ..errors import ArgumentError


def branch(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that are shown, first to last."""
    by_id = {message["id"]: message for message in conversation["messages"]}
    shown: list[dict[str, Any]] = []
    message = by_id.get(conversation["leaf_id"])
    while message is not None:
        shown.append(message)
        message = by_id.get(message["parent_id"])
    return shown[::-1]


def _fence(text: str) -> str:
    """A code fence that the text cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(3, longest + 1)


def _markdown(conversation: dict[str, Any]) -> str:
    parts = [f"# {conversation['title']}"]
    if conversation["system"]:
        parts.append(f"**System**\n\n{conversation['system']}")
    for message in branch(conversation):
        who = "You" if message["role"] == "user" else message["meta"].get("model") or "Assistant"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(message["created"]))
        body = message["content"]
        for item in message["attachments"]:
            fence = _fence(item["text"])
            body += f"\n\n{item['name']}:\n\n{fence}\n{item['text']}\n{fence}"
        parts.append(f"## {who}, {when}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def file_stem(title: str) -> str:
    """The title as a file name that every system takes."""
    stem = re.sub(r"[^\w\- ]+", "", title).strip()[:60]
    return re.sub(r"\s+", "-", stem) or "conversation"


def exported(conversation: dict[str, Any], form: str) -> tuple[str, str, str]:
    """(file name, media type, text).

    Raises:
        ArgumentError: a form other than `md` and `json`.
    """
    name = file_stem(conversation["title"])
    if form == "md":
        return f"{name}.md", "text/markdown", _markdown(conversation)
    if form == "json":
        return f"{name}.json", "application/json", json.dumps(conversation, indent=2, ensure_ascii=False) + "\n"
    raise ArgumentError(f"a conversation is exported as 'md' or 'json', not {form!r}")
