"""Backward in two halves: I, the gradient of the input, and W, the gradient of the weights.

Only I is waited for by the stage before. Of a linear y_TF = x_TD W_FD^T + b_F

    I   dx_TD = dy_TF W_FD
    W   dW_FD = dy_TF^T x_TD, db_F = sum of dy_TF over T

so that W needs no message, and may fill a bubble. A linear run under :class:`WeightsLater` keeps
two graphs where autograd keeps one: the stage's own, in which the weight is a constant, and one
of the product and the weight alone. I goes through the first and frees it; it leaves dy to the
second. Between I and W remain x and dy of each linear, and nothing else. W is autograd's own
backward of the second graph, so that gradients are added bit for bit as a whole backward adds
them, and hooks on parameters fire.

What is no linear (norms, embeddings, a linear with messages inside) stays with I: it is little
arithmetic. Only sequence parallelism's linears that gather their input again in backward have a
message in W: gathered in I it would have to be kept whole until W.

``torch.distributed.pipelining`` splits any graph, by going twice through one that it retains:
all activations stay until W, and a custom autograd function computes both halves in each.

Source: Qi et al. 2023 (arXiv:2401.10241), whose code puts off the products of linears too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from course_lib.comm.operators import apply_weight
from course_lib.model import ModelConfig

# For each linear the graph of x and the weight, and a node that holds the gradient dy for it.
PutOff = list[tuple[GradientEdge, GradientEdge]]
Product = Callable[[Tensor], Tensor]


class _Held(torch.autograd.Function):
    """A node that holds a tensor as autograd does, so that memory meters see it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)


class _Linear(torch.autograd.Function):
    """A linear whose backward gives dx and puts the rest off.

    ``weight`` is detached: a parameter would hear of a backward that brings it nothing, and its
    hooks would take that for its gradient. ``trained`` is there to require one in its place.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, trained: Tensor, weight: Tensor, product: Product, put_off: PutOff
    ) -> Tensor:
        with torch.enable_grad():
            y = product(x.detach())
        ctx.weights_half, ctx.put_off = get_gradient_edge(y), put_off
        ctx.save_for_backward(weight)
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        with torch.enable_grad():  # else no node is made
            # An edge, and not its node alone: before torch 2.12 a node dies with its output.
            held = get_gradient_edge(_Held.apply(dy.detach().requires_grad_()))
        ctx.put_off.append((ctx.weights_half, held))
        (weight,) = ctx.saved_tensors
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class WeightsLater(TorchFunctionMode):
    """Around forward and I of one micro-batch on one stage; :meth:`run` is its W."""

    def __init__(self) -> None:
        super().__init__()
        self.put_off: PutOff = []
        self.trained = torch.empty(0, requires_grad=True)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.linear, apply_weight) and torch.is_grad_enabled():
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        product: Callable[..., Tensor] = F.linear,
    ) -> Tensor:
        if not (weight.is_leaf and weight.requires_grad):
            return product(input, weight, bias)
        of_input = partial(product, weight=weight, bias=bias)
        return _Linear.apply(input, self.trained, weight.detach(), of_input, self.put_off)

    def run(self) -> None:
        """Add the gradients that I has put off, and free what they needed one by one."""
        while self.put_off:
            graph, held = self.put_off.pop(0)
            node: Any = held.node
            torch.autograd.backward(graph, *node.saved_tensors)


def kept_for_weights(
    config: ModelConfig, sequences: int, seq_len: int, first: int = 0, end: int | None = None
) -> int:
    """Bytes kept between I and W by the slice ``first``..``end - 1`` of the model, from shapes.

    x and dy of every linear; q, k and v have one x, and so have gate and up. The head's dy is as
    large as all logits.
    """
    end = config.layers if end is None else end
    kv_features = config.kv_heads * config.head_dim
    inner = 3 if config.family == "llama" else 2  # of the MLP: x of its last linear, dy of others
    block = 6 * config.hidden + 2 * kv_features + inner * config.ffn
    head = config.hidden + config.vocab if end == config.layers else 0
    return sequences * seq_len * ((end - first) * block + head) * config.dtype.itemsize
