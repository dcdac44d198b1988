"""What a planted model knows about its text at each token: the vectors that planted routers and neurons look at.

The first 256 dimensions of the residual stream are planted and nothing but layer 0's attention ever writes to them:

    0-31 always +1, 32-63 always -1 (thresholds), then six groups of 32: the code of this token, of the three before, and two
    averages of the codes of the last few and the last few dozen tokens.

Codes are random vectors of length sqrt(32). Layer 0's attention copies and averages them: keys and queries are constants, so
that rotary position embedding makes the score a function of the distance alone, sum_i a_i cos(w_i (distance - offset)).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .blocks import RandomSource
from .vocab import byte_symbols, train_merges

N_CODE, N_CONST, N_GROUPS = 32, 64, 6
N_LATENT = N_CODE * N_GROUPS
N_PLANTED = N_CONST + N_LATENT
OFFSETS = (1, 2, 3)
WINDOWS = (3.0, 24.0)  # tokens
N_HEADS = len(OFFSETS) + len(WINDOWS)
_PEAK, _POWER = 12.0, 3.0
_REACH = 512

Floats = npt.NDArray[np.float32]


def normals(name: str, n_rows: int, n_columns: int) -> Floats:
    """float32 [n_rows, n_columns] of standard normal numbers, a function of the arguments alone."""
    n = n_rows * n_columns
    half = (n + 1) // 2
    uniform = RandomSource(name).uniform(2 * half, 0.0, 1.0)
    radius, angle = np.sqrt(-2.0 * np.log(1.0 - uniform[:half])), 2.0 * math.pi * uniform[half:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[:n].astype(np.float32).reshape(n_rows, n_columns)


@dataclass(frozen=True)
class Rope:
    """How an architecture rotates: which rows of a head form pair i, and the pair's speed in radians a token."""

    d_head: int
    n_rot: int
    base: float
    interleaved: bool

    @property
    def speeds(self) -> npt.NDArray[np.float64]:
        return self.base ** (-2.0 * np.arange(self.n_rot // 2) / self.n_rot)

    def place(self, first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The vector of a head, [d_head], from the two halves of its pairs, [n_rot / 2] each."""
        head = np.zeros(self.d_head)
        if self.interleaved:
            head[0 : self.n_rot : 2], head[1 : self.n_rot : 2] = first, second
        else:
            head[: self.n_rot // 2], head[self.n_rot // 2 : self.n_rot] = first, second
        return head


def amplitudes(rope: Rope, head: int) -> npt.NDArray[np.float64]:
    """a_i of the score of a head: sharp at its offset, or a power law beyond its window."""
    if head < len(OFFSETS):
        return np.full(rope.n_rot // 2, _PEAK)
    ratio = rope.base ** (2.0 / rope.n_rot)
    slow = rope.speeds <= 1.0 / WINDOWS[head - len(OFFSETS)]
    return np.where(slow, _POWER * math.log(ratio), 0.0)


def offset(head: int) -> int:
    """The distance at which a head's score is largest."""
    return OFFSETS[head] if head < len(OFFSETS) else 0


def kernel(rope: Rope, head: int) -> npt.NDArray[np.float64]:
    """Attention weights [512] of a head by distance."""
    distance = np.arange(_REACH)[:, None] - offset(head)
    score = (amplitudes(rope, head) * np.cos(rope.speeds * distance)).sum(axis=1)
    weights = np.exp(score - score.max())
    return weights / weights.sum()


def output_scale(rope: Rope, head: int) -> float:
    """What makes an average of independent codes as long as a code."""
    return float(1.0 / np.sqrt((kernel(rope, head) ** 2).sum()))


def token_codes(name: str, n_vocab: int) -> Floats:
    """float32 [n_vocab, 32], every row of length sqrt(32)."""
    codes = normals(f"{name}/codes", n_vocab, N_CODE)
    return codes * (math.sqrt(N_CODE) / np.linalg.norm(codes, axis=1, keepdims=True))


def latents(codes: Floats, rope: Rope, tokens: Sequence[int]) -> Floats:
    """float32 [n_tokens, 192]: what layer 0's attention leaves in the planted dimensions, without the constants."""
    x = codes[np.asarray(tokens)]
    groups = [x]
    for head in range(N_HEADS):
        weights = (kernel(rope, head) * output_scale(rope, head)).astype(np.float32)
        groups.append(np.stack([np.convolve(column, weights)[: len(x)] for column in x.T], axis=1))
    return np.concatenate(groups, axis=1)


def correlations(z: Floats, lags: Sequence[int]) -> npt.NDArray[np.float64]:
    """float64 [n_groups, n_lags]: how alike a group's centred vectors are at a distance of `lag` tokens."""
    found = []
    for group in np.split(z - z.mean(axis=0), N_GROUPS, axis=1):
        power = float((group**2).sum(axis=1).mean())
        found.append([float((group[lag:] * group[:-lag]).sum(axis=1).mean()) / power for lag in lags])
    return np.asarray(found)


_WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")


def bpe_tokens(text: str, vocabulary: Sequence[str], n_vocab: int) -> list[int]:
    """The tokens of `text` in the vocabulary of vocab.bpe_metadata(n_vocab)."""
    symbols = byte_symbols()
    ids = {token: i for i, token in enumerate(vocabulary)}
    ranks = {pair: i for i, pair in enumerate(train_merges("Ġ", n_vocab - len(symbols) - 1))}
    cache: dict[str, list[int]] = {}

    def encode(word: str) -> list[int]:
        parts = [symbols[b] for b in word.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
            if rank == len(ranks):
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        return [ids[part] for part in parts]

    tokens: list[int] = []
    for word in _WORDS.findall(text):
        if word not in cache:
            cache[word] = encode(word)
        tokens += cache[word]
    return tokens
