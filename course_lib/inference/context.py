"""Context parallelism in inference: a long prompt is read by all ranks, its cache stays in parts.

Prefill. Each rank reads the positions that the layout gives it, attention goes round the ring (or
gathers K and V), and every rank keeps the rows of its own positions: a cache n times as long.

Decode. One new token is the work of one rank and the cache is on all: all ranks compute the token,
each attends to the rows that it has, and the parts are joined by their log-sum-exp, as blocks
of a ring are:

    out = sum_r exp(lse_r - lse) out_r,    lse = log sum_r exp(lse_r)

One all-gather of H (K + 1) numbers per token and layer, in rank order, so that all ranks have the
same bits and choose the same token. The token's own K and V go to the rank that has the fewest
rows. Moving the cache instead would cost 2 G K numbers for every *earlier* token.

Source: Yang et al. 2024 (arXiv:2411.01783), pass-KV prefill and the joining of parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from course_lib import comm, cp
from course_lib.formulas.inference import padded
from course_lib.inference.cache import Cache, LayerCache
from course_lib.inference.replica import Replica, forward_span
from course_lib.inference.sampling import Chooser
from course_lib.inference.scheduler import Work
from course_lib.mesh import Axis, Mesh
from course_lib.model import Attention, Decoder, accumulation_dtype

NOWHERE = 2**62  # the position of an empty row: no query sees it
Prefill = Callable[[Tensor, Tensor, Tensor, Axis, cp.SequenceLayout], Tensor]


class ContextReplica(Replica):
    """A whole model on each rank of ``mesh.cp``, and 1/n of the cache.

    ``prefill`` is cp.ring_attention or cp.gather_attention. Raises ValueError when the chunks of
    the layout do not divide max_seq_len.
    """

    cache: ContextCache

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        slots: int,
        choose: Chooser | None = None,
        *,
        prefill: Prefill = cp.ring_attention,
        layout: cp.SequenceLayout = cp.ZIGZAG,
    ) -> None:
        self.prefill, self.layout = prefill, layout
        super().__init__(model, mesh, slots, choose)

    def make_cache(self, slots: int) -> Cache:
        """The rows of this rank."""
        return ContextCache(self, slots)

    def step(self, work: Work) -> Tensor:
        """A prefill ends on the rank of the last position, which chooses and tells the others."""
        if not work.is_prefill:
            return super().step(work)
        axis = self.mesh.cp
        with forward_span(self.mesh, work):
            tokens_BS, positions_S = self.cache.open(work)
            logits_BSV = self.model(tokens_BS, positions_S)
        last = work.width - 1
        owner = self.cache.owner(last)
        # The others choose too, from any row: a cut head has them all take part.
        row = positions_S.tolist().index(last) if owner == axis.rank else 0
        return comm.broadcast(self.choose(logits_BSV[:, row], work), axis, owner)


class ContextCache(Cache):
    """Rows stand in the order in which they came; ``positions_NT`` says which position each is."""

    def __init__(self, replica: ContextReplica, slots: int) -> None:
        model, axis, layout = replica.model, replica.mesh.cp, replica.layout
        capacity = model.config.max_seq_len
        if padded(capacity, axis.size, layout) != capacity:
            raise ValueError(
                f"max_seq_len={capacity} cannot be cut into the "
                f"{layout.per_rank * axis.size} chunks that the {layout.name} "
                f"layout gives {axis.size} ranks of axis {axis.name}: build "
                "the model with a multiple"
            )
        self.axis, self.layout, self.prefill = axis, layout, replica.prefill
        super().__init__(model, slots)
        rows = capacity // axis.size
        self.positions_NT = torch.full((slots, rows), NOWHERE, device=self.device)
        self.held: dict[int, list[int]] = {}  # rows of each rank, by slot

    def layer(self, attention: Attention) -> LayerCache:
        """A share of the rows."""
        return ContextLayer(self, attention, self.capacity // self.axis.size)

    def owner(self, position: int) -> int:
        """Return the rank that holds ``position`` of the prompt that is being read."""
        return next(rank for rank, read in enumerate(self.read) if position in read)

    def open(self, work: Work) -> tuple[Tensor, Tensor]:
        """Decide who keeps which of the new rows, and write down their positions."""
        tokens_BS, positions_BS = super().open(work)
        self.prefilling = work.is_prefill
        if work.is_prefill:
            return self.open_prompt(work, tokens_BS)
        mine = []
        for row, (slot, start) in enumerate(zip(work.slots, work.starts, strict=True)):
            held = self.held[slot]
            keeper = held.index(min(held))
            if keeper == self.axis.rank:
                mine.append((row, slot, held[keeper]))
                self.positions_NT[slot, held[keeper]] = start
            held[keeper] += 1
        kept = torch.tensor(mine, dtype=torch.int64, device=self.device).view(-1, 3)
        self.kept_B, self.slots_B, self.rows_B = kept.unbind(1)
        return tokens_BS, positions_BS

    def open_prompt(self, work: Work, tokens_1S: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens of one prompt, padded, and their positions."""
        n, slot = self.axis.size, work.slots[0]
        length = padded(work.width, n, self.layout)
        chunks = torch.arange(length).view(n * self.layout.per_rank, -1)
        self.read = [  # positions, by rank
            chunks[list(self.layout.chunks(rank, n))].flatten().tolist() for rank in range(n)
        ]
        self.held[slot] = [sum(p < work.width for p in read) for read in self.read]
        mine_s = torch.tensor(self.read[self.axis.rank], device=self.device)
        self.real = slice(0, self.held[slot][self.axis.rank])  # padding is at the end
        self.positions_NT[slot] = NOWHERE
        self.positions_NT[slot, self.real] = mine_s[self.real]
        tokens_1S = torch.nn.functional.pad(tokens_1S, (0, length - work.width))
        return tokens_1S[:, mine_s], mine_s


class ContextLayer(LayerCache):
    """The rows of one layer on this rank."""

    cache: ContextCache

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        """Attention on the rows of all ranks, (B, S, H, K)."""
        cache = self.cache
        if cache.prefilling:
            slot, real = cache.slots_B1[0, 0], cache.real
            self.keys_NTGK[slot, real] = k_BSGK[0, real]
            self.values_NTGK[slot, real] = v_BSGK[0, real]
            return cache.prefill(q_BSHK, k_BSGK, v_BSGK, cache.axis, cache.layout)
        self.keys_NTGK[cache.slots_B, cache.rows_B] = k_BSGK[cache.kept_B, 0]
        self.values_NTGK[cache.slots_B, cache.rows_B] = v_BSGK[cache.kept_B, 0]
        slots_B = cache.slots_B1[:, 0]
        seen_BT = cache.positions_NT[slots_B] <= cache.positions_BS
        part = attend_part(q_BSHK, self.keys_NTGK[slots_B], self.values_NTGK[slots_B], seen_BT)
        return join_parts(comm.all_gather(part[None], cache.axis)).to(q_BSHK.dtype)


def attend_part(q_B1HK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, seen_BT: Tensor) -> Tensor:
    """Attention of one query a sequence on some rows: out and its log-sum-exp, (B, 1, H, K+1).

    Where no row is seen: 0, and a log-sum-exp of minus infinity.
    """
    wide = accumulation_dtype(q_B1HK.dtype)
    q_BGRK = q_B1HK[:, 0].unflatten(1, (k_BTGK.shape[2], -1)).to(wide)
    scores_BGRT = torch.einsum("bgrk,btgk->bgrt", q_BGRK, k_BTGK.to(wide))
    scores_BGRT = scores_BGRT * q_B1HK.shape[-1] ** -0.5
    scores_BGRT = scores_BGRT.masked_fill(~seen_BT[:, None, None], -torch.inf)
    lse_BGR1 = scores_BGRT.logsumexp(-1, keepdim=True)
    p_BGRT = (scores_BGRT - lse_BGR1.masked_fill(lse_BGR1 == -torch.inf, 0.0)).exp()
    out_BGRK = torch.einsum("bgrt,btgk->bgrk", p_BGRT, v_BTGK.to(wide))
    return torch.cat((out_BGRK, lse_BGR1), -1).flatten(1, 2)[:, None]


def join_parts(parts: Tensor) -> Tensor:
    """(n, B, 1, H, K+1) as of :func:`attend_part` to attention on all rows, (B, 1, H, K)."""
    out, lse = parts[..., :-1], parts[..., -1:]
    return (out * (lse - lse.logsumexp(0)).exp()).sum(0)
