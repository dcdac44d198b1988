"""chat.store: conversations as a tree of messages in one file, searched, exported, kept."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanstream_gguf.chat import store as chat_store
from leanstream_gguf.chat.export import exported, file_stem
from leanstream_gguf.chat.store import ConversationStore
from leanstream_gguf.errors import ArgumentError, StoreError, UnknownIdError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    opened = ConversationStore(tmp_path / "new" / "chat.sqlite3")
    yield opened
    opened.close()


def test_a_conversation_survives_the_program(tmp_path: Path) -> None:
    first = ConversationStore(tmp_path / "c.sqlite3")
    made = first.create(system="Be brief.", settings={"temperature": 0.2})
    question = first.add_message(
        made["id"], role="user", content="Why is the sky blue?\nSecond line", attachments=[{"name": "a", "text": "b"}]
    )
    answer = first.add_message(made["id"], role="assistant", content="", parent_id=question["id"], state="writing")
    first.update_message(answer["id"], content="Rayleigh.", state="complete", meta={"tokens_per_second": 3.5})
    first.close()
    second = ConversationStore(tmp_path / "c.sqlite3")
    found = second.conversation(made["id"])
    assert found["title"] == "Why is the sky blue?"
    assert (found["system"], found["settings"], found["leaf_id"]) == ("Be brief.", {"temperature": 0.2}, answer["id"])
    assert [m["content"] for m in found["messages"]] == ["Why is the sky blue?\nSecond line", "Rayleigh."]
    assert found["messages"][0]["attachments"] == [{"name": "a", "text": "b"}]
    assert found["messages"][1]["meta"] == {"tokens_per_second": 3.5}
    second.close()


@pytest.mark.skipif(sys.platform == "win32", reason="permissions work differently there")
def test_the_file_is_for_its_owner_only(store: ConversationStore) -> None:
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_versions_are_siblings_and_nothing_is_lost(store: ConversationStore) -> None:
    made = store.create()
    question = store.add_message(made["id"], role="user", content="one")
    first = store.add_message(made["id"], role="assistant", content="a", parent_id=question["id"])
    second = store.add_message(made["id"], role="assistant", content="b", parent_id=question["id"])
    found = store.conversation(made["id"])
    assert found["leaf_id"] == second["id"] and len(found["messages"]) == 3
    assert store.update(made["id"], leaf_id=first["id"])["leaf_id"] == first["id"]
    assert "## Assistant" in store.export(made["id"], "md")[2] and "\n\na\n" in store.export(made["id"], "md")[2]


def test_search_looks_into_titles_and_messages_whatever_the_case(store: ConversationStore) -> None:
    one, two = store.create(title="Straße"), store.create(title="Other")
    store.add_message(two["id"], role="user", content="before " * 20 + "the NEEDLE\nhere 100% _x_")
    assert [c["id"] for c in store.conversations("STRASSE")] == [one["id"]]
    (hit,) = store.conversations("needle")
    assert hit["id"] == two["id"] and "the NEEDLE here" in hit["snippet"] and hit["snippet"].startswith("…")
    assert store.conversations("100% _X_")[0]["id"] == two["id"]
    assert store.conversations("100%x") == []


def test_the_newest_conversation_comes_first(store: ConversationStore) -> None:
    ids = [store.create(title=str(i))["id"] for i in range(3)]
    store.add_message(ids[0], role="user", content="again")
    assert next(c["id"] for c in store.conversations()) == ids[0]


def test_deleting_takes_the_messages_along(store: ConversationStore) -> None:
    made = store.create()
    message = store.add_message(made["id"], role="user", content="x")
    store.delete(made["id"])
    with pytest.raises(UnknownIdError):
        store.conversation(made["id"])
    with pytest.raises(UnknownIdError):
        store.update_message(message["id"], content="y")
    with pytest.raises(UnknownIdError):
        store.delete(made["id"])


def test_what_does_not_exist_is_refused_and_nothing_changes(store: ConversationStore) -> None:
    one, two = store.create(), store.create()
    foreign = store.add_message(two["id"], role="user", content="x")
    with pytest.raises(UnknownIdError):
        store.add_message(one["id"], role="assistant", content="y", parent_id=foreign["id"])
    with pytest.raises(UnknownIdError):
        store.update(one["id"], title="changed", leaf_id=foreign["id"])
    with pytest.raises(ArgumentError):
        store.add_message(one["id"], role="system", content="y")
    with pytest.raises(ArgumentError):
        store.update_message(foreign["id"], state="done")
    assert store.conversation(one["id"])["title"] == chat_store.UNTITLED


def test_a_foreign_damaged_or_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite3"
    damaged.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError) as caught:
        ConversationStore(damaged)
    assert "move that file away" in str(caught.value) and damaged.read_bytes().startswith(b"not a database")
    newer = tmp_path / "newer.sqlite3"
    with sqlite3.connect(newer) as db:
        db.execute(f"PRAGMA user_version = {chat_store.VERSION + 1}")
    with pytest.raises(StoreError, match="newer version"):
        ConversationStore(newer)


def test_two_programs_and_several_threads_write_at_once(store: ConversationStore) -> None:
    other = ConversationStore(store.path)
    made = store.create()
    errors: list[BaseException] = []

    def write(target: ConversationStore) -> None:
        try:
            for i in range(15):
                target.add_message(made["id"], role="user", content=str(i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(target,)) for target in (store, store, other, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert not errors and len(store.conversation(made["id"])["messages"]) == 60


WRITER = """
import sys
from pathlib import Path
from leanstream_gguf.chat.store import ConversationStore

store = ConversationStore(Path(sys.argv[1]))
conversation = store.create()["id"]
print(conversation, flush=True)
while True:
    message = store.add_message(conversation, role="assistant", content="x" * 5000, state="writing")
    store.update_message(message["id"], content="y" * 5000)
    print(message["id"], flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9 there")
def test_killed_in_the_middle_of_writing_it_keeps_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    saved: dict[str, list[str]] = {}
    for n_messages in (1, 20, 60):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            conversation = writer.stdout.readline().strip()
            ids = [writer.stdout.readline().strip() for _ in range(n_messages)]
            writer.kill()
            ids += writer.stdout.read().split()
        saved[conversation] = ids
    store = ConversationStore(path)
    for conversation, ids in saved.items():
        messages = store.conversation(conversation)["messages"]
        assert [message["id"] for message in messages[: len(ids)]] == ids
        assert len(messages) <= len(ids) + 1  # one may have been saved and not yet reported
        assert all(message["content"] in ("x" * 5000, "y" * 5000) for message in messages)
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []


def test_export_as_json_holds_everything_and_unknown_forms_are_refused(store: ConversationStore) -> None:
    made = store.create(title="A / b: c?")
    store.add_message(made["id"], role="user", content="hi", attachments=[{"name": "n.md", "text": "```\nx\n```"}])
    name, media_type, text = store.export(made["id"], "json")
    assert (name, media_type) == ("A-b-c.json", "application/json")
    assert json.loads(text)["messages"][0]["content"] == "hi"
    assert "````\n```\nx\n```\n````" in store.export(made["id"], "md")[2]  # a fence that the file cannot end
    with pytest.raises(ArgumentError):
        exported(store.conversation(made["id"]), "pdf")


@given(st.text(max_size=200))
def test_any_title_makes_a_file_name(title: str) -> None:
    stem = file_stem(title)
    assert stem and not set(stem) & set('/\\:*?"<>|\0\n') and len(stem) <= 60


@given(st.text(max_size=500))
def test_any_first_message_makes_a_title(text: str) -> None:
    title = chat_store.title_from(text)
    assert title and "\n" not in title and len(title) <= 61


def test_preferences_are_kept(store: ConversationStore) -> None:
    assert store.preference("x", 1) == 1
    store.set_preference("x", {"a": [1]})
    store.set_preference("x", {"a": [2]})
    assert store.preference("x") == {"a": [2]}
