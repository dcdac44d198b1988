"""The scripts of a fresh clone: asked for help, or wrongly, they do nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def run(script: str, flag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPTS / script), flag], capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_usage(script: str) -> None:
    for flag in ("--help", "-h"):
        done = run(script, flag)
        assert done.returncode == 0 and f"bash scripts/{script} [--setup-only]" in done.stdout and "#" not in done.stdout
        assert "set -euo" not in done.stdout and not done.stderr
    wrong = run(script, "--no-such-flag")
    assert wrong.returncode == 2 and not wrong.stdout
    assert "there is no --no-such-flag" in wrong.stderr and "[--setup-only]" in wrong.stderr
