"""errors.py: the exception tree and its builtins, fields and copies."""

from __future__ import annotations

import pickle

import pytest

from leanstream_gguf import errors

ALL = [*errors.BY_STATUS.values(), errors.ModelFileError, errors.LibraryError]


@pytest.mark.parametrize(
    ("kind", "builtins"),
    [
        (errors.ArgumentError, (ValueError,)),
        (errors.ModelNotFoundError, (FileNotFoundError, ValueError)),
        (errors.ModelUnreadableError, (OSError, ValueError)),
        (errors.FormatError, (ValueError,)),
        (errors.UnsupportedError, (ValueError, NotImplementedError)),
        (errors.BudgetError, (ValueError, MemoryError)),
        (errors.ReadError, (OSError, RuntimeError)),
        (errors.FileChangedError, (errors.ReadError,)),
        (errors.OutOfMemoryError, (MemoryError,)),
        (errors.LibraryError, (ImportError,)),
    ],
)
def test_builtins_that_existing_handlers_expect(kind: type[Exception], builtins: tuple[type, ...]) -> None:
    for builtin in (*builtins, errors.LeanStreamError):
        assert issubclass(kind, builtin)


@pytest.mark.parametrize("kind", ALL)
def test_pickle_keeps_type_message_and_fields(kind: type[errors.LeanStreamError]) -> None:
    error = kind("cause", path="/m.gguf", offset=3, used=5, limit=7, remedy="do this", sys_errno=5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.to_dict() == error.to_dict()
    assert str(copy) == "cause (do this)"


@pytest.mark.parametrize("kind", ALL)
def test_dict_round_trip(kind: type[errors.LeanStreamError]) -> None:
    copy = errors.from_dict(kind("cause", limit=7).to_dict())
    assert type(copy) is kind
    assert (str(copy), copy.limit, copy.used) == ("cause", 7, None)


def test_codes_are_unique_and_statuses_are_errors() -> None:
    assert len({kind.code for kind in ALL}) == len(ALL)
    for kind in ALL:
        assert 400 <= kind.http_status < 600
        assert 1 <= kind.exit_status < 126


def test_os_errors_have_errno_and_filename() -> None:
    error = errors.ReadError("cause", path="/m.gguf", sys_errno=5)
    assert (error.errno, error.filename, str(error)) == (5, "/m.gguf", "cause")


def test_from_status() -> None:
    assert type(errors.from_status(10, "small", limit=3)) is errors.BudgetError
    assert type(errors.from_status(99, "")) is errors.InternalError


@pytest.mark.native
def test_every_status_of_the_header_has_a_class(native: None) -> None:
    from leanstream_gguf import _lib

    lib = _lib.native().lib
    statuses = {getattr(lib, name): name for name in dir(lib) if name.startswith("LS_ERR_")}
    assert set(statuses) == set(errors.BY_STATUS)
    assert lib.LS_OK == 0
    assert errors.BY_STATUS[lib.LS_ERR_BUDGET] is errors.BudgetError
    assert errors.BY_STATUS[lib.LS_ERR_CHANGED] is errors.FileChangedError
