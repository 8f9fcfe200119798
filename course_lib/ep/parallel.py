"""Expert parallelism: the ranks share the experts out, and tokens travel to them and back.

Lepikhin et al. 2020, GShard, arXiv:2006.16668. Rank r of n holds experts r E/n up to (r+1) E/n, and
everything else whole. The ranks hold different tokens: expert parallelism lives inside data
parallelism and takes no rank of its own. A layer is

    route     on this rank's tokens, the router being replicated
    dispatch  the row of each pair goes to the rank of its expert       all-to-all, uneven
    experts   each on its rows from all ranks
    combine   the result goes back, is weighted there and added up      all-to-all, uneven

and backward makes the same journeys the other way round: four times the pairs whose expert is
elsewhere. Weights stay at home: only rows of D travel, and the gradient of a weight is made where
its token is.

Gradients. Through dispatch's backward an expert has the sum over all tokens of its n ranks already:
what is missing is the sum over the ranks that hold the same experts (``mesh.edp``). All else is
summed over all data (``mesh.dp_cp``). No sum is divided: every rank has divided its loss by the
tokens of all ranks. Averaging expert gradients over ``edp`` while the rest is averaged over ``dp``
makes them n times too large, the classic mistake (DeepSpeed #5259, pytorch #160285).

Letters as in :mod:`course_lib.ep.moe`; A rows that arrive at this rank's experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from course_lib import comm
from course_lib.ep.decoder import moe_layers
from course_lib.ep.moe import Load, MoE, Routes
from course_lib.mesh import Axis
from course_lib.model import Decoder


def parallelize(model: Decoder, ep: Axis, data: Axis) -> Decoder:
    """Keep this rank's experts of every MoE layer of the serial ``model``, in place.

    ``data`` are all ranks that hold different tokens (``mesh.dp_cp``), those of ``ep`` among them.
    Call it before an optimizer takes the parameters. Raises ValueError for a number of experts
    that the ranks cannot share, and for an ``ep`` that is no part of ``data``.
    """
    if not set(ep.ranks) <= set(data.ranks):
        raise ValueError(
            f"ranks {ep.ranks} of axis {ep.name} are not all among {data.ranks} of axis "
            f"{data.name}: experts are shared by ranks that hold different tokens; give mesh.ep "
            "and mesh.dp_cp"
        )
    moe_layers(model)  # or a ValueError
    for block in model.blocks:
        if isinstance(block.ffn, MoE):
            block.ffn = ExpertParallelMoE(block.ffn, ep, data)
    return model


class ExpertParallelMoE(MoE):
    """This rank's share of ``moe``: its experts, and router and shared expert whole."""

    def __init__(self, moe: MoE, ep: Axis, data: Axis) -> None:
        names = list(moe.experts)
        if len(names) != moe.router.out_features:
            raise ValueError("the experts are shared out already: parallelize a serial model once")
        if len(names) % ep.size:
            raise ValueError(
                f"{len(names)} experts cannot be shared by the {ep.size} ranks of axis {ep.name}: "
                "every rank holds equally many; choose another number of experts or ranks"
            )
        own = len(names) // ep.size
        mine = names[ep.rank * own : (ep.rank + 1) * own]
        experts = {name: moe.experts[name] for name in mine}
        super().__init__(moe.router, experts, moe.choices, moe.capacity, moe.shared)
        self.ep, self.data = ep, data

    def of_every_rank(self, counts_2E: Tensor) -> Tensor:
        """Who sends how much to whom: every rank must know before rows can travel."""
        return comm.all_gather(counts_2E[None], self.ep, control=True)

    def over_all_tokens(self, chosen_E: Tensor) -> Tensor:
        """So that the ranks' auxiliary losses add up to that of the whole batch."""
        return comm.all_reduce(chosen_E, self.data, control=True)

    def through_experts(self, x_TD: Tensor, routes: Routes, load: Load) -> Tensor:
        """Dispatch, compute, combine."""
        sends, receives, blocks = splits(load, self.ep.rank)
        pairs_P = sorted_by_expert(routes.experts_CT, sum(sends))
        rows_PD = x_TD.index_select(0, pairs_P % max(len(x_TD), 1))
        arrived_AD = comm.all_to_all_v(rows_PD, self.ep, sends, receives)
        done_AD = self.own_experts(arrived_AD, blocks)
        returned_PD = comm.all_to_all_v(done_AD, self.ep, receives, sends)
        return combine(returned_PD, pairs_P, routes.weights_CT)

    def own_experts(self, arrived_AD: Tensor, blocks: Sequence[int]) -> Tensor:
        """Each expert on one piece of memory with its rows of all ranks; order as they arrived.

        Rows arrive by rank, and within a rank by expert: ``blocks`` are the sizes in that order.
        """
        parts = list(arrived_AD.split(list(blocks)))
        own = len(self.experts)
        for index, expert in enumerate(self.experts.values()):
            rows = torch.cat(parts[index::own])
            parts[index::own] = expert(rows).split(list(blocks[index::own]))
        return torch.cat(parts)


def splits(load: Load, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Rows that ``rank`` sends to each, receives from each, and those by rank and own expert."""
    ranks = len(load.kept)
    own = len(load.kept[0]) // ranks
    held = [slice(owner * own, (owner + 1) * own) for owner in range(ranks)]
    sends = [sum(load.kept[rank][part]) for part in held]
    arriving = [row[held[rank]] for row in load.kept]
    return sends, [sum(row) for row in arriving], [count for row in arriving for count in row]


def sorted_by_expert(experts_CT: Tensor, kept: int) -> Tensor:
    """Numbers of the ``kept`` pairs, by expert, and so by rank too; dropped ones come first."""
    order_P = experts_CT.flatten().argsort(stable=True)
    return order_P[len(order_P) - kept :]


def combine(rows_PD: Tensor, pairs_P: Tensor, weights_CT: Tensor) -> Tensor:
    """y (T, D): each row to its pair's place, weighted, summed over the choices of each token.

    A place of its own for each pair: rows added straight into y would be added in an order that a
    GPU leaves to chance. A dropped pair's place stays 0.
    """
    choices, tokens = weights_CT.shape
    empty = rows_PD.new_zeros(choices * tokens, rows_PD.shape[1])
    rows_CTD = empty.index_put((pairs_P,), rows_PD).unflatten(0, (choices, tokens))
    return (rows_CTD * weights_CT.to(rows_PD.dtype)[..., None]).sum(0)
