"""05-5: attention by heads in raw torch.distributed, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 4), Trial(4, 4), Trial(3, 6), Trial(1, 2))  # size: heads
BATCH, SEQ, HEAD = 2, 5, 4
REFUSAL = "this is what you are asked to write"
NAMES = ("q", "k", "v", "o")


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """x, the whole weights, the features of a head and dy: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    hidden = trial.size * HEAD
    x, dy = (torch.randn(BATCH, SEQ, hidden, generator=generator) for _ in range(2))
    weights = {
        name: torch.randn(hidden, hidden, generator=generator) / hidden**0.5 for name in NAMES
    }
    return x, weights, HEAD, dy


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    x, weights, head_dim, dy = inputs
    return answers[0](x, weights, head_dim, dy)


def _attend(x: Tensor, weights: Sequence[Tensor], head_dim: int) -> Tensor:
    """The heads whose rows of q, k and v are ``weights``: (B, S, their features)."""
    q_BHSK, k_BHSK, v_BHSK = (
        F.linear(x, w).unflatten(-1, (-1, head_dim)).transpose(1, 2) for w in weights
    )
    y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
    return y_BHSK.transpose(1, 2).flatten(-2)


@cache
def _serial(trial: Trial, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x, weights, head_dim, dy = _inputs(trial, 0, seed)
    x = x.requires_grad_()
    w = {name: weight.requires_grad_() for name, weight in weights.items()}
    y = F.linear(_attend(x, [w[name] for name in "qkv"], head_dim), w["o"])
    y.backward(dy)
    return y.detach(), _grad(x), {name: _grad(weight) for name, weight in w.items()}


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _formed(seen: Seen) -> str:
    """Whether every rank returned (y, dx, gradients by name)."""
    for rank, value in enumerate(seen.values):
        if not (isinstance(value, tuple | list) and len(value) == 3 and isinstance(value[2], dict)):
            return (
                f"rank {rank} returned a {type(value).__name__}; wanted are three things: y, dx "
                "and the dict of gradients"
            )
        if missing := [name for name in NAMES if name not in value[2]]:
            return f"rank {rank}'s gradients lack {missing[0]!r}: wanted are q, k, v and o"
        if any(isinstance(one, Tensor) and one.requires_grad for one in value[:2]):
            return "y and dx are to be plain numbers: detach them"
    return ""


def _parts(seen: Seen) -> list[Tensor]:
    """What each rank's heads add to y."""
    x, w, head_dim, _ = _inputs(seen.trial, 0, seen.seed)
    n = seen.trial.n
    cut = {name: w[name].chunk(n, 0) for name in "qkv"}
    out = w["o"].chunk(n, 1)
    return [
        F.linear(_attend(x, [cut[name][rank] for name in "qkv"], head_dim), out[rank])
        for rank in range(n)
    ]


def _outputs(seen: Seen) -> str:
    if says := _formed(seen):
        return says
    n, got = seen.trial.n, [value[0] for value in seen.values]
    says = difference("outputs", got, [_serial(seen.trial, seen.seed)[0]] * n)
    if says and n > 1 and not difference("", got, _parts(seen)):
        return f"each rank has what its own heads add to y: sum them over the ranks ({says})"
    return says


def _input_gradient(seen: Seen) -> str:
    if says := _formed(seen):
        return says
    n, wanted = seen.trial.n, _serial(seen.trial, seen.seed)[1]
    got = [value[1] for value in seen.values]
    if any(one is None for one in got):
        return "dx is None: no gradient reached x"
    says = difference("gradients of x", got, [wanted] * n)
    if says and n > 1 and all(isinstance(one, Tensor) and one.shape == wanted.shape for one in got):
        if not difference("", [torch.stack(got).sum(0)], [wanted]):
            return (
                "each rank has the gradient of x through its own heads alone: sum them over the "
                f"ranks ({says})"
            )
        if not difference("", got, [wanted / n] * n):
            return f"dx is averaged; the parts are summed ({says})"
    return says


def _weight_gradients(seen: Seen) -> str:
    if says := _formed(seen):
        return says
    n, right = seen.trial.n, _serial(seen.trial, seen.seed)[2]
    for name in NAMES:
        wanted = list(right[name].chunk(n, 1 if name == "o" else 0))
        got = [value[2][name] for value in seen.values]
        if any(one is None for one in got):
            return f"the gradient of {name} is None"
        says = difference(f"gradients of {name}", got, wanted)
        if says and n > 1 and not difference("", got, [torch.stack(wanted).sum(0)] * n):
            return (
                f"the gradients of {name} are summed over ranks that hold different heads: each "
                f"keeps its own ({says})"
            )
        if says:
            return says
    return ""


def _calls(seen: Seen) -> str:
    payload = _inputs(seen.trial, 0, seen.seed)[0].nbytes
    for rank, observed in enumerate(seen.ranks):
        made = [(call.op, call.payload) for call in observed.calls]
        if made != [("all_reduce", payload)] * 2:
            said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "nothing"
            return (
                f"rank {rank} sent {said}; wanted are two all_reduces of {payload} bytes: y, and "
                "dx once for q, k and v together"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        x, weights, _, dy = _inputs(seen.trial, rank, seen.seed)
        now_x, now_weights, _, now_dy = observed.inputs
        same = [torch.equal(now_x, x), torch.equal(now_dy, dy)]
        same += [torch.equal(now_weights[name], weights[name]) for name in NAMES]
        if not all(same):
            return f"rank {rank} wrote into what it was given: x, weights and dy stay as they are"
    return ""


def _step(
    x: Tensor,
    weights: dict[str, Tensor],
    head_dim: int,
    dy: Tensor,
    *,
    strided: bool = False,
    features: bool = False,
    sums: Sequence[str] = ("y", "dx"),
    scale: float = 1.0,
    causal: bool = True,
) -> Any:
    """Right, or with a mistake."""
    n, rank = dist.get_world_size(), dist.get_rank()
    cut = {name: w.chunk(n, 1 if name == "o" else 0)[rank] for name, w in weights.items()}
    if strided:
        cut |= {name: weights[name][rank::n] for name in "qkv"}
    own = {name: w.detach().clone().requires_grad_() for name, w in cut.items()}
    leaf = x.detach().clone().requires_grad_()
    if features:  # one head as wide as the rank's share
        head_dim = own["q"].shape[0]
    q, k, v = (
        F.linear(leaf, own[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in "qkv"
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(-2)
    part = F.linear(mixed, own["o"])
    part.backward(dy * scale)
    y, dx = part.detach().clone(), _grad(leaf)
    for name, tensor in (("y", y), ("dx", dx)):
        if name in sums:
            dist.all_reduce(tensor)
    gradients = {name: _grad(w) for name, w in own.items()}
    if "weights" in sums:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return y, dx, gradients


def _but(**mistake: Any) -> Answer:
    return lambda x, weights, head_dim, dy: _step(x, weights, head_dim, dy, **mistake)


def _right_by_grad(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """With autograd.grad, slices, and the sum of y made before backward."""
    n, rank = dist.get_world_size(), dist.get_rank()
    wide = x.shape[-1] // n
    mine = slice(rank * wide, (rank + 1) * wide)
    own = [(weights[name][mine] * 1).requires_grad_() for name in "qkv"]
    out = (weights["o"][:, mine] * 1).requires_grad_()
    leaf = (x * 1).requires_grad_()
    part = _attend(leaf, own, head_dim) @ out.mT
    y = part.detach().clone()
    dist.all_reduce(y)
    dx, *rest = torch.autograd.grad(part, [leaf, *own, out], dy)
    dx = dx.contiguous()
    dist.all_reduce(dx)
    return y, dx, dict(zip(NAMES, rest, strict=True))


def _three_sums(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """x enters once for each of q, k and v: three all-reduces where one will do."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = {
        name: w.chunk(n, 1 if name == "o" else 0)[rank].clone().requires_grad_()
        for name, w in weights.items()
    }
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    q, k, v = (
        F.linear(leaf, own[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for name, leaf in zip("qkv", leaves, strict=True)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    part = F.linear(mixed, own["o"])
    part.backward(dy)
    y = part.detach().clone()
    dist.all_reduce(y)
    for leaf in leaves:
        dist.all_reduce(leaf.grad)
    return y, sum(_grad(leaf) for leaf in leaves), {name: _grad(w) for name, w in own.items()}


def _gathers(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """Gathers the parts and adds them up itself."""
    y, dx, gradients = _step(x, weights, head_dim, dy, sums=())
    totals = []
    for part in (y, dx):
        every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(every, part.contiguous())
        totals.append(torch.stack(every).sum(0))
    return *totals, gradients


def _alone(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """Every rank computes all heads, and cuts the gradients only."""
    n, rank = dist.get_world_size(), dist.get_rank()
    w = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    leaf = x.clone().requires_grad_()
    y = F.linear(_attend(leaf, [w[name] for name in "qkv"], head_dim), w["o"])
    y.backward(dy)
    cut = {name: _grad(p).chunk(n, 1 if name == "o" else 0)[rank] for name, p in w.items()}
    return y.detach(), _grad(leaf), cut


def _in_place(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    y, dx, gradients = _step(x, weights, head_dim, dy)
    return y, x.copy_(dx), gradients


def _by_comm(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    y, dx, gradients = _step(x, weights, head_dim, dy, sums=())
    axis = make_mesh().world
    return comm.all_reduce(y, axis), comm.all_reduce(dx, axis), gradients


ATTENTION = Ranked(
    id="05-5",
    title="attention by heads in raw PyTorch",
    names=("attention_step",),
    hints=(
        "A head needs its own rows of q, k and v, and its own columns of o, and nothing of any "
        "other head. Neighbouring rows belong to one head.",
        "Cut q, k, v with chunk(n, 0) and o with chunk(n, 1); make the parts and a copy of x "
        "leaves that want gradients. part.backward(dy) on every rank: g passes the gradient on. "
        "Then two sums: of the parts of y, and of x's gradient.",
        "part = F.linear(mixed, own['o']); part.backward(dy); y = part.detach().clone(); "
        "dist.all_reduce(y); dx = leaf.grad; dist.all_reduce(dx); return y, dx, {name: w.grad for "
        "name, w in own.items()}.",
    ),
    wrong=(
        Wrong(lambda x, weights, head_dim, dy: None, words="returned a NoneType"),
        Wrong(lambda x, weights, head_dim, dy: (x, dy, {}), words="gradients lack 'q'"),
        Wrong(_but(sums=()), words="each rank has what its own heads add to y"),
        Wrong(_but(sums=("y",)), words="through its own heads alone"),
        Wrong(_but(sums=("dx",)), words="each rank has what its own heads add to y"),
        Wrong(_but(sums=("y", "dx", "weights")), words="each keeps its own"),
        Wrong(_but(strided=True), words="outputs are wrong on every rank"),
        Wrong(_but(features=True), words="outputs are wrong on every rank"),
        Wrong(_but(causal=False), words="outputs are wrong on every rank"),
        Wrong(_but(scale=0.5), words="exactly 2 times too small"),
        Wrong(_three_sums, words="dx once for q, k and v together"),
        Wrong(_gathers, words="sent all_gather"),
        Wrong(_alone, words="sent nothing"),
        Wrong(_in_place, words="wrote into what it was given"),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_step, _right_by_grad),
    stub=lambda x, weights, head_dim, dy: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _outputs),
        RankCase("gradients", "of x, two ranks", TWO, _input_gradient),
        RankCase("gradients", "of the weights, two ranks", TWO, _weight_gradients),
        RankCase("outputs", "four ranks, one head each", FOUR, _outputs),
        RankCase("gradients", "of x, four ranks", FOUR, _input_gradient),
        RankCase("gradients", "of the weights, three ranks, six heads", THREE, _weight_gradients),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("outputs", "what is given is left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "two all-reduces", FOUR, _calls),
    ),
    refused=("course_lib.comm.transfer:issue", "course_lib.model.layers:Attention.forward"),
)
