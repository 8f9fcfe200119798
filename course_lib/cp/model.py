"""Putting context-parallel attention into the serial model."""

from __future__ import annotations

from typing import Any

from torch import nn

from course_lib.model import Attention, AttentionCore, Decoder


def parallelize(model: Decoder, core: AttentionCore) -> Decoder:
    """Give every attention of ``model`` this ``core``, in place; weights stay as they are.

    From then on the model wants positions: without them it would count 0..s-1 on every rank.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = core
    model.register_forward_pre_hook(_positions_given, with_kwargs=True)
    return model


def _positions_given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) < 2 and kwargs.get("positions_S") is None:
        raise ValueError(
            "a context-parallel model does not know which positions this rank holds: call "
            "model(tokens, positions), both from cp.shard, and model.cross_entropy(logits, targets)"
        )
