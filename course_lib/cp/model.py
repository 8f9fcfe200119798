"""Context-parallel attention in the reference model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from course_lib.cp.layout import PositionsCheck, SequenceLayout
from course_lib.mesh import Axis
from course_lib.model import Attention, Decoder, causal_attention

ParallelAttention = Callable[..., Tensor]  # (q, k, v, axis=, layout=)


def parallelize(
    model: Decoder, attention: ParallelAttention, axis: Axis, layout: SequenceLayout
) -> Decoder:
    """Make ``attention`` the core of every attention of ``model``, in place; keep the weights.

    The model then raises ValueError for positions other than those that ``cp.shard`` returns on
    this rank, and for more positions than the model was built for. Raises ValueError if the core
    was replaced before.
    """
    check = PositionsCheck(axis, layout, model.config.max_seq_len)
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    if any(module.core is not causal_attention for module in modules):
        raise ValueError(
            "expected the reference model's attention, got another core: parallelize the model "
            "once, and call recompute.selective after that, which wraps the core that is there"
        )
    for module in modules:
        module.core = partial(attention, axis=axis, layout=layout)
        module.register_forward_pre_hook(check)
    return model
