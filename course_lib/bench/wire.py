"""`course bench wire`: compare the bytes sent over loopback with the ledger's formula.

The ledger has a formula for the bytes of the cheapest known algorithm. Here the kernel counts: the
``lo`` line of /proc/net/dev is read before and after. This is done in a private network namespace
if that is allowed, so that no traffic of other programs is counted. Linux only.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.launch import World
from course_lib.ledger import wire
from course_lib.mesh import Axis, make_mesh

RANKS = 4
PAYLOAD = 2**20  # input bytes per rank and call
_COUNTER = Path("/proc/net/dev")
_NATIVE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SET_FLAGS, _GET_FLAGS, _UP = 0x8914, 0x8913, 1  # of linux/sockios.h and linux/if.h
_CHILD = "from course_lib.bench import wire; wire._in_namespace()"


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


def measure(rounds: int = 20, payload: int = PAYLOAD) -> dict:
    """Return the bytes per call, of 4 ranks together: counted by the kernel, and by formula.

    ``payload`` is in bytes, a multiple of 16. Raises RuntimeError without the kernel's counter.
    """
    if not _COUNTER.exists():
        raise RuntimeError(f"expected the kernel's byte counter {_COUNTER}, which only Linux has")
    if payload < 16 or payload % 16 or rounds < 1:
        raise ValueError(
            "expected a payload that is a multiple of 16 bytes and at least 1 round, got "
            f"payload={payload}, rounds={rounds}"
        )
    private = _measure_privately(rounds, payload)
    moved = private or _measure_here(rounds, payload)
    rows = []
    for name, (_, op, senders) in _OPERATIONS.items():
        formula = float(senders * wire(op, payload, RANKS))
        ratio = moved[name] / formula
        rows.append({"name": name, "formula": formula, "moved": moved[name], "ratio": ratio})
    return {
        "ranks": RANKS,
        "payload": payload,
        "rounds": rounds,
        "private_namespace": private is not None,
        "rows": rows,
    }


def text(result: dict) -> str:
    """Return the result as a table, with an explanation."""
    lines = [
        f"Bytes over loopback per call: {result['ranks']} ranks together, input of "
        f"{result['payload']:,} bytes per rank, {result['rounds']} calls",
        f"{'':<32}{'formula':>12}{'moved':>14}{'moved / formula':>17}",
    ]
    for row in result["rows"]:
        numbers = f"{row['formula']:>12,.0f}{row['moved']:>14,.0f}{row['ratio']:>17.3f}"
        lines.append(f"{row['name']:<32}{numbers}")
    lines.append(
        "gloo's own reduce-scatter runs an all-reduce and sends twice the bytes; ours is an "
        "all-to-all and a local sum. The rest is headers and acknowledgements."
    )
    if result["private_namespace"]:
        lines.append("Counted in a private network namespace, without traffic of other programs.")
    else:
        lines.append(
            "Counted for the whole machine, with the loopback traffic of other programs, because a "
            "private network namespace is not allowed here."
        )
    return "\n".join(lines)


def private_namespace() -> list[str] | None:
    """Return the command for a private network namespace; None if it is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return None
    for command in (
        [unshare, "-n"],
        [unshare, "-r", "-n"],
    ):  # as root, or as root of a new user namespace
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return None


def _measure_privately(rounds: int, payload: int) -> dict[str, float] | None:
    """Run :func:`_measure_here` in a child with a private network; None if not allowed."""
    command = private_namespace()
    if command is None:
        return None
    child = subprocess.run(
        [*command, sys.executable, "-c", _CHILD, str(rounds), str(payload)],
        capture_output=True,
        text=True,
        timeout=180 + rounds,
    )
    if child.returncode:
        raise RuntimeError(f"measuring in a network namespace failed:\n{child.stderr.strip()}")
    return json.loads(child.stdout.splitlines()[-1])


def _in_namespace() -> None:
    """In the child: bring the loopback up, measure, and print the result as JSON."""
    _bring_loopback_up()
    print(json.dumps(_measure_here(int(sys.argv[1]), int(sys.argv[2]))))


def _bring_loopback_up() -> None:
    """Do the same as ``ip link set lo up``, without that program."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, request)
        flags = struct.unpack("16sH14x", answer)[1] | _UP
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags))


def _measure_here(rounds: int, payload: int) -> dict[str, float]:
    with World(RANKS) as world:
        return world.run(_count, rounds, payload, timeout=60 + rounds)[0]


def _count(rounds: int, payload: int) -> dict[str, float]:
    """Return the bytes per call of every operation; all ranks return the same."""
    axis = make_mesh().dp
    x = torch.zeros(payload // 4)
    moved = {}
    for name, (operation, *_) in _OPERATIONS.items():
        operation(x, axis)  # connections are made at first use
        before = _settled_counter()
        for _ in range(rounds):
            operation(x, axis)
        moved[name] = (_settled_counter() - before) / rounds
    return moved


def _settled_counter() -> int:
    """Return the bytes sent over loopback so far, read while no rank sends."""
    dist.barrier()
    read = torch.tensor([_loopback_bytes()])
    dist.broadcast(read, 0)  # all ranks wait until rank 0 has read
    return int(read)


def _loopback_bytes() -> int:
    """Return the transmitted bytes of ``lo``: column 9 of its line."""
    for line in _COUNTER.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError(f"no loopback interface in {_COUNTER}")
