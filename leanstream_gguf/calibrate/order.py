"""The order of a layer's neurons: hot ones first, and neighbours that fire together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]

WINDOW = 512  # candidates looked at for the next place
RECENT = 4  # neurons whose tokens the next one should share
MAX_TOKENS = 4096  # tokens used: 512 bytes a neuron, 16 MiB for 32,768 of them

if hasattr(np, "bitwise_count"):

    def count_bits(bits: Bits) -> npt.NDArray[np.int64]:
        """Set bits of each row."""
        result: npt.NDArray[np.int64] = np.bitwise_count(bits).sum(axis=-1, dtype=np.int64)
        return result

else:  # numpy 1
    _TABLE = np.array([bin(i).count("1") for i in range(256)], np.uint8)

    def count_bits(bits: Bits) -> npt.NDArray[np.int64]:
        """Set bits of each row."""
        result: npt.NDArray[np.int64] = _TABLE[bits].sum(axis=-1, dtype=np.int64)
        return result


def by_neuron(token_bits: Bits, n_ff: int) -> Bits:
    """Bitmaps [n_ff, tokens / 8] from bitmaps [tokens, n_ff / 8]."""
    out = np.empty((n_ff, -(-len(token_bits) // 8)), np.uint8)
    for first in range(0, n_ff, 4096):  # 4096 neurons of 4096 tokens are 16 MiB as bytes
        part = token_bits[:, first // 8 : (first + 4096) // 8]
        fires = np.unpackbits(part, axis=1, bitorder="little")[:, : min(4096, n_ff - first)]
        out[first : first + fires.shape[1]] = np.packbits(np.ascontiguousarray(fires.T), axis=1, bitorder="little")
    return out


def coactivation_order(token_bits: Bits, n_ff: int) -> npt.NDArray[np.int32]:
    """perm [n_ff]: original index of each new position.

    Greedy chain: among the WINDOW most frequent neurons not yet placed, the one whose tokens overlap most with those of the last
    RECENT placed ones, relative to the square root of how often it fires. Neurons that never fired come last, as they were.
    """
    bits = by_neuron(token_bits[:MAX_TOKENS], n_ff)
    frequency = count_bits(bits)
    by_frequency = np.argsort(-frequency, kind="stable")
    n_alive = int(np.count_nonzero(frequency))
    pool, rest = list(by_frequency[:WINDOW]), iter(by_frequency[WINDOW:n_alive].tolist())
    pool = pool[:n_alive]
    placed: list[int] = []
    candidates: Any = np.array(pool, np.int64)
    while len(candidates):
        if placed:
            recent = np.bitwise_or.reduce(bits[placed[-RECENT:]], axis=0)
            overlap = count_bits(bits[candidates] & recent)
            best = int(np.argmax(overlap / np.sqrt(np.maximum(1, frequency[candidates]))))
        else:
            best = 0
        placed.append(int(candidates[best]))
        following = next(rest, None)
        candidates = np.delete(candidates, best)
        if following is not None:
            candidates = np.append(candidates, following)
    return np.concatenate([np.array(placed, np.int32), by_frequency[n_alive:].astype(np.int32)])
