"""Dropout whose masks differ from rank to rank.

Where ranks hold the same activations (outside a region), they must drop the same elements: plain
``nn.Dropout`` does, if every rank has called ``torch.manual_seed`` with one number. Where they
hold different ones (inside a region; on other rows in sequence parallelism), equal masks would
drop the same places of every shard.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from course_lib.mesh import Axis


class RankDropout(nn.Module):
    """Dropout with a mask of its own on each rank of the axis.

    A seed is drawn from torch's common stream, equal on all ranks, which stay in step so; the rank
    is added to it. A recomputation that restores the common stream repeats the mask.
    """

    def __init__(self, p: float, axis: Axis) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p={p}: a share from 0 up to, not including, 1")
        self.p, self.axis = p, axis

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with a share p of its elements dropped and the others scaled by 1/(1-p)."""
        if not self.training or self.p == 0:
            return x
        seed = int(torch.randint(2**31, ())) * self.axis.size + self.axis.rank
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.p
        return x * kept / (1 - self.p)
