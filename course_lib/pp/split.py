"""The split backward: I computes the input gradient (dgrad), W the weight gradient (wgrad).

The stage before waits for I only. For a linear y_TF = x_TD W_FD^T + b_F

    I   dx_TD = dy_TF W_FD
    W   dW_FD = dy_TF^T x_TD, db_F = sum of dy_TF over T

so W sends nothing and can fill a bubble. A linear that runs under :class:`DeferredWeightGradients`
has two graphs instead of one: that of the stage, in which the weight is a constant, and one of
only the product and the weight. I is the backward of the first graph. It frees that graph and
saves dy for the second. Between I and W only x and dy of each linear are saved. W is autograd's
backward of the second graph, so gradients are added bit for bit as in a whole backward, and hooks
on parameters run.

Everything else (norms, embeddings, a linear with messages inside) is computed in I: it is little
arithmetic. In W, only those linears of sequence parallelism communicate that gather their input
again in backward. If I gathered it, the full input would have to be saved until W.

``torch.distributed.pipelining`` splits any graph: it retains the graph and runs backward twice.
All activations are saved until W, and a custom autograd function computes both halves each time.

Source: Qi et al. 2023 (arXiv:2401.10241), whose code also defers the products of linears.
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

# Per linear: the graph of the product and the weight, and a node that has saved dy for it.
Deferred = list[tuple[GradientEdge, GradientEdge]]
Product = Callable[[Tensor], Tensor]


class _Saved(torch.autograd.Function):
    """A node that saves a tensor as autograd does, so that memory meters count it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)


class _Linear(torch.autograd.Function):
    """A linear whose backward returns dx and defers the weight gradient.

    ``weight`` is detached: otherwise the hooks of the parameter would run in I, without a
    gradient. ``trained`` is an empty tensor that requires a gradient in its place.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, trained: Tensor, weight: Tensor, product: Product, deferred: Deferred
    ) -> Tensor:
        with torch.enable_grad():
            y = product(x.detach())
        ctx.weight_graph, ctx.deferred = get_gradient_edge(y), deferred
        ctx.save_for_backward(weight)
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        with torch.enable_grad():  # otherwise autograd makes no node
            # An edge, not only its node: before torch 2.12 a node is freed with its output.
            saved = get_gradient_edge(_Saved.apply(dy.detach().requires_grad_()))
        ctx.deferred.append((ctx.weight_graph, saved))
        (weight,) = ctx.saved_tensors
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class DeferredWeightGradients(TorchFunctionMode):
    """Run forward and I of one micro-batch on one stage inside; :meth:`run` is its W."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: Deferred = []
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
        return _Linear.apply(input, self.trained, weight.detach(), of_input, self.deferred)

    def run(self) -> None:
        """Add the deferred weight gradients, and free what each of them needed."""
        while self.deferred:
            graph, saved = self.deferred.pop(0)
            node: Any = saved.node
            torch.autograd.backward(graph, *node.saved_tensors)


def saved_for_wgrad(
    config: ModelConfig, sequences: int, seq_len: int, first: int = 0, end: int | None = None
) -> int:
    """Return the bytes that blocks ``first`` to ``end - 1`` save between I and W, from shapes.

    These are x and dy of every linear; q, k and v share one x, and so do gate and up. The head's
    dy has the size of all logits.
    """
    end = config.layers if end is None else end
    kv_features = config.kv_heads * config.head_dim
    inner = (
        3 if config.family == "llama" else 2
    )  # of the MLP: x of its last linear, dy of the others
    block = 6 * config.hidden + 2 * kv_features + inner * config.ffn
    head = config.hidden + config.vocab if end == config.layers else 0
    return sequences * seq_len * ((end - first) * block + head) * config.dtype.itemsize
