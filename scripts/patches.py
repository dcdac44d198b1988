#!/usr/bin/env python3
"""Work on the llama.cpp patches as commits, and keep patches/ an exact image of them.

    scripts/patches.py import [--3way] [--force]   vendor/llama.cpp = pin + series, one commit a patch
    ... edit, commit (or amend, reorder) in vendor/llama.cpp with plain git ...
    scripts/patches.py export                      write patches/*.patch and patches/series from the commits
    scripts/patches.py check                       lint the series, and fail if an export would change a byte
    scripts/patches.py stats [--json]              files and lines of each patch
    scripts/patches.py new "<subject>"             commit what is staged in vendor/llama.cpp, with the template to fill in

Patch files are never edited by hand: what a commit does not say, the next export removes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "vendor"))
import fetch  # noqa: E402
from _git import Checkout, GitError  # noqa: E402

MAX_ADDED_LINES = 300  # the whole series: call sites only, the logic is in leanstream_gguf/native
REASONS = ("upstreaming", "build", "divergence")
TRAILERS = ("Reason", "Drop-when", "Forwarded")
TEMPLATE = """{subject}

<what the call sites are for, and why they cannot live outside llama.cpp>

Reason: divergence
Drop-when: <what would make this patch unnecessary>
Forwarded: not-needed
"""


@dataclass(frozen=True)
class Patch:
    """One mailbox-form patch, taken apart as far as the checks need it."""

    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")

    @property
    def header(self) -> str:
        """Mail header and commit message: everything before the diff."""
        return self.text.split("\n---\n", 1)[0].split("\ndiff --git ", 1)[0]

    @property
    def subject(self) -> str:
        match = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", self.header, re.MULTILINE)
        return re.sub(r"\s*\n\s+", " ", match.group(1)).strip() if match else ""

    @property
    def file_name(self) -> str:
        return slug(self.subject) + ".patch"

    @property
    def body(self) -> str:
        parts = self.header.split("\n\n", 1)
        return parts[1].strip() if len(parts) == 2 else ""

    @property
    def trailers(self) -> dict[str, str]:
        return dict(re.findall(r"^([A-Z][A-Za-z-]+): (.+)$", self.body, re.MULTILINE))

    @property
    def prose(self) -> str:
        return re.sub(r"^[A-Z][A-Za-z-]+: .+$", "", self.body, flags=re.MULTILINE).strip()

    @property
    def files(self) -> list[str]:
        return re.findall(r"^diff --git a/\S+ b/(\S+)$", self.text, re.MULTILINE)

    def changed(self, sign: str) -> list[str]:
        """The added (+) or removed (-) lines, without the sign."""
        diff = self.text.partition("\ndiff --git ")[2]
        return [line[1:] for line in diff.splitlines() if line.startswith(sign) and not line.startswith((sign * 3) + " ")]


def slug(subject: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "_", subject.lower()).strip("_")[:80].rstrip("_")


# ---- checks ---------------------------------------------------------------------------------------------------------


def lint_patch(name: str, patch: Patch) -> list[str]:
    trailers, problems = patch.trailers, []
    if name != patch.file_name:
        problems.append(f"its subject gives the name {patch.file_name}")
    if not patch.subject or patch.subject.startswith("["):
        problems.append("the subject must be a phrase without [tags]")
    if len(patch.prose.split()) < 10 or "<" in trailers.get("Drop-when", "") or patch.prose.startswith("<"):
        problems.append("the message must say why the patch exists, in words")
    problems += [f"trailer `{key}:` is missing" for key in TRAILERS if key not in trailers]
    if trailers.get("Reason", REASONS[0]) not in REASONS:
        problems.append(f"`Reason:` must be one of {', '.join(REASONS)}")
    if any(line != line.rstrip() for line in patch.changed("+")):
        problems.append("an added line ends in white space")
    if b"\r" in patch.raw:
        problems.append("holds a carriage return")
    if not patch.raw.startswith(b"From " + b"0" * 40):
        problems.append("not written by `scripts/patches.py export`")
    return [f"{name}: {problem}" for problem in problems]


def lint_series(layout: fetch.Layout) -> list[str]:
    """Problems of patches/ that can be found without the checkout."""
    names = layout.series()
    on_disk = {path.name for path in layout.patches.glob("*.patch")}
    problems = [f"{name}: in series, but there is no such file" for name in names if name not in on_disk]
    problems += [f"{name}: not in series" for name in sorted(on_disk - set(names))]
    problems += [f"{name}: twice in series" for name in sorted({name for name in names if names.count(name) > 1})]
    patches = {name: Patch((layout.patches / name).read_bytes()) for name in names if name in on_disk}
    for name, patch in patches.items():
        problems += lint_patch(name, patch)
    added = sum(len(patch.changed("+")) for patch in patches.values())
    if added > MAX_ADDED_LINES:
        problems.append(f"series: {added} added lines, at most {MAX_ADDED_LINES} (move logic to leanstream_gguf/native)")
    return problems + lint_readme(layout, patches)


def lint_readme(layout: fetch.Layout, patches: dict[str, Patch]) -> list[str]:
    """The hook table has a row for every (patch, upstream file), and no row of a patch that is gone."""
    readme = layout.patches / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    rows = [line for line in text.splitlines() if line.startswith("|") and ".patch" in line]
    problems = []
    for name, patch in patches.items():
        for file in patch.files:
            if not any(name in row and file in row for row in rows):
                problems.append(f"README.md: the hook table has no row with {name} and {file}")
    for row in rows:
        problems += [f"README.md: {name} is not in series" for name in re.findall(r"[\w-]+\.patch", row) if name not in patches]
    return problems


def exported(checkout: Checkout) -> dict[str, bytes]:
    """What the commits of the checkout look like as files, in order."""
    if not checkout.exists():
        raise fetch.FetchError("vendor/llama.cpp is not there: run `scripts/patches.py import`")
    patches: dict[str, bytes] = {}
    for raw in checkout.format_patches("upstream"):
        name = Patch(raw).file_name
        if name in patches:
            raise fetch.FetchError(f"two commits in vendor/llama.cpp give the file name {name}: reword one subject")
        patches[name] = raw
    return patches


def stale(layout: fetch.Layout) -> list[str]:
    """Files that an export would write, change or delete."""
    fresh = exported(layout.checkout)
    on_disk = {path.name: path.read_bytes() for path in layout.patches.glob("*.patch")}
    problems = [f"{name}: differs from its commit" for name in fresh if on_disk.get(name) != fresh[name]]
    problems += [f"{name}: has no commit" for name in sorted(set(on_disk) - set(fresh))]
    if layout.series() != list(fresh):
        problems.append("series: not the order of the commits")
    return problems


# ---- commands -------------------------------------------------------------------------------------------------------


def cmd_import(layout: fetch.Layout, args: argparse.Namespace) -> int:
    work = fetch.local_work(layout.checkout)
    if work and not args.force:
        raise fetch.FetchError(f"vendor/llama.cpp has {work}; export them, or add --force to lose them")
    fetch.prepare(layout, force=True) if not args.three_way else import_three_way(layout)
    return 0


def import_three_way(layout: fetch.Layout) -> None:
    if not layout.checkout.exists():
        fetch.unpack_upstream(layout.pin, layout.checkout.path)
    fetch.apply_series(layout, layout.patch_hashes(), three_way=True)


def cmd_export(layout: fetch.Layout, args: argparse.Namespace) -> int:
    checkout = layout.checkout
    fresh = exported(checkout)
    if checkout.is_dirty():
        print("patches: note: edits in vendor/llama.cpp that are not committed are not exported", file=sys.stderr)
    for path in layout.patches.glob("*.patch"):
        if path.name not in fresh:
            path.unlink()
    for name, raw in fresh.items():
        (layout.patches / name).write_bytes(raw)
    (layout.patches / "series").write_bytes("".join(f"{name}\n" for name in fresh).encode())
    fetch.write_stamp(layout, layout.patch_hashes())
    report(lint_series(layout), "warning")
    print(f"patches: exported {len(fresh)}")
    return 0


def cmd_check(layout: fetch.Layout, args: argparse.Namespace) -> int:
    problems = lint_series(layout)
    if not problems:
        fetch.prepare(layout)
        problems = stale(layout)
    report(problems, "error")
    print(f"patches: {len(problems)} problems" if problems else "patches: series and commits agree")
    return 1 if problems else 0


def cmd_stats(layout: fetch.Layout, args: argparse.Namespace) -> int:
    rows = []
    for name in layout.series():
        patch = Patch((layout.patches / name).read_bytes())
        rows.append({"patch": name, "files": patch.files, "added": len(patch.changed("+")), "removed": len(patch.changed("-"))})
    total = {"patches": len(rows), "added": sum(row["added"] for row in rows), "removed": sum(row["removed"] for row in rows)}
    if args.json:
        print(json.dumps({**total, "series": rows}, indent=1))
        return 0
    for row in rows:
        print(f"{row['patch']}: +{row['added']} -{row['removed']} in {', '.join(row['files'])}")
    print(f"{total['patches']} patches, +{total['added']} -{total['removed']} (at most +{MAX_ADDED_LINES})")
    return 0


def cmd_new(layout: fetch.Layout, args: argparse.Namespace) -> int:
    checkout = layout.checkout
    if not checkout.exists():
        raise fetch.FetchError("vendor/llama.cpp is not there: run `scripts/patches.py import`")
    if not checkout.run("diff", "--cached", "--name-only"):
        raise fetch.FetchError("nothing is staged in vendor/llama.cpp: `git -C vendor/llama.cpp add FILE` first")
    checkout.run("commit", "--quiet", "--date", "now", "--file", "-", stdin=TEMPLATE.format(subject=args.subject).encode())
    print("patches: committed; fill in the message with `git -C vendor/llama.cpp commit --amend`, then export")
    return 0


def report(problems: list[str], severity: str) -> None:
    for problem in problems:
        print(f"patches: {severity}: {problem}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="import | export | check | stats | new")
    sub = commands.add_parser("import", help="vendor/llama.cpp = pin + series")
    sub.add_argument("--3way", dest="three_way", action="store_true", help="leave conflicts to resolve, for a bump")
    sub.add_argument("--force", action="store_true", help="lose commits and edits that are not exported")
    sub.set_defaults(call=cmd_import)
    commands.add_parser("export", help="write patches/ from the commits").set_defaults(call=cmd_export)
    commands.add_parser("check", help="lint, and dry-run the export").set_defaults(call=cmd_check)
    sub = commands.add_parser("stats", help="lines of each patch")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(call=cmd_stats)
    sub = commands.add_parser("new", help="commit what is staged, with a template message")
    sub.add_argument("subject")
    sub.set_defaults(call=cmd_new)
    return parser


def main(argv: list[str] | None = None, layout: fetch.Layout | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return args.call(layout or fetch.Layout(), args)
    except (fetch.FetchError, GitError) as cause:
        print(f"patches: error: {cause}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
