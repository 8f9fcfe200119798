"""Count the bytes that a rank really sent: the Linux kernel has them for each TCP connection.

gloo opens one connection to each peer when a group is made. The connections that open around
``new_group`` therefore belong to one axis, and the two ends of a connection name the pair of
ranks. TCP_INFO has the count of each connection; reading it needs no privileges and sends nothing.
Where there is no such count (macOS, nccl, an old kernel) the result is None.

The count is the formula's bytes and gloo's headers, which :func:`header_bytes` predicts.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from course_lib.ledger import Record

Address = tuple[str, int]
Connection = tuple[Address, Address]  # this end and the other end
Matrix = list[list[int]]  # bytes by [sender][receiver], global ranks

WORLD = "world"  # the axis of every connection that no other axis opened
OPEN_FILES = Path("/proc/self/fd")
# Offsets in struct tcp_info of linux/tcp.h: uint32 tcpi_notsent_bytes, uint64 tcpi_bytes_sent
# (retransmissions included, headers of TCP and IP not) and, next to it, tcpi_bytes_retrans.
NOT_SENT, SENT, INFO_BYTES = 144, 200, 216

# gloo sends three headers of 48 bytes for each message: the sender announces the message, the
# receiver says that it is ready, and the message has one of its own.
HEADER_BYTES = 3 * 48
LARGEST_SEGMENT = 2**20  # bytes in which gloo's all_reduce cuts a tensor at most


def bytes_written(info: bytes) -> int | None:
    """Return the bytes written to a connection, from its TCP_INFO; None if that is too short.

    They are bytes_sent less bytes_retrans. The bytes that wait in the send buffer are added: TCP
    will send each of them once, and a busy machine then reads the same count as an idle one.
    """
    if len(info) < INFO_BYTES:  # Linux before 4.19
        return None
    sent, retransmitted = struct.unpack_from("=QQ", info, SENT)
    return sent - retransmitted + struct.unpack_from("=I", info, NOT_SENT)[0]


def read_connections(open_files: Path = OPEN_FILES) -> dict[Connection, int] | None:
    """Return the bytes written so far to each TCP connection of this process.

    None where the kernel does not say.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    written = {}
    try:
        for name in os.listdir(open_files):
            if (found := _read_connection(int(name))) is not None:
                written[found[0]] = found[1]
    except OSError:  # there is no /proc, no TCP_INFO, or no descriptor left to read it with
        return None
    return written


def _read_connection(fd: int) -> tuple[Connection, int] | None:
    """Return the two ends and the bytes written; None if ``fd`` is no TCP connection.

    Raises OSError where the kernel has no count.
    """
    try:
        copy = os.dup(fd)  # the backend may close its own at any time
    except OSError as error:
        if error.errno == errno.EBADF:  # closed meanwhile
            return None
        raise
    try:
        one = socket.socket(fileno=copy)
    except OSError:  # a file
        os.close(copy)
        return None
    with one:
        if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            ends = _address(one.getsockname()), _address(one.getpeername())
        except OSError:  # it listens, or its peer is gone
            return None
        count = bytes_written(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    if count is None:
        raise OSError(errno.ENOPROTOOPT, "TCP_INFO of this kernel has no tcpi_bytes_sent")
    return ends, count


def _address(name: tuple) -> Address:
    """Host and port; the same host has one spelling, also through an IPv6 socket."""
    return name[0].removeprefix("::ffff:"), name[1]


@dataclass
class SentBytes:
    """The bytes that one rank sent on each connection: counts by (axis, connection).

    ``counts`` is None where the kernel does not say. :func:`traffic_matrices` finds the peers.
    """

    counts: dict[tuple[str, Connection], int] | None = None

    @property
    def by_axis(self) -> dict[str, int] | None:
        """Bytes that this rank sent on each axis."""
        if self.counts is None:
            return None
        sums: dict[str, int] = defaultdict(int)
        for (axis, _), count in self.counts.items():
            sums[axis] += count
        return dict(sums)


class SocketMeter:
    """Count the bytes that a rank sends on the connections of each axis.

    A connection that opens inside :meth:`opening` belongs to that axis, every other one to the
    default group, whose axis is "world". Where an axis has no connections, or has lost one (nccl,
    or a group that was destroyed), there is no count at all, rather than one that lacks an axis.
    There is no count either for tensors on a GPU (``on_cpu=False``). ``read`` returns the bytes of
    all connections.
    """

    def __init__(
        self,
        world_size: int = 1,
        *,
        on_cpu: bool = True,
        read: Callable[[], dict[Connection, int] | None] = read_connections,
    ) -> None:
        self._read = read if on_cpu else lambda: None
        self._axis_of: dict[Connection, str] = {}
        self._foreign: set[Connection] = set()
        self._needed = {WORLD} if world_size > 1 else set()
        self._start: dict[Connection, int] | None = {}

    def ignore_open(self) -> None:
        """Leave out the connections that are open now: they belong to a launcher's store."""
        self._foreign = set(self._read() or {})

    @contextmanager
    def opening(self, axis: str, size: int) -> Iterator[None]:
        """Give the connections that open inside to ``axis``, if it has more than one rank."""
        if size == 1:
            yield
            return
        before = self._read() or {}
        yield
        opened = {ends: count for ends, count in (self._read() or {}).items() if ends not in before}
        self._axis_of |= dict.fromkeys(opened, axis)
        if self._start is not None:
            self._start |= opened
        self._needed.add(axis)

    def restart(self) -> None:
        """Count from here on."""
        self._start = self._read()

    def sent(self) -> SentBytes:
        """Return what was sent since the start, on connections that are still open."""
        return self._since(self._start)

    @contextmanager
    def inside(self) -> Iterator[SentBytes]:
        """Count what is sent inside; the result is filled when the body ends."""
        before, result = self._read(), SentBytes()
        yield result
        result.counts = self._since(before).counts

    def _since(self, before: dict[Connection, int] | None) -> SentBytes:
        now = self._read()
        if before is None or now is None or not self._axis_of.keys() <= now.keys():
            return SentBytes()
        before = (self._start or {}) | before  # a connection that opened later has its own start
        counts = {
            (self._axis_of.get(ends, WORLD), ends): count - before.get(ends, 0)
            for ends, count in now.items()
            if ends not in self._foreign
        }
        if not self._needed <= {axis for axis, _ in counts}:
            return SentBytes()
        return SentBytes(counts)


def traffic_matrices(ranks: Iterable[SentBytes]) -> dict[str, Matrix] | None:
    """Return the bytes that each rank sent to each other rank: axis -> [sender][receiver].

    ``ranks`` has the counts of all ranks of a world in order, taken over the same part of their
    program. A connection leads to the rank that counted its other end. None where a rank has no
    count, or the other end of an axis' connection is on no rank.
    """
    counted = [rank.counts for rank in ranks]
    known = [counts for counts in counted if counts is not None]
    if len(known) < len(counted):
        return None
    here = {ends: rank for rank, counts in enumerate(known) for _, ends in counts}
    matrices: dict[str, Matrix] = {}
    for rank, counts in enumerate(known):
        for (axis, (near, far)), count in counts.items():
            peer = here.get((far, near))
            if peer is None and axis != WORLD:
                return None
            if peer is None or peer == rank:  # the connection of a store
                continue
            if axis not in matrices:
                matrices[axis] = [[0] * len(known) for _ in known]
            matrices[axis][rank][peer] += count
    return matrices


def header_bytes(record: Record) -> Fraction:
    """Return the bytes of gloo's headers per rank for a call, averaged over the ranks."""
    return HEADER_BYTES * _messages(record)


def _messages(record: Record) -> Fraction:
    """Messages that gloo sends for a call, per rank on average; see its allreduce.cc."""
    n, payload = record.n, record.payload
    if record.peer is not None:
        return Fraction(record.op == "send")
    if record.backend_op == "alltoall_base_":
        return Fraction(n - 1)
    if record.backend_op == "broadcast_":
        return Fraction(n - 1, n)
    if record.backend_op == "_allgather_base_":  # a ring; each shard in two halves
        return Fraction(2 * (n - 1))
    # all_reduce and gloo's reduce_scatter: a ring of at least 2n segments, of whole elements
    most = n * max(2, -(-payload // (n * LARGEST_SEGMENT)))
    elements = payload // record.itemsize
    segments = -(-elements // -(-elements // most)) if elements else 0
    return Fraction(2 * (n - 1) * segments, n)
