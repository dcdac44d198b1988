"""Loading through llama.cpp: one at a time, and with llama.cpp's own words in the error when it refuses.

llama_cpp only says "Failed to load model from file"; the cause is in llama.cpp's log, which is recorded here meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from ._lib import native
from .errors import ArgumentError, FormatError, LeanStreamError, UnsupportedError
from .planner import ContextDefaults

native()  # before llama_cpp is imported
import llama_cpp.llama_cpp as low_level  # noqa: E402
from llama_cpp import _internals as internals  # noqa: E402
from llama_cpp._logger import set_verbose  # noqa: E402

# llama_cpp redirects file descriptors 1 and 2 while it loads quietly, and the log callback is one for the process: two
# loads at once would lose the descriptors for good.
construction = threading.RLock()

_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class _Recorder:
    """The log callback while a model loads: keeps the error lines of the loading thread, passes everything on.

    One for the life of the process, since a thread that loads an ordinary model may still be in a call of it, or about to
    make one, when the recording ends.
    """

    def __init__(self) -> None:
        self.lines: list[str] | None = None
        self.thread = 0
        self.previous, self.user_data = low_level.llama_log_callback(), ctypes.c_void_p()
        self.callback = low_level.llama_log_callback(self._record)

    def _record(self, level: int, text: bytes, _: int | None) -> None:
        lines = self.lines
        if lines is not None and level == _LOG_ERROR and threading.get_ident() == self.thread:
            lines.append(text.decode("utf-8", "replace").strip())
        if self.previous:
            self.previous(level, text, self.user_data)

    def install(self) -> None:
        previous, user_data = low_level.llama_log_callback(), ctypes.c_void_p()
        low_level.llama_log_get(ctypes.byref(previous), ctypes.byref(user_data))
        self.previous, self.user_data = previous, user_data
        low_level.llama_log_set(self.callback, ctypes.c_void_p(0))

    def uninstall(self) -> None:
        low_level.llama_log_set(self.previous, self.user_data)


_recorder = _Recorder()


@contextlib.contextmanager
def recorded_log() -> Iterator[list[str]]:
    """The error lines llama.cpp logs meanwhile on this thread; they still reach the callback that was set before. Hold
    `construction`."""
    outer, _recorder.lines = _recorder.lines, []
    _recorder.thread = threading.get_ident()
    if outer is None:
        _recorder.install()
    try:
        yield _recorder.lines
    finally:
        if outer is None:
            _recorder.uninstall()
        _recorder.lines = outer


def refusal(path: str, log: list[str]) -> LeanStreamError:
    """What to raise when llama.cpp refused to load `path`, from the error lines it logged."""
    reason = next((line for line in log if "error loading model" in line), log[0] if log else "it gave no reason")
    text = reason.split("error loading model:")[-1].split("error loading model architecture:")[-1].strip()
    # The pinned library names the cause in its log only; an architecture it does not know is not a broken file.
    kind = UnsupportedError if "unknown model architecture" in text else FormatError
    return kind(f"llama.cpp cannot load {path}: {text}", path=path)


def context_params(sizes: ContextDefaults, *, n_threads: int, flash_attn: bool = False) -> Any:
    """llama_context_params as llama_cpp.Llama would fill them for these sizes."""
    params = low_level.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = sizes.n_ctx, sizes.n_batch, sizes.n_ubatch
    params.n_outputs_max = sizes.n_outputs_max
    params.n_threads = params.n_threads_batch = n_threads
    enabled, disabled = low_level.LLAMA_FLASH_ATTN_TYPE_ENABLED, low_level.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = enabled if flash_attn else disabled
    params.op_offload = False
    return params


@contextlib.contextmanager
def opened(
    path: str,
    scope: contextlib.AbstractContextManager[None],
    params: Any,
    *,
    verbose: bool = False,
    in_file_layout: bool = False,
    n_gpu_layers: int = 0,
) -> Iterator[internals.LlamaContext]:
    """A context on a model loaded inside `scope`, with its `model`; both are freed at the end.

    Args:
        in_file_layout: no weight repacking, for comparisons with a streamed model.

    Raises:
        FormatError, UnsupportedError: llama.cpp refuses the file. ArgumentError: it refuses the parameters.
    """
    low_level.llama_backend_init()
    set_verbose(verbose)
    model_params = low_level.llama_model_default_params()
    model_params.n_gpu_layers = n_gpu_layers
    no_devices = (ctypes.c_void_p * 1)(None)  # a list that ends where it begins
    if n_gpu_layers == 0:  # llama.cpp would take a device for its buffers even so
        model_params.devices = ctypes.addressof(no_devices)
    model_params.use_extra_bufts = not in_file_layout
    with contextlib.ExitStack() as stack:
        with construction, recorded_log() as log, scope:
            try:
                model = internals.LlamaModel(path_model=path, params=model_params, verbose=verbose)
            except ValueError as error:
                raise refusal(path, log) from error
            stack.callback(model.close)
            try:
                context = internals.LlamaContext(model=model, params=params, verbose=verbose)
            except ValueError as error:
                reason = log[0] if log else "it gave no reason"
                raise ArgumentError(f"llama.cpp refuses these context settings: {reason}", path=path) from error
            stack.callback(context.close)
        yield context
