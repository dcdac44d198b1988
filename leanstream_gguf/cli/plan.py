"""`leanstream plan`: what would be pinned, streamed and cached, and how fast it would be, without loading."""

from __future__ import annotations

import argparse
from typing import Any

from ..units import format_bytes, format_rate
from . import _common


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what would fit and how fast it would be, without loading",
        description="Say what a budget would pin, stream and cache, the smallest budget that works, and the tokens per second to "
        "expect from this drive and processor. No weights are read except to time the drive.",
    )
    _common.add_model(parser)
    _common.add_memory(parser)
    _common.add_device(parser)
    _common.add_context(parser)
    _common.add_streaming(parser)
    parser.add_argument("--no-speed", action="store_true", help="do not time drive and processor")
    _common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import measure, planner

    budget, config = _common.budget(args), _common.stream_config(args)
    wish = measure.ContextWish(args.ctx, args.batch, args.ubatch, args.threads, args.flash_attn, _common.gpu_layers(args))
    with measure.measured(args.model, config, wish, _common.device_budget(args)) as model:
        document: dict[str, Any] = {
            "model": args.model,
            "arch": model.shape.arch,
            "file_bytes": model.shape.file_bytes,
            "n_ctx": model.sizes.n_ctx,
            "n_batch": model.sizes.n_batch,
            "n_ubatch": model.sizes.n_ubatch,
            "n_threads": wish.threads,
            "flash_attn": args.flash_attn,
            "asked": {
                "memory": str(budget),
                "cache": args.cache,
                "reason": _reason(budget.kind),
                "device_memory": args.device_memory,
                "gpu_layers": wish.n_gpu_layers,
            },
            **model.plan(budget, config),
        }
        if not args.no_speed and "device" not in document:  # what a device computes is not timed
            speeds = measure.measure_speeds(model.handle, config, wish.threads, document)
            document["speeds"] = speeds.to_dict()
            document["expected"] = _expected(planner, document, speeds, config.policy)
            document["expected_tokens_per_second"] = document["expected"].get("tokens_per_second")
    if args.json:
        _common.print_json(document)
    else:
        print(summary(document))
    return 0


def _reason(kind: str) -> str:
    if kind != "auto":
        return "as asked for"
    from ..probe import automatic_budget

    return automatic_budget().reason


def _expected(planner: Any, document: dict[str, Any], speeds: Any, policy: str) -> dict[str, Any]:
    if speeds.compute is None or speeds.drive is None:
        return {}
    forecast = planner.forecast(
        document,
        compute_seconds=speeds.compute.seconds_per_token,
        bytes_per_second=speeds.drive.bytes_per_second,
        expert_bytes_per_second=speeds.experts.bytes_per_second if speeds.experts else None,
        policy=policy,
    )
    return {name: getattr(forecast, name) for name in forecast.__dataclass_fields__}


def _memory_table(memory: dict[str, int]) -> str:
    texts = {
        "baseline_bytes": "this process before",
        "metadata_bytes": "vocabulary, graphs",
        "kv_bytes": "context (keys, values)",
        "compute_bytes": "compute buffers",
        "resident_bytes": "weights always resident",
        "pinned_bytes": "layers pinned",
        "ring_bytes": "read-ahead buffers",
        "cache_bytes": "expert cache",
        "margin_bytes": "margin",
    }
    rows: list[tuple[str, ...]] = [(text, format_bytes(memory[key])) for key, text in texts.items() if memory.get(key)]
    rows.append(("total", format_bytes(sum(memory.get(key, 0) for key in texts))))
    return _common.table(rows, indent="    ")


def summary(document: dict[str, Any]) -> str:
    """The plan for people."""
    dense, experts = document["dense"], document["experts"]
    asked = document["asked"]
    lines = [
        f"{document['model']}: {document['arch']}, {format_bytes(document['file_bytes'])}",
        f"  smallest budget {format_bytes(document['minimum_budget_bytes'])}, "
        f"everything resident from {format_bytes(document['full_budget_bytes'])}",
        f"  context {document['n_ctx']}, batch {document['n_batch']}, micro-batch {document['n_ubatch']} "
        "(where not given, chosen from the model's shape)",
        f"  budget {asked['memory']}: {format_bytes(document['budget_bytes'])} ({asked['reason']}), mode {document['mode']}",
        _memory_table(document["memory"]),
    ]
    if dense["total_bytes"]:
        lines.append(
            f"  layers: {dense['n_pinned']} of {dense['n_groups']} parts pinned ({format_bytes(dense['pinned_bytes'])}), "
            f"{format_bytes(dense['streamed_bytes'])} read for every token"
        )
    if experts["total_bytes"]:
        lines.append(
            f"  experts: {format_bytes(experts['capacity_bytes'])} of {format_bytes(experts['total_bytes'])} cached; "
            f"one token uses {format_bytes(experts['token_demand_bytes'])}"
        )
    lines += _device_lines(document)
    lines += [f"  warning: {text}" for text in document.get("warnings", ())]
    return "\n".join([*lines, *_speed_lines(document)])


def _device_lines(document: dict[str, Any]) -> list[str]:
    """What goes to the device, or that there is none although one was asked for."""
    if "device" not in document:
        asked = document["asked"]["gpu_layers"] != 0
        return ["  device: none that this build of llama.cpp can use; everything runs on the host"] if asked else []
    device = document["device"]
    lines = [
        f"  device {device['name']}: budget {format_bytes(device['budget_bytes'])}, smallest "
        f"{format_bytes(device['minimum_budget_bytes'])}, everything resident from {format_bytes(device['full_budget_bytes'])}",
        f"    used {format_bytes(device['used_bytes'])}: {device['n_blocks_pinned']} of {device['n_blocks']} blocks pinned, "
        f"{device['n_slots']} expert slots, {device['n_moe_layers_resident']} of {device['n_moe_layers']} layers with all experts",
    ]
    if n_layers := document.get("neurons", {}).get("n_device_layers"):
        lines.append(f"    neurons for a device: {format_bytes(document['neurons']['device_bytes'])} in {n_layers} layers")
    return lines


def _speed_lines(document: dict[str, Any]) -> list[str]:
    if "speeds" not in document:
        return []
    drive, expected = document["speeds"]["drive"], document["expected"]
    lines = [f"  drive {format_rate(drive['bytes_per_second'])} ({document['speeds']['drive_reason']})"]
    if experts := document["speeds"]["experts"]:
        lines.append(f"  drive {format_rate(experts['bytes_per_second'])} for experts ({document['speeds']['experts_reason']})")
    if not expected:
        return [*lines, f"  speed unknown: {document['speeds']['compute_reason']}"]
    bound = "processor" if expected["bound_by"] == "compute" else "drive"
    hits = "" if expected["hit_ratio"] is None else f", assuming {expected['hit_ratio'] * 100:.0f} % hits"
    return [
        *lines,
        f"  expected {expected['tokens_per_second']:.2f} tokens/s, bound by the {bound}: "
        f"compute {expected['compute_seconds'] * 1e3:.1f} ms and reading {expected['read_seconds'] * 1e3:.1f} ms a token{hits}",
    ]
