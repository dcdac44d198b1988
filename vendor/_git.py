"""Run git on the vendored checkout, and nowhere else.

Knows git; knows nothing of pins, archives or the series. Every call names the checkout's own .git folder, so that a
missing one can never make a command act on the repository around it, and ignores the user's configuration, so that
commits and exported patches have the same bytes on every machine.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

IDENTITY = ("LeanStream patches", "patches@leanstream.invalid")
EPOCH = "1700000000 +0000"  # any fixed time: it only makes the ids of the unpatched commit reproducible

# Each flag removes something that would differ between machines or git versions.
FORMAT_FLAGS = (
    "--keep-subject",  # no [PATCH n/m], which would renumber every file when one is added
    "--no-stat",  # derived data
    "--no-signature",  # holds the git version
    "--full-index",  # abbreviated ids depend on the number of objects
    "--zero-commit",  # the id depends on the committer
    "--no-thread",
    "--no-attach",
    "--no-cover-letter",
    "--no-base",
    "--no-renames",
    "--diff-algorithm=myers",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


class GitError(RuntimeError):
    """git failed; the message holds the command and what it said."""


class Checkout:
    """A work tree with its own .git folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def exists(self) -> bool:
        return (self.path / ".git" / "HEAD").is_file()

    def run(self, *args: str, stdin: bytes | None = None) -> str:
        """Standard output of `git args` as text."""
        return self.run_bytes(*args, stdin=stdin).decode("utf-8", "replace").strip()

    def run_bytes(self, *args: str, stdin: bytes | None = None) -> bytes:
        command = ["git", "-c", "core.autocrlf=false", "-c", "core.whitespace=cr-at-eol", "-c", "gc.auto=0", *args]
        try:
            done = subprocess.run(command, cwd=self.path, env=self._env(), input=stdin, capture_output=True, check=False)
        except FileNotFoundError as cause:
            raise GitError("git is needed to unpack and patch llama.cpp, and was not found on PATH") from cause
        if done.returncode:
            said = (done.stderr + done.stdout).decode("utf-8", "replace").strip()
            raise GitError(f"git {' '.join(args[:3])} failed in {self.path}:\n{said}")
        return done.stdout

    def _env(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        for role in ("AUTHOR", "COMMITTER"):  # `git am` takes the author from the patch
            env[f"GIT_{role}_NAME"], env[f"GIT_{role}_EMAIL"] = IDENTITY
            env[f"GIT_{role}_DATE"] = EPOCH
        env.update(
            GIT_DIR=str(self.path / ".git"),
            GIT_WORK_TREE=str(self.path),
            GIT_CONFIG_GLOBAL=os.devnull,
            GIT_CONFIG_NOSYSTEM="1",
            GIT_TERMINAL_PROMPT="0",
            LC_ALL="C",
            TZ="UTC",
        )
        return env

    def init_with_everything(self, message: str) -> None:
        """Make the checkout a repository whose single commit `upstream` holds all files of the folder."""
        self.run("init", "--quiet", "--initial-branch=patched")
        self.run("config", "core.fileMode", "false")
        self.run("add", "--all", "--force", ".")
        self.run("commit", "--quiet", "--message", message)
        self.run("tag", "upstream")

    def head(self) -> str:
        return self.run("rev-parse", "HEAD")

    def tree(self, rev: str = "HEAD") -> str:
        return self.run("rev-parse", f"{rev}^{{tree}}")

    def is_dirty(self) -> bool:
        return bool(self.run("status", "--porcelain", "--untracked-files=no"))

    def is_applying(self) -> bool:
        """An interrupted `git am` is waiting for a decision."""
        return (self.path / ".git" / "rebase-apply").exists()

    def reset_to(self, rev: str) -> None:
        if self.is_applying():
            self.run("am", "--abort")
        self.run("reset", "--quiet", "--hard", rev)

    def apply_mailbox(self, patch: bytes, three_way: bool = False) -> None:
        flags = ["--3way"] if three_way else []
        self.run("am", "--quiet", "--keep", "--keep-cr", "--committer-date-is-author-date", "--whitespace=nowarn", *flags, stdin=patch)

    def format_patches(self, base: str) -> list[bytes]:
        """The commits since base as mailbox patches, oldest first, the same bytes on every machine."""
        text = self.run_bytes("format-patch", "--stdout", *FORMAT_FLAGS, f"{base}..HEAD")
        starts = [match.start() for match in re.finditer(rb"^From 0{40} ", text, re.MULTILINE)]
        bounds = [*starts, len(text)]
        return [text[begin:end].rstrip(b"\n") + b"\n" for begin, end in itertools.pairwise(bounds)]
