"""Fixtures that every test may use: toy models, larger test models where they exist, a clean environment.

Markers: `slow` runs only with --slow; `native` needs the built libraries; `model` needs files that are not part of the
repository and is skipped, with a list at the end of the run, where they are missing; `device` needs a GPU, `browser` Chromium,
and they are skipped, and listed, likewise.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "scripts/bench", "tests")]

from toygguf.models import write_model  # noqa: E402 - needs the path above

MARKERS = {
    "slow": "takes more than a few seconds; runs only with --slow",
    "native": "needs the built native libraries",
    "model": "needs model files outside the repository",
    "device": "needs a GPU and a build for it: scripts/test.sh --vulkan",
    "browser": "needs Chromium and playwright: scripts/test.sh --browser gets them",
}
KEPT_VARIABLES = ("LEANSTREAM_TEST_", "LEANSTREAM_LIB", "LEANSTREAM_LLAMA_SOURCE")
MISSING = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MISSING] = {}
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_report_header() -> list[str]:
    return [f"leanstream: {_library_report()}", f"test models: {models_folder()}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = config.stash[MISSING]
    if missing:
        terminalreporter.section("SKIPPED FOR WANT OF MODELS OR PROGRAMS", yellow=True)
        for what, where in missing.items():
            terminalreporter.line(f"{what}: {where}")


def _library_report() -> str:
    """Pin and folder of the libraries under test, or why there are none."""
    if importlib.util.find_spec("leanstream_gguf") is None:
        return "not installed"
    try:
        from leanstream_gguf import _lib

        return f"llama.cpp {_lib.LLAMA_COMMIT[:12]}, llama-cpp-python {_lib.LLAMA_CPP_PYTHON_VERSION}, {_lib.LIB_DIR}"
    except Exception as error:  # the header must not keep tests from running
        return f"not usable: {error}"


def models_folder() -> Path:
    """Where larger test models lie: LEANSTREAM_TEST_MODELS, or a folder beside the repository."""
    return Path(os.environ.get("LEANSTREAM_TEST_MODELS", ROOT.parent / "shared" / "models"))


def _require(config: pytest.Config, what: str, path: Path, remedy: str) -> Path:
    if not path.exists():
        config.stash[MISSING][what] = f"{path} is missing; {remedy}"
        pytest.skip(f"{what}: {path} is missing; {remedy}")
    return path


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No setting of the developer's shell reaches a test, nor one of llama_cpp.server's bare names (MODEL, HOST, PORT)."""
    server = _server_variables() if "native" in request.fixturenames else frozenset()
    for name in list(os.environ):
        ours = name.startswith("LEANSTREAM_") and not name.startswith(KEPT_VARIABLES)
        if ours or name.lower() in server:
            monkeypatch.delenv(name)


@functools.cache
def _server_variables() -> frozenset[str]:
    from leanstream_gguf.server import ModelSettings, ServerSettings

    return frozenset(ModelSettings.model_fields) | frozenset(ServerSettings.model_fields) | {"config_file"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(name, n_shards=1)`: the path of a toy model, written once a session. Do not change the file."""
    folder = tmp_path_factory.mktemp("tiny")
    written: dict[tuple[str, int], Path] = {}

    def get(name: str, n_shards: int = 1) -> Path:
        key = (name, n_shards)
        if key not in written:
            written[key] = write_model(name, folder, n_shards)
        return written[key]

    return get


@pytest.fixture(scope="session")
def native() -> None:
    """The native libraries; a test that asks for them fails, and does not skip, where they do not load."""
    from leanstream_gguf import _lib

    _lib.native()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest, native: None) -> None:
    """A GPU that the libraries were built for. LEANSTREAM_TEST_DEVICE=1: missing it fails and does not skip."""
    from leanstream_gguf import probe

    if probe.gpus():
        return
    reason = "no GPU that these libraries were built for; run scripts/test.sh --vulkan"
    assert not os.environ.get("LEANSTREAM_TEST_DEVICE"), reason
    request.config.stash[MISSING]["tests on a device"] = reason
    pytest.skip(reason)


@pytest.fixture(scope="session")
def zoo_moe(request: pytest.FixtureRequest) -> Path:
    """A trained mixture-of-experts model whose routing varies (qwen3moe, 32 experts)."""
    path = models_folder() / "zoo-moe-169m-Q4_K_M.gguf"
    return _require(request.config, "zoo_moe", path, "set LEANSTREAM_TEST_MODELS to its folder")


@pytest.fixture(scope="session")
def zoo_relu2(request: pytest.FixtureRequest) -> Path:
    """A trained model with squared ReLU (arcee)."""
    path = models_folder() / "zoo-relu2-83m-Q8_0.gguf"
    return _require(request.config, "zoo_relu2", path, "set LEANSTREAM_TEST_MODELS to its folder")


@pytest.fixture(scope="session")
def heldout_text(request: pytest.FixtureRequest) -> str:
    """Text that the trained test models have not seen."""
    path = models_folder().parent / "data" / "docs-heldout.txt"
    found = _require(request.config, "heldout_text", path, "it lies in data/ beside the folder of the test models")
    return found.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """The model that scripts/quickstart.sh fetches."""
    found = sorted((ROOT / "models").rglob("*[sS]mol[lL][mM]2*.gguf"))
    path = found[0] if found else ROOT / "models" / "SmolLM2"
    return _require(request.config, "demo_model", path, "run scripts/quickstart.sh --setup-only")


@pytest.fixture(scope="session")
def gemma_model(request: pytest.FixtureRequest) -> Path:
    """Gemma 3 270M; not fetched by the set-up."""
    found = [p for folder in (ROOT / "models", models_folder()) for p in sorted(folder.rglob("*[gG]emma-3-270*.gguf"))]
    path = found[0] if found else ROOT / "models" / "gemma-3-270m"
    return _require(request.config, "gemma_model", path, "run scripts/get_demo_model.py --model gemma3-270m")


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> Path:
    """A Chromium to drive: LEANSTREAM_TEST_CHROMIUM, or Debian's."""
    remedy = "run scripts/test.sh --browser"
    if importlib.util.find_spec("playwright") is None or importlib.util.find_spec("axe_playwright_python") is None:
        request.config.stash[MISSING]["tests of the chat page"] = f"playwright and axe are not installed; {remedy}"
        pytest.skip(f"playwright and axe are not installed; {remedy}")
    path = Path(os.environ.get("LEANSTREAM_TEST_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium")
    return _require(request.config, "tests of the chat page", path, remedy)


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Any]:
    """It runs for one file: while it does, no other test may use asyncio."""
    from chat_page import FLAGS
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(chromium), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def scratch_copy(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`scratch_copy(name)`: a private copy of a toy model that the test may damage."""

    def get(name: str) -> Path:
        copy = tmp_path / f"{name}.gguf"
        copy.write_bytes(tiny(name).read_bytes())
        return copy

    return get
