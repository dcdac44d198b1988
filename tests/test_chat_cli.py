"""`leanstream chat`: starting and finding each other, the desktop entry, and the terminal."""

from __future__ import annotations

import configparser
import json
import plistlib
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_page import Program
from serving import until
from support import streamed

from leanstream_gguf import cli, paths
from leanstream_gguf.chat import PAGE, app, desktop, tui
from leanstream_gguf.chat.store import ConversationStore
from leanstream_gguf.errors import ArgumentError, LibraryError, UnsupportedError

Tiny = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


# ---- starting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "status", "code"),
    [
        (["--memory", "lots"], 2, "argument"),
        (["--port", "70000"], 2, "argument"),
        (["--models", "/no/such/folder"], 2, "argument"),
        (["--ring-slots", "1"], 2, "argument"),
        (["--tui", "-m", "none.gguf"], 3, "not_found"),
    ],
)
def test_wrong_options_get_one_typed_error(argv: list[str], status: int, code: str, capsys: Capture, tmp_path: Path) -> None:
    assert cli.main(["chat", "--json", "--data", str(tmp_path), *argv]) == status
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["error"]["code"] == code
    assert captured.err.startswith("leanstream: ") and captured.err.count("\n") == 1


@pytest.mark.native
def test_it_starts_remembers_its_port_and_ends_on_a_signal(tiny: Tiny, native: None, tmp_path: Path) -> None:
    path = tiny("moe_qwen3")
    program = Program(tmp_path / "data", path.parent, "-m", str(path), "--ctx", "512", "--threads", "1")
    try:
        until(lambda: program.stats()["state"] == "ready", "the model is loaded")
        assert program.http.get("/chat/api/loaded").json()["n_ctx"] == 512
        assert app.running_at(tmp_path / "data") == program.url
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(timeout=30) == 0
        assert app.running_at(tmp_path / "data") is None
        again = Program(tmp_path / "data", path.parent)
        assert again.url == program.url
        assert again.stop() == 0
    finally:
        program.stop()


@pytest.mark.native
def test_the_model_used_last_is_loaded_again(tiny: Tiny, native: None, tmp_path: Path) -> None:
    path = tiny("moe_qwen3")
    program = Program(tmp_path / "data", path.parent, "--threads", "1")
    try:
        assert program.stats()["state"] == "empty"
        program.load(path, "min")
        program.kill()
        program.start()
        until(lambda: program.stats()["state"] == "ready", "it is loaded")
        assert program.http.get("/v1/stream/config").json()["budget"]["requested"] == "min"
    finally:
        program.stop()


def test_a_second_start_shows_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(app, "running_at", lambda folder: "http://127.0.0.1:1")
    monkeypatch.setattr(app.webbrowser, "open", lambda url: shown.append(url))
    assert app.run(app.ChatOptions(show="browser", data=tmp_path), lambda url, show: None) == 0
    assert shown == ["http://127.0.0.1:1"] and list(tmp_path.iterdir()) == []


def test_only_our_own_answer_on_loopback_counts_as_running(tmp_path: Path) -> None:
    for content in ("", "{}", '{"url": "http://evil.example"}', '{"url": "http://127.0.0.1:9"}', "[1]"):
        (tmp_path / app.RUNNING).write_text(content)
        assert app.running_at(tmp_path) is None


def test_how_the_page_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "has_display", lambda: True)
    monkeypatch.setattr(app.importlib.util, "find_spec", lambda name: None)
    assert app.choose("auto") == "browser"
    with pytest.raises(LibraryError, match="pywebview"):
        app.choose("window")
    monkeypatch.setattr(app.importlib.util, "find_spec", lambda name: object())
    assert app.choose("auto") == "window"
    monkeypatch.setattr(app, "has_display", lambda: False)
    assert app.choose("auto") == "none"  # a text browser would take the terminal


class Toolkit:
    """pywebview with a window that nobody sees; without a toolkit `start` fails as pywebview's does."""

    def __init__(self, usable: bool) -> None:
        self.settings: dict[str, Any] = {}
        self.usable, self.closed = usable, threading.Event()

    def create_window(self, title: str, url: str, **options: Any) -> Any:
        return SimpleNamespace(destroy=self.closed.set)

    def start(self, beside: Callable[[], None], **options: Any) -> None:
        if not self.usable:
            raise RuntimeError("You must have either QT or GTK")
        thread = threading.Thread(target=beside)
        thread.start()
        assert self.closed.wait(60)
        thread.join()


def test_the_window_closes_when_the_page_or_a_signal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit, stop = Toolkit(usable=True), threading.Event()
    monkeypatch.setitem(sys.modules, "webview", toolkit)  # type: ignore[arg-type]
    threading.Timer(0.1, stop.set).start()
    assert app.show_window("http://127.0.0.1:1", stop) and toolkit.closed.is_set()


def test_without_a_toolkit_for_a_window_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "webview", Toolkit(usable=False))  # type: ignore[arg-type]
    assert not app.show_window("http://127.0.0.1:1", threading.Event())
    assert capsys.readouterr().err == "leanstream: no app window (You must have either QT or GTK); using the browser\n"


def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEANSTREAM_DATA", str(tmp_path / "x"))
    assert paths.data_folder() == tmp_path / "x"
    monkeypatch.delenv("LEANSTREAM_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert paths.models_folder() == tmp_path / "share" / "leanstream" / "models"


def test_a_double_click_needs_no_terminal() -> None:
    code = "import sys; sys.stdout = sys.stderr = None; from leanstream_gguf.cli import chat; sys.argv[1:] = ['--port', '99999']; "
    code += "sys.exit(chat.main())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 2


# ---- desktop entry --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="writes the entry of Linux desktops")
def test_the_entry_is_installed_started_from_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert cli.main(["chat", "--install", "--json"]) == 0
    files = [Path(name) for name in json.loads(capsys.readouterr().out)["files"]]
    assert all(path.is_file() and tmp_path in path.parents for path in files)
    entry = configparser.ConfigParser(interpolation=None)
    entry.optionxform = str  # type: ignore[assignment,method-assign]
    entry.read(files[0], encoding="utf-8")
    section = entry["Desktop Entry"]
    assert (section["Type"], section["Terminal"], section["Icon"]) == ("Application", "false", "leanstream")
    started = subprocess.run([*shlex.split(section["Exec"]), "--help"], capture_output=True, text=True, check=True)
    assert "usage: leanstream chat" in started.stdout
    assert cli.main(["chat", "--uninstall"]) == 0
    assert not any(path.exists() for path in files)


def test_a_path_with_odd_characters_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", '/opt/my "py"/100%/python')
    line = next(line for line in desktop.entry().splitlines() if line.startswith("Exec="))
    assert line == r'Exec="/opt/my \\"py\\"/100%%/python" -m leanstream_gguf chat'


def test_the_mac_application_is_a_bundle_that_starts_us(tmp_path: Path) -> None:
    files = {path.name: content for path, content in desktop.files("darwin", tmp_path).items()}
    assert plistlib.loads(files["Info.plist"])["CFBundleExecutable"] == "leanstream"
    assert files["leanstream"].decode().splitlines()[-1] == f"exec {shlex.join(desktop.command())}"
    with pytest.raises(UnsupportedError, match=r"leanstream-chat\.exe"):
        desktop.files("win32", tmp_path)


def test_the_icons_are_there() -> None:
    assert (PAGE / "icon-256.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (PAGE / "icon.svg").read_text(encoding="utf-8")


# ---- terminal -------------------------------------------------------------------------------------------------------------


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert tui.printable("a\x1b[31mb\x07\r\x9b1mc\u202ed\te\n") == "a[31mb1mcd\te\n"


@pytest.fixture(scope="module")
def llm(tiny: Tiny, native: None) -> Iterator[Any]:
    with streamed(tiny("moe_qwen3"), "min+50%", logits_all=False) as model:
        yield model


@pytest.fixture
def terminal(llm: Any, tmp_path: Path) -> Iterator[tui.Terminal]:
    store = ConversationStore(tmp_path / "chat.sqlite3")
    made = tui.Terminal(store, llm, write=lambda text: written.append(text))
    written: list[str] = []
    made.written = written  # type: ignore[attr-defined]
    for setting in ("max_tokens 6", "temperature 0"):
        made.handle(f"/set {setting}")
    yield made
    store.close()


def shown(terminal: tui.Terminal) -> str:
    """What was written since the last time."""
    written: list[str] = terminal.written  # type: ignore[attr-defined]
    text = "".join(written)
    written.clear()
    return text


@pytest.mark.native
def test_a_session_in_the_terminal(terminal: tui.Terminal, tmp_path: Path) -> None:
    terminal.handle("/system Be brief.")
    assert terminal.handle("hello") and shown(terminal)
    assert terminal.handle("/retry") and terminal.handle("/edit goodbye")
    conversation = terminal.conversation
    assert conversation is not None and conversation["system"] == "Be brief." and conversation["settings"]["max_tokens"] == 6
    assert [message["role"] for message in conversation["messages"]].count("assistant") == 3
    terminal.handle("/rename Greetings")
    terminal.handle(f"/export {tmp_path / 'x.md'}")
    assert (tmp_path / "x.md").read_text().startswith("# Greetings")
    terminal.handle("/new")
    shown(terminal)
    terminal.handle("/list goodbye")
    assert "Greetings" in shown(terminal)
    terminal.handle("/open 1")
    assert "goodbye" in shown(terminal)
    terminal.handle("/stats")
    assert "pinned" in shown(terminal) or "resident" in shown(terminal)
    terminal.handle("/budget full")
    assert terminal.llm.stream.budget is not None and str(terminal.llm.stream.budget) == "full"
    terminal.handle("/delete")
    assert terminal.store.conversations() == []
    assert terminal.handle("/help") and not terminal.handle("/quit")


@pytest.mark.native
@pytest.mark.parametrize(
    "line",
    [
        *("/fly", "/open 9", "/set heat 1", "/set top_p 7", "/set seed x", "/retry", "/rename x", "/file none.txt", "/edit"),
        *("/budget 1KiB", "/budget lots"),
    ],
)
def test_mistakes_are_shown_and_the_session_goes_on(terminal: tui.Terminal, line: str) -> None:
    shown(terminal)
    assert terminal.handle(line)
    assert len(shown(terminal).strip().splitlines()) == 1


@pytest.mark.native
def test_ctrl_c_keeps_the_answer_so_far(terminal: tui.Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(conversation: Any) -> Iterator[str]:
        yield "so "
        yield "far"
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "_stream", interrupted)
    terminal.handle("go on")
    assert terminal.conversation is not None
    answer = terminal.conversation["messages"][-1]
    assert (answer["content"], answer["state"]) == ("so far", "stopped")


@pytest.mark.native
def test_the_command_reads_lines_and_leaves_at_their_end(tiny: Tiny, native: None, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "leanstream_gguf",
        "chat",
        "--tui",
        "-m",
        str(tiny("moe_qwen3")),
        "--data",
        str(tmp_path),
        "--threads",
        "1",
    ]
    done = subprocess.run(command, input="/set max_tokens 3\nhello\n/fly\n", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "there is no /fly" in done.stdout and "/help lists commands" in done.stderr
    store = ConversationStore(tmp_path / "chat.sqlite3")
    assert [item["title"] for item in store.conversations()] == ["hello"]
    store.close()


def test_without_models_the_terminal_says_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "models").mkdir()
    assert cli.main(["chat", "--tui", "--data", str(tmp_path), "--models", str(tmp_path / "models")]) == ArgumentError.exit_status
    assert "no model was found" in capsys.readouterr().err
