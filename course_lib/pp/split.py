"""The split backward: I computes the input gradient (dgrad), W the weight gradient (wgrad).

The stage before waits for I only. For a linear y_TF = x_TD W_FD^T + b_F

    I   dx_TD = dy_TF W_FD
    W   dW_FD = dy_TF^T x_TD, db_F = sum of dy_TF over T

W sends nothing, so it can fill a bubble. Under :class:`DeferredWeightGradients` weight and bias of
a linear are constants, so autograd computes I alone and frees its graph. W is the two products
above. Between I and W only x and dy of each linear are saved. The products and the order of sums
are autograd's, so gradients are bitwise those of a whole backward, and hooks on parameters run.

All other gradients (norms, embeddings, a linear with messages inside) are computed in I, because
they need little arithmetic.

``torch.distributed.pipelining`` splits any graph: it retains the graph and runs backward twice. All
activations are saved until W, and a custom autograd function computes both gradients each time.

Source: Qi et al. 2023 (arXiv:2401.10241), whose code also defers the products of linears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from course_lib.comm.operators import Product, apply_weight


class _Saved(torch.autograd.Function):
    """A node that saves tensors as autograd does, so that memory meters count them."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return trained.view_as(trained)


class _InputGradient(torch.autograd.Function):
    """Return ``y``, the product of x and ``weight``; backward is I alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        return dy @ weight, None, None


class _Weight(Tensor):
    """An alias of a weight in a module, so that torch asks this class for its products.

    A TorchFunctionMode would be asked for every operation of the stage.
    """

    weight: Tensor
    collector: DeferredWeightGradients | None  # of the micro-batch that runs now

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in (F.linear, apply_weight):
            x, alias, *others = args
            if alias.collector and x.requires_grad and torch.is_grad_enabled():
                return alias.collector.product(x, alias.weight, *others)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


WeightSlot = tuple[dict[str, Any], str, _Weight]  # a module's parameters, a name there, its alias


def weights_of(stage: nn.Module) -> list[WeightSlot]:
    """Return all trainable matrices of ``stage``, each with its slot and its alias.

    The embedding is among them. Its lookup is not a product with a weight, so it is not deferred.
    """
    slots: list[WeightSlot] = []
    for module in stage.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.dim() == 2 and weight.requires_grad:
                alias = weight.as_subclass(_Weight)
                alias.weight, alias.collector = weight, None
                slots.append((module._parameters, name, alias))
    return slots


class DeferredWeightGradients:
    """Run forward and I of one micro-batch on one stage inside; :meth:`run` is its W.

    ``weights`` are :func:`weights_of` the stage; all of its micro-batches may share them.
    """

    def __init__(self, weights: Sequence[WeightSlot]) -> None:
        self.weights = weights
        # Per product: the function that adds its weight gradient, and the numbers of its x and dy.
        self.pending: list[tuple[Callable[..., None], tuple[int, ...]]] = []
        self.new: list[Tensor] = []  # tensors since the last ``with``, not in ``saved`` yet
        self.saved: list[GradientEdge] = []
        self.count = 0  # of the tensors in both

    def __enter__(self) -> DeferredWeightGradients:
        for parameters, name, alias in self.weights:
            parameters[name], alias.collector = alias, self
        return self

    def __exit__(self, *_: object) -> None:
        for parameters, name, alias in self.weights:
            parameters[name], alias.collector = alias.weight, None
        if self.new:
            trained = torch.empty(0, requires_grad=True)
            # An edge, not only its node: before torch 2.12 a node is freed with its output.
            self.saved.append(get_gradient_edge(_Saved.apply(trained, *self.new)))
            self.new = []

    def _save(self, x: Tensor) -> int:
        self.new.append(x.detach())
        self.count += 1
        return self.count - 1

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, product: Product = F.linear
    ) -> Tensor:
        """Return ``product(x, weight, bias)``; autograd computes only its input gradient."""
        add: Callable[..., None]
        saved: tuple[int, ...] = ()
        if product is F.linear:
            y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
            add, saved = partial(_add_gradients, weight, bias), (self._save(x),)
        else:  # the product saves the tensors of W itself
            y = product(x.detach(), weight, bias)
            add = partial(torch.autograd.backward, get_gradient_edge(y))
            y = _InputGradient.apply(x, weight.detach(), y.detach())
        y.register_hook(lambda dy: self.pending.append((add, (*saved, self._save(dy)))))
        return y

    def run(self) -> None:
        """Add the deferred weight gradients, and free the tensors of each."""
        nodes: list[Any] = [edge.node for edge in self.saved]
        tensors = dict(enumerate(tensor for node in nodes for tensor in node.saved_tensors))
        self.saved.clear()
        nodes.clear()
        while self.pending:
            add, numbers = self.pending.pop(0)
            add(*map(tensors.pop, numbers))


def _add_gradients(weight: Tensor, bias: Tensor | None, x: Tensor, dy: Tensor) -> None:
    """Add dW and db as autograd does, so that hooks on parameters run."""
    dy_TF = dy.flatten(0, -2)
    torch.autograd.backward(weight, dy_TF.t() @ x.flatten(0, -2))
    if bias is not None and bias.requires_grad:
        torch.autograd.backward(bias, dy_TF.sum(0))
