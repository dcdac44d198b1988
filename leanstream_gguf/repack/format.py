"""Names, keys and sizes of the lean format. docs/lean_format.md says what they mean; nothing here touches a file."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 1
SUFFIX = ".lean.gguf"
PAGE = 4096  # general.alignment of a lean file, and what expert records are multiples of
SLICE_ALIGNMENT = 64  # of an expert's slices within its record
PART_ALIGNMENT = 16  # of a neuron's rows and column within its record
PLANE_ALIGNMENT = 64
OUTPUT_GROUP = 64  # outputs that a column is padded to
SKETCH_GROUP = 32  # weights that share a scale of the sketch

PREFIX = "leanstream."
KEPT = "leanstream.kept."
MISLEADING = ("general.alignment", "split.")  # source keys that a reader of the lean file would take for its own

DEVICE_DOWN, DEVICE_UP = "device_down", "device_up"  # matrices of the neurons that are there for a device too

TYPE_I8, TYPE_I32 = 24, 26  # ggml types of our own tensors


@dataclass(frozen=True)
class BlockType:
    """How ggml stores a type: elements and bytes in a block."""

    id: int
    name: str
    n_elements: int
    n_bytes: int

    def row_bytes(self, n_elements: int) -> int:
        return n_elements // self.n_elements * self.n_bytes


_TYPES = (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
)  # fmt: skip
TYPES = {row[0]: BlockType(*row) for row in _TYPES}
BY_NAME = {item.name: item for item in TYPES.values()}


def ceil_to(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple


def padded_outputs(n_embd: int) -> int:
    """E: outputs of a column, padding included."""
    return ceil_to(n_embd, OUTPUT_GROUP)


def sketch_row_bytes(n_embd: int) -> int:
    return padded_outputs(n_embd) // 4 + padded_outputs(n_embd) // SKETCH_GROUP * 2


def name_experts(block: int) -> str:
    return f"blk.{block}.ffn_exps.lean"


def name_expert_checksums(block: int) -> str:
    return f"blk.{block}.ffn_exps.checksums.lean"


def name_of(block: int, what: str) -> str:
    """`what`: clusters, planes, sketch, perm, checksums, device_down or device_up."""
    return f"blk.{block}.ffn.{what}.lean"
