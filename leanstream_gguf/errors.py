"""The exception tree: one class per cause, each with the fields a caller needs to act on it.

Every class derives from `LeanStreamError` and, where llama-cpp-python or Python itself would have raised a builtin for
the same cause, from that builtin too, so that existing `except ValueError` or `except FileNotFoundError` keep working.
Messages are one sentence: cause, sizes, remedy. Nothing here matches on message text.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LeanStreamError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: stable machine-readable name of the cause.
        http_status: what a server should answer with.
        exit_status: what the command exits with.
        path: the file concerned, or None.
        offset: byte offset in `path` of a failed read, or None.
        used: bytes that were asked for, or None.
        limit: bytes that would be needed or the most there is (see the class), or None.
        remedy: what to do about it, or None where the message already says it.
        sys_errno: errno of the failing system call, or None.
    """

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1
    errno: Any  # of OSError, in the classes that are one
    filename: Any

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        used: int | None = None,
        limit: int | None = None,
        remedy: str | None = None,
        sys_errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.offset = offset
        self.used = used
        self.limit = limit
        self.remedy = remedy
        self.sys_errno = sys_errno
        if isinstance(self, OSError):
            self.errno = sys_errno
            self.filename = path

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message} ({self.remedy})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._fields())

    def _fields(self) -> dict[str, Any]:
        names = ("path", "offset", "used", "limit", "remedy", "sys_errno")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """`{"code", "message"}` and every field that is known, for JSON replies."""
        fields = {key: value for key, value in self._fields().items() if value is not None}
        return {"code": self.code, "message": str(self), **fields}


def _rebuild(cls: type[LeanStreamError], message: str, fields: dict[str, Any]) -> LeanStreamError:
    return cls(message, **fields)


class ArgumentError(LeanStreamError, ValueError):
    """A value given by the caller is wrong."""

    code = "argument"
    http_status = 400
    exit_status = 2


class UnknownIdError(ArgumentError):
    """What was named does not exist, or does not any more."""

    code = "unknown_id"
    http_status = 404


class ModelFileError(LeanStreamError, ValueError):
    """Base of everything that is wrong with a model file (llama_cpp raises ValueError for these)."""

    code = "model_file"
    http_status = 422
    exit_status = 3


class ModelNotFoundError(ModelFileError, FileNotFoundError):
    """The file does not exist."""

    code = "not_found"
    http_status = 404


class ModelUnreadableError(ModelFileError, OSError):
    """The file exists but cannot be opened or read (permissions, a directory)."""

    code = "unreadable"
    http_status = 403


class FormatError(ModelFileError):
    """Not a GGUF file, or a corrupt one."""

    code = "format"


class TruncatedError(FormatError):
    """Shorter than its tensor table says (half-downloaded, `.part`, zero length): has `used`, needs `limit` bytes."""

    code = "truncated"


class EndianError(FormatError):
    """A GGUF of the other byte order."""

    code = "endian"


class ShardError(ModelFileError):
    """A shard of a split set is missing, or the file given is not the first one."""

    code = "shard"


class JoinedShardsError(FormatError):
    """Shards joined with `cat` instead of `llama-gguf-split --merge`."""

    code = "joined"


class CalibrationError(ModelFileError):
    """A calibration record that does not belong to the model, is damaged or is missing what was asked of it."""

    code = "calibration"


class UnsupportedError(LeanStreamError, NotImplementedError, ValueError):
    """An architecture, a setting or a use that is refused by name instead of being run wrongly."""

    code = "unsupported"
    http_status = 422
    exit_status = 4


class BudgetError(LeanStreamError, MemoryError, ValueError):
    """The memory budget is too small: `used` bytes were offered, `limit` is the minimum."""

    code = "budget"
    http_status = 507
    exit_status = 5


class ReadError(LeanStreamError, OSError, RuntimeError):
    """A read failed while the model was in use. The next call starts clean."""

    code = "read"
    http_status = 503
    exit_status = 6


class FileChangedError(ReadError):
    """The file changed or shrank while the model was in use."""

    code = "changed"


class RepackError(LeanStreamError, OSError):
    """A file could not be written, has no room, or did not read back as it was written. No file has the final name."""

    code = "write"
    http_status = 507
    exit_status = 8


class OutOfMemoryError(LeanStreamError, MemoryError):
    """The system refused memory or address space."""

    code = "memory"
    http_status = 507
    exit_status = 5


class StateError(LeanStreamError, RuntimeError):
    """The call does not fit the state of the model (closed, not streamed, in use)."""

    code = "state"
    http_status = 409


class StoreError(LeanStreamError, OSError):
    """The file of conversations or a download folder cannot be used."""

    code = "store"


class InternalError(LeanStreamError, RuntimeError):
    """A bug in this package."""

    code = "internal"


class LibraryError(LeanStreamError, ImportError):
    """The native libraries are missing, do not match this package, or others were loaded first."""

    code = "library"
    exit_status = 7


class LeanStreamWarning(UserWarning):
    """Something works, but slower or differently than one would expect."""


# ls_status of include/leanstream.h -> class. A test compares the numbers with the compiled enum.
BY_STATUS: dict[int, type[LeanStreamError]] = {
    1: ArgumentError,
    2: ModelNotFoundError,
    3: ModelUnreadableError,
    4: FormatError,
    5: TruncatedError,
    6: EndianError,
    7: ShardError,
    8: JoinedShardsError,
    9: UnsupportedError,
    10: BudgetError,
    11: ReadError,
    12: FileChangedError,
    13: OutOfMemoryError,
    14: StateError,
    15: InternalError,
}


def from_status(status: int, message: str, **fields: Any) -> LeanStreamError:
    """The exception for an `ls_status` other than LS_OK; an unknown number is an InternalError."""
    cls = BY_STATUS.get(status, InternalError)
    return cls(message or f"native call failed with status {status}", **fields)


def from_dict(document: dict[str, Any]) -> LeanStreamError:
    """The exception that `to_dict()` described, in another process."""
    others = [ModelFileError, LibraryError, CalibrationError, RepackError, StoreError, UnknownIdError]
    known: list[type[LeanStreamError]] = [*BY_STATUS.values(), *others]
    classes = {cls.code: cls for cls in known}
    fields = {key: document.get(key) for key in ("path", "offset", "used", "limit", "sys_errno")}
    return classes.get(document["code"], InternalError)(document["message"], **fields)
