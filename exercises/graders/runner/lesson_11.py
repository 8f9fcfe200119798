"""Lesson 11 in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from course_lib.grading.runner import Answers, Inputs, Unfit, named
from course_lib.mesh import Axis, Mesh, sub_axis


def give_way(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """11-4: tp and dp of a 2 x 2 mesh; in a smaller world two axes of the same ranks."""
    tp, dp = mesh.tp, mesh.dp
    if mesh.world.size < 4:
        tp, dp = (sub_axis(mesh.world, mesh.world.size, name) for name in ("tp", "dp"))
    smalls, bucket, most = given.values()
    found = named(answers[0](smalls, bucket, tp, dp, most), "sums", "total")
    if not isinstance(found["sums"], tuple | list) or len(found["sums"]) != len(smalls):
        raise Unfit(f"expected sums to be a list of {len(smalls)} tensors, got {found['sums']!r}")
    return {f"sum of small tensor {number}": x for number, x in enumerate(found["sums"])} | {
        "total": found["total"]
    }


def make_groups(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """11-5: sums on all groups, started together; which names share a group."""
    groups = given["groups"]
    made = answers[0](groups)
    says = _unfit(made, groups)
    anyone = torch.tensor([float(bool(says))])
    dist.all_reduce(anyone)  # or some ranks would wait on groups that others do not have
    if anyone.item():
        raise Unfit(says or "another rank returned no groups")
    started = []
    for number, name in enumerate(sorted(groups), 1):
        x = torch.tensor([float(number * 10**mesh.rank)])
        started.append((name, x, dist.all_reduce(x, group=made[name], async_op=True)))
    sums, names = {}, {}
    for name, x, work in started:
        work.wait()
        sums[name] = x.item()
        names[name] = str(made[name].group_name)
    shared = [name for name in names if list(names.values()).count(names[name]) > 1]
    return {"sums": sums, "axes that share a group": shared}


def _unfit(made: Any, groups: Mapping[str, Any]) -> str:
    if not isinstance(made, Mapping):
        return f"expected a dict from names to groups, got a {type(made).__name__}"
    for name in sorted(groups):
        if not isinstance(made.get(name), dist.ProcessGroup):
            got = f"a {type(made[name]).__name__}" if name in made else "nothing"
            return f"expected a process group for {name!r}, got {got}"
    return ""
