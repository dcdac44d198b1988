"""chat.discovery: which files are models, what they need, and that asking never disturbs anything."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import until

from leanstream_gguf import cli
from leanstream_gguf.chat import discovery
from leanstream_gguf.chat.discovery import FoundModel, NeedsBook, find_models

Tiny = Callable[..., Path]


class Kept:
    """Preferences in memory."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def preference(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set_preference(self, key: str, value: Any) -> None:
        self.values[key] = value


def touch(path: Path, n_bytes: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * n_bytes)
    return path


def test_models_are_found_below_folders_split_sets_once(tmp_path: Path) -> None:
    touch(tmp_path / "publisher" / "repo" / "b.gguf", 7)
    for i in range(1, 4):
        touch(tmp_path / f"A-0000{i}-of-00003.gguf", 100)
    touch(tmp_path / "mmproj-b.gguf")
    touch(tmp_path / "notes.txt")
    touch(tmp_path / ".hidden" / "c.gguf")
    found = find_models([tmp_path, tmp_path / "publisher", tmp_path / "missing"])
    assert [(m.name, m.file_bytes, m.n_files) for m in found] == [("A", 300, 3), ("b", 7, 1)]
    assert found[0].path.endswith("A-00001-of-00003.gguf")


@pytest.mark.skipif(not hasattr(os, "symlink") or os.name == "nt", reason="needs symbolic links")
def test_links_to_folders_are_not_followed_and_a_linked_file_is_one_model(tmp_path: Path) -> None:
    model = touch(tmp_path / "real" / "m.gguf")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)
    (tmp_path / "real" / "again.gguf").symlink_to(model)
    assert len(find_models([tmp_path])) == 1


def test_a_shard_without_its_first_one_is_no_model(tmp_path: Path) -> None:
    touch(tmp_path / "m-00002-of-00002.gguf")
    assert find_models([tmp_path]) == []


def _model(path: str = "m.gguf") -> FoundModel:
    return FoundModel(path, "m", ".", 5, 1, 1.0)


PLAN: dict[str, Any] = {
    "arch": "llama",
    "minimum_budget_bytes": 100 << 20,
    "full_budget_bytes": 200 << 20,
    "n_ctx": 64,
    "memory": {"baseline_bytes": 40 << 20},
    "experts": {"n_experts": 0, "n_used": 0},
}


def known(book: NeedsBook, model: FoundModel) -> dict[str, Any]:
    return dict(until(lambda: book.of(model), "its needs are known"))


def test_needs_are_worked_out_once_and_count_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def plan(path: str, *_: str) -> dict[str, Any]:
        calls.append(path)
        return PLAN

    monkeypatch.setattr(discovery, "own_bytes", lambda: 90 << 20)
    book = NeedsBook(Kept(), plan)
    book.ask([_model("a"), _model("b")])
    book.ask([_model("a")])
    needs = known(book, _model("a"))
    known(book, _model("b"))
    book.ask([_model("a")])
    assert sorted(calls) == ["a", "b"]
    assert needs["minimum_bytes"] == 150 << 20 and needs["full_bytes"] == 250 << 20
    assert needs["fits"] in ("whole", "streamed", "no")


def test_errors_of_planning_are_kept_and_shown() -> None:
    book = NeedsBook(Kept(), lambda *_: {"error": {"code": "format", "message": "not a GGUF file"}})
    book.ask([_model()])
    assert known(book, _model())["error"]["message"] == "not a GGUF file"


def test_a_crash_is_shown_but_not_kept_for_the_next_start() -> None:
    kept = Kept()
    book = NeedsBook(kept, lambda *_: {"error": {"code": "crashed", "message": "signal 11"}})
    book.ask([_model()])
    assert known(book, _model())["error"]["message"] == "signal 11"
    assert kept.values == {}


def test_closing_begins_no_other_plan() -> None:
    release, started, calls = threading.Event(), threading.Event(), []

    def plan(path: str, *_: str) -> dict[str, Any]:
        calls.append(path)
        started.set()
        release.wait(10)
        return PLAN

    book = NeedsBook(Kept(), plan)
    book.ask([_model("a"), _model("b")])
    assert started.wait(10)
    book.close()
    release.set()
    time.sleep(0.1)
    assert calls == ["a"]


@pytest.mark.native
def test_needs_are_those_of_the_plan_command(tiny: Tiny, native: None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny("moe_qwen3")
    document = discovery.plan_document(str(path), "--memory", "min", "--no-speed")
    needs = discovery.needs_from(document)
    assert needs["n_experts"] > needs["n_experts_used"] > 0
    assert 0 < needs["own_bytes"] < needs["minimum_bytes"] <= needs["full_bytes"]
    assert cli.main(["plan", "-m", str(path), "--memory", "min", "--no-speed", "--json"]) == 0


@pytest.mark.native
def test_a_damaged_file_gets_the_planners_error(tmp_path: Path, native: None) -> None:
    broken = touch(tmp_path / "broken.gguf", 5000)
    needs = discovery.needs_from(discovery.plan_document(str(broken), "--memory", "min", "--no-speed"))
    assert needs["error"]["code"] == "format"
