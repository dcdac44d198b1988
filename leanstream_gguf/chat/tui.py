"""The chat in a terminal: the same conversations as the page, the model in this process.

What the model writes is shown as text: control characters are taken out, so that an answer cannot drive the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import paths
from ..cli import _common
from ..conversation import Messages, chat_prompt, left_out, recent, room_for_answer
from ..errors import ArgumentError, LeanStreamError
from ..units import format_bytes, format_rate
from .export import branch
from .service import ChatService
from .store import ConversationStore

if TYPE_CHECKING:
    from ..model import Llama

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
HELP = """\
/new              a new conversation          /list [TEXT]      the conversations, or those with TEXT
/open N           the Nth of the list         /rename TITLE     rename this one
/delete           delete this one             /export FILE      save it as .md or .json
/retry            another answer              /edit TEXT        the last question in other words
/system TEXT      set the system prompt       /set NAME VALUE   temperature, top_p, top_k, min_p, seed, max_tokens
/budget SIZE      change the memory budget    /stats            memory, reads and hits
/file PATH        send a text file along      /quit             leave (or Ctrl-D)
Ctrl-C stops an answer."""
SAMPLING: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 5),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "top_k": (int, 0, 100_000),
    "seed": (int, 0, 2**32 - 1),
    "max_tokens": (int, 1, 10_000_000),
}


def printable(text: str) -> str:
    """The text without control characters, line breaks and tabs excepted."""
    return _CONTROL.sub("", text)


class Terminal:
    """One session: the store, the open conversation, and a model."""

    def __init__(self, store: ConversationStore, llm: Llama, write: Callable[[str], Any] | None = None) -> None:
        self.store, self.llm = store, llm
        self.write = write or (lambda text: print(text, end="", flush=True))
        self.conversation: dict[str, Any] | None = None
        self.system = ""
        self.settings: dict[str, Any] = {}
        self.listed: list[str] = []
        self.attachments: list[dict[str, str]] = []

    # ---- answers ----------------------------------------------------------------------------------------------------

    def ask(self, text: str, parent_id: str | None) -> None:
        """Add a question after a message, and its answer."""
        if self.conversation is None:
            self.conversation = self.store.create(system=self.system, settings=self.settings)
        files, self.attachments = self.attachments, []
        added = self.store.add_message(self.conversation["id"], role="user", content=text, parent_id=parent_id, attachments=files)
        self.answer(added["id"])

    def answer(self, question_id: str) -> None:
        """Stream an answer; Ctrl-C ends it and keeps what there is."""
        assert self.conversation is not None
        conversation = self.store.update(self.conversation["id"], leaf_id=question_id)
        message = self.store.add_message(conversation["id"], role="assistant", content="", parent_id=question_id, state="writing")
        text, state, n_tokens = "", "complete", 0
        meta: dict[str, Any] = {}
        start, first = time.monotonic(), None
        try:
            for piece in self._stream(conversation):
                first = first or time.monotonic()
                text, n_tokens = text + piece, n_tokens + 1
                self.write(printable(piece))
        except KeyboardInterrupt:
            state = "stopped"
        except (LeanStreamError, ValueError) as error:
            state, meta = "failed", {"error": {"message": str(error)}}
            self.write(f"\n[{error}]")
        seconds = time.monotonic() - (first or start)
        if n_tokens > 1 and seconds:
            meta |= {"completion_tokens": n_tokens, "tokens_per_second": (n_tokens - 1) / seconds}
        self.store.update_message(message["id"], content=text, state=state, meta={"model": Path(self.llm.model_path).name, **meta})
        self.conversation = self.store.conversation(conversation["id"])
        rate = f"{meta['tokens_per_second']:.1f} tokens/s, {n_tokens} tokens" if "tokens_per_second" in meta else ""
        self.write(f"\n{dim(' · '.join(part for part in (rate, state if state == 'stopped' else '') if part))}\n")

    def _stream(self, conversation: dict[str, Any]) -> Iterator[str]:
        messages = [{"role": "system", "content": conversation["system"]}] if conversation["system"] else []
        for message in branch(conversation):
            files = [f"\n\nFile {item['name']}:\n{item['text']}" for item in message["attachments"]]
            messages.append({"role": message["role"], "content": message["content"] + "".join(files)})
        settings = {"temperature": 0.7, "max_tokens": 1024, **conversation["settings"]}
        messages = self._fitting(messages, settings["max_tokens"])
        stream = self.llm.create_chat_completion(messages, stream=True, **settings)  # type: ignore[arg-type]
        try:
            for chunk in stream:
                piece = chunk["choices"][0]["delta"].get("content")  # type: ignore[index, union-attr]
                if piece:
                    yield str(piece)
        finally:
            with contextlib.suppress(AttributeError):
                stream.close()  # type: ignore[union-attr]

    def _fitting(self, messages: Messages, max_tokens: int) -> Messages:
        """The conversation without its oldest turns where it has outgrown the context, which is said."""
        n_ctx = self.llm.n_ctx()
        limit = n_ctx - room_for_answer(n_ctx, max_tokens)
        kept, n_left_out = recent(messages, lambda some: len(chat_prompt(self.llm, some)[0]) <= limit)
        if n_left_out:
            self.write(dim(f"{left_out(n_left_out, n_ctx)}; /new begins another one, --ctx makes room") + "\n")
        return kept

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _open(self) -> dict[str, Any]:
        if self.conversation is None:
            raise ArgumentError("there is no conversation yet")
        return self.conversation

    def _last_question(self) -> dict[str, Any]:
        questions = [message for message in branch(self._open()) if message["role"] == "user"]
        if not questions:
            raise ArgumentError("nothing was asked yet")
        return questions[-1]

    def new(self, _: str) -> None:
        self.conversation, self.attachments = None, []

    def list(self, query: str) -> None:
        found = self.store.conversations(query, limit=30)
        self.listed = [item["id"] for item in found]
        for number, item in enumerate(found, 1):
            self.write(f"{number:3}  {printable(item['title'])}\n")

    def open(self, number: str) -> None:
        if not number.isdigit() or not 1 <= int(number) <= len(self.listed):
            raise ArgumentError("/open takes a number of the last /list")
        self.conversation = self.store.conversation(self.listed[int(number) - 1])
        for message in branch(self.conversation):
            self.write(f"{bold('> ') if message['role'] == 'user' else ''}{printable(message['content'])}\n\n")

    def rename(self, title: str) -> None:
        self.conversation = self.store.update(self._open()["id"], title=title)

    def delete(self, _: str) -> None:
        self.store.delete(self._open()["id"])
        self.conversation = None

    def export(self, name: str) -> None:
        path = Path(name).expanduser()
        text = self.store.export(self._open()["id"], path.suffix.removeprefix("."))[2]
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"cannot write {path}: {error.strerror}", path=str(path)) from error

    def retry(self, _: str) -> None:
        self.answer(self._last_question()["id"])

    def edit(self, text: str) -> None:
        if not text:
            raise ArgumentError("/edit takes the new question")
        self.ask(text, self._last_question()["parent_id"])

    def set_system(self, text: str) -> None:
        self.system = text
        if self.conversation is not None:
            self.conversation = self.store.update(self.conversation["id"], system=text)

    def set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if name not in SAMPLING:
            raise ArgumentError(f"/set knows {', '.join(SAMPLING)}")
        kind, lowest, highest = SAMPLING[name]
        try:
            number = kind(value)
        except ValueError:
            raise ArgumentError(f"{name} must be a number, not {value!r}") from None
        if not lowest <= number <= highest:
            raise ArgumentError(f"{name} must be from {lowest:g} to {highest:g}")
        self.settings = {**self.settings, name: number}
        if self.conversation is not None:
            self.conversation = self.store.update(self.conversation["id"], settings={**self.conversation["settings"], name: number})

    def budget(self, size: str) -> None:
        self.llm.stream.set_budget(size)
        self.write(dim(f"budget {self.llm.stream.budget}, {format_bytes(self.llm.stream.memory().total_bytes)} planned") + "\n")

    def stats(self, _: str) -> None:
        stats, memory = self.llm.stream.stats(), self.llm.stream.memory()
        rows: list[tuple[str, ...]] = [
            (key.removesuffix("_bytes"), format_bytes(value)) for key, value in memory.to_dict().items() if value
        ]
        hits = "-" if stats.hit_ratio is None else f"{stats.hit_ratio * 100:.1f} %"
        rate = format_rate(stats.read_bandwidth) if stats.read_bandwidth else "-"
        rows += [("read so far", format_bytes(stats.read_bytes)), ("read rate", rate), ("hits", hits)]
        self.write(_common.table(rows) + "\n")

    def file(self, name: str) -> None:
        path = Path(name).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"cannot read {path} as text: {error}", path=str(path)) from error
        self.attachments.append({"name": path.name, "text": text})
        self.write(dim(f"{path.name} goes with the next question") + "\n")

    def help(self, _: str) -> None:
        self.write(HELP + "\n")

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash; False to leave."""
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit", "q"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            **{word: getattr(self, word) for word in ("new", "list", "open", "rename", "delete", "export", "retry", "edit", "set")},
            **{"budget": self.budget, "stats": self.stats, "file": self.file, "help": self.help, "system": self.set_system},
        }
        if name not in commands:
            raise ArgumentError(f"there is no /{name}; /help lists what there is")
        commands[name](rest.strip())
        return True

    def handle(self, line: str) -> bool:
        """One line of input; False to leave. What goes wrong is shown, and the session goes on."""
        try:
            if line.startswith("/"):
                return self.command(line)
            leaf = self.conversation["leaf_id"] if self.conversation else None
            self.ask(line, leaf)
        except LeanStreamError as error:
            self.write(f"{error}\n")
        return True


def _styled(code: str) -> Callable[[str], str]:
    return lambda text: f"\033[{code}m{text}\033[0m" if text and sys.stdout.isatty() else text


bold, dim = _styled("1"), _styled("2")


def _choose(service: ChatService) -> str:
    """Ask which model to use, from those in the folders.

    Raises:
        ArgumentError: there is none, or nobody to ask.
    """
    kept = service.remembered()
    found = service.models()
    if kept is not None:
        return str(kept["path"])
    if not found:
        places = ", ".join(item["path"] for item in service.folders())
        raise ArgumentError(
            f"no model was found in {places}", remedy="give one with -m FILE, or start `leanstream chat` for the demo model"
        )
    if len(found) == 1 or not sys.stdin.isatty():
        return found[0].path
    for number, model in enumerate(found, 1):
        print(f"{number:3}  {model.name}  {format_bytes(model.file_bytes)}")
    answer = input("Model: ").strip()
    if not answer.isdigit() or not 1 <= int(answer) <= len(found):
        raise ArgumentError(f"there is no model {answer!r} in the list")
    return found[int(answer) - 1].path


def _lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and editing
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if line:
            yield line


def run(args: argparse.Namespace) -> int:
    """`leanstream chat --tui`."""
    from ..cli.chat import model_options
    from ..model import Llama
    from ..probe import cpu_count

    folder = (args.data or paths.data_folder()).expanduser()
    service = ChatService(folder, model_folders=[Path(item) for item in args.models])
    try:
        path = args.model or _choose(service)
        service.needs.close()
        options = model_options(args)
        context = {name: options.pop(name) for name in ("n_ctx", "n_batch", "n_ubatch", "flash_attn") if name in options}
        threads = args.threads or cpu_count()
        with Llama(
            path,
            memory_budget=_common.budget(args),
            stream=_common.stream_config(args),
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **context,
        ) as llm:
            plan = llm.stream.plan()
            size = format_bytes(llm.stream.memory().total_bytes)
            _common.note(f"{Path(path).name}: {plan['mode']}, {size}. /help lists commands, Ctrl-D leaves.")
            terminal = Terminal(service.store, llm)
            for line in _lines():
                if not terminal.handle(line):
                    break
    finally:
        service.close()
    return 0
