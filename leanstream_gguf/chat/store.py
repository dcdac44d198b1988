"""Conversations on this machine, in one SQLite file.

Messages form a tree: an answer that is tried again and a question that is edited become siblings of the old one, so that
nothing written is ever lost. A conversation's `leaf_id` names the last message of the branch that is shown.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, StoreError, UnknownIdError
from . import export

VERSION = 1
_SCHEMA = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, system TEXT NOT NULL, settings TEXT NOT NULL, leaf_id TEXT,
    created REAL NOT NULL, updated REAL NOT NULL
);
CREATE TABLE messages (
    id TEXT PRIMARY KEY, conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    parent_id TEXT REFERENCES messages(id) ON DELETE CASCADE, role TEXT NOT NULL, content TEXT NOT NULL,
    attachments TEXT NOT NULL, meta TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL
);
CREATE INDEX messages_of ON messages(conversation_id, created);
CREATE INDEX messages_after ON messages(parent_id);
CREATE TABLE preferences (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
STATES = ("complete", "writing", "stopped", "failed")
ROLES = ("user", "assistant")
UNTITLED = "New conversation"
SNIPPET_BEFORE, SNIPPET_LENGTH = 24, 120
_JSON = ("settings", "attachments", "meta")


def _contains(text: str, folded_query: str) -> bool:
    return folded_query in text.casefold()


def _row(row: sqlite3.Row) -> dict[str, Any]:
    return {key: json.loads(row[key]) if key in _JSON else row[key] for key in row.keys()}  # noqa: SIM118 - a Row iterates values


def _to_json(value: Any) -> str:
    """The value as text that every reader takes, replies over HTTP included.

    Raises:
        ArgumentError: a number or a text that JSON in UTF-8 cannot hold.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except ValueError as error:
        raise ArgumentError(f"this cannot be kept: {error}") from error
    return text


def title_from(text: str) -> str:
    """A title made of the first line of a message, cut at a word."""
    line = next((line.strip(" #*`>-") for line in text.splitlines() if line.strip(" #*`>-")), "")
    if len(line) > 60:
        line = line[:60].rsplit(" ", 1)[0].rstrip(" ,;:.") + "…"
    return line or UNTITLED


class ConversationStore:
    """All conversations in one file. Thread-safe; several processes may use the file at once."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it readable by its owner only.

        Raises:
            StoreError: not our file, damaged, written by a newer version, or not writable.
        """
        self.path = path
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
            self._db.row_factory = sqlite3.Row
            self._db.create_function("contains", 2, _contains, deterministic=True)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._migrate()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"cannot use the conversations in {path}: {error}",
                path=str(path),
                remedy="move that file away, or choose another --data",
            ) from error

    def _migrate(self) -> None:
        with self._change():
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found == VERSION:
                return
            if found > VERSION:
                raise StoreError(
                    f"{self.path} was written by a newer version", path=str(self.path), remedy="update, or choose another --data"
                )
            for statement in _SCHEMA.split(";\n"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction that writes."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StoreError(f"cannot save to {self.path}: {error}", path=str(self.path)) from error

    def _rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        with self._lock:
            try:
                return [_row(row) for row in self._db.execute(query, values)]
            except sqlite3.Error as error:
                raise StoreError(f"cannot read {self.path}: {error}", path=str(self.path)) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # ---- conversations ----------------------------------------------------------------------------------------------

    def conversations(self, query: str = "", limit: int = 500) -> list[dict[str, Any]]:
        """Newest first: id, title, created, updated; with a query only those that contain it, and a `snippet`."""
        columns = "c.id, c.title, c.created, c.updated"
        folded = query.strip().casefold()
        if not folded:
            return self._rows(f"SELECT {columns} FROM conversations c ORDER BY c.updated DESC LIMIT ?", limit)
        found = self._rows(
            f"""SELECT {columns}, (SELECT m.content FROM messages m WHERE m.conversation_id = c.id AND contains(m.content, ?1)
                ORDER BY m.created LIMIT 1) AS snippet FROM conversations c
                WHERE contains(c.title, ?1) OR snippet IS NOT NULL ORDER BY c.updated DESC LIMIT ?2""",
            folded,
            limit,
        )
        for row in found:
            row["snippet"] = _snippet(row["snippet"], folded)
        return found

    def conversation(self, conversation_id: str) -> dict[str, Any]:
        """One conversation with all its `messages`, oldest first.

        Raises:
            UnknownIdError: there is none of that id.
        """
        found = self._rows("SELECT * FROM conversations WHERE id = ?", conversation_id)
        if not found:
            raise _missing("conversation")
        messages = self._rows("SELECT * FROM messages WHERE conversation_id = ? ORDER BY created, rowid", conversation_id)
        return {**found[0], "messages": messages}

    def create(self, title: str = "", system: str = "", settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A new, empty conversation."""
        now, new_id = time.time(), uuid.uuid4().hex
        with self._change():
            self._db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, NULL, ?, ?)",
                (new_id, title.strip() or UNTITLED, system, _to_json(dict(settings or {})), now, now),
            )
        return self.conversation(new_id)

    def update(self, conversation_id: str, **changes: Any) -> dict[str, Any]:
        """Change `title`, `system`, `settings` or `leaf_id`; what is not given stays.

        Raises:
            UnknownIdError: no such conversation, or the leaf is not one of its messages.
        """
        with self._change():
            current = self.conversation(conversation_id)
            if "leaf_id" in changes and changes["leaf_id"] not in {m["id"] for m in current["messages"]}:
                raise _missing("message")
            if "title" in changes:
                changes["title"] = changes["title"].strip() or UNTITLED
            for name in ("title", "system", "settings", "leaf_id"):
                if name in changes:
                    value = _to_json(changes[name]) if name in _JSON else changes[name]
                    self._db.execute(f"UPDATE conversations SET {name} = ? WHERE id = ?", (value, conversation_id))
        return self.conversation(conversation_id)

    def delete(self, conversation_id: str) -> None:
        """Delete it with all its messages.

        Raises:
            UnknownIdError: there is none of that id.
        """
        with self._change():
            if not self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,)).rowcount:
                raise _missing("conversation")

    def export(self, conversation_id: str, form: str) -> tuple[str, str, str]:
        """(file name, media type, text) of a conversation as `md` (the branch shown) or `json` (everything)."""
        return export.exported(self.conversation(conversation_id), form)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def add_message(
        self,
        conversation_id: str,
        *,
        role: str,
        content: str,
        parent_id: str | None = None,
        attachments: list[Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        state: str = "complete",
    ) -> dict[str, Any]:
        """Add a message after `parent_id` (None: the first one) and show its branch. The first one titles the conversation.

        Raises:
            UnknownIdError: no such conversation or parent. ArgumentError: an unknown role or state.
        """
        if role not in ROLES or state not in STATES:
            raise ArgumentError(f"no message can have the role {role!r} and the state {state!r}")
        now, new_id = time.time(), uuid.uuid4().hex
        with self._change():
            current = self.conversation(conversation_id)
            if parent_id is not None and parent_id not in {m["id"] for m in current["messages"]}:
                raise _missing("message")
            self._db.execute(
                "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    new_id,
                    conversation_id,
                    parent_id,
                    role,
                    content,
                    _to_json(attachments or []),
                    _to_json(dict(meta or {})),
                    state,
                    now,
                    now,
                ),
            )
            title = title_from(content) if not current["messages"] and current["title"] == UNTITLED else current["title"]
            self._db.execute(
                "UPDATE conversations SET leaf_id = ?, updated = ?, title = ? WHERE id = ?", (new_id, now, title, conversation_id)
            )
        return self._rows("SELECT * FROM messages WHERE id = ?", new_id)[0]

    def update_message(self, message_id: str, **changes: Any) -> dict[str, Any]:
        """Change `content`, `meta` or `state` of a message.

        Raises:
            UnknownIdError: no such message. ArgumentError: an unknown state.
        """
        if changes.get("state", "complete") not in STATES:
            raise ArgumentError(f"no message can have the state {changes['state']!r}")
        with self._change():
            found = self._rows("SELECT conversation_id FROM messages WHERE id = ?", message_id)
            if not found:
                raise _missing("message")
            now = time.time()
            for name in ("content", "meta", "state"):
                if name in changes:
                    value = _to_json(changes[name]) if name in _JSON else changes[name]
                    self._db.execute(f"UPDATE messages SET {name} = ?, updated = ? WHERE id = ?", (value, now, message_id))
            self._db.execute("UPDATE conversations SET updated = ? WHERE id = ?", (now, found[0]["conversation_id"]))
        return self._rows("SELECT * FROM messages WHERE id = ?", message_id)[0]

    # ---- preferences ------------------------------------------------------------------------------------------------

    def preference(self, key: str, default: Any = None) -> Any:
        """What `set_preference()` stored."""
        found = self._rows("SELECT value FROM preferences WHERE key = ?", key)
        return json.loads(found[0]["value"]) if found else default

    def set_preference(self, key: str, value: Any) -> None:
        with self._change():
            self._db.execute("INSERT OR REPLACE INTO preferences VALUES (?, ?)", (key, _to_json(value)))


def _missing(what: str) -> UnknownIdError:
    return UnknownIdError(f"there is no such {what}; it may have been deleted in another tab")


def _snippet(content: str | None, folded_query: str) -> str | None:
    """The part of a text around the first match, in one line."""
    if content is None:
        return None
    text = " ".join(content.split())
    start = max(0, text.casefold().find(folded_query) - SNIPPET_BEFORE)
    return ("…" if start else "") + text[start : start + SNIPPET_LENGTH]
