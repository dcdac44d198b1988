#!/usr/bin/env python3
"""Get the pinned llama.cpp, unpack what the build needs, and apply patches/series to it.

    python vendor/fetch.py             prints the folder of the sources; does nothing when they are up to date
    python vendor/fetch.py --force     also when commits or edits in vendor/llama.cpp would be lost
    python vendor/fetch.py --upstream DIR   the unpatched pin, unpacked into DIR
    python vendor/fetch.py --sdist     only the archive; prints its path

The archive is the source distribution that pip downloads, kept in a cache folder and checked by SHA-256. Patches become
commits on top of one commit named `upstream`, so that work on them is ordinary git (scripts/patches.py).

Environment: LEANSTREAM_LLAMA_SOURCE=DIR  use these sources as they are, without patching
             LEANSTREAM_SDIST_DIR=DIR     look for the archive here first
             LEANSTREAM_CACHE_DIR=DIR     where the archive is kept (default: leanstream in the user's cache folder)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _git import Checkout, GitError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama_cpp_python"
STAMP = "leanstream-stamp.json"  # inside the checkout's .git folder, so that they go together


class FetchError(RuntimeError):
    """The sources cannot be provided; the message names cause and remedy."""


@dataclass(frozen=True)
class Pin:
    """vendor/llama.cpp.toml."""

    version: str
    sdist_sha256: str
    commit: str
    paths: tuple[str, ...]
    unpacked_tree: str

    @classmethod
    def read(cls, path: Path) -> Pin:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            version=data[PACKAGE]["version"],
            sdist_sha256=data[PACKAGE]["sdist_sha256"],
            commit=data["llama_cpp"]["commit"],
            paths=tuple(data["unpack"]["paths"]),
            unpacked_tree=data["unpack"]["tree"],
        )

    @property
    def sdist_name(self) -> str:
        return f"{PACKAGE}-{self.version}.tar.gz"


@dataclass(frozen=True)
class Layout:
    """Where things are in a repository like this one; tests make small ones."""

    root: Path = ROOT

    @property
    def pin(self) -> Pin:
        return Pin.read(self.root / "vendor" / "llama.cpp.toml")

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def checkout(self) -> Checkout:
        return Checkout(self.root / "vendor" / "llama.cpp")

    def series(self) -> list[str]:
        """File names of the patches in the order they apply."""
        lines = (self.patches / "series").read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def patch_hashes(self) -> dict[str, str]:
        """Name to SHA-256, in order: what has to be applied."""
        names = self.series()
        missing = [name for name in names if not (self.patches / name).is_file()]
        if missing:
            raise FetchError(f"patches/series lists files that do not exist: {', '.join(missing)}")
        return {name: hashlib.sha256((self.patches / name).read_bytes()).hexdigest() for name in names}


def say(text: str) -> None:
    print(f"fetch: {text}", file=sys.stderr, flush=True)


# ---- the archive ----------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    chosen = os.environ.get("LEANSTREAM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "leanstream"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def get_sdist(pin: Pin) -> Path:
    """A verified copy of the archive: from LEANSTREAM_SDIST_DIR, the cache, or pip."""
    places = [Path(folder) for folder in [os.environ.get("LEANSTREAM_SDIST_DIR")] if folder]
    for folder in [*places, cache_dir()]:
        path = folder / pin.sdist_name
        if path.is_file():
            if sha256_of(path) == pin.sdist_sha256:
                return path
            say(f"{path} has another SHA-256 than the pin, not used")
    return download_sdist(pin, cache_dir())


def download_sdist(pin: Pin, target: Path) -> Path:
    requirement = f"{PACKAGE.replace('_', '-')}=={pin.version}"
    say(f"downloading the source distribution of {requirement} with pip (73 MiB)")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            PACKAGE.replace("_", "-"),
            "--dest",
            folder,
            requirement,
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        path = Path(folder) / pin.sdist_name
        if done.returncode or not path.is_file():
            raise FetchError(
                f"pip could not download {requirement}. Without a network, put {pin.sdist_name} into a folder "
                "and set LEANSTREAM_SDIST_DIR to it."
            )
        found = sha256_of(path)
        if found != pin.sdist_sha256:
            raise FetchError(f"{pin.sdist_name} has SHA-256 {found}, the pin says {pin.sdist_sha256}: not used")
        os.replace(path, target / pin.sdist_name)
    return target / pin.sdist_name


def wanted(name: PurePosixPath, paths: tuple[str, ...]) -> bool:
    return any(name == PurePosixPath(path) or PurePosixPath(path) in name.parents for path in paths)


def unpack(pin: Pin, sdist: Path, target: Path) -> None:
    """Write pin.paths of the archive's vendor/llama.cpp under target; check the archive's own record of the commit."""
    top = PurePosixPath(f"{PACKAGE}-{pin.version}")
    source, head = top / "vendor" / "llama.cpp", top / ".git" / "modules" / "vendor" / "llama.cpp" / "HEAD"
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if not member.isfile() or ".." in name.parts:
                continue
            if name == head:
                check_commit(pin, archive.extractfile(member).read().decode().strip())
            elif source in name.parents and wanted(name.relative_to(source), pin.paths):
                path = target / name.relative_to(source)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())


def check_commit(pin: Pin, found: str) -> None:
    if found != pin.commit:
        raise FetchError(f"{pin.sdist_name} vendors llama.cpp {found}, the pin says {pin.commit}")


def unpack_upstream(pin: Pin, target: Path) -> Checkout:
    """The unpatched pin in a new folder, as a repository with the one commit `upstream`."""
    if target.exists():
        raise FetchError(f"{target} exists")
    sdist = get_sdist(pin)
    say(f"unpacking {sdist.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        unpack(pin, sdist, temporary)
        checkout = Checkout(temporary)
        checkout.init_with_everything(f"llama.cpp {pin.commit}\n\nAs vendored by {PACKAGE} {pin.version}, unpacked in part.")
        if checkout.tree() != pin.unpacked_tree:
            raise FetchError(f"the unpacked files have git tree {checkout.tree()}, the pin says {pin.unpacked_tree}")
        temporary.chmod(0o755)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkout(target)


# ---- the patched checkout -------------------------------------------------------------------------------------------


def read_stamp(checkout: Checkout) -> dict[str, object]:
    """What fetch.py or an export left behind: {sdist_sha256, unpacked_tree, patches, head}; empty if nothing is there."""
    path = checkout.path / ".git" / STAMP
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_stamp(layout: Layout, patches: dict[str, str]) -> None:
    pin, checkout = layout.pin, layout.checkout
    stamp = {"sdist_sha256": pin.sdist_sha256, "unpacked_tree": pin.unpacked_tree, "patches": patches, "head": checkout.head()}
    (checkout.path / ".git" / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def local_work(checkout: Checkout) -> str:
    """Why the checkout must not be reset, or ""."""
    if not checkout.exists():
        return ""
    if checkout.is_applying():
        return "an interrupted `git am`"
    if checkout.is_dirty():
        return "edits that are not committed"
    if checkout.head() != read_stamp(checkout).get("head"):
        return "commits that are not exported"
    return ""


def prepare(layout: Layout, force: bool = False) -> Path:
    """Bring vendor/llama.cpp to pin + series and return it. Idempotent; never throws work away unless forced."""
    pin, checkout = layout.pin, layout.checkout
    patches, stamp = layout.patch_hashes(), read_stamp(checkout)
    same_pin = (stamp.get("sdist_sha256"), stamp.get("unpacked_tree")) == (pin.sdist_sha256, pin.unpacked_tree)
    same_patches = list(dict(stamp.get("patches", {})).items()) == list(patches.items())
    if checkout.exists() and same_pin and same_patches and not force:
        work = local_work(checkout)
        if work:
            say(f"vendor/llama.cpp has {work}; building it as it is")
        return checkout.path
    work = local_work(checkout)
    if work and not force:
        raise FetchError(
            f"the pin or patches/ changed, but vendor/llama.cpp has {work}. Keep them with "
            "`scripts/patches.py export`, or drop them with `vendor/fetch.py --force`."
        )
    if not (checkout.exists() and same_pin):
        shutil.rmtree(checkout.path, ignore_errors=True)
        unpack_upstream(pin, checkout.path)
        write_stamp(layout, {})
    apply_series(layout, patches)
    return checkout.path


def apply_series(layout: Layout, patches: dict[str, str], three_way: bool = False) -> None:
    checkout = layout.checkout
    checkout.reset_to("upstream")
    write_stamp(layout, {})
    for name in patches:
        try:
            checkout.apply_mailbox((layout.patches / name).read_bytes(), three_way)
        except GitError as cause:
            if not three_way:  # a three-way attempt leaves the conflict for its author
                checkout.reset_to("upstream")
            raise FetchError(
                f"patches/{name} does not apply to llama.cpp {layout.pin.commit[:9]}. After a bump, run "
                f"`scripts/patches.py import --3way` and resolve it.\n{cause}"
            ) from cause
    write_stamp(layout, patches)
    say(f"applied {len(patches)} patch{'' if len(patches) == 1 else 'es'}")


def overriding_source() -> Path | None:
    chosen = os.environ.get("LEANSTREAM_LLAMA_SOURCE")
    if not chosen:
        return None
    path = Path(chosen).resolve()
    if not (path / "src" / "llama-graph.cpp").is_file():
        raise FetchError(f"LEANSTREAM_LLAMA_SOURCE={chosen} holds no llama.cpp sources")
    say(f"using {path} as it is, without patching")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="unpack and patch again, losing local work")
    parser.add_argument("--upstream", metavar="DIR", type=Path, help="only unpack the unpatched pin into DIR")
    parser.add_argument("--sdist", action="store_true", help="only get the archive, and print its path")
    args = parser.parse_args(argv)
    try:
        if args.sdist:
            path = get_sdist(Layout().pin)
        elif args.upstream:
            path = unpack_upstream(Layout().pin, args.upstream.resolve()).path
        else:
            path = overriding_source() or prepare(Layout(), args.force)
    except (FetchError, GitError) as cause:
        print(f"fetch: error: {cause}", file=sys.stderr)
        return 1
    print(path.as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
