"""Lesson 10: wrong and right answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor, nn

from course_lib import comm, ep
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, make_mesh

REFUSAL = "this is what you are asked to write"
Experts = Sequence[nn.Module]
Expert = Callable[[Tensor], Tensor]
Routes = list[dict[int, float]]


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("10-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 10-2
def _in_place(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    if edp.size > 1:
        dist.all_reduce(gradient, group=edp.group)
    return gradient


def _raw(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    return _in_place(gradient.clone(), ep, edp, data)


def _some_of_all(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    """All gradients to all ranks, then those of the holders."""
    every = comm.all_gather(gradient[None], data)
    return every[data.rank % ep.size :: ep.size].sum(0)


def _without_group(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    """The group of an axis of one rank is None, which torch takes for the world."""
    total = gradient.clone()
    dist.all_reduce(total, group=edp.group)
    return total


def _does_not_wait(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    total = gradient.clone()
    if edp.size > 1:
        dist.all_reduce(total, group=edp.group, async_op=True)
        dist.barrier(group=edp.group)
    return total


# --- 10-3
def _by_torch(logits: list[list[float]], choices: int, room: int, **how: Any) -> Routes:
    p_TE = torch.tensor(logits, **how).softmax(-1)
    weights_TC, experts_TC = p_TE.topk(choices)
    if choices > 1:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return _assigned(weights_TC.tolist(), experts_TC.tolist(), p_TE.shape[1], room)


def _assigned(
    weights: list[list[float]], experts: list[list[int]], number: int, room: int
) -> Routes:
    left, served = [room] * number, [{} for _ in weights]  # type: Any
    for choice in range(len(weights[0])):
        for token, each in enumerate(experts):
            if left[each[choice]]:
                left[each[choice]] -= 1
                served[token][each[choice]] = weights[token][choice]
    return served


def _overflows(logits: list[list[float]], choices: int, room: int) -> Routes:
    """Softmax without the maximum."""
    experts, weights = [], []
    for row in logits:
        powers = [math.exp(each) for each in row]
        best = sorted(range(len(row)), key=lambda e: -row[e])[:choices]
        total = sum(powers[e] for e in best) if choices > 1 else sum(powers)
        experts.append(best)
        weights.append([powers[e] / total for e in best])
    return _assigned(weights, experts, len(logits[0]), room)


def _sorts_in_place(logits: list[list[float]], choices: int, room: int) -> Routes:
    served = _by_torch(logits, choices, room, dtype=torch.float64)
    for row in logits:
        row.sort(reverse=True)
    return served


def _by_the_library(logits: list[list[float]], choices: int, room: int) -> Any:
    return ep.route(torch.tensor(logits, dtype=torch.float64), choices, room)


# --- 10-4
def _moe(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis,
    *, send: Any = comm.all_to_all_v, unsort: bool = True, weigh: int = 1, regroup: bool = True,
    first: bool = False, bias: bool = True,
) -> Tensor:  # fmt: skip
    """Right, or with a mistake."""
    n, own, choices = axis.size, len(experts), experts_TC.shape[1]
    wanted_P = experts_TC.flatten()
    order_P = wanted_P.argsort(stable=True)
    counts_E = wanted_P.bincount(minlength=n * own)
    blocks = comm.all_gather(counts_E[None], axis).unflatten(1, (n, own))[:, axis.rank]
    sends, receives = counts_E.view(n, own).sum(1).tolist(), blocks.sum(1).tolist()
    arrived = send(x[order_P // choices], axis, sends, receives)
    parts = list(arrived.split((blocks if regroup else blocks.t()).flatten().tolist()))
    for place, part in enumerate(parts):
        expert: Any = experts[0 if first else place % own if regroup else place // n]
        parts[place] = expert(part) if bias else part @ expert.weight.T + expert.bias.detach()
    returned = send(torch.cat(parts), axis, receives, sends)
    rows = returned
    if unsort:
        rows = returned.new_empty(returned.shape).index_copy(0, order_P, returned)
    y = rows.unflatten(0, (-1, choices))
    for _ in range(weigh):
        y = y * weights_TC[..., None]
    return y.sum(1)


def _but(**mistake: Any) -> Answer:
    return lambda x, e, w, experts, axis: _moe(x, e, w, experts, axis, **mistake)


def _without_zeros(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Sends no row whose weight is 0: right, except for the gradient of this weight."""
    seen_P = (weights_TC.flatten() != 0).nonzero()[:, 0]
    one_TC = weights_TC.flatten()[seen_P][:, None]
    tokens_P = seen_P // experts_TC.shape[1]
    rows = _moe(x[tokens_P], experts_TC.flatten()[seen_P][:, None], one_TC, experts, axis)
    return torch.zeros_like(x).index_add(0, tokens_P, rows)


def _sums_to_1(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Does not weigh a single choice."""
    return _moe(x, experts_TC, weights_TC, experts, axis, weigh=min(1, weights_TC.shape[1] - 1))


def _moe_otherwise(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """First choices first; numbers of experts are sent as rows; results are added in place."""
    tokens, own = len(experts_TC), len(experts)
    wanted = experts_TC.t().reshape(-1)
    order = torch.sort(wanted, stable=True).indices
    home = wanted[order] // own
    sends = [int((home == rank).sum()) for rank in range(axis.size)]
    table = comm.all_gather(torch.tensor([sends]), axis)
    receives = table[:, axis.rank].tolist()
    arrived = comm.all_to_all_v(x.index_select(0, order % tokens), axis, sends, receives)
    numbers = comm.all_to_all_v(wanted[order], axis, sends, receives)
    done = torch.zeros_like(arrived)
    for index, expert in enumerate(experts):
        mine = (numbers == axis.rank * own + index).nonzero()[:, 0]
        done = done.index_copy(0, mine, expert(arrived[mine]))
    back = comm.all_to_all_v(done, axis, receives, sends)
    weighted = back * weights_TC.t().reshape(-1)[order, None]
    return torch.zeros_like(x).index_add(0, order % tokens, weighted)


def _gathers_tokens(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Every token to all ranks: padded to one length, gathered, and the results summed."""
    missing = int(comm.all_reduce_max(torch.tensor(len(x)), axis)) - len(x)

    def pad(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(missing, *t.shape[1:])])

    everyone = comm.gather_from_sequence(pad(x), axis)
    chosen = comm.all_gather(pad(experts_TC), axis)
    weights = comm.gather_from_sequence(pad(weights_TC), axis)
    y = torch.zeros_like(everyone)
    for index, expert in enumerate(experts):
        weight = (weights * (chosen == axis.rank * len(experts) + index)).sum(1, keepdim=True)
        y = y + expert(everyone) * weight
    return comm.reduce_scatter_to(y, axis)[: len(x)]


def _own_experts(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """No row is sent: this rank's experts in place of all."""
    every = torch.stack([expert(x) for expert in experts], 1)
    rows = every[torch.arange(len(x))[:, None], experts_TC % len(experts)]
    return (rows * weights_TC[..., None]).sum(1)


def _exchanged(t: Tensor, axis: Axis, sends: list[int], receives: list[int]) -> Tensor:
    return comm.all_to_all_v(t, axis, receives, sends)


def _detached(t: Tensor, axis: Axis, sends: list[int], receives: list[int]) -> Tensor:
    return comm.all_to_all_v(t.detach(), axis, sends, receives)


def _in_the_world(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Right on the axis, and the counts go to the world."""
    comm.all_gather(experts_TC[:1], make_mesh().world)
    return _moe(x, experts_TC, weights_TC, experts, axis)


def _weighs_in_place(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Writes the sorted numbers of experts into its input."""
    y = _moe(x, experts_TC, weights_TC, experts, axis)
    experts_TC.copy_(experts_TC.sort(1).values.flip(1) - 1)
    return y


def _by_library(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    counts = experts_TC.flatten().bincount(minlength=axis.size * len(experts))
    table = tuple(map(tuple, comm.all_gather(counts[None], axis).tolist()))
    sends, receives, _ = ep.parallel.splits(ep.Load(table, table), axis.rank)
    return comm.all_to_all_v(x, axis, sends, receives)


# --- 10-5
def _through(
    x_TD: Tensor, experts_T: Tensor, expert: Expert,
    *, sort: bool = True, unsort: bool = True, inverse: bool = True, back: bool = True,
    wait: bool = True,
) -> Tensor:  # fmt: skip
    """Right, or with a mistake."""
    order_T = experts_T.argsort(stable=True) if sort else torch.arange(len(x_TD))
    sends_N = experts_T.bincount(minlength=dist.get_world_size())
    receives_N = torch.empty_like(sends_N)
    dist.all_to_all_single(receives_N, sends_N)
    sends, receives = sends_N.tolist(), receives_N.tolist()
    arrived = x_TD.new_empty(sum(receives), x_TD.shape[1])
    dist.all_to_all_single(arrived, x_TD[order_T], receives, sends)
    done = expert(arrived)
    if not back:
        return done
    returned = torch.empty_like(x_TD)
    dist.all_to_all_single(returned, done, sends, receives, async_op=not wait)
    if not wait:
        dist.barrier()
    if not unsort:
        return returned
    if not inverse:
        return returned[order_T]
    y_TD = torch.empty_like(returned)
    y_TD[order_T] = returned
    return y_TD


def _through_but(**mistake: Any) -> Answer:
    return lambda x_TD, experts_T, expert: _through(x_TD, experts_T, expert, **mistake)


def _through_otherwise(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    """Counts by all-gather; the inverse permutation."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = torch.tensor([int((experts_T == each).sum()) for each in range(n)])
    table = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(table, own)
    receives = [int(line[rank]) for line in table]
    values, order = torch.sort(experts_T, stable=True)
    arrived = torch.empty(sum(receives), x_TD.shape[1], dtype=x_TD.dtype)
    dist.all_to_all_single(arrived, x_TD[order].contiguous(), receives, own.tolist())
    returned = torch.empty(len(values), x_TD.shape[1], dtype=x_TD.dtype)
    dist.all_to_all_single(returned, expert(arrived), own.tolist(), receives)
    return returned[order.argsort()]


def _gathered(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    """All tokens to all ranks, padded; each expert computes all of them."""
    n = dist.get_world_size()
    longest = torch.tensor(len(x_TD))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = x_TD.new_zeros(int(longest), x_TD.shape[1])
    padded[: len(x_TD)] = x_TD
    every = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(every, padded)
    done = torch.cat([expert(rows) for rows in every])
    found = [torch.empty_like(done) for _ in range(n)]
    dist.all_gather(found, done)
    first = dist.get_rank() * int(longest)
    mine = torch.stack([one[first : first + len(x_TD)] for one in found])
    return mine[experts_T, torch.arange(len(x_TD))]


def _even(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    """All blocks as large as the largest: no counts are sent but one."""
    n = dist.get_world_size()
    sends = experts_T.bincount(minlength=n)
    room = sends.max()
    dist.all_reduce(room, op=dist.ReduceOp.MAX)
    order = experts_T.argsort(stable=True)
    place = torch.arange(len(order)) - (sends.cumsum(0) - sends)[experts_T[order]]
    place = place + experts_T[order] * int(room)
    packed = x_TD.new_zeros(n * int(room), x_TD.shape[1])
    packed[place] = x_TD[order]
    arrived, returned = torch.empty_like(packed), torch.empty_like(packed)
    dist.all_to_all_single(arrived, packed)
    dist.all_to_all_single(returned, expert(arrived))
    y_TD = torch.empty_like(x_TD)
    y_TD[order] = returned[place]
    return y_TD


def _float32(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    return _through(x_TD, experts_T, expert).float()


def _by_comm(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    sends = experts_T.bincount(minlength=dist.get_world_size())
    axis = make_mesh().world
    receives = comm.all_gather(sends[None], axis)[:, axis.rank].tolist()
    return comm.all_to_all_v(x_TD[experts_T.argsort()], axis, sends.tolist(), receives)


ATTACKS = {
    "10-1": Attacks(
        wrong=(
            Wrong(_table(dropped=None), words="'dropped' is not filled in yet"),
            Wrong(_table(rows=[0, 1, 2, 1, 2]), words="expected 6 values, got 5 values"),
        ),
        right=(
            _table(imbalance=Fraction(7, 6), splits=((4, 2), (3, 3))),
            _table(bytes=[2 * (2 + 3) * 8 * 4] * 2, balance=4 * 1.7 / 6),
            {**_table(), "summed with": {5, 1}},
        ),
    ),
    "10-2": Attacks(
        wrong=(
            Wrong(lambda g, ep, edp, data: None, words="to be a tensor, got None"),
            Wrong(lambda g, ep, edp, data: g, words="other groups hold the same experts"),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(g, edp) / edp.size,
                words="averaged over edp",
            ),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(g, edp) / data.size,
                words="divided by the number of data ranks",
            ),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(g, data),
                words="summed over all data ranks",
            ),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(g, data) / data.size,
                words="averaged over all data ranks",
            ),
            Wrong(lambda g, ep, edp, data: comm.all_reduce(g, ep), words="summed over ep"),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(comm.all_reduce(g, ep), edp),
                words="summed over all data ranks",
            ),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(g, edp) * ep.size, words="times too large"
            ),
            Wrong(
                lambda g, ep, edp, data: comm.all_reduce(g * 2 / edp.size, edp),
                words="times too small",
            ),
            Wrong(
                lambda g, ep, edp, data: comm.all_gather(g[None], edp).sum(0),
                words="One all-reduce over edp",
            ),
            Wrong(_some_of_all, words="all_gather of"),
            Wrong(_in_place, words="the answer wrote into it"),
            Wrong(_without_group, words="none if edp has one rank"),
            Wrong(_does_not_wait, words="rank 0"),
        ),
        right=(lambda g, ep, edp, data: comm.all_reduce(g, edp), _raw),
    ),
    "10-3": Attacks(
        wrong=(
            Wrong(lambda logits, choices, room: None, words="expected a list of dicts"),
            Wrong(
                lambda logits, choices, room: [[0]] * len(logits), words="expected a list of dicts"
            ),
            Wrong(lambda logits, choices, room: [{} for _ in logits], words="expected {"),
            Wrong(_overflows, words="raised "),
            Wrong(_sorts_in_place, words="changed its argument logits"),
            Wrong(lambda *given: _by_torch(*given, dtype=torch.float16), words="expected {"),
            Wrong(lambda logits, c, room: _by_torch(logits, c, min(room, 2)), words="expected {"),
            Wrong(_by_the_library, words=REFUSAL),
        ),
        right=(
            _by_torch,
            lambda *given: _by_torch(*given, dtype=torch.float64),
            lambda *given: tuple(
                {np.int64(e): np.float64(w) for e, w in each.items()} for each in _by_torch(*given)
            ),
        ),
    ),
    "10-4": Attacks(
        wrong=(
            Wrong(lambda x, e, w, experts, axis: None, words="to be a tensor, got None"),
            Wrong(lambda x, e, w, experts, axis: x * 1, words="outputs: wrong on every rank"),
            Wrong(_but(unsort=False), words="rows came back sorted by expert"),
            Wrong(_but(weigh=0), words="without their weights"),
            Wrong(_but(weigh=2), words="the weights are applied twice"),
            Wrong(_but(regroup=False), words="split as if they were sorted by expert"),
            Wrong(_but(first=True), words="experts[0] computed all rows"),
            Wrong(_but(send=_detached), words="no gradient reached x_TD"),
            Wrong(_but(bias=False), words="gradient of the bias of experts[0]"),
            Wrong(_without_zeros, words="gradient of weights_TC: wrong"),
            Wrong(_sums_to_1, words="without their weights"),
            Wrong(_own_experts, words="each rank used its own experts"),
            Wrong(_but(send=_exchanged), words="send_counts"),
            Wrong(_gathers_tokens, words="all-to-alls of rows"),
            Wrong(_in_the_world, words="expected its calls to use the group of the axis"),
            Wrong(_weighs_in_place, words="the answer wrote into it"),
            Wrong(_by_library, words=REFUSAL),
        ),
        right=(_moe, _moe_otherwise),
    ),
    "10-5": Attacks(
        wrong=(
            Wrong(lambda x, e, expert: None, words="to be a tensor, got None"),
            Wrong(lambda x, e, expert: x.clone(), words="no expert computed them"),
            Wrong(lambda x, e, expert: expert(x), words="the expert of its own rank"),
            Wrong(_through_but(unsort=False), words="put each into its token's place"),
            Wrong(_through_but(inverse=False), words="y[order] = returned is the inverse"),
            Wrong(_through_but(sort=False), words="were not sorted before they were sent"),
            Wrong(_through_but(back=False), words="send them back"),
            Wrong(_through_but(wait=False), words="never waited for it"),
            Wrong(_gathered, words="all_gather of"),
            Wrong(_even, words="expected 2 all-to-alls of rows"),
            Wrong(_float32, words="of torch.float64 on rank"),
            Wrong(
                lambda x, e, expert: x.copy_(_through(x, e, expert)),
                words="the answer wrote into it",
            ),
            Wrong(_by_comm, words=REFUSAL),
        ),
        right=(_through, _through_otherwise),
    ),
}
