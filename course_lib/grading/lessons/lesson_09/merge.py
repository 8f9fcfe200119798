"""09-3: two partial attentions become one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.cp import blockwise
from course_lib.grading.answers import NotRight, shown
from course_lib.grading.compare import ABSOLUTE, RELATIVE
from course_lib.grading.exercise import Case, Function, Instance, Wrong

Pair = tuple[Tensor, Tensor]


class _Close:
    """(out, lse), equal to another one up to rounding."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    def __iter__(self) -> Any:
        return iter((self.out, self.lse))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Close) and all(map(_agree, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"out {_rounded(self.out)}, lse {_rounded(self.lse)}"


def _agree(one: Tensor, other: Tensor) -> bool:
    """Also where both overflowed, so that this mistake can be named."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one.double(), other.double(), RELATIVE, ABSOLUTE, equal_nan=True)


def _rounded(x: Tensor) -> Any:
    return [_rounded(row) if row.dim() else round(row.item(), 4) for row in x]


def _as_pair(value: Any) -> _Close:
    try:
        out, lse = value
    except (TypeError, ValueError):
        raise NotRight(f"a pair (out, lse) is wanted, not {shown(value)}") from None
    for name, each, dims in (("out", out, 2), ("lse", lse, 1)):
        if not isinstance(each, Tensor):
            raise NotRight(f"{name} is {shown(each)}; a tensor is wanted")
        if each.dim() != dims:
            raise NotRight(f"{name} has shape {list(each.shape)}; it has {dims} dim(s)")
    return _Close(out.detach(), lse.detach())


def _merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    weight = torch.sigmoid(lse_2 - lse_1)[:, None]
    return out_1 + (out_2 - out_1) * weight, torch.logaddexp(lse_1, lse_2)


def _blocks(scores: Callable[[random.Random], float], empty: bool = False) -> Any:
    """Draws attentions of three queries on two blocks; ``scores`` draws how large lse is."""

    def draw(rng: random.Random) -> list[Instance]:
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        found = []
        for _ in range(3):
            out_1, out_2 = torch.randn(2, 3, 2, generator=generator)
            lse_1, lse_2 = scores(rng) + 2 * torch.randn(2, 3, generator=generator)
            if empty:  # two rows have seen nothing yet
                out_1[:2], lse_1[:2] = 0.0, float("-inf")
            found.append({"out_1": out_1, "lse_1": lse_1, "out_2": out_2, "lse_2": lse_2})
        return found

    return draw


def _mean(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return (out_1 + out_2) / 2, torch.logaddexp(lse_1, lse_2)


def _sum(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return out_1 + out_2, torch.logaddexp(lse_1, lse_2)


def _swapped(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return _merge(out_2, lse_1, out_1, lse_2)


def _lse_added(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return _merge(out_1, lse_1, out_2, lse_2)[0], lse_1 + lse_2


def _lse_larger(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return _merge(out_1, lse_1, out_2, lse_2)[0], torch.maximum(lse_1, lse_2)


def _lse_mean(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return _merge(out_1, lse_1, out_2, lse_2)[0], (lse_1 + lse_2) / 2


def _by_lse(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    """Weighs by the log-sum-exp itself."""
    weight = (lse_2 / (lse_1 + lse_2))[:, None]
    return out_1 + (out_2 - out_1) * weight, torch.logaddexp(lse_1, lse_2)


def _not_normalised(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    total = lse_1.exp()[:, None] * out_1 + lse_2.exp()[:, None] * out_2
    return total, torch.logaddexp(lse_1, lse_2)


def _overflows(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    sum_1, sum_2 = lse_1.exp(), lse_2.exp()
    total = sum_1 + sum_2
    return (sum_1[:, None] * out_1 + sum_2[:, None] * out_2) / total[:, None], total.log()


def _second_only(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    return out_2, lse_2


def _by_library(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    out, lse = out_1.clone(), lse_1.clone()
    blockwise.merge(out, lse, out_2, lse_2)
    return out, lse


def _by_softmax(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> list[Tensor]:
    both = torch.stack((lse_1, lse_2))
    weights = both.softmax(0)[..., None]
    return [(torch.stack((out_1, out_2)) * weights).sum(0), both.logsumexp(0)]


def _by_maximum(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    """As online softmax is usually written: both sums relative to the larger exponent."""
    top = torch.maximum(lse_1, lse_2)
    sum_1, sum_2 = (lse_1 - top).exp(), (lse_2 - top).exp()
    total = sum_1 + sum_2
    out = (sum_1[:, None] * out_1 + sum_2[:, None] * out_2) / total[:, None]
    return out, top + total.log()


MERGE = Function(
    id="09-3",
    title="merge two partial attentions",
    names=("merge",),
    hints=(
        "Each output is an average over its own block's keys. Which sum of exponentials was it "
        "divided by, and by which is the whole one?",
        "Block 2's weight is exp(lse_2) / (exp(lse_1) + exp(lse_2)), which is a sigmoid of a "
        "difference. The new lse is the logarithm of that sum. Neither needs exp of a large "
        "number.",
        "w = torch.sigmoid(lse_2 - lse_1)[:, None]; return out_1 + w * (out_2 - out_1), "
        "torch.logaddexp(lse_1, lse_2).",
    ),
    wrong=(
        Wrong(
            _mean,
            "This is the mean of the outputs: the block with more of the exponentials weighs more.",
        ),
        Wrong(_sum, "This is the sum of the outputs: weights are missing that add up to 1."),
        Wrong(_swapped, "The weights are the wrong way round."),
        Wrong(
            _lse_added,
            "out is right. lse: the sums of exponentials add up, not their logarithms.",
        ),
        Wrong(_lse_larger, "out is right. lse: the larger one is not the sum of both."),
        Wrong(_lse_mean, "out is right. lse: a mean of logarithms is no logarithm of a sum."),
        Wrong(_by_lse, "Weighed by the logarithms: the weights are their exponentials."),
        Wrong(
            _not_normalised,
            "The outputs are already divided by their own sums: divide by the new sum once more.",
        ),
        Wrong(_second_only, "This is the second block alone."),
        Wrong(
            _overflows,
            "exp of an lse of this size is infinite or 0 in float32: take it of differences alone.",
        ),
        Wrong(_by_library, words="this is what you are asked to write"),
        Wrong(lambda *given: _merge(*given)[0], words="a pair (out, lse) is wanted"),
        Wrong(
            lambda *given: (_merge(*given)[0], _merge(*given)[1][:, None]),
            words="lse has shape [3, 1]",
        ),
    ),
    right=(_by_softmax, _by_maximum),
    stub=lambda out_1, lse_1, out_2, lse_2: None,
    reference=_by_library,
    normal=_as_pair,
    drawn=(
        Case("two blocks", _blocks(lambda rng: rng.uniform(0, 2))),
        Case("rows that have seen nothing yet", _blocks(lambda rng: rng.uniform(0, 2), True)),
        Case("exponents beyond what exp can hold", _blocks(lambda rng: rng.uniform(150, 300))),
        Case("far below zero", _blocks(lambda rng: rng.uniform(-300, -150))),
    ),
    refused=("course_lib.cp.blockwise:merge",),
)
