"""Tokenizers for the toy models: byte-level BPE and SentencePiece-style, of any size, that tokenise any text."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "

# Token types of the GGUF format.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6

_TEXT = (
    "the quick brown fox jumps over the lazy dog and then reads the file again . a model is streamed from the disk "
    "when memory is small , so the answer stays the same while the weights come and go . this is a test of the tokens "
    "that are found in common words : there , their , other , another , with , which , would , could , should , from , "
    "for , before , after , into , out , about , some , thing , nothing , something , anything , reading , writing , "
    "running , loading , being , one , two , three , number , value , list , name , line , time , order , under , over"
)


def _pairs(words: Counter[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    pairs: Counter[tuple[str, str]] = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count
    return pairs


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            merged.append(word[i] + word[i + 1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)


def train_merges(space: str, limit: int) -> list[tuple[str, str]]:
    """At most `limit` merges learned from a fixed text, most frequent first; `space` marks the start of a word."""
    words = Counter(tuple(space + word) for word in _TEXT.split())
    merges: list[tuple[str, str]] = []
    while len(merges) < limit:
        pairs = _pairs(words)
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): count for word, count in words.items()})
    return merges


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def _filler(space: str, n: int) -> list[str]:
    return [f"{space}w{i:06d}" for i in range(n)]


def bpe_metadata(n_vocab: int) -> dict[str, Any]:
    """tokenizer.* keys of a byte-level BPE with exactly n_vocab (at least 260) tokens; the last one ends a text."""
    symbols = byte_symbols()
    merges = train_merges("Ġ", n_vocab - len(symbols) - 1)
    tokens = [*symbols, *dict.fromkeys(a + b for a, b in merges)]
    tokens += [*_filler("Ġ", n_vocab - 1 - len(tokens)), "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * (n_vocab - 1) + [_CONTROL],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": n_vocab - 1,
        "tokenizer.ggml.eos_token_id": n_vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def spm_metadata(n_vocab: int) -> dict[str, Any]:
    """tokenizer.* keys of a SentencePiece vocabulary with exactly n_vocab (at least 360) tokens."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    letters = ["▁", *(chr(c) for c in range(33, 127))]
    base = len(special) + len(byte_tokens) + len(letters)
    merged = list(dict.fromkeys(a + b for a, b in train_merges("▁", n_vocab - base)))
    pieces = [*letters, *merged]
    pieces += _filler("▁", n_vocab - len(special) - len(byte_tokens) - len(pieces))
    # A better (higher) score merges first; single letters never merge from anything, their score is unused.
    scores = [0.0] * (len(special) + 256) + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*special, *byte_tokens, *pieces],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
