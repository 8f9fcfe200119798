"""``course bench comm``: one call of ``course_lib.comm`` beside bare ``torch.distributed``.

Both run in the same processes. A round times CALLS calls of each contestant from a common start, in
rotating order; ``bare again`` is the bare call a second time, and its ratio is the noise. The bare
calls do what ours must do: they leave their input as it is, so that an all-reduce starts with a
copy, and they allocate their results.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.bench.rounds import (
    Say,
    Times,
    interleave,
    quiet,
    ratios,
    slowest_rank,
    timed,
)
from course_lib.launch import World
from course_lib.mesh import Axis, make_mesh

RANKS = 2
CALLS = {1_000: 100, 1_000_000: 10}  # calls in a round, by payload bytes
AIMS = {1_000: 1.25, 1_000_000: 1.10}  # ours / bare, for all_reduce
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Op = Callable[[Tensor, Axis], Any]


def _bare_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=axis.group)
    return total


def _bare_all_gather(x: Tensor, axis: Axis) -> Tensor:
    full = x.new_empty(axis.size * len(x))
    _ALL_GATHER(full, x, group=axis.group)
    return full


def _bare_ping_pong(x: Tensor, axis: Axis) -> Tensor:
    received, other = torch.empty_like(x), axis.ranks[axis.next]
    if axis.rank == 0:
        dist.send(x, other, group=axis.group)
        dist.recv(received, other, group=axis.group)
    else:
        dist.recv(received, other, group=axis.group)
        dist.send(received, other, group=axis.group)
    return received


def _ping_pong(x: Tensor, axis: Axis) -> Tensor:
    if axis.rank == 0:
        comm.send(x, axis, to=1)
        return comm.recv(x, axis, source=1)
    received = comm.recv(x, axis, source=0)
    comm.send(received, axis, to=0)
    return received


PAIRS: dict[str, tuple[Op, Op]] = {  # ours, bare
    "all_reduce": (comm.all_reduce, _bare_all_reduce),
    "all_gather": (comm.all_gather, _bare_all_gather),
    "send and recv": (_ping_pong, _bare_ping_pong),
}


def measure(rounds: int = 20, say: Say = quiet) -> dict[str, Any]:
    """Return microseconds per call and the median ratio ours / bare, by operation and bytes."""
    results = []
    with World(RANKS) as world:
        for op in PAIRS:
            for payload in CALLS:
                say(f"{op} of {payload:,} bytes")
                ran = world.run(_time_ranks, op, payload, rounds, timeout=60 + 5 * rounds)
                times = slowest_rank(list(ran))
                ratio = ratios(times, "bare")
                results.append(
                    {
                        "op": op,
                        "bytes": payload,
                        "microseconds": {
                            name: 1e6 * median(seconds) / CALLS[payload]
                            for name, seconds in times.items()
                        },
                        "ratio": ratio["ours"],
                        "noise": ratio["bare again"],
                    }
                )
    return {"ranks": RANKS, "rounds": rounds, "calls": results}


def _time_ranks(op: str, payload: int, rounds: int) -> Times:
    mesh = make_mesh()
    ours, bare = PAIRS[op]
    x = torch.ones(payload // 4)

    def many(call: Op) -> Callable[[], float]:
        def step(_: int) -> None:
            for _ in range(CALLS[payload]):
                call(x, mesh.dp)

        return timed(step, mesh)

    contestants = {"ours": many(ours), "bare": many(bare), "bare again": many(bare)}
    return interleave(contestants, rounds)


def text(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [
        f"One call of comm beside bare torch.distributed: {result['ranks']} ranks, median of "
        f"{result['rounds']} rounds",
        f"{'':<16}{'bytes':>10}{'ours, us':>11}{'bare, us':>11}{'ours/bare':>11}{'noise':>8}  aim",
    ]
    for row in result["calls"]:
        micro, aim = row["microseconds"], AIMS.get(row["bytes"])
        shown = f"  {aim:.2f}" if row["op"] == "all_reduce" else ""
        lines.append(
            f"{row['op']:<16}{row['bytes']:>10,}{micro['ours']:>11.1f}{micro['bare']:>11.1f}"
            f"{row['ratio']:>11.2f}{row['noise']:>8.2f}{shown}"
        )
    return "\n".join(lines)
