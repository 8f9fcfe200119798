"""A decoder with experts instead of MLPs, and the loss that balances their load."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from course_lib.ep.moe import MoE
from course_lib.model import Decoder


def add_experts(
    model: Decoder,
    experts: int,
    top_k: int,
    *,
    capacity_factor: float | None = None,
    shared: bool = False,
    seed: int = 0,
) -> Decoder:
    """Put a :class:`MoE` in the place of every block's MLP; the ``model`` itself is changed.

    Expert 0 is that MLP. The other experts, and the ``shared`` one, are copies with matrices drawn
    anew, of the same spread; they follow from ``seed`` alone. Raises ValueError for sizes that do
    not fit.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"expected top_k from 1 to experts={experts}, got top_k={top_k}")
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(
            f"expected capacity_factor above 0 (1 fits an even load) or None (nothing is dropped), "
            f"got capacity_factor={capacity_factor}"
        )
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        dense: nn.Module = block.ffn  # type: ignore[assignment]
        if isinstance(dense, MoE):
            raise ValueError("this model has experts already: start from a dense one")
        drawn = [dense, *(_another(dense, generator) for _ in range(experts - 1))]
        block.ffn = MoE(
            _router(model.config.hidden, experts, next(dense.parameters()), generator),
            {str(number): expert for number, expert in enumerate(drawn)},
            top_k,
            capacity_factor,
            _another(dense, generator) if shared else None,
        )
    return model


@torch.no_grad()
def _another(dense: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy with new random matrices, drawn in float32 on the CPU as build_model does."""
    other = deepcopy(dense)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            spread = parameter.float().cpu().std()
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return other


@torch.no_grad()
def _router(hidden: int, experts: int, like: Tensor, generator: torch.Generator) -> nn.Linear:
    """Return a router whose logits have variance 1 on an input of variance 1."""
    kind = {"bias": False, "dtype": like.dtype, "device": like.device}
    router = nn.utils.skip_init(nn.Linear, hidden, experts, **kind)  # which draws no numbers
    draw = torch.randn(router.weight.shape, generator=generator, dtype=torch.float32)
    router.weight.copy_(draw * hidden**-0.5)
    return router


def moe_layers(model: nn.Module) -> list[MoE]:
    """The layers with experts, in order. Raises ValueError when there is none."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ValueError("the model has no experts: call add_experts(model, ...) first")
    return layers


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The balance_loss of the last forward, summed over the layers; it is taken away.

    Add it, times a small coefficient, to the summed loss, and divide both by the tokens of all
    ranks. Raises RuntimeError when there was no forward since the last call, and when the forward
    left no graph to go back through.
    """
    total = torch.zeros(())
    for number, layer in enumerate(moe_layers(model)):
        loss, layer.auxiliary = layer.auxiliary, None
        if loss is None:
            raise RuntimeError(
                f"layer {number} has had no forward since its auxiliary loss was taken: take it "
                "once after each forward"
            )
        if torch.is_grad_enabled() and layer.router.weight.requires_grad and not loss.requires_grad:
            raise RuntimeError(
                f"the auxiliary loss of layer {number} has no graph, since its forward ran without "
                "gradients: recompute less (the core of attention alone), or read it in no_grad"
            )
        total = loss + total
    return total


def loss_sum(
    model: Decoder, coefficient: float
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The model's loss_sum plus ``coefficient`` times the auxiliary loss, for a train step."""

    def total(tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = model.loss_sum(tokens_BS, targets_BS)
        return loss + coefficient * auxiliary_loss(model), count

    return total
