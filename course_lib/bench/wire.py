"""`course bench wire`: the bytes that the kernel counted for each operation, beside the formula.

The ledger has the bytes that the cheapest known algorithm sends. The Linux kernel counts the bytes
that TCP sent on the connections of the ranks (:mod:`course_lib.trace.traffic`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.bench.rounds import Say, quiet
from course_lib.launch import World
from course_lib.ledger import wire
from course_lib.mesh import Axis, make_mesh
from course_lib.trace import SentBytes, traffic_matrices

RANKS = 4
PAYLOAD = 2**20  # input bytes per rank and call
_NATIVE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _natively(x: Tensor, axis: Axis) -> None:
    """Call torch.distributed's own reduce-scatter on gloo."""
    _NATIVE(x.new_empty(x.numel() // axis.size), x, group=axis.group)


def _one_message(x: Tensor, axis: Axis) -> None:
    if axis.rank == 0:
        comm.send(x, axis, to=1)
    if axis.rank == 1:
        comm.recv(x, axis, source=0)


Operation = Callable[[Tensor, Axis], object]
# Name -> the operation, the operation of the formula, and the number of ranks that send.
_OPERATIONS: dict[str, tuple[Operation, str, int]] = {
    "all_reduce": (comm.all_reduce, "all_reduce", RANKS),
    "all_reduce, a ring of messages": (comm.ring_all_reduce, "all_reduce", RANKS),
    "all_reduce, a tree of messages": (comm.tree_all_reduce, "all_reduce", RANKS),
    "all_gather": (comm.all_gather, "all_gather", RANKS),
    "reduce_scatter, ours": (comm.reduce_scatter, "reduce_scatter", RANKS),
    "reduce_scatter, gloo's own": (_natively, "reduce_scatter", RANKS),
    "all_to_all": (comm.all_to_all, "all_to_all", RANKS),
    "broadcast": (comm.broadcast, "broadcast", RANKS),
    "send": (_one_message, "send", 1),
}


def measure(rounds: int = 20, payload: int = PAYLOAD, say: Say = quiet) -> dict:
    """Return the bytes per call of 4 ranks together: counted by the kernel, and by the formula.

    ``payload`` is in bytes, a multiple of 16. Raises RuntimeError where the kernel has no count.
    """
    if payload < 16 or payload % 16 or rounds < 1:
        raise ValueError(
            f"expected payload to be a multiple of 16 bytes and rounds at least 1, got "
            f"payload={payload}, rounds={rounds}"
        )
    say(f"{len(_OPERATIONS)} operations, {rounds} calls of each")
    with World(RANKS) as world:
        sent = world.run(_count, rounds, payload, timeout=60 + rounds)
    rows = []
    for name, (_, op, senders) in _OPERATIONS.items():
        matrices = traffic_matrices(rank[name] for rank in sent)
        if matrices is None:
            raise RuntimeError("this kernel does not count what TCP sends (TCP_INFO): use Linux")
        formula = float(senders * wire(op, payload, RANKS))
        moved = sum(map(sum, matrices["dp"])) / rounds
        rows.append({"name": name, "formula": formula, "moved": moved, "ratio": moved / formula})
    return {
        "ranks": RANKS,
        "payload": payload,
        "rounds": rounds,
        "private_namespace": False,  # not needed: the count is that of the ranks' own connections
        "rows": rows,
    }


def text(result: dict) -> str:
    """Return the result as a table, with its explanation."""
    lines = [
        f"Bytes per call, {result['ranks']} ranks together: each passes {result['payload']:,} "
        f"bytes to the call; {result['rounds']} calls",
        f"{'':<32}{'formula':>12}{'kernel':>14}{'kernel / formula':>18}",
    ]
    for row in result["rows"]:
        numbers = f"{row['formula']:>12,.0f}{row['moved']:>14,.0f}{row['ratio']:>18.3f}"
        lines.append(f"{row['name']:<32}{numbers}")
    lines.append(
        "gloo's own reduce-scatter is an all-reduce inside, twice the bytes; ours is an "
        "all-to-all and a local sum. The rest is gloo's headers, 144 bytes per message."
    )
    return "\n".join(lines)


def _count(rounds: int, payload: int) -> dict[str, SentBytes]:
    """Count what this rank sends in ``rounds`` calls of every operation."""
    mesh = make_mesh()
    x = torch.zeros(payload // 4)
    counts = {}
    for name, (operation, *_) in _OPERATIONS.items():
        with mesh.kernel_bytes() as counts[name]:
            for _ in range(rounds):
                operation(x, mesh.dp)
    return counts
