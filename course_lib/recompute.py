"""Recomputation: save the input of a function for backward, and run the function again there.

Chen et al. 2016, arXiv:1604.06174. *Full*: each block saves its input alone and runs forward twice.
*Selective* (Korthikanti et al. 2022, arXiv:2205.05198): only the core of attention runs again. It
saves q, k and v instead of scores, which grow with the square of the sequence, and costs little
arithmetic. A fused kernel such as torch's saves no scores anyway: there it spares one log-sum-exp
per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.formulas.recompute import (  # noqa: F401  its formulas are exported
    ID_BYTES,
    SavedByBlock,
    SavedOutsideBlocks,
    saved_by_block,
    saved_by_stage,
    saved_outside_blocks,
)
from course_lib.model import Block, Decoder


class _Recomputed(torch.autograd.Function):
    """Forward without a graph; backward makes the graph and goes through it at once."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.fn, ctx.random = fn, _random_state(tensors[0].device)
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return fn(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors]
        devices = [inputs[0].device] if inputs[0].is_cuda else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            _set_random_state(ctx.random)  # dropout must drop the same elements again
            output = ctx.fn(*inputs)
        torch.autograd.backward(output, gradient)
        return None, *(each.grad for each in inputs)


def recomputed(fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``fn(*tensors)`` and save only ``tensors`` for backward.

    One of them must require a gradient; the parameters that ``fn`` uses get theirs in backward.
    """
    if not any(each.requires_grad for each in tensors):
        return fn(*tensors)  # nothing to go back to; parameters inside would get no gradient
    return _Recomputed.apply(fn, *tensors)


def full(model: Decoder) -> None:
    """Let every block save its input alone."""
    for block in _blocks(model):
        block.run = recomputed


def selective(model: Decoder) -> None:
    """Let the core of each attention save q, k and v alone."""
    for block in _blocks(model):
        block.attn.core = partial(recomputed, block.attn.core)


def _blocks(model: Decoder) -> Iterator[Block]:
    return (block for block in model.blocks if isinstance(block, Block))


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def _set_random_state(states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
