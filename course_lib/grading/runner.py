"""The side of a ranked exercise that a rank runs: call the answers, and record what they did."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.refuse import refusing
from course_lib.grading.wire import WireCall, WireCalls
from course_lib.launch import begun as all_begun
from course_lib.mesh import Axis, Mesh, make_mesh
from course_lib.trace import PeakLiveBytes

Answers = Sequence[Any]
Inputs = Mapping[str, Any]  # the inputs of one call on one rank, by name, in order
# act(answers, inputs, axis, mesh) returns the results by name. A generator function yields
# wherever the other call may go on, and returns the results: for classes, whose two instances are
# then used alternately.
Act = Callable[[Answers, Inputs, Axis, Mesh], Any]


class Unfit(Exception):
    """Raised by an act when the returned value has the wrong form; the text is the message."""


@dataclass(frozen=True)
class Placement:
    """The mesh of a trial: its order, its sizes, and the axis that the exercise is about."""

    order: str
    sizes: Mapping[str, int]
    axis: str


@dataclass
class Observed:
    """What one call did on one rank.

    ``values`` are the results by name, ``unfit`` is why there are none. ``calls`` are the network
    operations, ``peak`` the peak of live bytes, ``changed`` the names of inputs that are different
    after the calls.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unfit: str = ""
    calls: list[WireCall] = field(default_factory=list)
    peak: int = 0
    changed: list[str] = field(default_factory=list)


@dataclass
class _Call:
    steps: Iterator[Any]
    observed: Observed
    wire: WireCalls
    peak: PeakLiveBytes


def graded(
    act: Act,
    refused: Sequence[str],
    placement: Placement,
    strided: bool,
    calls: Sequence[Sequence[Inputs]],
    *answers: Any,
) -> list[Observed]:
    """Make all calls on this rank and return what each did.

    ``calls`` has the inputs of a call by global rank. The first two calls are open at the same
    time if the act is a generator. A third gets the tensors of the second, with its own values.
    """
    mesh = make_mesh(placement.order, **placement.sizes)
    axis: Axis = getattr(mesh, placement.axis)
    given = [dict(call[mesh.rank]) for call in calls]
    if strided:
        given = [{name: _strided(value) for name, value in each.items()} for each in given]
    all_begun()  # from here on time counts
    with refusing(refused):
        seen = _together(act, answers, given[:2], axis, mesh)
        for last in given[2:]:
            for each in seen:  # a result may share memory with an input
                each.values = _kept(each.values)
            seen += _together(act, answers, [_refilled(given[1], last)], axis, mesh)
    return seen


def _together(
    act: Act, answers: Answers, given: Sequence[Inputs], axis: Axis, mesh: Mesh
) -> list[Observed]:
    """Make the calls in turn, each up to its next yield, and return what each did."""
    before, versions = copy.deepcopy(given), [_versions(each) for each in given]
    begun = [_begin(act, answers, each, axis, mesh) for each in given]
    going = list(begun)
    while going:
        going = [call for call in going if _goes_on(call)]
    for call, now, was, version in zip(begun, given, before, versions, strict=True):
        call.wire.finish()
        after = _versions(now)
        call.observed.changed = [
            name
            for name in was
            if version[name] != after[name] or not unchanged(now[name], was[name])
        ]
    return [call.observed for call in begun]


def _begin(act: Act, answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> _Call:
    def steps() -> Iterator[Any]:
        result = act(answers, given, axis, mesh)
        if inspect.isgenerator(result):
            result = yield from result
        return result

    return _Call(steps(), Observed(), WireCalls(), PeakLiveBytes())


def _goes_on(call: _Call) -> bool:
    """Run a call to its next yield; return False at its end, with everything recorded."""
    try:
        with call.peak, call.wire:
            next(call.steps)
        return True
    except StopIteration as end:
        call.observed.values = end.value
    except Unfit as reason:
        call.observed.unfit = str(reason)
    call.observed.calls, call.observed.peak = call.wire.calls, call.peak.peak
    return False


def _versions(given: Inputs) -> dict[str, list[int]]:
    """Return how often torch wrote into each tensor of the inputs: also a write that was undone."""
    return {
        name: [each._version for each in tensors_in(value) if type(each) is Tensor]
        if isinstance(value, Tensor | list | tuple | dict)
        else []
        for name, value in given.items()
    }


def _kept(value: Any) -> Any:
    """Return a value with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _kept(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return value


def _refilled(used: Any, new: Any) -> Any:
    """Return ``new`` in the tensors of ``used``, wherever these have the same shape and dtype."""
    if isinstance(used, dict) and isinstance(new, dict):
        return {key: _refilled(used.get(key), value) for key, value in new.items()}
    if type(used) is type(new) is list and len(used) == len(new):
        return [_refilled(*each) for each in zip(used, new, strict=True)]
    if not (type(used) is type(new) is Tensor and used.is_leaf and 0 not in used.stride()):
        return new
    if (used.shape, used.dtype) != (new.shape, new.dtype):
        return new
    used.grad = None
    used.requires_grad_(new.requires_grad).detach().copy_(new)
    return used


def _strided(value: Any) -> Any:
    """Return a tensor of floats transposed in memory, with gaps between its elements, also in
    lists, dicts and parameters; other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)(map(_strided, value))
    if isinstance(value, dict):
        return {key: _strided(each) for key, each in value.items()}
    if isinstance(value, nn.Parameter):
        grad, value.grad = value.grad, None
        value.data, value.grad = _strided(value.data), _strided(grad)
        return value
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim()):
        return value
    if 0 in value.stride():  # an expanded tensor
        return value
    turned = value.transpose(0, -1)
    wide = value.new_full((*turned.shape, 2), float("nan"))
    wide[..., 0] = turned
    return wide[..., 0].transpose(0, -1)


def unchanged(now: Any, before: Any) -> bool:
    """Return whether two values are equal bit by bit: tensors, modules, containers of them."""
    if isinstance(before, Tensor):
        if not isinstance(now, Tensor) or now.shape != before.shape or now.dtype != before.dtype:
            return False
        now, before = now.detach(), before.detach()
        return bool(torch.equal(now.isnan(), before.isnan()) if before.is_floating_point()
                    else True) and torch.equal(now.nan_to_num(), before.nan_to_num())  # fmt: skip
    if isinstance(before, nn.Module):
        return type(now) is type(before) and unchanged(now.state_dict(), before.state_dict())
    if isinstance(before, Mapping):
        return list(now) == list(before) and all(unchanged(now[key], before[key]) for key in before)
    if isinstance(before, list | tuple):
        return len(now) == len(before) and all(map(unchanged, now, before))
    try:
        return bool(now == before) or callable(before)
    except Exception:
        return now is before


def named(value: Any, *names: str) -> dict[str, Any]:
    """Return the parts of a tuple or list by name. Raises Unfit if their number is another."""
    if isinstance(value, tuple | list) and len(value) == len(names):
        return dict(zip(names, value, strict=True))
    number = f" of {len(value)} values" if isinstance(value, tuple | list) else ""
    wanted = ", ".join(names)
    raise Unfit(
        f"expected {len(names)} values ({wanted}), got a {type(value).__name__}{number}: return "
        "them as a tuple"
    )


def tensors_in(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Return every tensor that an object stores: in modules, attributes and containers."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif inspect.isfunction(value):
        parts = [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, Axis | Mesh | type) or not hasattr(value, "__dict__"):
        return []
    else:
        parts = list(vars(value).values())
    return [tensor for part in parts for tensor in tensors_in(part, seen)]
