"""The measured process: builds one model and does what the parent asks, one JSON line in, one JSON line out.

Requests: {"do": "build"}, {"do": "check"}, {"do": "warm", "n": 256}, {"do": "sample"}, {"do": "quit"}.
Started by decode.py with the variant's description as its argument; it runs in the memory group if there is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Reply = dict[str, Any]


def _stock_class(repack: bool) -> Any:
    """llama_cpp.Llama of whatever libraries LLAMA_CPP_LIB_PATH names, with or without weight repacking."""
    import llama_cpp
    import llama_cpp.llama_cpp as low_level

    if not repack:
        defaults = low_level.llama_model_default_params

        def without_repacking() -> Any:
            params = defaults()
            params.use_extra_bufts = False
            return params

        low_level.llama_model_default_params = without_repacking
    return llama_cpp.Llama


class Child:
    """One variant of a workload."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.llm: Any = None
        self.tokens: list[int] = []
        self.position = 0

    # ---- model -----------------------------------------------------------------------------------------------------

    def _make(self) -> Any:
        settings = {"verbose": False, "seed": 1, **self.job["settings"]}
        variant = self.job["variant"]
        if variant["engine"] != "leanstream":
            return _stock_class(bool(variant.get("repack")))(self.job["model"], **settings)
        from leanstream_gguf import Llama, StreamConfig

        stream = StreamConfig(**variant.get("stream", {}))
        return Llama(self.job["model"], memory_budget=variant["memory"], stream=stream, **settings)

    def build(self, _request: Reply) -> Reply:
        """Load the model and say what it was really given."""
        start = time.perf_counter()
        self.llm = self._make()
        seconds = time.perf_counter() - start
        params = self.llm.context_params
        names = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn_type", "op_offload")
        effective = {name: int(getattr(params, name)) for name in names}
        with open(self.job["text"], "rb") as file:
            file.seek(self.job.get("text_offset", 0))
            self.tokens = self.llm.tokenize(file.read(600_000), add_bos=False)
        reply: Reply = {"load_seconds": seconds, "effective": effective, "rss_bytes": _peak_rss()}
        if self.job["variant"]["engine"] == "leanstream":
            plan = self.llm.stream.plan()
            memory = self.llm.stream.memory().to_dict()
            reply |= {"plan": plan, "memory": memory, "load": self.llm.stream.stats().to_dict()}
        return reply

    def _next(self, n: int) -> list[int]:
        """The next n tokens of the text; it starts over at its end."""
        if self.position + n > len(self.tokens):
            self.position = 0
        self.position += n
        return self.tokens[self.position - n : self.position]

    def _feed(self, tokens: list[int]) -> None:
        """One by one, starting over with an empty context when it is full."""
        for token in tokens:
            if self.llm.n_tokens + 1 > self.llm.n_ctx():
                self.llm.reset()
            self.llm.eval([token])

    # ---- requests --------------------------------------------------------------------------------------------------

    def check(self, _request: Reply) -> Reply:
        """SHA-256 of the logits of a prompt and 16 single tokens: equal for variants that claim the same bits."""
        import llama_cpp
        import numpy as np

        self.llm.reset()
        tokens = self.tokens[1000:1080]
        digest = hashlib.sha256()
        for part in (tokens[:64], *([t] for t in tokens[64:])):
            self.llm.eval(part)
            row = llama_cpp.llama_get_logits_ith(self.llm.ctx, -1)
            digest.update(np.ctypeslib.as_array(row, shape=(self.llm.n_vocab(),)).tobytes())
        self.llm.reset()
        return {"logits_sha256": digest.hexdigest()}

    def warm(self, request: Reply) -> Reply:
        """Feed tokens without measuring."""
        self._feed(self._next(int(request["n"])))
        return {}

    def sample(self, _request: Reply) -> Reply:
        """One measured sample of the workload's task, with what the streaming counters did meanwhile."""
        before = self._counters()
        reply = _TASKS[self.job["task"]](self)
        after = self._counters()
        return {**reply, "counters": {key: after[key] - before[key] for key in before}, "rss_bytes": _peak_rss()}

    def _counters(self) -> dict[str, Any]:
        if self.llm is None or self.job["variant"]["engine"] != "leanstream":
            return {}
        return {k: v for k, v in self.llm.stream.stats().to_dict().items() if isinstance(v, int)}

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def teacher_forced(self) -> Reply:
        """Tokens of the text, one at a time."""
        tokens = self._next(self.job["n_tokens"])
        start = time.perf_counter()
        self._feed(tokens)
        return _speed(len(tokens), time.perf_counter() - start)

    def prefill(self) -> Reply:
        """A prompt into an empty context."""
        tokens = self._next(self.job["n_prompt"])
        self.llm.reset()
        start = time.perf_counter()
        self.llm.eval(tokens)
        return _speed(len(tokens), time.perf_counter() - start)

    def prompt_and_tokens(self) -> Reply:
        """A prompt, then tokens of the text one at a time; the speed is that of the tokens."""
        reply = self.prefill()
        return {**self.teacher_forced(), "prefill_seconds": reply["seconds"]}

    def load(self) -> Reply:
        """Build the model anew; the rate is that of the weights read."""
        self.llm.close()
        start = time.perf_counter()
        self.llm = self._make()
        seconds = time.perf_counter() - start
        stats = self.llm.stream.stats()
        rate = stats.load_bytes * 1e9 / stats.load_ns if stats.load_ns else 0.0
        return {"seconds": seconds, "load_bytes": stats.load_bytes, "load_bytes_per_second": rate}

    def quit(self, _request: Reply) -> Reply:
        """Free the model."""
        if self.llm is not None:
            self.llm.close()
        return {}


_TASKS: dict[str, Callable[[Child], Reply]] = {
    "teacher_forced": Child.teacher_forced,
    "prefill": Child.prefill,
    "prompt_and_tokens": Child.prompt_and_tokens,
    "load": Child.load,
}


def _speed(n_tokens: int, seconds: float) -> Reply:
    return {"n_tokens": n_tokens, "seconds": seconds, "tokens_per_second": n_tokens / seconds}


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _reply_channel() -> Iterator[Callable[[Reply], None]]:
    """The original stdout for replies; what libraries print goes to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with channel:

        def send(reply: Reply) -> None:
            channel.write(json.dumps(reply) + "\n")
            channel.flush()

        yield send


def main() -> None:
    """Answer requests until `quit` or the end of the input; an error is an answer too."""
    child = Child(json.loads(sys.argv[1]))
    with _reply_channel() as send:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                send(getattr(child, request["do"])(request))
            except Exception as error:
                send({"error": f"{type(error).__name__}: {error}"})
            if request["do"] == "quit":
                break


if __name__ == "__main__":
    main()
