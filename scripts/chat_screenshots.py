#!/usr/bin/env python3
"""Make the pictures of the chat in docs/: starts it with the demo model, has some answers written, and looks at it in Chromium.

Needs what `bash scripts/test.sh --browser --setup-only` installs; a folder with other models (--models) makes the list richer.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from chat_page import FLAGS, ChatPage, Program  # noqa: E402 - needs the path above

# Questions that the demo model answers rightly, which is not true of many.
QUESTIONS = (
    "Name three primary colors.",
    "What are the three states of matter? Answer as a list.",
    "What is the water cycle? Give its steps as a list.",
)


def take(page: Any, name: str) -> None:
    page.wait_for_timeout(700)
    page.screenshot(path=ROOT / "docs" / f"{name}.png")


def desktop(browser: Any, program: Program, model: Path) -> None:
    """First start, then an answer beside the live panel."""
    context = browser.new_context(viewport={"width": 1360, "height": 860}, color_scheme="light")
    chat = ChatPage(context.new_page(), program.url).open()
    chat.page.locator(".model-card", has_text=model.stem).locator(".needs strong").first.wait_for()
    take(chat.page, "chat-welcome")
    program.load(model, "min+50%")
    program.defaults(max_tokens=400, temperature=0, seed=7, repeat_penalty=1.1)
    chat.open()
    for question in QUESTIONS:
        chat.new_chat()
        chat.ask(question)
        if question == QUESTIONS[-1]:
            chat.wait_growing(100)
            chat.page.press("#budget", "Home")
        chat.wait_answer()
    chat.page.focus("#prompt")
    take(chat.page, "chat")
    context.close()


def dark(browser: Any, program: Program) -> None:
    context = browser.new_context(viewport={"width": 1360, "height": 860}, color_scheme="dark")
    chat = ChatPage(context.new_page(), program.url).open()
    chat.page.click(".conversation-open >> nth=0")
    chat.page.wait_for_selector(".message.assistant")
    chat.page.click("#model-button")
    chat.page.wait_for_selector("#models-dialog .card")
    take(chat.page, "chat-models")
    context.close()


def narrow(browser: Any, program: Program) -> None:
    context = browser.new_context(viewport={"width": 375, "height": 700}, color_scheme="dark", has_touch=True, is_mobile=True)
    chat = ChatPage(context.new_page(), program.url).open()
    chat.page.tap("#toggle-sidebar")
    chat.page.tap(".conversation-open >> nth=0")
    chat.page.wait_for_selector(".message.assistant .retry")
    take(chat.page, "chat-narrow")
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder with the demo model (default: models/)")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="program to look with")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    model = next(iter(sorted(args.models.glob("SmolLM2*.gguf"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        program = Program(Path(folder) / "leanstream", args.models)
        browser = playwright.chromium.launch(executable_path=args.chromium, args=FLAGS)
        try:
            desktop(browser, program, model)
            dark(browser, program)
            narrow(browser, program)
        finally:
            browser.close()
            program.stop()


if __name__ == "__main__":
    main()
