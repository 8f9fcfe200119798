"""Numbers of the questions on several axes at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from course_lib.formulas.moves import Move, Passes
from course_lib.formulas.pp import partition
from course_lib.interview.concepts.numbers import about
from course_lib.layout import Layout, make_layout, rank_groups
from course_lib.planner import Configuration, Model, configure, estimate, hardware, model
from course_lib.planner.communication import BUCKET, stage_moves, step_moves
from course_lib.planner.links import Span, seconds
from course_lib.planner.memory import memory, state_bytes
from course_lib.planner.parameters import parameters, parameters_per_rank
from course_lib.planner.result import Estimate

PER_NODE = 8
LLAMA, GPU = "llama-3-70b", "h100"


def nodes_of(group: Iterable[int]) -> int:
    """Return the number of nodes that ``group`` touches."""
    return len({rank // PER_NODE for rank in group})


def shown_group(group: list[int], ends: int = 3) -> str:
    """Return a group as text, its middle left out: "0, 8, ..., 56"."""
    if len(group) <= ends + 1:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[: ends - 1]))}, ..., {group[-1]}"


def three_d() -> dict[str, Any]:
    """GPT-3 on 512 H100: tp=8, pp=8, dp=8 in the order tp-pp-dp; 1,536 sequences per step."""
    sizes: dict[str, Any] = {"tp": 8, "pp": 8, "dp": 8}
    config, rank = model("gpt-3-175b"), 77
    layout = make_layout(512, "tp-pp-dp", **sizes)
    plan = configure(config, 512, **sizes, zero=1, global_batch=1536)
    found = estimate(config, hardware(GPU), plan)
    values: dict[str, Any] = {
        "gpus": layout.world,
        **sizes,
        "nodes": layout.world // PER_NODE,
        "rank": rank,
        "replica": sizes["tp"] * sizes["pp"],
        "layers": config.layers,
        "stage": config.layers // sizes["pp"],
        "m": plan.micro_batches,
        "bubble": about(found.bubble_of_total, "share", 2),
        "step": about(found.step_seconds, "s", 2),
        "grid": _nodes(layout),
    }
    for axis, at in layout.coordinates(rank).items():
        if axis in sizes:
            group = next(one for one in layout.groups(axis) if rank in one)
            one = found.communication[axis]
            values |= {
                f"at_{axis}": at,
                f"group_{axis}": shown_group(group),
                f"groups_{axis}": len(layout.groups(axis)),
                f"sent_{axis}": about(one.wire_bytes),
                f"calls_{axis}": one.calls,
            }
    return values


def _nodes(layout: Layout) -> str:
    """Return the ranks of each node: a column per replica and a row per stage."""

    def row(pp: int) -> str:
        cells = []
        for dp in (0, 1, layout.sizes["dp"] - 1):
            first = (dp * layout.sizes["pp"] + pp) * layout.sizes["tp"]
            assert layout.coordinates(first) == {"tp": 0, "cp": 0, "pp": pp, "dp": dp}
            cells.append(f"[{first:>3} - {first + layout.sizes['tp'] - 1:>3}]")
        return f"  stage {pp}   {cells[0]}   {cells[1]}   ...   {cells[2]}"

    last = layout.sizes["pp"] - 1
    return "\n".join([row(0), row(1), " " * 15 + "...           ...               ...", row(last)])


def divide() -> dict[str, Any]:
    """Llama 3 405B on 1,024 H100, 4 Mi tokens per step: layouts, and the state per GPU."""
    config, gpu, gpus, seq = model("llama-3-405b"), hardware(GPU), 1024, 8192
    count = parameters(config)
    layouts = {"a": (8, 4, 1), "b": (8, 8, 1), "c": (8, 16, 1), "d": (16, 8, 1), "e": (4, 16, 1)}
    layouts["f"] = (8, 8, 4)
    values: dict[str, Any] = {"gpus": gpus, "nodes": gpus // PER_NODE, "seq": seq}
    for name, (tp, pp, chunks) in layouts.items():
        plan = configure(
            config, gpus, tp=tp, pp=pp, chunks=chunks, zero=1, seq=seq, recompute="full"
        )
        found = estimate(config, gpu, plan)
        values |= {
            f"{name}_tp": tp,
            f"{name}_pp": pp,
            f"{name}_dp": plan.dp,
            f"{name}_m": plan.micro_batches,
            f"{name}_held": about(found.memory.total, digits=2),
            f"{name}_bubble": about(found.bubble_of_total, "share", 2),
            f"{name}_step": about(found.step_seconds, "s") if found.fits else "too large",
        }
        values["sequences"] = plan.global_batch
    chosen = configure(config, gpus, tp=8, pp=8, zero=1, seq=seq)
    return values | {
        "chunks": layouts["f"][2],
        "per": chosen.recipe,
        "billions": round(count / 1e9),
        "state": about(state_bytes(count).total),
        "state_tp": about(state_bytes(count / 8).total, digits=2),
        "state_pp": about(state_bytes(count / 64).total, digits=2),
        "state_zero": about(state_bytes(count / 64, zero=1, shards=chosen.dp).total, digits=2),
        "room": about(gpu.capacity_bytes),
        "saved": about(memory(config, chosen).activations, digits=2),
        "model_ranks": chosen.tp * chosen.pp,
    }


def _small() -> tuple[Model, Configuration, Layout]:
    """Return Llama 2 13B on 16 H100 in two nodes: tp=2, then dp=2, then pp=4."""
    sizes: dict[str, Any] = {"tp": 2, "dp": 2, "pp": 4}
    config = model("llama-2-13b")
    plan = configure(config, 16, **sizes, zero=1, seq=4096, global_batch=64)
    return config, plan, make_layout(16, "tp-dp-pp", **sizes)


def principle() -> dict[str, Any]:
    """Seconds of each axis of 16 GPUs in two nodes, inside a node and across the network."""
    config, plan, layout = _small()
    gpu, first = hardware(GPU), stage_moves(config, plan)[0]
    tp = [move for part in _middle(config, plan) for move in part]
    moves = {
        "tp": [move.times(plan.micro_batches) for move in tp],
        "dp": list(step_moves(config, plan, 0).data["dp"].moves),
        "pp": [move.times(2 * plan.micro_batches) for move in first.onward],
    }
    found = estimate(config, gpu, plan)
    values: dict[str, Any] = {
        "gpus": layout.world,
        "nodes": layout.world // PER_NODE,
        "m": plan.micro_batches,
        "ranks": _coordinates(layout),
        "step": about(found.step_seconds, "s", 2),
    }
    outer = make_layout(layout.world, "dp-pp-tp", **_sizes(plan))
    for axis, calls in moves.items():
        size = layout.sizes[axis]
        values |= {
            axis: size,
            f"sent_{axis}": about(float(sum(move.wire for move in calls))),
            f"in_{axis}": about(seconds(calls, Span(size, 1), gpu), "s", 2),
            f"out_{axis}": about(seconds(calls, Span(1, size), gpu), "s", 2),
            f"nodes_{axis}": max(map(nodes_of, layout.groups(axis))),
        }
    return values | {"outer_tp": max(map(nodes_of, outer.groups("tp")))}


def _coordinates(layout: Layout) -> str:
    """Return a line of all ranks, a node after the other, and a line per axis below it."""
    rows = {"rank": list(range(layout.world))}
    rows |= {a: [layout.coordinates(r)[a] for r in rows["rank"]] for a in ("tp", "dp", "pp")}
    lines = []
    for name, values in rows.items():
        cells = [f"{value:>3}" for value in values]
        nodes = ["".join(cells[at : at + PER_NODE]) for at in range(0, len(cells), PER_NODE)]
        lines.append(f"  {name:>4} |{' |'.join(nodes)} |")
    return "\n".join(lines)


def _sizes(plan: Configuration) -> dict[str, int]:
    return {"tp": plan.tp, "dp": plan.dp, "pp": plan.pp}


def _middle(config: Model, plan: Configuration) -> Passes:
    """Return the calls of tp on a stage without embedding and LM head, for one micro-batch."""
    return stage_moves(config, plan)[1].passes["tp"]


def purpose() -> dict[str, Any]:
    """What rank 6 of 16 computes and with whom: Llama 2 13B, tp=2, dp=2, pp=4."""
    config, plan, layout = _small()
    rank = 6
    at = layout.coordinates(rank)
    groups = rank_groups("tp-dp-pp", layout.world, **_sizes(plan))
    counts = {axis: len(groups[axis]) for axis in ("tp", "dp", "pp", "mp")}
    layers = partition(config.layers, plan.pp)
    first = sum(layers[: at["pp"]])
    heads = config.heads // plan.tp
    values: dict[str, Any] = {
        "gpus": layout.world,
        "last": layout.world - 1,
        "per_node": PER_NODE,
        **_sizes(plan),
        "mp": plan.tp * plan.pp,
        "rank": rank,
        "layers": config.layers,
        "first_layer": first,
        "last_layer": first + layers[at["pp"]] - 1,
        "heads": config.heads,
        "first_head": at["tp"] * heads,
        "last_head": (at["tp"] + 1) * heads - 1,
        "share": about(parameters_per_rank(config, plan, at["pp"]).dense / 1e9, "count"),
        "billions": about(parameters(config) / 1e9, "count"),
        "all": sum(counts.values()),
    }
    for axis, number in counts.items():
        values[f"n_{axis}"] = number
        values[f"group_{axis}"] = ", ".join(
            map(str, next(one for one in groups[axis] if rank in one))
        )
    return values | {f"at_{axis}": at[axis] for axis in ("tp", "dp", "pp")}


def isolation() -> dict[str, Any]:
    """64 GPUs, TP 8 x PP 4 x DP 2: groups, wrong formulas, and a small call behind a bucket."""
    sizes = {"tp": 8, "pp": 4, "dp": 2}
    layout, gpu = make_layout(64, "tp-pp-dp", **sizes), hardware(GPU)
    groups = {axis: layout.groups(axis) for axis in sizes}
    listed = [[rank + 8 * i for i in range(4)] for rank in range(64)]
    bucket = seconds([Move("all_reduce", BUCKET * 4, 2)], Span(1, 2), gpu)
    config = model(LLAMA)
    x_bytes = 8192 * config.hidden * 2
    small = seconds([Move("all_reduce", x_bytes, 8)], Span(8, 1), gpu)
    return {
        "gpus": layout.world,
        **sizes,
        **{f"n_{axis}": len(found) for axis, found in groups.items()},
        "all": sum(map(len, groups.values())),
        "own": sum(9 in group for found in groups.values() for group in found),
        "right": sum(one in groups["pp"] for one in listed),
        "rank": 9,
        "wrong_group": ", ".join(map(str, listed[9])),
        "right_group": ", ".join(map(str, next(one for one in groups["pp"] if 9 in one))),
        "next": next(one for one in groups["pp"] if 9 in one)[2],
        "bucket_bytes": about(BUCKET * 4),
        "bucket": about(bucket, "s", 2),
        "x": about(x_bytes),
        "small": about(small, "s", 2),
        "behind": about(bucket + small, "s", 2),
    }


def experts() -> dict[str, Any]:
    """Mixtral 8x7B on 64 H100, ZeRO-1 and full recomputation, 4 Mi tokens per step."""
    config, gpu, gpus = model("mixtral-8x7b"), hardware(GPU), 64
    assert config.experts is not None

    def plan(**degrees: Any) -> tuple[Configuration, Estimate]:
        made = configure(config, gpus, seq=4096, zero=1, recompute="full", **degrees)
        return made, estimate(config, gpu, made)

    (_, without), (wide, inside), (far, across) = plan(), plan(ep=8), plan(tp=8, ep=8)
    own = parameters_per_rank(config, wide, 0)
    whole = parameters_per_rank(config, without.configuration, 0)
    layout = make_layout(gpus, "tp-dp", tp=1, dp=gpus, ep=8)
    ep_groups, edp_groups = layout.expert_groups()
    return {
        "gpus": gpus,
        "ep": wide.ep,
        "edp": wide.dp // wide.ep,
        "ep_group": shown_group(ep_groups[1]),
        "edp_group": shown_group(edp_groups[0]),
        "dense": about(own.dense * 2),
        "all_experts": about(whole.experts * 2),
        "own_experts": about(own.experts * 2),
        "held_without": about(without.memory.total, digits=2),
        "held": about(inside.memory.total, digits=2),
        "tokens": about(inside.communication["ep"].wire_bytes),
        "inside": about(inside.communication["ep"].seconds, "s", 2),
        "across": about(across.communication["ep"].seconds, "s", 2),
        "tp": far.tp,
        "gradients_without": about(without.communication["dp"].wire_bytes),
        "gradients": about(inside.communication["edp"].wire_bytes, digits=2),
    }


def inside_a_node() -> dict[str, Any]:
    """Llama 3 70B on 64 H100: the size of tp; and tp=8 with ZeRO-3, with and without overlap."""
    config, gpu, gpus, seq = model(LLAMA), hardware(GPU), 64, 8192
    values: dict[str, Any] = {"gpus": gpus, "per_node": PER_NODE}
    for tp in (4, 8, 16):
        found = estimate(config, gpu, configure(config, gpus, tp=tp, zero=2, seq=seq))
        over_tp = found.communication["tp"]
        values |= {
            f"tp_{tp}": tp,
            f"held_{tp}": about(found.memory.total, digits=2),
            f"step_{tp}": about(found.step_seconds, "s", 2),
            f"exposed_{tp}": about(over_tp.exposed_seconds, "s", 2),
        }
    node, network = gpu.node, gpu.network
    values |= {
        "node": about(node.bandwidth * node.efficiency, "byte/s"),
        "network": about(network.bandwidth * network.efficiency, "byte/s"),
        "ratio": about(
            node.bandwidth * node.efficiency / (network.bandwidth * network.efficiency), "count", 2
        ),
        "room": about(gpu.capacity_bytes),
    }
    for name, overlap in (("plain", False), ("tiles", True)):
        plan = configure(config, gpus, tp=8, zero=3, seq=seq, recompute="full", overlap_tp=overlap)
        for axis, one in estimate(config, gpu, plan).communication.items():
            values[f"{name}_{axis}"] = about(one.exposed_seconds, "s", 2)
            values[f"sent_{axis}"] = about(one.wire_bytes)
    return values
