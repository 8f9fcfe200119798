"""Lesson 08 in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.grading.runner import Answers, Inputs, Unfit, named
from course_lib.mesh import Axis, Mesh

COPIES = {"clone", "copy_", "_to_copy", "zeros", "zeros_like", "new_zeros", "_unsafe_view"}
EAGER, SECOND = "computed before later()", "a second later() is the same"
EARLY, AGAIN = "computed before the message", "computed twice"
PARAMETERS = ("weight 1", "bias 1", "weight 2", "bias 2")


class _Computed(TorchDispatchMode):
    """Append the name and the number of elements of every tensor that is computed to ``into``."""

    def __init__(self, into: list[tuple[str, int]]) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if not func.is_view and name not in COPIES:
            self.into.append((name, result.numel() if isinstance(result, Tensor) else 0))
        return result


def split(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """08-3: dx of both calls, then ``later()`` of both, twice."""
    x, weight, dy = given.values()
    with _Computed([]) as seen:
        pair = answers[0](x, weight, dy)
    found = named(pair, "dx", "later")
    later = found.pop("later")
    if not callable(later) or isinstance(later, Tensor):
        raise Unfit(
            f"expected later to be a function without arguments, got a {type(later).__name__}: "
            "return the function, not its result"
        )
    yield
    found |= _called(later)
    sizes = {weight.numel(): "dweight", len(weight): "dbias"}
    found[EAGER] = [sizes[size] for _, size in seen.into if size in sizes]
    try:
        again = _called(later)
    except Exception:  # such as autograd's, which has freed its graph
        again = found
    found[SECOND] = all(_same(value, found[name]) for name, value in again.items())
    return found


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


def _called(later: Any) -> dict[str, Any]:
    pair = later()
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise Unfit(
            f"expected later() to return a pair (dweight, dbias), got a {type(pair).__name__}"
        )
    copies = [each.clone() if isinstance(each, Tensor) else each for each in pair]
    return dict(zip(("dweight", "dbias"), copies, strict=True))


def halves(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """08-5: raw torch on the default group; a micro-batch of either call in turn."""
    stage = given["stage"]
    own = dict(zip(PARAMETERS, stage.parameters(), strict=True))
    events: list[tuple[str, int]] = []
    for name, p in own.items():
        p.register_hook(lambda _, name=name: events.append((name, 0)))
    found: dict[str, Any] = {EARLY: [], AGAIN: []}
    for mb in range(given["micro-batches"]):
        y = stage(given[f"x of {mb}"].requires_grad_(axis.rank > 0))
        before = y.detach().clone()
        events.clear()
        with _Computed(events):
            answers[0](given[f"x of {mb}"], y, list(own.values()), given[f"dy of {mb}"])
        if not torch.equal(y, before):
            raise Unfit("expected y to be unchanged, but the answer wrote into it")
        names = [name for name, _ in events if name in own or name == "send"]
        found[EARLY] += [name for name in names[: _index(names, "send")] if axis.rank > 0]
        found[AGAIN] += [name for name in own if names.count(name) > 1]
        yield
    return found | {f"gradient of {name}": p.grad for name, p in own.items()}


def _index(names: list[str], name: str) -> int:
    return names.index(name) if name in names else 0
