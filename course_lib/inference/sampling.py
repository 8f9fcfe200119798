"""From logits to tokens: greedy or drawn, and the same token on every rank of a model.

Under tensor parallelism a rank has the logits of V/t tokens. Gathering them would cost V numbers
per token; a maximum needs two: every rank offers its largest logit with its token, and all take
the best pair. Drawing is made a maximum too (Gumbel-max): with one number e of an exponential
distribution for each token of the vocabulary, ``argmax(z / temperature - log e)`` is distributed as
the softmax. The noise follows from (seed, request, position) and covers the whole vocabulary; each
rank draws all of it and uses its own part, so that the token is that of the single-process
reference for any number of ranks, any batching, and any restart. (With one seed per rank, the
distribution would be right, but the text would depend on t.)

Where every rank instead gathered all logits and drew by a random state of its own, ranks would
take different tokens, and from then on attend to different pasts: nothing fails, the text is
nonsense (sglang #33549).

top-k keeps the k largest logits; top-p, of these, the fewest whose probabilities reach p
(Holtzman et al. 2019, arXiv:1904.09751). Both are a threshold, which all ranks compute from the
largest logits of each, gathered: at most ``top_k`` numbers per rank, or all V/t if only
top_p is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib import comm
from course_lib.inference.scheduler import Work
from course_lib.mesh import Axis
from course_lib.model import Decoder, accumulation_dtype
from course_lib.tp import VocabHead

MIX = 1_000_003  # a prime: seeds, requests and positions do not fall on one another
Chooser = Callable[[Tensor, Work], Tensor]  # logits_BV (or this rank's), work -> tokens_B


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``top_k`` None keeps all; ``top_p`` 1 too."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # Else logits leave the range of float32, or the minus infinity of padding divides to NaN.
        if not 1e-30 <= self.temperature <= 1e30:
            raise ValueError(
                f"expected a temperature from 1e-30 to 1e30, got {self.temperature}; for the "
                "likeliest token each time leave sampling out (greedy)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"expected top_k of 1 or more, or None for all tokens, got {self.top_k}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p above 0 and at most 1, got {self.top_p}")

    @property
    def cuts(self) -> bool:
        """Whether some tokens are ruled out."""
        return self.top_k is not None or self.top_p < 1


def chooser(model: Decoder, sampling: Sampling | None = None) -> Chooser:
    """Greedy, or by ``sampling``, for the model's head, cut or whole."""
    head = model.head
    if isinstance(head, VocabHead):
        axis, rows = head.axis, len(head.weight)
        return lambda logits_BVt, work: choose(
            logits_BVt, work, sampling, axis, axis.rank * rows, model.config.vocab
        )
    return lambda logits_BV, work: choose(logits_BV, work, sampling)


def choose(
    logits_BVt: Tensor,
    work: Work,
    sampling: Sampling | None = None,
    axis: Axis | None = None,
    first: int = 0,
    vocab: int | None = None,
) -> Tensor:
    """The next token of each request, (B), int64, equal on all ranks of ``axis``.

    The columns are tokens ``first`` and up of ``vocab``. Of equal logits the lowest token wins.
    """
    z_BVt = logits_BVt.to(accumulation_dtype(logits_BVt.dtype))
    if sampling is not None:
        z_BVt = z_BVt / sampling.temperature
        if sampling.cuts:
            z_BVt = z_BVt.masked_fill(z_BVt < threshold(z_BVt, sampling, axis), -torch.inf)
        noise_BV = gumbel(work, sampling.seed, vocab or z_BVt.shape[1]).to(z_BVt)
        own_BVt = F.pad(noise_BV, (0, z_BVt.shape[1]))[:, first : first + z_BVt.shape[1]]
        z_BVt = z_BVt + own_BVt
    best_B, token_B = z_BVt.max(1)
    if axis is None or axis.size == 1:
        return token_B
    # The token is sent in the dtype of the logits: float32 represents 16 million tokens exactly.
    pair_B2 = torch.stack([best_B, (token_B + first).to(best_B)], 1)
    pair_nB2 = comm.all_gather(pair_B2[None], axis)
    winner_1B1 = pair_nB2[..., :1].argmax(0, keepdim=True)
    return pair_nB2[..., 1:].gather(0, winner_1B1)[0, :, 0].to(torch.int64)


def threshold(z_BVt: Tensor, sampling: Sampling, axis: Axis | None = None) -> Tensor:
    """The smallest logit that may be drawn, (B, 1), of the whole vocabulary."""
    largest_BC = z_BVt.topk(min(sampling.top_k or z_BVt.shape[1], z_BVt.shape[1])).values
    if axis is not None:
        largest_BC = comm.all_gather(largest_BC, axis, dim=1)
    largest_BC = largest_BC.sort(descending=True).values[:, : sampling.top_k]
    if sampling.top_p < 1:
        share_BC = largest_BC.softmax(-1)
        before_BC = share_BC.cumsum(-1) - share_BC  # of all larger ones: the first is always in
        largest_BC = largest_BC.masked_fill(before_BC >= sampling.top_p, torch.inf)
    return largest_BC.amin(1, keepdim=True)


def gumbel(work: Work, seed: int, vocab: int) -> Tensor:
    """Noise (B, V) for the token that follows; on the CPU, so that all devices draw alike."""
    noise = torch.empty(len(work.slots), vocab, dtype=torch.float64)
    for row, (request, start) in enumerate(zip(work.requests, work.starts, strict=True)):
        mixed = ((seed * MIX + request) * MIX + start + work.width) % 2**32
        noise[row].exponential_(generator=torch.Generator().manual_seed(mixed)).log_().neg_()
    return noise
