"""Apply the techniques to a single-process model, each to the result of those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib import cp, ep, pp, tp
from course_lib.compose.plan import Experts, Plan
from course_lib.mesh import Mesh
from course_lib.model import Decoder
from course_lib.schedule import Schedule


def build_stages(
    model: Decoder, schedule: Schedule | None, mesh: Mesh, plan: Plan
) -> dict[int, Decoder]:
    """Return this rank's stages of the single-process ``model``, which is changed; one without pp.

    Experts are divided first, since tensor parallelism must not shard them. Both steps see the
    whole model, because both make groups on all ranks, as USP over cp does. Attention over cp and
    recomputation are applied last: they wrap modules that exist by then.
    """
    check_experts(model, plan.experts)
    if plan.experts is not None:
        ep.parallelize(model, mesh.ep, mesh.dp_cp, mesh.tp if plan.by_rows else None)
    if mesh.tp.size > 1:
        cuts = tp.plan_for(model)
        if plan.experts is not None:
            cuts = {key: entry for key, entry in cuts.items() if not key.startswith("blocks.*.ffn")}
        tp.parallelize(model, mesh.tp, plan.region, cuts)
    stages = {0: model} if schedule is None else pp.make_stages(model, schedule, mesh.pp.rank)
    attention = plan.core.on(mesh.cp) if mesh.cp.size > 1 else None
    for stage in stages.values():
        if attention is not None:
            cp.parallelize(stage, attention, mesh.cp, plan.layout)
        if plan.recompute is not None:
            plan.recompute(stage)
    return stages


def check_experts(model: nn.Module, planned: Experts | None) -> None:
    """Raise ValueError unless the model has the experts that the plan says."""
    layers = [module for module in model.modules() if isinstance(module, ep.MoE)]
    for layer in layers:
        there = (len(layer.experts), layer.top_k, layer.capacity_factor, layer.shared is not None)
        said = planned and (planned.number, planned.top_k, planned.capacity_factor, planned.shared)
        if there != said:
            raise ValueError(
                "(number, top_k, capacity_factor, shared) of the model's experts are "
                f"{there}, and {said} in the plan: give Plan(experts=Experts(...)) what "
                "ep.add_experts was given"
            )
    if planned is not None and not layers:
        raise ValueError("the plan has experts and the model has none: call ep.add_experts first")


class BalanceLoss:
    """Has every layer with experts add its auxiliary loss to the step's, on whichever stage it is.

    The loss proper is on the last stage, and auxiliary losses on all. So each rides on its layer's
    output: forward it changes nothing, backward it gets the gradient that it would have as a
    summand of the loss. Source: Megatron-LM, MoEAuxLossAutoScaler.
    """

    def __init__(self, stages: Mapping[int, Decoder], mesh: Mesh, plan: Plan) -> None:
        self.coefficient = plan.experts.coefficient if plan.experts else 0.0
        self.tokens: Tensor = torch.ones(())  # by which the step's loss is divided
        self.total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for stage in stages.values() if plan.experts else ():
            layers = ep.moe_layers(stage)
            stage.register_forward_hook(lambda *_, layers=layers: self._count(layers))
            for layer in layers:
                layer.register_forward_hook(self._ride)

    def start(self, tokens: Tensor) -> None:
        """Begin a step whose summed loss is divided by ``tokens``."""
        self.tokens, self.total = tokens, torch.zeros_like(self.total)

    def _ride(self, layer: ep.MoE, _: object, y_BSD: Tensor) -> Tensor:
        assert layer.auxiliary is not None, "made by the forward that has just ended"
        return _Rides.apply(y_BSD, layer.auxiliary, self.coefficient / self.tokens)

    def _count(self, layers: list[ep.MoE]) -> None:
        """After a stage's forward: what its layers add (a recomputed one is no forward of it)."""
        for layer in layers:
            assert layer.auxiliary is not None, "every layer has run"
            self.total += self.coefficient * layer.auxiliary.detach() / self.tokens


class _Rides(torch.autograd.Function):
    """``y`` as it is; backward also hands ``weight`` to ``loss``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.gradient = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, ctx.gradient, None
