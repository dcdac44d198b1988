"""`leanstream inspect`: what is in a GGUF file, by purpose, and what of it can be streamed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..units import format_bytes
from . import _common


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="tensors of a GGUF file by purpose, and what can be streamed",
        description="List a model's tensors by purpose with their bytes, its shards, and for each purpose whether it can be streamed "
        "or why not. Reads the header only.",
    )
    _common.add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    _common.add_json(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Purpose:
    """A kind of tensor: its share of the file and what streaming does with it."""

    name: str
    text: str
    streamable: bool
    reason: str


PURPOSES = {
    purpose.name: purpose
    for purpose in (
        Purpose("experts", "experts", True, "read when a token is routed to them, kept in the expert cache"),
        Purpose("neurons", "neurons in clusters", True, "read when they fire, kept in a cache"),
        Purpose("attention", "attention matrices", True, "pinned, or read ahead layer by layer"),
        Purpose("ffn", "feed-forward matrices", True, "pinned, or read ahead layer by layer"),
        Purpose("embedding", "token embedding", True, "looked up by row: only the rows of the tokens are read"),
        Purpose("output", "output matrix", False, "every token needs all of it at the end: stays resident"),
        Purpose(
            "tables", "tables of the lean file", False, "orders, scales, sketches and checksums that reading needs: stay resident"
        ),
        Purpose("other", "norms, biases, routers and others", False, "small and used by every token: stay resident"),
    )
}


def purpose_of(tensor: Mapping[str, Any], *, tied: bool) -> str:
    """Name of the purpose of a tensor, from its name and shape. `tied`: the embedding is the output matrix too."""
    name, shape = tensor["name"], tensor["shape"]
    if name.endswith(".lean"):
        return {"ffn_exps.lean": "experts", "ffn.clusters.lean": "neurons"}.get(name.split(".", 2)[-1], "tables")
    is_matrix = len(shape) > 1 and shape[1] > 1 and name.endswith(".weight")
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return "output"
    if "token_embd" in name:
        return "embedding"
    if not is_matrix or "ffn_gate_inp" in name:
        return "other"
    if "exps" in name:
        return "experts"
    if ".ffn" in name:
        return "ffn"
    return "attention" if name.startswith("blk.") else "other"


def describe(index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a purpose that occurs: {purpose, n_tensors, bytes, types, streamable, reason}.

    Bytes are those in the file: what lies in the records of a lean file counts once, with the gaps of the records.
    """
    bundled: dict[str, list[Mapping[str, Any]]] = {}
    for tensor in index["tensors"]:
        if "bundle" in tensor:
            bundled.setdefault(tensor["bundle"], []).append(tensor)
    tied = all(tensor["name"] != "output.weight" for tensor in index["tensors"])
    rows: dict[str, dict[str, Any]] = {}
    for tensor in index["tensors"]:
        if "bundle" in tensor:
            continue
        purpose = PURPOSES[purpose_of(tensor, tied=tied)]
        row = rows.setdefault(purpose.name, {"purpose": purpose.name, "n_tensors": 0, "bytes": 0, "types": {}})
        row["bytes"] += tensor["bytes"]
        for held in bundled.get(tensor["name"], [tensor]):
            row["n_tensors"] += 1
            row["types"][held["type"]] = row["types"].get(held["type"], 0) + held["bytes"]
        row |= {"streamable": purpose.streamable, "reason": purpose.reason}
    return [rows[name] for name in PURPOSES if name in rows]


def run(args: argparse.Namespace) -> int:
    from ..measure import outlook
    from ..runtime import ModelHandle

    with ModelHandle(args.model) as handle:
        index = handle.index()
    document = {
        "model": args.model,
        **{key: value for key, value in index.items() if key != "tensors"},
        "purposes": describe(index),
        **outlook(args.model),
    }
    if "leanstream.version" in index.get("metadata", {}):
        from . import _lean

        document["lean"] = _lean.document(args.model)
    if args.tensors or args.json:
        document["tensors"] = index["tensors"]
    if args.json:
        _common.print_json(document)
    else:
        print(summary(document))
    return 0


def summary(document: dict[str, Any]) -> str:
    """The file for people."""
    shape = ", ".join(f"{key} {document[key]}" for key in ("n_layer", "n_embd", "n_ff", "n_vocab", "n_ctx_train") if document.get(key))
    if document.get("n_expert"):
        shape += f", {document['n_expert']} experts of which a token uses {document['n_expert_used']}"
    lines = [f"{document['model']}: {document['arch']}, {format_bytes(document['file_bytes'])}", f"  {shape}"]
    if len(document["shards"]) > 1:
        lines += [f"  shard {shard['path']}  {format_bytes(shard['bytes'])}" for shard in document["shards"]]
    rows: list[tuple[str, ...]] = [
        (
            PURPOSES[row["purpose"]].text,
            str(row["n_tensors"]),
            format_bytes(row["bytes"]),
            " ".join(sorted(row["types"], key=row["types"].__getitem__, reverse=True)),
        )
        for row in document["purposes"]
    ]
    lines.append(_common.table([("purpose", "tensors", "size", "types"), *rows]))
    lines += [f"  {PURPOSES[row['purpose']].text}: {row['reason']}" for row in document["purposes"]]
    if "lean" in document:
        from . import _lean

        lines += _lean.lines(document["lean"])
    if document["streamable"]:
        plan = document["plan"]
        lines.append(
            f"  can be streamed with {format_bytes(plan['minimum_budget_bytes'])} or more; "
            f"everything is resident from {format_bytes(plan['full_budget_bytes'])} (`leanstream plan` says more)"
        )
    else:
        lines.append(f"  cannot be streamed: {document['why_not']['message']}")
    for tensor in document.get("tensors", ()):
        lines.append(f"  {tensor['name']}  {tensor['type']}  {tensor['shape']}  {tensor['bytes']} bytes at {tensor['offset']}")
    return "\n".join(lines)
