"""06-4: cross-entropy with the vocabulary divided, which never gathers logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib import comm, tp
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh

TWO, FOUR, ONE = range(3)
TRIALS = (Trial(2, 6), Trial(4, 10), Trial(1, 5))  # size: words, V; 4 ranks pad 10 to 12
TOKENS = 7
HEIGHT = 200.0  # e to this is infinite in float32
REFUSAL = "this is what you are asked to write"


def _whole(trial: Trial, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """All logits, targets, and the gradient that comes back to each token's loss."""
    generator = torch.Generator().manual_seed(seed)
    z_TV = 2 * torch.randn(TOKENS, trial.size, generator=generator) + HEIGHT
    targets_T = torch.randint(trial.size, (TOKENS,), generator=generator)
    return z_TV, targets_T, torch.randn(TOKENS, generator=generator)


def _parts(z_TV: Tensor, n: int, padding: float) -> list[Tensor]:
    """One part for each rank, padded to equal sizes."""
    words = -(-z_TV.shape[1] // n)
    return list(F.pad(z_TV, (0, words * n - z_TV.shape[1]), value=padding).chunk(n, 1))


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    """This rank's logits, in which padding is minus infinity; all targets; the gradient."""
    z_TV, targets_T, back_T = _whole(trial, seed)
    return _parts(z_TV, trial.n, -torch.inf)[rank].clone(), targets_T, back_T


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    z, targets, back = inputs
    leaf = z.clone().requires_grad_()
    function: Any = answers[0]
    with WireCalls() as forward:
        loss = function.apply(leaf, targets, mesh.world)
    found = {"loss": loss.detach() if isinstance(loss, Tensor) else loss, "forward": forward.calls}
    if not (isinstance(loss, Tensor) and loss.requires_grad and loss.shape == back.shape):
        return found
    with WireCalls() as backward:
        loss.backward(back)
    return found | {"dz": leaf.grad, "backward": backward.calls}


def _losses(seen: Seen) -> str:
    z, targets, _ = _whole(seen.trial, seen.seed)
    n, got = seen.trial.n, [value["loss"] for value in seen.values]
    wanted = F.cross_entropy(z, targets, reduction="none")
    says = difference("losses", got, [wanted] * n)
    if not says or n == 1:
        return says
    if all(isinstance(one, Tensor) and not one.isfinite().all() for one in got):
        return (
            f"losses are not finite: e to a logit of {HEIGHT:g} is infinite; subtract the maximum "
            "first"
        )
    own_sum = [_by_own_sum(z, targets, part) for part in _parts(z, n, -torch.inf)]
    if not difference("", got, own_sum):
        return f"each rank divided by the sum over its own words: all words count ({says})"
    return says


def _by_own_sum(z: Tensor, targets: Tensor, part: Tensor) -> Tensor:
    return part.logsumexp(1) - z.gather(1, targets[:, None])[:, 0]


def _gradients(seen: Seen) -> str:
    z, targets, back = _whole(seen.trial, seen.seed)
    n = seen.trial.n
    if any("dz" not in value for value in seen.values):
        return "the losses carry no gradient: return (T,) losses from forward"
    got = [value["dz"] for value in seen.values]
    if any(one is None for one in got):
        return "None arrived where the gradient of the logits is wanted"
    softmax, onehot = z.softmax(1), F.one_hot(targets, z.shape[1])
    wanted = _parts((softmax - onehot) * back[:, None], n, 0.0)
    says = difference("gradients of the logits", got, wanted)
    if not says:
        return ""
    for mistaken, message in (
        (softmax * back[:, None], "the target's own column has 1 less than softmax"),
        (softmax - onehot, "the gradient that comes back to each token's loss is not in it"),
    ):
        if not difference("", got, _parts(mistaken, n, 0.0)):
            return f"{message} ({says})"
    return says


def _calls(seen: Seen) -> str:
    limit = 3 * TOKENS * 4
    for rank, value in enumerate(seen.values):
        for phase, most in (("forward", limit), ("backward", 0)):
            calls = value.get(phase, [])
            sent = sum(call.payload for call in calls)
            if sent > most or any(call.op != "all_reduce" for call in calls):
                said = ", ".join(f"{call.op} of {call.payload} bytes" for call in calls)
                right = (
                    f"three numbers a token, {most} bytes in all-reduces," if most else "nothing"
                )
                return f"{phase}: rank {rank} sent {said}; {right} is wanted"
    return ""


def _loss(forward: Any, backward: Any) -> Any:
    """An autograd function of two moves; forward returns the losses and what is to be kept."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor, targets: Tensor, axis: Axis) -> Any:
            loss, softmax, rows, mine = forward(z, targets, axis)
            ctx.save_for_backward(softmax, rows, mine)
            ctx.axis = axis
            return loss

        @staticmethod
        def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
            return backward(*ctx.saved_tensors, dloss, ctx.axis), None, None

    return Made


def _forward(
    z: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    maximum: str = "all",
    sum_all: bool = True,
    shift: bool = True,
    masked: bool = True,
    target_all: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right, or with a mistake."""
    top = z.amax(1)
    if maximum == "all":
        top = comm.all_reduce_max(top, axis)
    if maximum == "none":
        top = torch.zeros_like(top)
    exp = (z - top[:, None]).exp()
    total = comm.all_reduce(exp.sum(1), axis) if sum_all else exp.sum(1)
    local = targets - axis.rank * z.shape[1] if shift else targets
    mine = (local >= 0) & (local < z.shape[1])
    rows = local.masked_fill(~mine, 0)
    own = z.gather(1, rows[:, None])[:, 0]
    if masked:
        own = own.masked_fill(~mine, 0.0)
    target = comm.all_reduce(own, axis) if target_all else own
    return total.log() + top - target, exp / total[:, None], rows, mine


def _backward(
    softmax: Tensor,
    rows: Tensor,
    mine: Tensor,
    dloss: Tensor,
    axis: Axis,
    *,
    onehot: bool = True,
    masked: bool = True,
    weighted: bool = True,
    summed: bool = False,
) -> Tensor:
    dz = softmax.clone()
    if onehot:
        ones = mine.to(dz.dtype) if masked else torch.ones_like(dz[:, 0])
        dz.scatter_add_(1, rows[:, None], -ones[:, None])
    if weighted:
        dz = dz * dloss[:, None]
    return comm.all_reduce(dz, axis) if summed else dz


def _but(**mistake: Any) -> Any:
    return _loss(lambda z, targets, axis: _forward(z, targets, axis, **mistake), _backward)


def _but_back(**mistake: Any) -> Any:
    return _loss(_forward, lambda *given: _backward(*given, **mistake))


def _gathered(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """All logits on every rank: right numbers, and what the lesson forbids."""
    whole = comm.all_gather(z, axis, 1)
    loss = F.cross_entropy(whole, targets, reduction="none")
    _, _, rows, mine = _forward(z[:, :], targets, axis)
    return loss, whole.softmax(1).chunk(axis.size, 1)[axis.rank].clone(), rows, mine


class _Stub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        raise NotImplementedError("write forward")


class _ByLibrary:
    @staticmethod
    def apply(z: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        loss, _ = tp.loss_sum(z, targets, axis, z.shape[1] * axis.size)
        return loss


class _RightInTwo(torch.autograd.Function):
    """Raw torch; the sum and the target's logit travel together; one-hot by comparing."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        words = torch.arange(z.shape[1]) + axis.rank * z.shape[1]
        ctx.onehot = words[None] == targets[:, None]
        top = z.max(1).values
        if axis.size > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        shifted = z - top[:, None]
        both = torch.stack([shifted.exp().sum(1), shifted.where(ctx.onehot, 0.0).sum(1)])
        if axis.size > 1:
            dist.all_reduce(both, group=axis.group)
        ctx.softmax = shifted.exp() / both[0][:, None]
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
        return (ctx.softmax - ctx.onehot.float()) * dloss[:, None], None, None


LOSS = Ranked(
    id="06-4",
    title="a loss that never gathers logits",
    names=("VocabLoss",),
    hints=(
        "Write down log-sum-exp with a maximum in it. Which three numbers of a token does no rank "
        "have by itself?",
        "The maximum (comm.all_reduce_max), the sum of e^(z - max), and the target's logit, which "
        "one rank has: the others give 0 to the sum. Target minus rank times words is the column "
        "here, if it lies in 0..words-1. Backward is softmax, 1 less where the target is here, "
        "times the gradient of the token's loss.",
        "top = comm.all_reduce_max(z.amax(1), axis); exp = (z - top[:, None]).exp(); total = "
        "comm.all_reduce(exp.sum(1), axis); own = z.gather(1, rows[:, None])[:, 0].masked_fill("
        "~mine, 0.0); return total.log() + top - comm.all_reduce(own, axis).",
    ),
    wrong=(
        Wrong(_but(maximum="none"), words="losses are not finite"),
        Wrong(_but(maximum="own"), words="losses are wrong"),
        Wrong(_but(sum_all=False), words="each rank divided by the sum over its own words"),
        Wrong(_but(shift=False), words="losses are wrong"),
        Wrong(_but(masked=False), words="losses are wrong"),
        Wrong(_but(target_all=False), words="losses are wrong"),
        Wrong(_but_back(onehot=False), words="1 less than softmax"),
        Wrong(_but_back(masked=False), words="gradients of the logits are wrong"),
        Wrong(_but_back(weighted=False), words="comes back to each token's loss is not in it"),
        Wrong(_but_back(summed=True), words="gradients of the logits are wrong"),
        Wrong(_loss(_gathered, _backward), words="forward: rank 0 sent all_gather"),
        Wrong(_ByLibrary, words=REFUSAL),
    ),
    right=(_loss(_forward, _backward), _RightInTwo),
    stub=_Stub,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _losses),
        RankCase("gradients", "of the logits, two ranks", TWO, _gradients),
        RankCase("outputs", "four ranks, two words of padding", FOUR, _losses),
        RankCase("gradients", "of the logits, four ranks", FOUR, _gradients),
        RankCase("outputs", "one rank", ONE, _losses),
        RankCase("wire", "three numbers a token, forward only", FOUR, _calls),
    ),
    refused=(
        "course_lib.tp.layers:loss_sum",
        "course_lib.tp.layers:_VocabCrossEntropy.forward",
    ),
)
