"""The page's own files, listed once at the start: what is not in the list cannot be asked for."""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ModelNotFoundError

MAX_FILES = 500


@dataclass(frozen=True)
class PageFile:
    """One file, in memory."""

    body: bytes
    media_type: str
    etag: str


class Page:
    """A folder of static files as a table from URL path to content; symbolic links are left out.

    Attributes:
        files: "/" is index.html.
    """

    def __init__(self, folder: Path) -> None:
        """Read the folder.

        Raises:
            ModelNotFoundError: it has no index.html.
        """
        self.files: dict[str, PageFile] = {}
        found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        for path in found[:MAX_FILES]:
            body = path.read_bytes()
            kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            kind = "text/javascript" if path.suffix in (".js", ".mjs") else kind  # some systems' tables say otherwise
            file = PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
            self.files["/" + path.relative_to(folder).as_posix()] = file
        if "/index.html" not in self.files:
            raise ModelNotFoundError(f"the page's folder {folder} has no index.html", path=str(folder))
        self.files["/"] = self.files["/index.html"]

    def reply(self, request: Request) -> Response:
        """The file at the request's path, which must be in the table."""
        file = self.files[request.url.path]
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)
