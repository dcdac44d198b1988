#!/usr/bin/env python3
"""Move the chat page's budget slider while an answer is written: how soon memory follows, and whether the text stays the same.

Memory is what the system says that the process holds, the page is the real one in Chromium. Needs what
`bash scripts/test.sh --browser --setup-only` installs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests")]

from chat_page import FLAGS, ChatPage, Program  # noqa: E402 - needs the path above
from serving import until  # noqa: E402

QUESTION = "Write a long story about a lighthouse keeper and the sea."
SHARE = 0.9


def answer(chat: ChatPage) -> str:
    """The whole answer to the question in a conversation of its own, once it is being written."""
    chat.new_chat()
    chat.ask(QUESTION)
    return chat.wait_growing(20)


def move(chat: ChatPage, program: Program, watch_seconds: float) -> dict[str, Any]:
    """One move in the middle of an answer: seconds until SHARE of the fall, bytes, and the text."""
    answer(chat)
    before, start = program.resident_bytes(), time.monotonic()
    chat.page.press("#budget", "Home")
    course = []
    while time.monotonic() - start < watch_seconds:
        course.append((time.monotonic() - start, program.resident_bytes()))
        time.sleep(0.005)
    writing = not chat.page.locator(".message.assistant .retry").count()
    lowest = min(resident for _, resident in course)
    goal = before - SHARE * (before - lowest)
    seconds = next(at for at, resident in course if resident <= goal)
    text = chat.wait_answer()
    chat.page.press("#budget", "End")
    until(lambda: program.resident_bytes() >= before - (before - lowest) // 10, "everything is in memory again")
    return {"seconds": seconds, "freed_bytes": before - lowest, "still_writing": writing, "text": text}


def measure(chat: ChatPage, program: Program, workload: dict[str, Any]) -> dict[str, Any]:
    for _ in range(2):  # the first one leaves the prompt in the model's context, so that the next ones start alike
        answer(chat)
        expected = chat.wait_answer()
    moves = [move(chat, program, workload["watch_seconds"]) for _ in range(workload["moves"])]
    seconds = [item["seconds"] for item in moves]
    same = all(item["text"] == expected for item in moves)
    return {
        "moves": len(moves),
        "seconds": {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)},
        "freed_bytes": int(statistics.median(item["freed_bytes"] for item in moves)),
        "answer_characters": len(expected),
        "same_text": same,
        "still_writing": sum(item["still_writing"] for item in moves),
        "met": same and max(seconds) <= workload["bounds"]["seconds"],
    }


def report(result: dict[str, Any], path: Path | None) -> None:
    """Print the line, and append it to a file."""
    line = json.dumps(result)
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="program to look with")
    parser.add_argument("--save", action="store_true", help="append the line to results/")
    args = parser.parse_args()
    workload = json.loads(args.workload.read_text(encoding="utf-8"))
    result = {"benchmark": workload["name"], **machine.describe(args.model), "requested": workload}
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        program = Program(Path(folder) / "leanstream", args.model.parent)
        browser = playwright.chromium.launch(executable_path=args.chromium, args=FLAGS)
        try:
            program.load(args.model)
            program.defaults(max_tokens=workload["max_tokens"])
            result |= measure(ChatPage(browser.new_page(), program.url).open(), program, workload)
            report(result, HERE / "results" / f"{workload['name']}.jsonl" if args.save else None)
        finally:
            browser.close()
            program.stop()
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
