"""Record a rank's calls of torch's network layer, below course_lib.comm.

A dispatch mode sees every ``c10d`` operation, including send and recv_, and every operation on a
tensor. Answers in raw torch are therefore judged like answers that use course_lib.comm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.ledger import wire

# torch's operation -> (its name here, the index of its input, the index of its result)
OPERATIONS = {
    "send": ("send", 0, None),
    "recv_": ("recv", 0, 0),
    "recv_any_source_": ("recv", 0, 0),
    "allreduce_": ("all_reduce", 0, 0),
    "allreduce_coalesced_": ("all_reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    "allgather_": ("all_gather", 1, 0),
    "_allgather_base_": ("all_gather", 1, 0),
    "reduce_scatter_": ("reduce_scatter", 1, 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 0),
    "alltoall_": ("all_to_all", 1, 0),
    "alltoall_base_": ("all_to_all", 1, 0),
    "all_gather_into_tensor": ("all_gather", 0, None),
    "reduce_scatter_tensor": ("reduce_scatter", 0, None),
    "all_to_all_single": ("all_to_all", 0, None),
    "monitored_barrier_": ("barrier", 0, None),
}
LAST_WAIT = timedelta(seconds=1)  # for a call that an answer did not wait for
NAMES = {op for op, _, _ in OPERATIONS.values()} - {"barrier"}  # those with a wire formula
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
# The methods of a process group that begin a call and return its Work.
METHODS = (
    "send",
    "recv",
    "recv_anysource",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "gather",
    "scatter",
    "reduce",
    "barrier",
)
SHAPE_ONLY = {"empty_like", "new_empty", "new_zeros", "zeros_like", "ones_like", "full_like",
              "new_ones", "new_full", "empty_strided", "new_empty_strided"}  # fmt: skip


@dataclass(slots=True)
class WireCall:
    """One operation: its name, the bytes of its input, the peer of a message in its group.

    ``ranks`` are the global ranks of its group. ``begun`` and ``ended`` number the events of the
    rank: the call, and the first wait for its Work (0 if there was none). ``early`` is the torch
    operation that used a tensor of the call before that.
    """

    op: str
    payload: int
    peer: int | None = None
    ranks: tuple[int, ...] = field(default=(), compare=False)
    begun: int = field(default=0, compare=False)
    ended: int = field(default=0, compare=False)
    early: str = field(default="", compare=False)

    @property
    def waited(self) -> bool:
        """Whether its Work was waited for."""
        return self.ended > 0

    def wire(self, n: int) -> Fraction:
        """Return the bytes that one of ``n`` ranks sends; the payload for an unknown operation."""
        return wire(self.op, self.payload, n) if self.op in NAMES else Fraction(self.payload)


@dataclass(slots=True)
class _Pending:
    """A call before its wait: the memory that nothing may write, and that nothing may use."""

    call: WireCall
    read: list[tuple[int, int]]
    written: list[tuple[int, int]]


class WireCalls(TorchDispatchMode):
    """Record every network operation of the body in ``calls``, in order, and the waits for them.

    It can be entered several times; waits count while it is entered. ``Work.is_completed`` is no
    wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[WireCall] = []
        self._events = 0
        self._pending: list[_Pending] = []
        self._works: list[tuple[Any, list[WireCall]]] = []
        self._messages: list[tuple[weakref.ref, WireCall]] = []  # after their wait
        self._torch: list[list[tuple[Any, str, Any]]] = []

    def __enter__(self) -> WireCalls:
        # The entries of the classes are put back later: what getattr returns would not bind.
        saved: list[tuple[Any, str, Any]] = [(dist.Work, "wait", vars(dist.Work)["wait"])]
        own = vars(dist.ProcessGroup)
        saved += [(dist.ProcessGroup, name, own[name]) for name in METHODS if name in own]
        for _, name, _ in saved[1:]:
            method = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, self._beginning(method))
        setattr(dist.Work, "wait", self._waiting(dist.Work.wait))  # noqa: B010
        self._torch.append(saved)
        return super().__enter__()

    def finish(self) -> None:
        """Wait for calls that were not waited for, so that no other rank waits for them forever."""
        for work, _ in self._works:
            with suppress(RuntimeError):  # no rank takes the other side
                work.wait(LAST_WAIT)
        self._works.clear()

    def __exit__(self, *error: Any) -> None:
        for place, name, method in self._torch.pop():
            setattr(place, name, method)
        super().__exit__(*error)

    def _next_event(self) -> int:
        self._events += 1
        return self._events

    def _beginning(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def begins(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = len(self.calls)
            work = method(group, *args, **kwargs)
            made = self.calls[before:]
            for call in made:
                call.ranks = tuple(dist.get_process_group_ranks(group))
            self._works.append((work, made))
            return work

        return begins

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def waits(work: Any, *args: Any, **kwargs: Any) -> Any:
            for over, call in self._messages:
                if over() is work:  # gloo would wait forever
                    raise RuntimeError(
                        f"wait() was called twice for the {call.op} with rank {call.peer}: a "
                        "message arrives once, so call wait() once on each handle"
                    )
            pending, self._pending = self._pending, []  # gloo itself copies in some waits
            try:
                found = method(work, *args, **kwargs)
            finally:
                self._pending = pending
            for begun, calls in self._works:
                if begun is work:
                    for call in calls:
                        call.ended = self._next_event()
                        if call.peer is not None:
                            self._messages.append((weakref.ref(work), call))
            self._works = [each for each in self._works if each[0] is not work]
            self._pending = [each for each in self._pending if not each.call.waited]
            return found

        return waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        space, name = func.namespace, func._schema.name.split("::")[-1]
        if space in ("c10d", "_c10d_functional"):
            if name not in SILENT:
                self._call(name, args, blocking=space != "c10d")
        elif self._pending and not func.is_view and name.rstrip("_") not in SHAPE_ONLY:
            self._use(name, func._schema.arguments, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _call(self, name: str, args: tuple, *, blocking: bool) -> None:
        op, place, result = OPERATIONS.get(name, (name.strip("_"), 0, 0))
        tensors = [] if op == "barrier" else list(_tensors(args[place]))
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        peer = int(args[2]) if name in ("send", "recv_") else None
        call = WireCall(op, payload, peer, begun=self._next_event())
        call.ended = self._next_event() if blocking else 0
        read = [_memory(tensor) for tensor in tensors]
        written = [] if result is None else [_memory(each) for each in _tensors(args[result])]
        for other in self._pending:
            if _overlap(read, other.written) or _overlap(written, other.written + other.read):
                other.call.early = other.call.early or op
        self.calls.append(call)
        if not blocking:
            self._pending.append(_Pending(call, read, written))

    def _use(self, name: str, parameters: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        values = [*args, *(kwargs.get(each.name) for each in parameters[len(args) :])]
        for parameter, value in zip(parameters, values, strict=False):
            used = [_memory(tensor) for tensor in _tensors(value)]
            writes = parameter.alias_info is not None and parameter.alias_info.is_write
            for each in self._pending:
                if _overlap(used, each.written + (each.read if writes else [])):
                    each.call.early = each.call.early or name


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the first address behind them."""
    if tensor.numel() == 0:
        return 0, 0
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()


def _overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
