"""The pin and the patch stack: fetching, applying, exporting, and that a build with the hooks off is the unpatched library.

Everything but the last test works on a small repository of its own, made here, with an archive of three files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "vendor"), str(ROOT / "scripts")]

import fetch  # noqa: E402
import patches  # noqa: E402

COMMIT = "1" * 40
FILES = {"CMakeLists.txt": "project(x)\n", "src/a.cpp": "one\ntwo\nthree\n", "docs/not-wanted.md": "big\n"}
# Seconds, not minutes: the compiler cache holds our own build, and with it all that no patch touches.
CHEAP_BUILD = shutil.which("ccache") is not None and (ROOT / "build" / "dev").is_dir()
MESSAGE = """{subject}

The graph builder is where every feed-forward layer passes, and it has no callback that could replace a tensor.

Reason: divergence
Drop-when: upstream offers a callback that may replace a weight
Forwarded: not-needed
"""


def write_sdist(folder: Path, commit: str = COMMIT) -> Path:
    path = folder / "llama_cpp_python-9.9.tar.gz"
    content = {f"vendor/llama.cpp/{name}": text for name, text in FILES.items()}
    content[".git/modules/vendor/llama.cpp/HEAD"] = commit + "\n"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in content.items():
            member = tarfile.TarInfo(f"llama_cpp_python-9.9/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def write_pin(root: Path, sha256: str, tree: str) -> None:
    (root / "vendor" / "llama.cpp.toml").write_text(
        f'[llama_cpp_python]\nversion = "9.9"\nsdist_sha256 = "{sha256}"\n[llama_cpp]\ncommit = "{COMMIT}"\n'
        f'[unpack]\npaths = ["CMakeLists.txt", "src"]\ntree = "{tree}"\n'
    )


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fetch.Layout:
    """A repository with a pin on a tiny archive and an empty series."""
    sdist = write_sdist(tmp_path)
    monkeypatch.setenv("LEANSTREAM_SDIST_DIR", str(tmp_path))
    monkeypatch.setenv("LEANSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    layout = fetch.Layout(tmp_path / "repo")
    (layout.root / "vendor").mkdir(parents=True)
    layout.patches.mkdir()
    (layout.patches / "series").write_text("")
    write_pin(layout.root, fetch.sha256_of(sdist), "")
    with pytest.raises(fetch.FetchError) as wrong_tree:
        fetch.prepare(layout)
    write_pin(layout.root, fetch.sha256_of(sdist), str(wrong_tree.value).split("git tree ")[1][:40])
    return layout


def commit_change(layout: fetch.Layout, subject: str, old: str, new: str, message: str = MESSAGE) -> None:
    checkout = layout.checkout
    source = checkout.path / "src" / "a.cpp"
    source.write_text(source.read_text().replace(old, new))
    checkout.run("commit", "--quiet", "--all", "--file", "-", stdin=message.format(subject=subject).encode())


def write_hook_table(layout: fetch.Layout) -> None:
    rows = "".join(f"| {name} | src/a.cpp |\n" for name in layout.series())
    (layout.patches / "README.md").write_text(rows)


@pytest.fixture
def stack(repo: fetch.Layout) -> fetch.Layout:
    """The same with two exported patches."""
    fetch.prepare(repo)
    commit_change(repo, "graph: call the hook", "two", "two hook()")
    commit_change(repo, "loader: leave data alone", "three", "three skip()")
    assert patches.main(["export"], repo) == 0
    write_hook_table(repo)
    return repo


def source_text(layout: fetch.Layout) -> str:
    return (layout.checkout.path / "src" / "a.cpp").read_text()


# ---- the archive ----------------------------------------------------------------------------------------------------


def test_unpacks_only_the_listed_paths(repo: fetch.Layout) -> None:
    path = fetch.prepare(repo)
    found = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file() and ".git" not in p.parts)
    assert found == ["CMakeLists.txt", "src/a.cpp"]


def test_unpatched_commit_has_the_same_id_everywhere(repo: fetch.Layout, tmp_path: Path) -> None:
    first = fetch.unpack_upstream(repo.pin, tmp_path / "one").head()
    assert fetch.unpack_upstream(repo.pin, tmp_path / "two").head() == first


def test_an_archive_with_another_hash_is_not_used(repo: fetch.Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fetch, "download_sdist", lambda pin, target: asked.append(pin.version) or write_sdist(tmp_path))
    with (tmp_path / "llama_cpp_python-9.9.tar.gz").open("ab") as archive:
        archive.write(b"\0")
    fetch.get_sdist(repo.pin)
    assert asked == ["9.9"]


def test_an_archive_of_another_commit_is_refused(repo: fetch.Layout, tmp_path: Path) -> None:
    write_pin(repo.root, fetch.sha256_of(write_sdist(tmp_path, commit="2" * 40)), repo.pin.unpacked_tree)
    with pytest.raises(fetch.FetchError, match=r"vendors llama\.cpp 2222"):
        fetch.prepare(repo)
    assert not repo.checkout.path.exists()


def test_the_source_can_be_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.setenv("LEANSTREAM_LLAMA_SOURCE", str(tmp_path))
    with pytest.raises(fetch.FetchError, match=r"holds no llama\.cpp sources"):
        fetch.overriding_source()
    (tmp_path / "src" / "llama-graph.cpp").touch()
    assert fetch.overriding_source() == tmp_path


# ---- applying -------------------------------------------------------------------------------------------------------


def test_series_is_applied_in_order(stack: fetch.Layout) -> None:
    fetch.prepare(stack, force=True)
    assert source_text(stack) == "one\ntwo hook()\nthree skip()\n"
    assert stack.series() == ["graph_call_the_hook.patch", "loader_leave_data_alone.patch"]


def test_up_to_date_sources_are_not_touched(stack: fetch.Layout) -> None:
    fetch.prepare(stack)
    before = (stack.checkout.head(), (stack.checkout.path / "src" / "a.cpp").stat().st_mtime_ns)
    fetch.prepare(stack)
    assert (stack.checkout.head(), (stack.checkout.path / "src" / "a.cpp").stat().st_mtime_ns) == before


def test_a_shorter_series_takes_the_patch_back(stack: fetch.Layout) -> None:
    (stack.patches / "series").write_text("graph_call_the_hook.patch\n")
    fetch.prepare(stack)
    assert source_text(stack) == "one\ntwo hook()\nthree\n"


def test_work_that_is_not_exported_is_never_lost(stack: fetch.Layout) -> None:
    commit_change(stack, "third", "one", "one more")
    (stack.patches / "series").write_text("")
    with pytest.raises(fetch.FetchError, match="commits that are not exported"):
        fetch.prepare(stack)
    assert patches.main(["import"], stack) == 1
    assert source_text(stack).startswith("one more")
    fetch.prepare(stack, force=True)
    assert source_text(stack) == FILES["src/a.cpp"]


def test_a_patch_that_does_not_apply_leaves_the_unpatched_sources(stack: fetch.Layout) -> None:
    path = stack.patches / "loader_leave_data_alone.patch"
    path.write_bytes(path.read_bytes().replace(b"-three", b"-3"))
    with pytest.raises(fetch.FetchError, match=r"patches/loader_leave_data_alone\.patch does not apply"):
        fetch.prepare(stack)
    assert source_text(stack) == FILES["src/a.cpp"]
    assert not stack.checkout.is_applying()


# ---- exporting and checking -----------------------------------------------------------------------------------------


def test_export_gives_the_same_bytes_after_an_import(stack: fetch.Layout) -> None:
    before = stack.patch_hashes()
    assert patches.main(["import", "--force"], stack) == 0
    assert patches.main(["export"], stack) == 0
    assert stack.patch_hashes() == before
    assert patches.main(["check"], stack) == 0


def test_export_ignores_the_users_git_settings(stack: fetch.Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("[diff]\n\tnoprefix = true\n\tcontext = 9\n[format]\n\tsignature = me\n[core]\n\tabbrev = 5\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    before = stack.patch_hashes()
    assert patches.main(["export"], stack) == 0
    assert stack.patch_hashes() == before


def test_export_removes_the_file_of_a_dropped_commit(stack: fetch.Layout) -> None:
    stack.checkout.reset_to("HEAD~1")
    assert patches.main(["export"], stack) == 0
    assert [path.name for path in stack.patches.glob("*.patch")] == stack.series() == ["graph_call_the_hook.patch"]


def test_check_finds_a_hand_edited_patch(stack: fetch.Layout, capsys: pytest.CaptureFixture[str]) -> None:
    path = stack.patches / "graph_call_the_hook.patch"
    path.write_bytes(path.read_bytes().replace(b"it has no callback", b"it  has no callback"))
    assert patches.main(["check"], stack) == 0, "the edit is applied as a commit, so file and commit agree"
    path.write_bytes(path.read_bytes().replace(b"@@ -1,3 +1,3 @@", b"@@ -1,3 +1,3 @@ void f()"))
    assert patches.main(["check"], stack) == 1
    assert "graph_call_the_hook.patch: differs from its commit" in capsys.readouterr().err


def test_two_commits_of_one_name_are_refused(stack: fetch.Layout, capsys: pytest.CaptureFixture[str]) -> None:
    commit_change(stack, "Graph: call  the hook", "one", "one more")
    assert patches.main(["export"], stack) == 1
    assert "reword one subject" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Reason: divergence\n", "", "trailer `Reason:` is missing"),
        ("Reason: divergence", "Reason: because", "`Reason:` must be one of"),
        ("Forwarded: not-needed\n", "", "trailer `Forwarded:` is missing"),
        ("The graph builder", "Short.\n\nX: ", "must say why"),
        ("+two hook()", "+two hook() ", "ends in white space"),
        ("Subject: graph", "Subject: [PATCH] graph", "must be a phrase"),
        ("Subject: graph", "Subject: tree", "gives the name tree_call_the_hook.patch"),
        ("From 0000", "From 1234", "not written by"),
    ],
)
def test_lint_names_the_problem(stack: fetch.Layout, old: str, new: str, problem: str) -> None:
    path = stack.patches / "graph_call_the_hook.patch"
    text = path.read_text().replace(old, new, 1)
    if old.startswith("The"):
        text = "\n".join(line for line in text.split("\n") if not line.startswith("X: "))
    path.write_text(text)
    assert any(problem in found for found in patches.lint_series(stack))


def test_lint_compares_series_and_folder(stack: fetch.Layout) -> None:
    (stack.patches / "series").write_text("graph_call_the_hook.patch\ngraph_call_the_hook.patch\nmissing.patch\n")
    found = patches.lint_series(stack)
    assert "missing.patch: in series, but there is no such file" in found
    assert "loader_leave_data_alone.patch: not in series" in found
    assert "graph_call_the_hook.patch: twice in series" in found


def test_lint_wants_a_row_in_the_hook_table(stack: fetch.Layout) -> None:
    (stack.patches / "README.md").write_text("| gone.patch | src/a.cpp |\n")
    found = patches.lint_series(stack)
    assert "README.md: the hook table has no row with graph_call_the_hook.patch and src/a.cpp" in found
    assert "README.md: gone.patch is not in series" in found


def test_lint_limits_the_added_lines(stack: fetch.Layout) -> None:
    commit_change(stack, "graph: grow", "one", "one" + "\nmore" * patches.MAX_ADDED_LINES)
    assert patches.main(["export"], stack) == 0
    assert any("added lines, at most" in found for found in patches.lint_series(stack))


def test_stats_count_lines(stack: fetch.Layout, capsys: pytest.CaptureFixture[str]) -> None:
    assert patches.main(["stats", "--json"], stack) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["patches"], found["added"], found["removed"]) == (2, 2, 2)


def test_new_commits_what_is_staged(stack: fetch.Layout) -> None:
    assert patches.main(["new", "graph: more"], stack) == 1
    (stack.checkout.path / "src" / "a.cpp").write_text("other\n")
    stack.checkout.run("add", "--update")
    assert patches.main(["new", "graph: more"], stack) == 0
    assert stack.checkout.run("log", "-1", "--format=%s") == "graph: more"


# ---- this repository ------------------------------------------------------------------------------------------------


def test_the_series_passes_the_lint() -> None:
    assert patches.lint_series(fetch.Layout()) == []


def test_the_series_is_the_image_of_its_commits() -> None:
    layout = fetch.Layout()
    if not layout.checkout.exists():
        pytest.skip("vendor/llama.cpp is not there: the package was built from other sources")
    if fetch.read_stamp(layout.checkout).get("patches") != layout.patch_hashes():
        pytest.skip("patches/ changed since vendor/llama.cpp was made: build again")
    assert patches.stale(layout) == []


def test_every_place_names_the_same_pin() -> None:
    from leanstream_gguf import _lib

    pin = fetch.Layout().pin
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]["server"]
    assert f"llama-cpp-python=={pin.version}" in project["dependencies"]
    assert f"llama-cpp-python[server]=={pin.version}" in extras
    assert (pin.version, pin.commit) == (_lib.LLAMA_CPP_PYTHON_VERSION, _lib.LLAMA_COMMIT)


# ---- the off switch -------------------------------------------------------------------------------------------------

PRINT_LOGITS = """
import hashlib, json, sys
import llama_cpp
result = {"base": str(llama_cpp.llama_cpp._base_path)}
for path in sys.argv[1:]:
    llm = llama_cpp.Llama(path, n_ctx=256, n_batch=64, n_ubatch=64, n_threads=2, seed=7, logits_all=True, verbose=False)
    tokens = [11 + 7 * i % (llm.n_vocab() - 20) for i in range(80)]
    llm.eval(tokens[:64])
    for token in tokens[64:]:
        llm.eval([token])
    result[path] = hashlib.sha256(llm.scores[:80].tobytes()).hexdigest()
    llm.close()
print(json.dumps(result))
"""


def build_unpatched() -> Path:
    """libllama of the unpatched pin, built under build/unpatched with our build's options.

    The folders lie to each other as ours do, so that the compiler cache has every file that no patch touches.
    """
    source, build = (ROOT / "build" / "unpatched" / part for part in ("vendor/llama.cpp", "build/dev"))
    pin = fetch.Layout().pin
    if source.exists() and fetch.Checkout(source).tree() != pin.unpacked_tree:
        shutil.rmtree(source)
    if not source.exists():
        fetch.unpack_upstream(pin, source)
    environment = {**os.environ, "LEANSTREAM_LLAMA_SOURCE": str(source)}
    options = ["-DLEANSTREAM_PYTHON=OFF", "-DLEANSTREAM_MTMD=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", ROOT / "leanstream_gguf" / "native", "-B", build, "-G", "Ninja", *options],
        ["cmake", "--build", build, "--target", "llama"],
    ):
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return build / "bin"


@(pytest.mark.native if CHEAP_BUILD else pytest.mark.slow)
@pytest.mark.timeout(1800)
def test_without_hooks_the_patched_library_gives_the_bytes_of_the_unpatched_one(tiny: Callable[..., Path]) -> None:
    from leanstream_gguf import _lib

    models = [str(tiny(name)) for name in ("dense_tied", "dense_gemma3", "moe_qwen3", "moe_merged", "moe_bias", "moe_scales")]
    models += [str(path) for path in sorted((ROOT / "models").glob("*.gguf"))]
    results = []
    for folder in (build_unpatched(), _lib.LIB_DIR):
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder)}
        command = [sys.executable, "-c", PRINT_LOGITS, *models]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads(done.stdout.splitlines()[-1])
        assert result.pop("base") == str(folder)
        results.append(result)
    assert results[0] == results[1]


def test_sha256_of_reads_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert fetch.sha256_of(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()
