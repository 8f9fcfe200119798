"""Lesson 12 in a rank: how the answers are called."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.grading.runner import Answers, Inputs, Unfit
from course_lib.layout import DEFAULT_ORDER, make_layout
from course_lib.mesh import Axis, Mesh


def clip(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """12-4: the norm that is returned, and the gradients that were given."""
    gradients = dict(given["gradients"])
    norm = answers[0](given["gradients"], given["max_norm"], mesh.tp, mesh.pp)
    if isinstance(norm, bool | str) or not hasattr(type(norm), "__float__"):
        raise Unfit(f"expected the norm, a number, got a {type(norm).__name__}")
    if isinstance(norm, Tensor) and norm.numel() != 1:
        raise Unfit(f"expected the norm, one number, got a tensor of shape {list(norm.shape)}")
    dtype = gradients["cut"].dtype
    found: dict[str, Any] = {"norm": torch.tensor(float(norm), dtype=dtype)}
    return found | {f"gradient {kind!r}": gradient for kind, gradient in gradients.items()}


def complete(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """12-5: all groups are made on all ranks, in one order."""
    sizes = {name: given[name] for name in ("tp", "dp", "pp")}
    layout = make_layout(mesh.world.size, DEFAULT_ORDER, **sizes)
    own = []
    for name in sizes:
        for ranks in layout.groups(name):
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                own.append(group)
    gradients = dict(given["gradients"])
    answers[0](given["gradients"], *own)
    return {f"gradient {kind!r}": gradient for kind, gradient in gradients.items()}
