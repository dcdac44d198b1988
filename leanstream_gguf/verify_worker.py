"""One teacher-forced run in a process of its own: `python -m leanstream_gguf.verify_worker`, a job as JSON on stdin.

Writes the logits of the wanted tokens as raw float32 [n_rows, n_vocab] and prints what it did as JSON. With and without
streaming it is the same code with the same parameters, so that only the source of the weights differs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from .errors import LeanStreamError
from .planner import ContextDefaults
from .settings import Budget, StreamConfig


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        model: GGUF file.
        out: where the logits go.
        text: tokenised to the prompt if `tokens` is empty.
        tokens: prompt and the tokens that follow it; the rest up to n_generate is chosen greedily.
        n_prompt, n_generate: tokens run as a prompt and one by one.
        prompt_rows: positions of the prompt whose logits are written; those of every generated step are.
        repacked: let llama.cpp repack weights, as it does by default.
        memory, cache: of a streamed run; memory None runs llama.cpp through mmap, unstreamed.
    """

    model: str
    out: str
    text: str
    tokens: list[int]
    n_prompt: int
    n_generate: int
    prompt_rows: list[int]
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: bool
    repacked: bool = False
    memory: str | None = None
    cache: str | None = None
    stream: dict[str, Any] = field(default_factory=dict)


def run(job: Job) -> dict[str, Any]:
    """Do the job.

    Raises:
        LeanStreamError: typed, as for loading and decoding.
    """
    from . import loading, measure, probe, runtime
    from .model import as_streamed

    starts = range(0, job.n_prompt, job.n_batch)
    per_batch = [sum(1 for row in job.prompt_rows if start <= row < start + job.n_batch) for start in starts]
    sizes = ContextDefaults(job.n_ctx, job.n_batch, job.n_ubatch, max(1, *per_batch))
    params = loading.context_params(sizes, n_threads=job.n_threads, flash_attn=job.flash_attn)
    with contextlib.ExitStack() as stack:
        handle, scope = None, contextlib.nullcontext()
        if job.memory is not None:
            config = StreamConfig(cache_budget=job.cache, **job.stream)
            handle = stack.enter_context(runtime.ModelHandle(job.model, config))
            scope = handle.load_scope()  # type: ignore[assignment]
        context = stack.enter_context(loading.opened(job.model, scope, params, in_file_layout=not job.repacked))
        if handle is not None and job.memory is not None:
            context = as_streamed(context, handle, sizes.n_outputs_max)
            measure.activate(handle, Budget.parse(job.memory), config)
        tokens = job.tokens or _tokenize(context.model, job.text, job.n_prompt)
        start = time.monotonic()
        with open(job.out, "wb") as out:
            tokens, prefill_seconds = _forced(context, job, tokens, out)
        result: dict[str, Any] = {
            "tokens": tokens,
            "n_vocab": context.model.n_vocab(),
            "prefill_seconds": prefill_seconds,
            "decode_seconds": time.monotonic() - start - prefill_seconds,
            "peak_rss_bytes": probe.peak_resident_bytes(),
        }
        if handle is not None:
            result |= {"plan": handle.plan_in_force(), "stats": handle.stats().to_dict()}
    return result


def _tokenize(model: Any, text: str, n_tokens: int) -> list[int]:
    """Exactly `n_tokens` tokens of `text`, which is repeated if it is short."""
    tokens: list[int] = model.tokenize(text.encode(), add_bos=bool(model.add_bos_token()), special=False)
    body = model.tokenize(text.encode(), add_bos=False, special=False)
    while len(tokens) < n_tokens:
        tokens += body
    return tokens[:n_tokens]


def _forced(context: Any, job: Job, tokens: Sequence[int], out: IO[bytes]) -> tuple[list[int], float]:
    """Run prompt and forced tokens, choosing what is missing greedily; (all tokens, seconds of the prompt)."""
    import numpy as np
    from llama_cpp import _internals as internals

    done = list(tokens[: job.n_prompt])
    n_vocab, wanted = context.model.n_vocab(), frozenset(job.prompt_rows)
    batch = internals.LlamaBatch(n_tokens=job.n_batch, embd=0, n_seq_max=1, verbose=False)

    def row(position: int) -> Any:
        return np.ctypeslib.as_array(context.get_logits_ith(position), shape=(n_vocab,))

    with contextlib.closing(batch):
        start = time.monotonic()
        for first in range(0, job.n_prompt, job.n_batch):
            part = done[first : first + job.n_batch]
            batch.set_batch(part, n_past=first, logits_all=False)
            for i in range(len(part)):
                batch.batch.logits[i] = first + i in wanted
            context.decode(batch)
            for i in range(len(part)):
                if first + i in wanted:
                    out.write(row(i).tobytes())
        seconds = time.monotonic() - start
        last = row((job.n_prompt - 1) % job.n_batch)
        for step in range(job.n_generate):
            given = job.n_prompt + step < len(tokens)
            done.append(int(tokens[job.n_prompt + step]) if given else int(last.argmax()))
            batch.set_batch(done[-1:], n_past=len(done) - 1, logits_all=False)
            context.decode(batch)
            last = row(0)
            out.write(last.tobytes())
    return done, seconds


def main() -> int:
    try:
        result = run(Job(**json.load(sys.stdin)))
    except LeanStreamError as error:
        print(json.dumps({"error": error.to_dict()}))
        return error.exit_status
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
