"""Priorities between axes that share a link: what ranks wait for goes first, the rest in the gaps.

A tensor-parallel all-reduce is small, and its ranks wait for it. A bucket of gradients is large and
is needed only before the optimizer step. A link carries transfers in the order in which they are
issued, so a bucket that is issued first delays every small call behind it. Two remedies, both from
ByteScheduler (Peng et al. 2019, doi:10.1145/3341301.3359642; the idea is also P3's, Jayarajan et
al. 2019, arXiv:1905.03960): hold the bucket back while urgent calls are expected, and cut it into
pieces that are through before the next urgent call comes.

The rule: a call on a lower axis is held back when it is started. Whenever the program has waited
for a call on a higher axis it goes on to compute, and the link has a gap: then one call leaves, of
the highest axis that holds any. A call that is waited for leaves at once, behind all that is held
on its own axis and above. So pieces should fit into a gap: 2(n-1)/n piece_bytes / beta plus
2(n-1) alpha seconds, up to the computation between two urgent calls.

Why no rank can wait for ever because of it:

* What leaves when depends on which calls the rank's program has waited for, never on a clock or on
  what has arrived. The members of a group run the same program (a data-parallel group joins equal
  stages), so they all start its calls in one order, and in one order with those on other groups, as
  nccl wants it. A thread that sent pieces when the link *seems* free would break this.
* A held call leaves at the latest where it is waited for. So the worst that can come of it is the
  program that makes the call there, and not where it is started: ``dp.Bucketed`` instead of
  ``dp.Overlapped``. If that one comes to an end, this one does.

Messages (send, recv) are never held back: another rank waits for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from course_lib.comm.instruments.watch import call_site
from course_lib.comm.transfer import Call, Handle
from course_lib.mesh import Axis, Instrument


class Priorities(Instrument):
    """Delay the less urgent axes in ``with Priorities(mesh.tp, mesh.dp, piece_bytes=2**18):``.

    ``axes`` are given from the most urgent to the least. All-reduces on delayed axes are sent in
    pieces of at most ``piece_bytes``, other collectives in one. The sums are the same bit
    for bit on two ranks; on more a backend may add the ranks in another order. An axis is delayed
    only if one above it has several ranks. Give the axes that the calls are made on: with cp above
    one rank gradients are summed on ``mesh.dp_cp``, those of experts on ``mesh.edp``. Enter it on
    every rank, around backward and ``finish()``; calls that are still held at its end are sent
    there. Do not delay calls for which the program soon waits, such as the all-gathers of ZeRO-3.

    Raises ValueError for fewer than two axes, an axis given twice, or pieces below one byte.
    """

    def __init__(self, *axes: Axis, piece_bytes: int) -> None:
        names = [axis.name for axis in axes]
        if len(set(names)) < max(2, len(axes)):
            raise ValueError(
                f"priorities of axes {names}: give two or more, each once, the most urgent first"
            )
        if piece_bytes < 1:
            raise ValueError(f"expected pieces of at least 1 byte, got piece_bytes={piece_bytes}")
        self.axes, self.piece_bytes = axes, piece_bytes
        self._held: list[deque[_Delayed]] = [deque() for _ in axes]

    def __enter__(self) -> Priorities:
        context = self.axes[0].context
        if any(isinstance(one, Priorities) for one in context.instruments):
            raise RuntimeError("these ranks have priorities already: leave them first")
        context.instruments = (self, *context.instruments)
        return self

    def __exit__(self, error: Any, *_: object) -> None:
        context = self.axes[0].context
        context.instruments = tuple(one for one in context.instruments if one is not self)
        if error is None:  # after an error other ranks may not come
            self._leave_down_to(len(self.axes) - 1)

    def around(self, axis: Axis, call: Call, issue: Callable[[Call], Handle]) -> Handle:
        """Issue ``call`` now or in a gap; a large all-reduce that has to wait is cut first."""
        if call.peer is not None or not self.holds(axis):
            return _BeforeGap(self, axis, call.op, issue(call))
        call.where = call_site(axis.context.cells)  # of the start, not of the wait

        def start(piece: Call) -> Handle:
            return _BeforeGap(self, axis, piece.op, issue(piece))

        pieces = [call]
        if call.op == "all_reduce":
            pieces = [replace(call, tensor=piece) for piece in self.cut(call.tensor, axis)]
        handles = [self.hold(axis, partial(start, piece)) for piece in pieces]
        return handles[0] if len(handles) == 1 else _Pieces(handles, call.tensor)

    def holds(self, axis: Axis) -> bool:
        """Whether a call on ``axis`` has to wait for a gap."""
        place = self._place(axis)
        return place is not None and any(above.size > 1 for above in self.axes[:place])

    def cut(self, fresh: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        """Return ``fresh`` in the pieces to send on ``axis``: flat views of about equal size."""
        if fresh.nbytes <= self.piece_bytes or not self.holds(axis):
            return (fresh,)
        count = -(-fresh.numel() // max(1, self.piece_bytes // fresh.element_size()))
        return fresh.view(-1).tensor_split(count)

    def hold(self, axis: Axis, start: Callable[[], Handle]) -> Handle:
        """A handle of a call that ``start()`` will make in a gap, or when it is waited for."""
        place = self._place(axis)
        assert place is not None
        held = _Delayed(start, lambda: self._leave_down_to(place))
        self._held[place].append(held)
        return held

    def gap(self, axis: Axis) -> None:
        """The program has waited for a call on ``axis``: the next one below it may leave."""
        place = self._place(axis)
        if place is None or self not in axis.context.instruments:
            return
        waiting = next((queue for queue in self._held[place + 1 :] if queue), None)
        if waiting:
            waiting.popleft().leave()

    def _place(self, axis: Axis) -> int | None:
        return self.axes.index(axis) if axis in self.axes else None

    def _leave_down_to(self, place: int) -> None:
        for queue in self._held[: place + 1]:
            while queue:
                queue.popleft().leave()


class _BeforeGap(Handle):
    """A call that was made. Once it is waited for the program goes on to compute: a gap."""

    def __init__(self, priorities: Priorities, axis: Axis, op: str, inner: Handle) -> None:
        self._priorities: Priorities | None = None if op == "send" else priorities
        self._axis, self._inner = axis, inner

    def wait(self) -> Any:
        """Wait for the call; then the next one may leave, once."""
        value = self._inner.wait()
        priorities, self._priorities = self._priorities, None
        if priorities is not None:
            priorities.gap(self._axis)
        return value


class _Pieces(Handle):
    """The pieces of one tensor, which is the result when all have arrived."""

    def __init__(self, handles: list[Handle], whole: Tensor) -> None:
        self._handles, self._whole = handles, whole

    def wait(self) -> Tensor:
        """Block until all pieces have arrived."""
        for handle in self._handles:
            handle.wait()
        return self._whole


class _Delayed(Handle):
    """A call that has not been made yet."""

    def __init__(self, start: Callable[[], Handle], leave_all: Callable[[], None]) -> None:
        self._start, self._leave_all = start, leave_all
        self._started: Handle | None = None
        self._error: Exception | None = None

    def leave(self) -> None:
        """Make the call. What goes wrong is raised here, and again where it is waited for."""
        try:
            self._started = self._start()
        except Exception as error:
            error.add_note("It was raised when a call left that priorities had held back.")
            self._error = error
            raise

    def wait(self) -> Any:
        """Have it made now, behind all that is held before it, and wait for it."""
        if self._started is None and self._error is None:
            self._leave_all()
        if self._error is not None:
            raise self._error
        assert self._started is not None, "what is held is in the queue"
        return self._started.wait()
