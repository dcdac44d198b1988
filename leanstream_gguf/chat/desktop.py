"""An entry in the system's menu of applications: starts the chat by a click."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ..errors import StoreError, UnsupportedError
from . import PAGE

NAME = "leanstream"
_ENTRY = """\
[Desktop Entry]
Type=Application
Version=1.0
Name=LeanStream
GenericName=Language model chat
Comment=Chat with language models larger than memory, on this computer
Exec={exec}
Icon={icon}
Terminal=false
StartupNotify=true
StartupWMClass=LeanStream
Categories=Utility;
Keywords=LLM;GGUF;llama;AI;chat;
"""


def command() -> list[str]:
    """What starts the chat from this installation."""
    return [sys.executable, "-m", "leanstream_gguf", "chat"]


def _quoted(argument: str) -> str:
    """An argument of an Exec line: quoted, and escaped once for the quotes and once for the file, as the specification says."""
    if not any(character in argument for character in " \t\n\"'\\><~|&;$*?#()`%"):
        return argument
    inner = argument.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$", "\\$").replace("%", "%%")
    return '"' + inner.replace("\\", "\\\\") + '"'


def entry(icon: str = NAME) -> str:
    """The text of the .desktop file."""
    return _ENTRY.format(exec=" ".join(map(_quoted, command())), icon=icon)


def _linux_files(home: Path) -> dict[Path, bytes]:
    share = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    icons = share / "icons" / "hicolor"
    return {
        share / "applications" / f"{NAME}.desktop": entry().encode(),
        icons / "scalable" / "apps" / f"{NAME}.svg": (PAGE / "icon.svg").read_bytes(),
        icons / "256x256" / "apps" / f"{NAME}.png": (PAGE / "icon-256.png").read_bytes(),
    }


def _mac_files(home: Path) -> dict[Path, bytes]:
    contents = home / "Applications" / "LeanStream.app" / "Contents"
    info = {
        "CFBundleName": "LeanStream",
        "CFBundleIdentifier": "org.leanstream.chat",
        "CFBundleExecutable": NAME,
        "CFBundlePackageType": "APPL",
        "CFBundleShortVersionString": "1.0",
        "LSUIElement": True,  # the window or the browser is what is seen
    }
    script = f"#!/bin/sh\nexec {shlex.join(command())}\n"
    return {contents / "Info.plist": plistlib.dumps(info), contents / "MacOS" / NAME: script.encode()}


def files(platform: str = sys.platform, home: Path | None = None) -> dict[Path, bytes]:
    """What `install()` writes: path -> content.

    Raises:
        UnsupportedError: this system has no such entry that is made of files.
    """
    home = home or Path.home()
    if platform == "darwin":
        return _mac_files(home)
    if platform == "win32":
        raise UnsupportedError(
            "on Windows no entry is written", remedy="start leanstream-chat.exe in Python's Scripts folder, also by double click"
        )
    return _linux_files(home)


def install(home: Path | None = None) -> list[Path]:
    """Write the entry; an older one is replaced. Returns the files, the one to click first.

    Raises:
        StoreError: a file cannot be written. UnsupportedError: not on this system.
    """
    wanted = files(home=home)
    for path, content in wanted.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if path.suffix in (".desktop", ""):
                path.chmod(0o755)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}", path=str(path)) from error
    _tell_desktop(next(iter(wanted)).parent)
    return list(wanted)


def uninstall(home: Path | None = None) -> list[Path]:
    """Remove what `install()` wrote; returns what was there."""
    found = [path for path in files(home=home) if path.exists()]
    for path in found:
        path.unlink()
    return found


def _tell_desktop(folder: Path) -> None:
    """Menus are read again at once where this tool exists, later where it does not."""
    tool = shutil.which("update-desktop-database")
    if tool and folder.name == "applications":
        subprocess.run([tool, str(folder)], check=False, capture_output=True, timeout=30)
