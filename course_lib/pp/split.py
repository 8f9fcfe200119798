"""The split backward: I computes the input gradient (dgrad), W the weight gradient (wgrad).

The stage before waits for I only. For a linear y_TF = x_TD W_FD^T + b_F

    I   dx_TD = dy_TF W_FD
    W   dW_FD = dy_TF^T x_TD, db_F = sum of dy_TF over T

so W sends nothing and can fill a bubble. Under :class:`DeferredWeightGradients` weight and bias of
a linear are constants, so autograd computes I alone and frees its graph. W is the two products
above. Between I and W only x and dy of each linear are saved. The products and the order of sums
are autograd's, so gradients are bitwise those of a whole backward, and hooks on parameters run.

Everything else (norms, embeddings, a linear with messages inside) is computed in I: it is little
arithmetic.

``torch.distributed.pipelining`` splits any graph: it walks the graph, retains it and runs backward
twice. All activations are saved until W, and a custom autograd function computes both halves each
time.

Source: Qi et al. 2023 (arXiv:2401.10241), whose code also defers the products of linears.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from course_lib.comm.operators import Product, apply_weight
from course_lib.model import ModelConfig


class _Saved(torch.autograd.Function):
    """A node that saves tensors as autograd does, so that memory meters count them."""

    @staticmethod
    def forward(ctx, trained: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return trained.view_as(trained)


class _InputGradient(torch.autograd.Function):
    """Return ``y``, the product of x and ``weight``; backward is I alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (weight,) = ctx.saved_tensors
        return dy @ weight, None, None


class _Weight(Tensor):
    """An alias of a weight, so that torch asks this class how to compute with it.

    A TorchFunctionMode would be asked at every operation of the stage, which takes longer.
    """

    product: Callable[..., Tensor]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func in (F.linear, apply_weight) and args[0].requires_grad:
                return args[1].product(args[0], *args[2:])
            return func(*args, **(kwargs or {}))


class DeferredWeightGradients:
    """Run forward and I of one micro-batch on ``stage`` inside; :meth:`run` is its W."""

    def __init__(self, stage: nn.Module) -> None:
        self.weights = [
            (module._parameters, name, parameter, self._alias(parameter))
            for module in stage.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.dim() == 2 and parameter.requires_grad
        ]
        self.deferred: list[tuple[Callable[..., None], list[int]]] = []
        self.fresh: list[Tensor] = []
        self.saved: list[Any] = []
        self.count = 0

    def __enter__(self) -> DeferredWeightGradients:
        for parameters, name, _, alias in self.weights:
            parameters[name] = alias
        return self

    def __exit__(self, *_: object) -> None:
        for parameters, name, weight, _ in self.weights:
            parameters[name] = weight
        if self.fresh:
            trained = torch.empty(0, requires_grad=True)
            self.saved.append(get_gradient_edge(_Saved.apply(trained, *self.fresh)))
            self.fresh = []

    def _alias(self, weight: Tensor) -> Tensor:
        alias = weight.as_subclass(_Weight)
        alias.product = partial(self._product, weight)
        return alias

    def _save(self, x: Tensor) -> int:
        self.fresh.append(x.detach())
        self.count += 1
        return self.count - 1

    def _product(
        self, weight: Tensor, x: Tensor, bias: Tensor | None = None, product: Product = F.linear
    ) -> Tensor:
        if product is F.linear:
            y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
            add, needed = partial(_add_gradients, weight, bias), [self._save(x)]
        else:
            y = product(x.detach(), weight, bias)
            add, needed = partial(torch.autograd.backward, get_gradient_edge(y)), []
            y = _InputGradient.apply(x, weight.detach(), y.detach())
        y.register_hook(lambda dy: self.deferred.append((add, [*needed, self._save(dy)])))
        return y

    def run(self) -> None:
        """Add the deferred weight gradients, and free what each of them needed."""
        tensors = [tensor for edge in self.saved for tensor in edge.node.saved_tensors]
        self.saved = []
        while self.deferred:
            add, needed = self.deferred.pop(0)
            given = [tensors[at] for at in needed]
            for at in needed:
                tensors[at] = None
            add(*given)


def _add_gradients(weight: Tensor, bias: Tensor | None, x: Tensor, dy: Tensor) -> None:
    """Add dW and db as autograd does, so that hooks on parameters run."""
    dy_TF = dy.flatten(0, -2)
    torch.autograd.backward(weight, dy_TF.t() @ x.flatten(0, -2))
    if bias is not None and bias.requires_grad:
        torch.autograd.backward(bias, dy_TF.sum(0))


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
