"""Putting context-parallel attention into the serial model, and what the model then keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.cp.layout import SequenceLayout, positions
from course_lib.cp.ring import ring_saved_bytes
from course_lib.mesh import Axis
from course_lib.model import Attention, Decoder, ModelConfig, causal_attention
from course_lib.recompute import saved_by_block

ParallelAttention = Callable[..., Tensor]  # (q, k, v, axis=, layout=)


def parallelize(
    model: Decoder, attention: ParallelAttention, axis: Axis, layout: SequenceLayout
) -> Decoder:
    """Give every attention of ``model`` this ``attention``, in place; weights stay as they are.

    From then on the model wants the positions that this rank holds, as ``cp.shard`` gives them:
    others are a ValueError, and so are more positions than the model was built for. Raises
    ValueError when a core is there already that it would take away.
    """
    check = _PositionsCheck(axis, layout, model.config.max_seq_len)
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    if any(module.core is not causal_attention for module in modules):
        raise ValueError(
            "the model's attention is not the serial one any more: parallelize it once, and call "
            "recompute.selective after that, which goes around the core that is there"
        )
    for module in modules:
        module.core = partial(attention, axis=axis, layout=layout)
        module.register_forward_pre_hook(check)
    return model


class _PositionsCheck:
    """Before each attention: are these the positions that this rank holds?

    A model that is called without positions counts 0..s-1 on every rank: RoPE and mask would be
    wrong, and the loss would fall all the same. On a GPU comparing waits for the device: there
    only the first forward of each length is looked at.
    """

    def __init__(self, axis: Axis, layout: SequenceLayout, longest: int) -> None:
        self.axis, self.layout, self.longest = axis, layout, longest
        self.expected: dict[int, Tensor] = {}  # by the number of rows

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        given_s = args[1]
        rows = given_s.shape[-1]
        seen = rows in self.expected
        if not seen:
            self._check_length(rows * self.axis.size)
            here = positions(rows * self.axis.size, self.axis, self.layout)
            self.expected[rows] = here.to(given_s.device)
        if seen and given_s.device.type != "cpu":
            return
        if not torch.equal(given_s, self.expected[rows]):
            raise ValueError(
                f"axis {self.axis.name}, rank {self.axis.rank}: positions {_brief(given_s)} are "
                f"not those of this rank in the {self.layout.name} layout, "
                f"{_brief(self.expected[rows])}: call model(tokens, positions), both from "
                "cp.shard(tokens, targets, axis, layout) with this axis and layout, and "
                "model.cross_entropy(logits, targets)"
            )

    def _check_length(self, seq_len: int) -> None:
        if seq_len > self.longest:
            raise ValueError(
                f"axis {self.axis.name}: {self.axis.size} ranks hold {seq_len} positions "
                f"together, but the model was built for max_seq_len={self.longest}; shorten the "
                "sequence or build with a larger one"
            )


def _brief(positions_s: Tensor) -> str:
    """Runs of neighbours: ``0..5 42..47``, the first few."""
    runs: list[list[int]] = []
    for position in positions_s.flatten().tolist():
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    shown = " ".join(f"{first}..{last}" for first, last in runs[:4])
    return shown if len(runs) <= 4 else f"{shown} ..."


def kept_per_block(
    config: ModelConfig,
    sequences: int,
    seq_len: int,
    n: int,
    saved_bytes: int,
    *,
    swapped: bool = False,
) -> int:
    """Bytes that a rank keeps of one block whose attention keeps ``saved_bytes``.

    As one process of a sequence of S/n, attention aside. What the next linear keeps is the output
    of attention, and in ``saved_bytes`` already, unless it was ``swapped`` back, as in Ulysses.
    """
    block = saved_by_block(config, sequences, seq_len // n).total
    copy = sequences * seq_len * config.hidden * config.dtype.itemsize // n
    serial = ring_saved_bytes(config, sequences, seq_len, n)
    return block - serial + saved_bytes + (copy if swapped else 0)
