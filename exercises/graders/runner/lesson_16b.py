"""Lesson 16b in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.grading.graders.runner import lesson_03, lesson_04, lesson_05, lesson_07
from course_lib.grading.runner import Act, Answers, Inputs, Unfit, named, tensors_in
from course_lib.grading.wire import WireCall, WireCalls
from course_lib.mesh import Axis, Mesh

# All of comm that sends is refused, because the answers are to be raw torch.
SENDERS = tuple(
    f"course_lib.comm.{name}"
    for name in ("transfer:issue", "p2p:start_exchange", "p2p:start_send", "p2p:start_recv")
)


def in_group(act: Act, answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """Call the act of another lesson; the answers get ``axis.group`` in the place of the axis."""
    return act([_with_group(answer) for answer in answers], given, axis, mesh)


def _with_group(answer: Any) -> Any:
    return lambda *inputs: answer(*inputs[:-1], inputs[-1].group)


# --- 16b-2 ---------------------------------------------------------------------------------------


def ddp(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """The steps of 03-4, with parameters from the first tower to the last."""

    def built(buckets: Any, axis: Axis) -> Any:
        parameters = [p for tower in reversed(buckets) for p in tower]
        return answers[0](parameters, given["bucket_bytes"], axis.group)

    return lesson_03.overlap([built], given, axis, mesh)


# --- 16b-3 ---------------------------------------------------------------------------------------


class _MLP(nn.Module):
    """The answers as the module of 05-4; it does not communicate itself."""

    def __init__(self, answers: Answers, mlp: Any, axis: Axis) -> None:
        super().__init__()
        self.answers, self.group = list(answers), axis.group
        whole = (mlp.fc_in.weight, mlp.fc_in.bias, mlp.fc_out.weight, mlp.fc_out.bias)
        for name, weight, dim in zip(lesson_05.PARAMETERS, whole, (0, 0, 1, None), strict=True):
            shard = weight if dim is None else weight.chunk(axis.size, dim)[axis.rank]
            own = shard.detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(own))

    def forward(self, x: Tensor) -> Any:
        weight_in, bias_in, weight_out, bias_out = self.parameters()
        h = self.answers[0](x, weight_in, bias_in, self.group)
        if not isinstance(h, Tensor) or h.shape != (*x.shape[:-1], len(weight_in)):
            shape = list(h.shape) if isinstance(h, Tensor) else type(h).__name__
            raise Unfit(
                f"expected column_linear to return this rank's {len(weight_in)} features for each "
                f"token of x {list(x.shape)}, got {shape}"
            )
        return self.answers[1](F.gelu(h), weight_out, bias_out, self.group)


def linears(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """The steps of 05-4: GELU between the two linears."""
    return lesson_05.mlp([partial(_MLP, answers)], given, axis, mesh)


# --- 16b-4 ---------------------------------------------------------------------------------------

INPUTS = "inputs alive"  # the most inputs of the stage that were alive when a forward began


def one_f_one_b(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """16b-4: the step of 07-5, whose row the answer does not get."""
    alive: dict[int, StorageWeakRef] = {}  # by storage, because an answer may use a buffer again
    most = [0]

    def count(_: Any, inputs: tuple[Tensor]) -> None:
        for key in [key for key, storage in alive.items() if storage.expired()]:
            del alive[key]
        new = StorageWeakRef(inputs[0].untyped_storage())
        alive[new.cdata] = new
        most[0] = max(most[0], len(alive))

    watching = given["stage"].register_forward_pre_hook(count)
    answer = [lambda row, *others: answers[0](*others)]
    found = in_group(lesson_07.step, answer, given, axis, mesh)
    watching.remove()
    return found | {INPUTS: most[0]}


# --- 16b-5 ---------------------------------------------------------------------------------------


class AdamW:
    """new weights = update(weights, gradients); ``options`` are arguments of torch.optim.AdamW.

    eps is large, because a wrong factor of the gradients would not show with a small one.
    """

    def __init__(self, rate: float, slip: str = "") -> None:
        self.options = {"lr": rate, "betas": (0.9, 0.95), "eps": 0.5, "weight_decay": 0.2}
        self.slip = slip  # a classic mistake
        self.t, self.moments, self.sizes = 0, (0, 0), []  # type: int, Any, list[int]

    def __call__(self, weights: Tensor, gradients: Tensor) -> Tensor:
        rate, betas, eps, decay = self.options.values()
        if self.slip == "coupled":
            gradients = gradients + decay * weights
        elif self.slip != "decay last":
            weights = weights * (1 - (1 if self.slip == "decay without lr" else rate) * decay)
        if self.slip == "forgets":
            self.t, self.moments = 0, (0, 0)
        self.t = 1 if self.slip == "t stays 1" else self.t + 1
        pairs = zip(betas, self.moments, (gradients, gradients**2), strict=True)
        self.moments = tuple(b * old + (1 - b) * new for b, old, new in pairs)
        m, v = (
            moment if self.slip == "uncorrected" else moment / (1 - b**self.t)
            for b, moment in zip(betas, self.moments, strict=True)
        )
        if self.slip == "eps first":
            eps /= (1 - betas[1] ** self.t) ** 0.5
        below = (v + eps) ** 0.5 if self.slip == "eps inside" else v**0.5 + eps
        kept = 1 - rate * decay if self.slip == "decay last" else 1
        return (weights - rate * m / below) * kept


def zero_1(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """16b-5: the three steps of 04-3; the elements in the memory of each tensor in the state."""
    state: dict[str, Any] = {}

    def step(weights: Tensor, gradients: Tensor, update: AdamW, axis: Axis) -> Any:
        return answers[0](weights, gradients, state, update.options, axis.group)

    found = yield from lesson_04.stage_1([step], given, axis, mesh)
    stored = {x.untyped_storage().data_ptr(): x for x in tensors_in(state)}
    sizes = [x.untyped_storage().nbytes() // x.element_size() for x in stored.values()]
    return found | {"state": sizes, "moments": [x.detach().flatten() for x in tensors_in(state)]}


# --- 16b-6 ---------------------------------------------------------------------------------------

LSE = "log-sum-exp"


class _Products(TorchDispatchMode):
    """At each matrix product, the numbers of messages that this rank has begun to receive, and
    that it has waited for."""

    def __init__(self, calls: Sequence[WireCall]) -> None:
        super().__init__()
        self.calls, self.seen = calls, []  # type: Any, list[tuple[int, int]]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        products = 2 if "attention" in name else name.endswith(("mm", "mv"))
        receives = [call for call in self.calls if call.op == "recv"]
        self.seen += [(len(receives), sum(call.waited for call in receives))] * products
        return func(*args, **(kwargs or {}))


def ring_attention(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """16b-6: both results; what had arrived at each product; the global rank that follows."""
    with WireCalls() as wire, _Products(wire.calls) as products:
        found = named(answers[0](*given.values(), axis.group), "outputs", LSE)
    return found | {"products": products.seen, "next": axis.ranks[axis.next]}
