"""05-4: the MLP of a layer, cut over ranks: a class made from the serial one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_05 import mlp_answers as answers
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig
from course_lib.model.layers import MLP

TWO, FOUR, ONE = range(3)
TRIALS = (Trial(2, 8), Trial(4, 8), Trial(1, 4))  # size: inner features, F
HIDDEN, SHAPE = 4, (2, 3, 4)  # of x_BSD
STEPS, RATE = 3, 0.2
NAMES = ("weight_in", "bias_in", "weight_out", "bias_out")
REFUSAL = "this is what you are asked to write"


def serial_mlp(trial: Trial, seed: int) -> MLP:
    """The whole MLP: its weights follow from ``seed``; no bias is 0."""
    mlp = MLP(ModelConfig(family="gpt", hidden=HIDDEN, heads=2, kv_heads=2, ffn=trial.size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in mlp.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return mlp


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """The seed of the weights; x and the gradient that comes back, the same on every rank."""
    generator = torch.Generator().manual_seed(seed + 1)
    x, dy = torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)
    return trial, seed, x, dy


def _act(given: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    """One forward and backward, looked at closely; then steps of SGD."""
    trial, seed, x, dy = inputs
    mlp = serial_mlp(trial, seed)
    parallel: Any = given[0](mlp, mesh.world)
    held = {name: getattr(parallel, name, None) for name in NAMES}
    leaf = x.clone().requires_grad_()
    with WireCalls() as forward:
        y = parallel(leaf)
    found: dict[str, Any] = {
        "y": y.detach() if isinstance(y, Tensor) else y,
        "shapes": {name: _shape(p) for name, p in held.items()},
        "bytes": {name: _storage(p) for name, p in held.items()},
        "extra": sorted(
            {name for name, _ in parallel.named_parameters()} - set(NAMES)
            if isinstance(parallel, nn.Module)
            else set()
        ),
        "forward": forward.calls,
    }
    if not (isinstance(y, Tensor) and y.requires_grad):
        return found
    with WireCalls() as backward:
        y.backward(dy)
    found |= {"dx": leaf.grad, "backward": backward.calls}
    found["gradients"] = {
        name: p.grad.clone() if isinstance(p, Tensor) and p.grad is not None else None
        for name, p in held.items()
    }
    right = serial_mlp(trial, seed)
    found["serial"] = all(
        torch.equal(a, b) for a, b in zip(mlp.parameters(), right.parameters(), strict=True)
    )
    if any(not isinstance(p, nn.Parameter) for p in held.values()):
        return found
    optimizer = torch.optim.SGD(list(held.values()), lr=RATE)  # type: ignore[arg-type]
    for _ in range(STEPS):
        optimizer.zero_grad()
        parallel(x).backward(dy)
        optimizer.step()
    found["weights"] = {name: p.detach().clone() for name, p in held.items()}  # type: ignore[union-attr]
    return found


def _shape(parameter: Any) -> Any:
    return tuple(parameter.shape) if isinstance(parameter, nn.Parameter) else None


def _storage(parameter: Any) -> int:
    return parameter.untyped_storage().nbytes() if isinstance(parameter, Tensor) else 0


@cache
def _serial(trial: Trial, seed: int) -> dict[str, Any]:
    """What one process gets: y, dx, and by rank gradients and weights after the steps."""
    _, _, x, dy = _inputs(trial, 0, seed)
    mlp, leaf = serial_mlp(trial, seed), x.clone().requires_grad_()
    y = mlp(leaf)
    y.backward(dy)
    gradients = MLP(ModelConfig(family="gpt", hidden=HIDDEN, heads=2, kv_heads=2, ffn=trial.size))
    with torch.no_grad():
        for mine, p in zip(gradients.parameters(), mlp.parameters(), strict=True):
            mine.copy_(p.grad)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(mlp.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mlp(x).backward(dy)
        optimizer.step()
    return {
        "y": y.detach(),
        "dx": leaf.grad,
        "gradients": [
            _detached(answers.share(gradients, trial.n, rank)) for rank in range(trial.n)
        ],
        "weights": [_detached(answers.share(mlp, trial.n, rank)) for rank in range(trial.n)],
    }


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _outputs(seen: Seen) -> str:
    n, wanted = seen.trial.n, _serial(seen.trial, seen.seed)["y"]
    if says := _held(seen):
        return says
    got = [value["y"] for value in seen.values]
    says = difference("outputs", got, [wanted] * n)
    if not says or n == 1 or not all(isinstance(one, Tensor) for one in got):
        return says
    mlp, x = serial_mlp(seen.trial, seen.seed), _inputs(seen.trial, 0, seen.seed)[2]
    bias = mlp.fc_out.bias.detach()
    if not difference("", got, [wanted + (n - 1) * bias] * n):
        return f"the outer bias is in the sum {n} times: add it after the sum ({says})"
    if not difference("", got, [wanted - bias] * n):
        return f"the outer bias is missing ({says})"
    if not difference("", [torch.stack(got).sum(0)], [wanted + (n - 1) * bias]):
        return f"the ranks' parts are not summed ({says})"
    if not difference("", [torch.stack(got).sum(0)], [wanted + (n - 1) * bias - n * bias]):
        return f"the ranks' parts are not summed, and the outer bias is missing ({says})"
    inner = mlp.fc_in(x).detach()
    if not difference("", got, [F.linear(inner, mlp.fc_out.weight, bias).detach()] * n):
        return f"there is no GELU between the two linears ({says})"
    return says


def _held(seen: Seen) -> str:
    """Whether the four parameters are there, in the shapes of a share."""
    n = seen.trial.n
    wanted = {
        name: tuple(p.shape) for name, p in _serial(seen.trial, seen.seed)["weights"][0].items()
    }
    for rank, value in enumerate(seen.values):
        for name in NAMES:
            shape = value["shapes"][name]
            if shape is None:
                return f"rank {rank} has no parameter {name} (an nn.Parameter of the module)"
            if shape != wanted[name]:
                said = (
                    f"{name} of rank {rank} has shape {list(shape)}; {list(wanted[name])} is right"
                )
                hint = "" if name == "bias_out" else f": one of {n} parts of the inner features"
                return said + hint
        if value["extra"]:
            return (
                f"rank {rank} holds {', '.join(value['extra'])} as well; only its share is wanted"
            )
    return ""


def _input_gradient(seen: Seen) -> str:
    n, wanted = seen.trial.n, _serial(seen.trial, seen.seed)["dx"]
    if any("dx" not in value for value in seen.values):
        return "what forward returns carries no gradient"
    got = [value["dx"] for value in seen.values]
    if any(one is None for one in got):
        return (
            "no gradient reached x: comm.all_reduce has no backward, comm.copy_to and "
            "comm.reduce_from do"
        )
    says = difference("gradients of x", got, [wanted] * n)
    if says and n > 1 and not difference("", [torch.stack(got).sum(0)], [wanted]):
        return (
            "each rank has only the part of dx that went through its own features: where x "
            f"enters, backward has to sum them ({says})"
        )
    return says


def _own_gradients(seen: Seen) -> str:
    return _by_name(seen, "gradients", "gradients")


def _weights(seen: Seen) -> str:
    return _by_name(seen, "weights", "weights")


def _by_name(seen: Seen, key: str, what: str) -> str:
    wanted = _serial(seen.trial, seen.seed)[key]
    for name in NAMES:
        got = [value.get(key, {}).get(name) for value in seen.values]
        if any(one is None for one in got):
            return f"no {what} of {name}: autograd did not reach it"
        if says := difference(f"{what} of {name}", got, [one[name] for one in wanted]):
            return says
    return ""


def _share(seen: Seen) -> str:
    for rank, value in enumerate(seen.values):
        if not value.get("serial", False):
            return f"rank {rank} changed the serial mlp that it was given"
        for name in NAMES:
            size = 4
            for extent in value["shapes"][name]:
                size *= extent
            if name != "bias_out" and value["bytes"][name] > size:
                return (
                    f"{name} of rank {rank} has {size} bytes and keeps {value['bytes'][name]} "
                    "alive: a chunk is a view, which holds the whole matrix; .clone() it"
                )
    return ""


def _calls(seen: Seen) -> str:
    payload = _inputs(seen.trial, 0, seen.seed)[2].nbytes
    for rank, value in enumerate(seen.values):
        for phase in ("forward", "backward"):
            made = [(call.op, call.payload) for call in value[phase]]
            if made != [("all_reduce", payload)]:
                said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "nothing"
                return (
                    f"{phase}: rank {rank} sent {said}; one all_reduce of {payload} bytes is "
                    "wanted, as large as x"
                )
    return ""


MLP_PAIR = Ranked(
    id="05-4",
    title="the MLP on ranks",
    names=("ParallelMLP",),
    hints=(
        "Which of the two matrices can be cut so that GELU sees finished numbers? An nn.Linear "
        "keeps its weight as (out, in): columns of the lesson are rows of that tensor.",
        "First by output features, its bias too; second by input features, its bias whole. x "
        "enters with comm.copy_to; the parts leave with comm.reduce_from, and then comes the bias. "
        "A part must be a copy of its own: .clone().",
        "nn.Parameter(mlp.fc_in.weight.detach().chunk(n, 0)[rank].clone()), fc_out.weight along "
        "dim 1. forward: h = F.gelu(F.linear(comm.copy_to(x, axis), weight_in, bias_in)); return "
        "comm.reduce_from(F.linear(h, weight_out), axis) + bias_out.",
    ),
    wrong=(
        Wrong(answers.NoCopy, words="only the part of dx that went through its own features"),
        Wrong(answers.NoReduce, words="the ranks' parts are not summed"),
        Wrong(answers.Numbers, words="no gradient reached x"),
        Wrong(answers.SumsTwice, words="times too large"),
        Wrong(answers.BiasEarly, words="the outer bias is in the sum 2 times"),
        Wrong(answers.NoBias, words="the outer bias is missing"),
        Wrong(answers.NoGelu, words="there is no GELU"),
        Wrong(answers.Views, words="a chunk is a view, which holds the whole matrix"),
        Wrong(answers.Strided, words="outputs are wrong on every rank"),
        Wrong(answers.FirstShard, words="outputs are wrong on every rank"),
        Wrong(answers.Whole, words="one of 2 parts of the inner features"),
        Wrong(answers.RowsFirst, words="one of 2 parts of the inner features"),
        Wrong(answers.Gathers, words="forward: rank 0 sent all_gather"),
        Wrong(answers.TwoCopies, words="gradients of x are wrong on every rank"),
        Wrong(answers.ByLibrary, words=REFUSAL),
        Wrong(lambda mlp, axis: mlp, words="has no parameter weight_in"),
        Wrong(lambda mlp, axis: None, words="NoneType"),
    ),
    right=(answers.Right, answers.RightOtherwise),
    stub=answers.Stub,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks, each with its share", TWO, _outputs),
        RankCase("gradients", "of x, two ranks", TWO, _input_gradient),
        RankCase("gradients", "of the shares, two ranks", TWO, _own_gradients),
        RankCase("weights", "after three steps, two ranks", TWO, _weights),
        RankCase("outputs", "four ranks", FOUR, _outputs),
        RankCase("gradients", "of x, four ranks", FOUR, _input_gradient),
        RankCase("weights", "after three steps, four ranks", FOUR, _weights),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("peak", "a rank keeps its share alone", FOUR, _share),
        RankCase("wire", "one all-reduce forward, one backward", FOUR, _calls),
    ),
    refused=(
        "course_lib.tp.layers:ColumnLinear.forward",
        "course_lib.tp.layers:RowLinear.forward",
        "torch.distributed.tensor.parallel.api:parallelize_module",
    ),
)
