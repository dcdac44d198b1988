"""`leanstream run`: complete a prompt, or chat, under a memory budget."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conversation import chat_prompt, left_out, recent, room_for_answer
from ..errors import ArgumentError
from ..settings import check_context
from ..units import format_bytes, format_rate
from . import _common

if TYPE_CHECKING:
    from ..model import Llama


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="complete a prompt, or chat, under a memory budget",
        description="Complete a prompt, or chat if there is none. Text goes to standard output, a summary to standard error. "
        "With --json the only output is one document: text, tokens, tokens_per_second, prefill_seconds, load_seconds, "
        "peak_rss_bytes, budget_bytes, bytes_read, hit_ratio, mode, and more.",
    )
    _common.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue; without it: a chat, or standard input")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("-n", "--tokens", type=int, default=128, metavar="N", help="tokens to generate at most; default 128")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of a chat")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    parser.add_argument("--temp", type=float, default=0.8, metavar="T", help="temperature, 0 = always the likeliest; default 0.8")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="sample from the K likeliest; default 40")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="sample from this much probability; default 0.95")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler; default 0")
    _common.add_memory(parser)
    _common.add_device(parser)
    _common.add_context(parser)
    _common.add_streaming(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's log on standard error")
    _common.add_json(parser)
    parser.set_defaults(run=run)


@dataclass
class Answer:
    """One generation as it happens; times in seconds."""

    n_prompt: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first, which belongs to the prompt's run; 0 if there are none."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 and self.decode_seconds else 0.0


def generate(llm: Llama, tokens: list[int], args: argparse.Namespace, answer: Answer) -> Iterator[str]:
    """Pieces of text as they become valid UTF-8; `answer` is filled on the way."""
    import llama_cpp

    vocab, decoder = llm._model.vocab, codecs.getincrementaldecoder("utf-8")("replace")
    llm.set_seed(args.seed)
    answer.n_prompt = len(tokens)
    limit = min(args.tokens, llm.n_ctx() - len(tokens))
    start = time.monotonic()
    stream = llm.generate(tokens, top_k=args.top_k, top_p=args.top_p, temp=args.temp)
    for token in stream:
        now = time.monotonic()
        answer.prefill_seconds = answer.prefill_seconds or now - start
        answer.decode_seconds = now - start - answer.prefill_seconds
        if llama_cpp.llama_vocab_is_eog(vocab, token) and not args.ignore_eos:
            break
        answer.tokens.append(token)
        piece = decoder.decode(_piece(vocab, token))
        answer.text += piece
        yield piece
        if len(answer.tokens) >= limit:
            break
    stream.close()
    rest = decoder.decode(b"", final=True)
    answer.text += rest
    yield rest
    if len(answer.tokens) == limit < args.tokens:
        _common.note(f"\nleanstream: stopped: the context of {llm.n_ctx()} tokens is full; raise --ctx for a longer answer")


def _piece(vocab: Any, token: int) -> bytes:
    """The bytes of a token, whatever their number; b"" for control tokens."""
    import ctypes

    import llama_cpp

    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n_bytes = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, False)
        if n_bytes >= 0:
            return buffer.raw[:n_bytes]
        size = -n_bytes


def _prompt_text(args: argparse.Namespace) -> str | None:
    """The prompt, or None for a chat at the terminal."""
    if args.prompt is not None and args.file is not None:
        raise ArgumentError("give -p or -f, not both")
    if args.prompt is not None:
        return _utf8(args.prompt, "-p")
    if args.file is not None:
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"cannot read the prompt from {args.file}: {error}", path=args.file) from error
    if sys.stdin is None:
        raise ArgumentError("there is no prompt, and standard input is closed; give -p or -f")
    if sys.stdin.isatty():
        return None
    try:
        return _utf8(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"the prompt on standard input is not text in {error.encoding}") from error


def _utf8(text: str, source: str) -> str:
    """The text, if it can be given to a tokenizer: bytes that are no text arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"the prompt in {source} is not UTF-8 text") from None
    return text


def load(args: argparse.Namespace) -> tuple[Llama, float]:
    """The model and how many seconds it took."""
    from .. import Llama
    from ..probe import cpu_count

    check_context({"n_ctx": args.ctx, "n_batch": args.batch, "n_ubatch": args.ubatch, "n_threads": args.threads})
    threads = args.threads or cpu_count()
    settings = {"n_ctx": args.ctx, "n_batch": args.batch, "n_ubatch": args.ubatch}
    start = time.monotonic()
    llm = Llama(
        args.model,
        memory_budget=_common.budget(args),
        device_budget=_common.device_budget(args),
        n_gpu_layers=_common.gpu_layers(args),
        stream=_common.stream_config(args),
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=args.flash_attn,
        seed=args.seed,
        verbose=args.verbose,
        **{name: value for name, value in settings.items() if value is not None},
    )
    return llm, time.monotonic() - start


def _check_length(llm: Llama, tokens: list[int]) -> None:
    if not tokens:
        raise ArgumentError("the prompt is empty")
    if len(tokens) >= llm.n_ctx():
        raise ArgumentError(
            f"the prompt has {len(tokens)} tokens, but the context holds {llm.n_ctx()}",
            used=len(tokens),
            limit=llm.n_ctx(),
            remedy="shorten it or raise --ctx",
        )


def report(llm: Llama, answer: Answer, load_seconds: float, path: str) -> dict[str, Any]:
    """The final document."""
    from ..probe import peak_resident_bytes

    stats, plan = llm.stream.stats(), llm.stream.plan()
    document = {
        "model": path,
        "mode": plan["mode"],
        "text": answer.text,
        "prompt_tokens": answer.n_prompt,
        "tokens": len(answer.tokens),
        "tokens_per_second": round(answer.tokens_per_second, 3),
        "prefill_seconds": round(answer.prefill_seconds, 4),
        "prefill_tokens_per_second": round(answer.n_prompt / answer.prefill_seconds, 3) if answer.prefill_seconds else 0.0,
        "load_seconds": round(load_seconds, 4),
        "peak_rss_bytes": peak_resident_bytes(),
        "budget_bytes": plan["budget_bytes"],
        "bytes_read": stats.read_bytes,
        "load_bytes": stats.load_bytes,
        "hit_ratio": stats.hit_ratio,
        "stall_share": stats.stall_share,
        "n_ctx": llm.n_ctx(),
        "n_batch": llm.n_batch,
        "n_ubatch": llm.context_params.n_ubatch,
        "n_threads": llm.n_threads,
        "memory": llm.stream.memory().to_dict(),
    }
    if "device" in plan:
        document["device"] = {
            **{name: plan["device"][name] for name in ("name", "budget_bytes", "used_bytes")},
            "copied_bytes": stats.device_copied_bytes,
            "hit_ratio": stats.device_hit_ratio,
            "syncs_per_token": stats.device_syncs_per_token,
            "host_experts": stats.device_host_experts,
        }
    return document


def summary(document: dict[str, Any]) -> str:
    """The final document in one or two lines."""
    hits = "no reads needed" if document["hit_ratio"] is None else f"{document['hit_ratio'] * 100:.1f} % hits"
    budget = format_bytes(document["budget_bytes"]) if document["budget_bytes"] else "no bound"
    return (
        f"{document['tokens_per_second']:.2f} tokens/s ({document['tokens']} tokens), "
        f"prefill {document['prefill_tokens_per_second']:.1f} tokens/s ({document['prompt_tokens']} tokens), "
        f"loaded in {document['load_seconds']:.2f} s\n"
        f"peak memory {format_bytes(document['peak_rss_bytes'])} (budget {budget}), "
        f"read {format_bytes(document['bytes_read'])} while running, {hits}, mode {document['mode']}"
    )


def _check_sampling(args: argparse.Namespace) -> None:
    """Refuse what would sample nonsense without a word."""
    if args.tokens < 1:
        raise ArgumentError(f"-n must be at least 1, not {args.tokens}")
    if not 0 <= args.temp <= 100:
        raise ArgumentError(f"--temp must be from 0 to 100, not {args.temp}")
    if not 0 <= args.top_p <= 1:
        raise ArgumentError(f"--top-p must be from 0 to 1, not {args.top_p}")
    if not 0 <= args.top_k < 2**31:
        raise ArgumentError(f"--top-k must be from 0 (all tokens) to {2**31 - 1}, not {args.top_k}")
    if not 0 <= args.seed < 2**32:
        raise ArgumentError(f"--seed must be from 0 to {2**32 - 1}, not {args.seed}")


def run(args: argparse.Namespace) -> int:
    _check_sampling(args)
    prompt = _prompt_text(args)
    llm, load_seconds = load(args)
    with llm:
        if prompt is None:
            return _interactive(llm, args)
        if args.chat or args.system:
            tokens, _ = chat_prompt(llm, _messages(args.system, prompt))
        else:
            tokens = llm.tokenize(prompt.encode(), add_bos=bool(llm._model.add_bos_token()), special=True)
        _check_length(llm, tokens)
        answer = Answer()
        for piece in generate(llm, tokens, args, answer):
            if not args.json:
                print(piece, end="", flush=True)
        document = report(llm, answer, load_seconds, args.model)
        for_chats = "tokenizer.chat_template" in llm.metadata and not (args.chat or args.system)
    if args.json:
        _common.print_json(document)
    else:
        print()
        if for_chats and not answer.text.strip():
            _common.note("leanstream: the model ended at once; it was made for conversations, and --chat asks it as in one")
        _common.note(summary(document))
    return 0


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": prompt}]


def _fitting(llm: Llama, history: list[dict[str, str]], args: argparse.Namespace) -> list[int]:
    """Tokens of the conversation, without its oldest turns where it has outgrown the context, which is said.

    Raises:
        ArgumentError: the last question alone does not fit.
    """
    limit = llm.n_ctx() - room_for_answer(llm.n_ctx(), args.tokens)
    kept, n_left_out = recent(history, lambda messages: len(chat_prompt(llm, messages)[0]) <= limit)
    tokens, _ = chat_prompt(llm, kept)
    _check_length(llm, tokens)
    if n_left_out:
        _common.note(f"leanstream: {left_out(n_left_out, llm.n_ctx())}; raise --ctx to keep more")
    return tokens


def _interactive(llm: Llama, args: argparse.Namespace) -> int:
    """A chat at the terminal; an empty line or end of input leaves."""
    history = [{"role": "system", "content": args.system}] if args.system else []
    plan = llm.stream.plan()
    _common.note(f"{args.model}: {plan['mode']}, budget {args.memory}. Empty line or Ctrl-D leaves, Ctrl-C stops an answer.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            line = ""
        if not line:
            return 0
        history.append({"role": "user", "content": line})
        try:
            tokens = _fitting(llm, history, args)
        except ArgumentError as error:
            history.pop()
            _common.note(f"leanstream: {error}")
            continue
        answer = Answer()
        try:
            for piece in generate(llm, tokens, args, answer):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass  # the answer so far stays in the conversation
        print()
        history.append({"role": "assistant", "content": answer.text})
        stats = llm.stream.stats()
        rate = f", {format_rate(stats.read_bandwidth)}" if stats.read_bandwidth else ""
        _common.note(f"[{answer.tokens_per_second:.2f} tokens/s, read {format_bytes(stats.read_bytes)}{rate}]")
