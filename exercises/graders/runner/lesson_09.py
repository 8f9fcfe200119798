"""Lesson 09 in a rank: how the answers are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from course_lib.cp.blockwise import PLAIN
from course_lib.grading.runner import Answers, Inputs
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh
from course_lib.model import causal_attention


def ring(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """09-4: the result; per call of attend, the bytes sent and the bytes received by then; the
    global rank that follows on the ring."""
    blocks: list[tuple[int, int]] = []
    with WireCalls() as wire:

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            sent = sum(call.payload for call in wire.calls if call.op == "send")
            waited = (call for call in wire.calls if call.op == "recv" and call.waited)
            blocks.append((sent, sum(call.payload for call in waited)))
            return PLAIN.forward(q, k, v, causal)

        y = answers[0](*given.values(), axis, attend)
    return {"outputs": y, "blocks": blocks, "next": axis.ranks[axis.next]}


def ulysses(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """09-5: both ways, then attention and its backward between them; the calls of each way."""
    to_heads, to_rows = answers
    ways: list[tuple[str, int, list[tuple[str, int]]]] = []

    def way(name: str, function: Any, x: Tensor) -> Any:
        with WireCalls() as wire:
            y = function(x)
        ways.append((name, x.nbytes, [(call.op, call.payload) for call in wire.calls]))
        return y.detach() if isinstance(y, Tensor) else y

    q, n = given["q"], axis.size
    batch, rows, heads, features = q.shape
    first = way("to_heads", to_heads, q)
    found = {"outputs of to_heads": first, "ways": ways}
    if not isinstance(first, Tensor) or first.shape != (batch, n * rows, heads // n, features):
        return found
    gaps = first.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    found["outputs of to_rows"] = back = way("to_rows", to_rows, gaps)
    if not isinstance(back, Tensor) or back.shape != q.shape:
        return found
    leaves = [way("to_heads", to_heads, given[name]).clone().requires_grad_() for name in "qkv"]
    y = causal_attention(*leaves)
    found["outputs of attention between them"] = way("to_rows", to_rows, y.detach())
    y.backward(way("to_heads", to_heads, given["dy"]))
    for name, leaf in zip("qkv", leaves, strict=True):
        found[f"gradients of {name}"] = way("to_rows", to_rows, leaf.grad)
    return found
