"""Expert parallelism: each rank holds some of the experts, and tokens are sent to their experts.

Lepikhin et al. 2020, GShard, arXiv:2006.16668. Rank r of n holds experts r E/n up to (r+1) E/n; all
other parameters are replicated. The ranks hold different tokens: expert parallelism uses the ranks
of data parallelism. A layer has four steps:

    route     this rank's tokens, with the replicated router
    dispatch  send the row of each pair to the rank of its expert        all-to-all, uneven
    experts   apply each expert to its rows from all ranks
    combine   send the results back, weight them there and add them up   all-to-all, uneven

Backward makes the same two exchanges in reverse, so that each row with an expert on another rank is
sent four times. Router weights are never sent: they are applied on the rank of the token.

Gradients. After the backward of dispatch, an expert's gradient is the sum over the tokens of its n
ranks. It still has to be summed over the ranks that hold the same experts (``mesh.edp``). Other
gradients are summed over all data ranks (``mesh.dp_cp``). No sum is divided: every rank has divided
its loss by the tokens of all ranks. Averaging expert gradients over ``edp`` while the rest is
averaged over ``dp`` makes them n times too large, the classic mistake (DeepSpeed #5259, pytorch
#160285).

Letters as in :mod:`course_lib.ep.moe`; A rows that arrive at this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.ep.decoder import moe_layers
from course_lib.ep.moe import Load, MoE, Routes
from course_lib.mesh import Axis
from course_lib.model import Decoder


def parallelize(model: Decoder, ep: Axis, data: Axis, rows: Axis | None = None) -> Decoder:
    """Reduce each MoE layer of the single-process ``model`` to this rank's experts, in place.

    ``data`` are all ranks that hold different tokens (``mesh.dp_cp``), those of ``ep`` among them;
    under sequence parallelism the ranks of ``rows`` (``mesh.tp``) hold different tokens too.
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
            block.ffn = ExpertParallelMoE(block.ffn, ep, data, rows)
    return model


class ExpertParallelMoE(MoE):
    """This rank's part of ``moe``: its own experts, the replicated router and shared expert."""

    def __init__(self, moe: MoE, ep: Axis, data: Axis, rows: Axis | None = None) -> None:
        names = list(moe.experts)
        if len(names) != moe.router.out_features:
            raise ValueError(
                "the experts are divided among ranks already: parallelize a full model, once"
            )
        if len(names) % ep.size:
            raise ValueError(
                f"{len(names)} experts cannot be shared by the {ep.size} ranks of axis {ep.name}: "
                "every rank holds equally many; choose another number of experts or ranks"
            )
        own = len(names) // ep.size
        mine = names[ep.rank * own : (ep.rank + 1) * own]
        experts = {name: moe.experts[name] for name in mine}
        super().__init__(moe.router, experts, moe.top_k, moe.capacity_factor, moe.shared)
        self.ep, self.data, self.rows = ep, data, rows
        for parameter in self.experts.parameters() if ep.size > 1 else ():
            comm.set_shard_spec(parameter, comm.ShardSpec(ep))

    def of_every_rank(self, counts_2E: Tensor) -> Tensor:
        """Gather how many rows each rank sends to each other: receivers must know it first."""
        return comm.all_gather(counts_2E[None], self.ep, control=True)

    def over_all_tokens(self, chosen_E: Tensor) -> Tensor:
        """Sum the counts over all tokens, as the auxiliary loss of the whole batch needs them."""
        chosen_E = comm.all_reduce(chosen_E, self.data, control=True)
        return comm.all_reduce(chosen_E, self.rows, control=True) if self.rows else chosen_E

    def through_experts(self, x_TD: Tensor, routes: Routes, load: Load) -> Tensor:
        """Dispatch, compute, combine."""
        sends, receives, blocks = splits(load, self.ep.rank)
        pairs_P = sorted_by_expert(routes.experts_KT, sum(sends))
        rows_PD = x_TD.index_select(0, pairs_P % max(len(x_TD), 1))
        arrived_AD = comm.all_to_all_v(rows_PD, self.ep, sends, receives)
        done_AD = self.own_experts(arrived_AD, blocks)
        returned_PD = comm.all_to_all_v(done_AD, self.ep, receives, sends)
        return combine(returned_PD, pairs_P, routes.weights_KT)

    def own_experts(self, arrived_AD: Tensor, blocks: Sequence[int]) -> Tensor:
        """Apply each expert to one tensor with its rows of all ranks; return them as they arrived.

        Rows arrive by rank, and within a rank by expert: ``blocks`` are the sizes in that order.
        """
        parts = list(arrived_AD.split(list(blocks)))
        own = len(self.experts)
        for index, expert in enumerate(self.experts.values()):
            rows = torch.cat(parts[index::own])
            parts[index::own] = expert(rows).split(list(blocks[index::own]))
        return torch.cat(parts)


def splits(load: Load, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Return the rows that ``rank`` sends to each rank, receives from each, and by own expert."""
    ranks = len(load.kept)
    own = len(load.kept[0]) // ranks
    held = [slice(owner * own, (owner + 1) * own) for owner in range(ranks)]
    sends = [sum(load.kept[rank][part]) for part in held]
    arriving = [row[held[rank]] for row in load.kept]
    return sends, [sum(row) for row in arriving], [count for row in arriving for count in row]


def sorted_by_expert(experts_KT: Tensor, kept: int) -> Tensor:
    """Return the numbers of the ``kept`` pairs, sorted by expert and so by rank."""
    order_P = experts_KT.flatten().argsort(stable=True)
    return order_P[len(order_P) - kept :]


def combine(rows_PD: Tensor, pairs_P: Tensor, weights_KT: Tensor) -> Tensor:
    """y (T, D): each row to its pair's place, weighted, summed over the experts of each token.

    Each pair has its own place: adding rows straight into y would make the order of the additions,
    and so the rounding, vary from run to run on a GPU. The place of a dropped pair stays 0.
    """
    top_k, tokens = weights_KT.shape
    empty = rows_PD.new_zeros(top_k * tokens, rows_PD.shape[1])
    rows_KTD = empty.index_put((pairs_P,), rows_PD).unflatten(0, (top_k, tokens))
    return (rows_KTD * weights_KT.to(rows_PD.dtype)[..., None]).sum(0)


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return this rank's experts' parameters: their gradients are summed over ``mesh.edp``."""
    return [p for layer in moe_layers(model) for p in layer.experts.parameters()]


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all others, with routers and shared experts: summed over ``mesh.dp_cp``."""
    experts = set(expert_parameters(model))
    return [p for p in model.parameters() if p not in experts]


class ExpertSync:
    """Two gradient syncs as one: ``make`` makes one for the shared and one for the experts'.

    ``make`` is a class like dp.Overlapped or zero.Zero1, called with parameters and an axis.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Iterable[nn.Parameter], Axis], Any],
        *,
        ep: Axis,
        edp: Axis,
        data: Axis,
    ) -> None:
        self.model, self.ep, self.axis = model, ep, data
        self.syncs = (
            make(shared_parameters(model), data),
            make(expert_parameters(model), edp),
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A backward inside sends tokens, but no gradients of parameters."""
        with ExitStack() as both:
            for sync in self.syncs:
                both.enter_context(sync.accumulate())
            yield

    def finish(self) -> None:
        """Call it once per step, after the last backward."""
        for sync in self.syncs:
            sync.finish()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients to a global norm of at most ``max_norm``; return the norm before.

        By the norm of its own experts alone each rank would scale the shared ones by another
        factor. Raises ValueError where gradients are not in ``.grad``, as under ZeRO.
        """
        held = comm.held_gradients(self.model.parameters())
        return comm.clip_grad_norm(held, [self.ep], max_norm)
