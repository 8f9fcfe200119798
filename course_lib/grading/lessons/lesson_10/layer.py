"""10-4: tokens travel to their experts and back, with gradients, on real ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from course_lib import comm, ep
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_10.rows_sent import wrongly_sent
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh

TWO, FOUR, SKEWED, ONE = range(4)
TRIALS = (Trial(2, 2), Trial(4, 1), Trial(3, 2), Trial(1, 4))  # size: experts of a rank
CHOICES, HIDDEN = 2, 16
REFUSAL = "this is what you are asked to write"
Experts = Sequence[nn.Module]


def _tokens(trial: Trial, rank: int) -> int:
    """Other numbers of tokens on each rank."""
    return 5 + 2 * (rank % 3)


def _every_expert(trial: Trial, seed: int) -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    experts = []
    for _ in range(trial.n * trial.size):
        linear = nn.Linear(HIDDEN, HIDDEN)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)
        experts.append(linear)
    return experts


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """x, experts and weights of this rank's tokens; dy; trial, rank and seed to make experts."""
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    tokens, experts = _tokens(trial, rank), trial.n * trial.size
    x_TD, dy_TD = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    liking_TE = torch.rand(tokens, experts, generator=generator)
    if TRIALS.index(trial) == SKEWED:
        liking_TE[:, 0] += 1  # everybody wants expert 0, and nobody the last one
        liking_TE[:, -1] -= 1
    experts_TC = liking_TE.topk(CHOICES).indices
    weights_TC = torch.rand(tokens, CHOICES, generator=generator) + 0.1
    return x_TD, experts_TC, weights_TC, dy_TD, trial, rank, seed


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    x_TD, experts_TC, weights_TC, dy_TD, trial, rank, seed = inputs
    mine = _every_expert(trial, seed)[rank * trial.size : (rank + 1) * trial.size]
    x, weights = x_TD.clone().requires_grad_(), weights_TC.clone().requires_grad_()
    with WireCalls() as forward:
        y = answers[0](x, experts_TC.clone(), weights, mine, mesh.world)
    found: dict[str, Any] = {
        "y": y.detach() if isinstance(y, Tensor) else y,
        "forward": forward.calls,
    }
    if not (isinstance(y, Tensor) and y.requires_grad):
        return found
    with WireCalls() as backward:
        y.backward(dy_TD)
    found |= {"x": x.grad, "weights": weights.grad, "backward": backward.calls}
    found["experts"] = [None if e.weight.grad is None else e.weight.grad.clone() for e in mine]
    return found


@cache
def _serial(trial: Trial, seed: int) -> dict[str, list[Any]]:
    """One process with all tokens and experts; all by rank."""
    experts = _every_expert(trial, seed)
    found: dict[str, list[Any]] = defaultdict(list)
    for rank in range(trial.n):
        x_TD, experts_TC, weights_TC, dy_TD, *_ = _inputs(trial, rank, seed)
        x, weights = x_TD.requires_grad_(), weights_TC.requires_grad_()
        all_TED = torch.stack([expert(x) for expert in experts], 1)
        rows_TCD = all_TED[torch.arange(len(x))[:, None], experts_TC]
        y = (rows_TCD * weights[..., None]).sum(1)
        y.backward(dy_TD)
        found["y"].append(y.detach())
        found["x"].append(x.grad)
        found["weights"].append(weights.grad)
        found["plain"].append(rows_TCD.sum(1).detach())
        order = experts_TC.flatten().argsort(stable=True)
        came_TCD = rows_TCD.flatten(0, 1)[order].view_as(rows_TCD)
        found["as they came"].append((came_TCD * weights[..., None]).sum(1).detach())
        found["sent"].append(experts_TC)
    grads = [expert.weight.grad for expert in experts]
    found["experts"] = [
        grads[rank * trial.size : (rank + 1) * trial.size] for rank in range(trial.n)
    ]
    return found


def _outputs(seen: Seen) -> str:
    serial = _serial(seen.trial, seen.seed)
    got = [value["y"] for value in seen.values]
    says = difference("outputs", got, serial["y"])
    if not says:
        return ""
    if not difference("", got, serial["plain"]):
        return f"the results are added up without their weights ({says})"
    if not difference("", got, serial["as they came"]):
        return (
            "rows came home sorted by expert, and were taken for the pairs in order: put each "
            f"into its pair's place ({says})"
        )
    return says


def _input_gradients(seen: Seen) -> str:
    serial = _serial(seen.trial, seen.seed)
    for name, what in (("x", "gradients of x"), ("weights", "gradients of the weights")):
        got = [value.get(name) for value in seen.values]
        if any(one is None for one in got):
            return (
                f"no {what} arrived: comm.all_to_all_v carries gradients back only if its input "
                "was not detached"
            )
        if says := difference(what, got, serial[name]):
            return says
    return ""


def _expert_gradients(seen: Seen) -> str:
    serial = _serial(seen.trial, seen.seed)
    for rank, value in enumerate(seen.values):
        got = value.get("experts") or [None] * seen.trial.size
        for number, (one, right) in enumerate(zip(got, serial["experts"][rank], strict=True)):
            name = rank * seen.trial.size + number
            if one is None and not right.any():
                continue  # nobody chose it: none will do
            if one is None:
                return f"no gradient reached expert {name}, on rank {rank}"
            if says := difference(f"gradients of expert {name}", [one], [right]):
                return says.replace("rank 0", f"rank {rank}").replace("every rank", "its rank")
    return ""


def _calls(seen: Seen) -> str:
    """Two all-to-alls of the pairs' rows each way; what steers them is small."""
    own = seen.trial.size
    chosen = torch.cat([each.flatten() for each in _serial(seen.trial, seen.seed)["sent"]])
    row = 4 * HIDDEN
    for rank, value in enumerate(seen.values):
        leaving = row * CHOICES * _tokens(seen.trial, rank)
        arriving = row * int((chosen // own == rank).sum())
        for phase in ("forward", "backward"):
            if said := wrongly_sent(value[phase], leaving, arriving):
                return (
                    f"{phase}: rank {rank} sent {said}; wanted are two all_to_alls, of the "
                    f"{leaving} bytes of its pairs and of the {arriving} that it computes"
                )
    return ""


def _right(
    x: Tensor,
    experts_TC: Tensor,
    weights_TC: Tensor,
    experts: Experts,
    axis: Axis,
    *,
    swap: Any = comm.all_to_all_v,
    unsort: bool = True,
    weigh: int = 1,
    regroup: bool = True,
    first: bool = False,
) -> Tensor:
    """Right, or with a mistake."""
    n, own, choices = axis.size, len(experts), experts_TC.shape[1]
    wanted_P = experts_TC.flatten()
    order_P = wanted_P.argsort(stable=True)
    counts_E = wanted_P.bincount(minlength=n * own)
    blocks = comm.all_gather(counts_E[None], axis).unflatten(1, (n, own))[:, axis.rank]
    sends, receives = counts_E.view(n, own).sum(1).tolist(), blocks.sum(1).tolist()
    arrived = swap(x[order_P // choices], axis, sends, receives)
    parts = list(arrived.split(blocks.flatten().tolist()))
    if not regroup:  # as if rows had come by expert
        parts = list(arrived.split(blocks.t().flatten().tolist()))
    for place, part in enumerate(parts):
        number = place % own if regroup else place // n
        parts[place] = experts[0 if first else number](part)
    returned = swap(torch.cat(parts), axis, receives, sends)
    rows = returned
    if unsort:
        rows = returned.new_empty(returned.shape).index_copy(0, order_P, returned)
    y = rows.unflatten(0, (-1, choices))
    for _ in range(weigh):
        y = y * weights_TC[..., None]
    return y.sum(1)


def _but(**mistake: Any) -> Answer:
    return lambda x, e, w, experts, axis: _right(x, e, w, experts, axis, **mistake)


def _right_otherwise(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """First choices first; experts numbers travel as rows; results added where they belong."""
    tokens = len(experts_TC)
    own = len(experts)
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


def _gathers(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Every token goes everywhere: padded to one length, gathered, and the results summed."""
    longest = int(comm.all_reduce_max(torch.tensor(len(x)), axis))
    room = longest - len(x)

    def pad(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(room, *t.shape[1:])])

    everyone = comm.gather_from_sequence(pad(x), axis)
    chosen = comm.all_gather(pad(experts_TC), axis)
    weights = comm.gather_from_sequence(pad(weights_TC), axis)
    y = torch.zeros_like(everyone)
    for index, expert in enumerate(experts):
        weight = (weights * (chosen == axis.rank * len(experts) + index)).sum(1, keepdim=True)
        y = y + expert(everyone) * weight
    return comm.reduce_scatter_to(y, axis)[: len(x)]


def _at_home(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """Nobody travels: this rank's experts in the place of all."""
    every = torch.stack([expert(x) for expert in experts], 1)
    rows = every[torch.arange(len(x))[:, None], experts_TC % len(experts)]
    return (rows * weights_TC[..., None]).sum(1)


def _swapped(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    """send_counts and receive_counts the wrong way round."""

    def swap(t: Tensor, a: Axis, sends: list[int], receives: list[int]) -> Tensor:
        return comm.all_to_all_v(t, a, receives, sends)

    return _right(x, experts_TC, weights_TC, experts, axis, swap=swap)


def _detached(t: Tensor, a: Axis, sends: list[int], receives: list[int]) -> Tensor:
    return comm.all_to_all_v(t.detach(), a, sends, receives)


def _by_library(
    x: Tensor, experts_TC: Tensor, weights_TC: Tensor, experts: Experts, axis: Axis
) -> Tensor:
    counts = experts_TC.flatten().bincount(minlength=axis.size * len(experts))
    table = tuple(map(tuple, comm.all_gather(counts[None], axis).tolist()))
    sends, receives, _ = ep.parallel.splits(ep.Load(table, table), axis.rank)
    return comm.all_to_all_v(x, axis, sends, receives)


LAYER = Ranked(
    id="10-4",
    title="there and back",
    names=("moe_layer",),
    hints=(
        "Five steps: sort the pairs by expert, tell everybody how many, send, compute, send back. "
        "What must be undone at the end, so that each row finds its token?",
        "order_P = experts_TC.flatten().argsort(stable=True) sorts the pairs; pair p is a row of "
        "token p // C. An all_gather of the counts of all experts tells every rank what comes. "
        "Rows arrive by rank and within a rank by expert: split them into n times e pieces.",
        "table = comm.all_gather(counts_E[None], axis).unflatten(1, (n, e))[:, axis.rank] are the "
        "pieces; sends = counts_E.view(n, e).sum(1).tolist(), receives = table.sum(1).tolist(). "
        "Piece number i goes through experts[i % e]. Back: comm.all_to_all_v(done, axis, receives, "
        "sends), then torch.empty_like(rows).index_copy(0, order_P, rows).",
    ),
    wrong=(
        Wrong(lambda x, e, w, experts, axis: None, words="from rank 0, got a NoneType"),
        Wrong(lambda x, e, w, experts, axis: x, words="outputs are wrong on every rank"),
        Wrong(_but(unsort=False), words="rows came home sorted by expert"),
        Wrong(_but(weigh=0), words="without their weights"),
        Wrong(_but(weigh=2), words="outputs are wrong on every rank"),
        Wrong(_but(regroup=False), words="outputs are wrong"),
        Wrong(_but(first=True), words="outputs are wrong"),
        Wrong(_but(swap=_detached), words="no gradients of x arrived"),
        Wrong(_at_home, words="outputs are wrong on every rank"),
        Wrong(_swapped, words="send_counts"),
        Wrong(_gathers, words="sent"),
        Wrong(_by_library, words=REFUSAL),
    ),
    right=(_right, _right_otherwise),
    stub=lambda x, e, w, experts, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks, two experts each", TWO, _outputs),
        RankCase("gradients", "of x and the weights, two ranks", TWO, _input_gradients),
        RankCase("gradients", "of the experts, two ranks", TWO, _expert_gradients),
        RankCase("outputs", "four ranks, one expert each", FOUR, _outputs),
        RankCase("gradients", "of the experts, four ranks", FOUR, _expert_gradients),
        RankCase("outputs", "three ranks, one expert that all want", SKEWED, _outputs),
        RankCase("gradients", "of x and the weights, three ranks", SKEWED, _input_gradients),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("wire", "the rows of the pairs, and no others", FOUR, _calls),
    ),
    refused=(
        "course_lib.ep.parallel:ExpertParallelMoE.through_experts",
        "course_lib.ep.parallel:ExpertParallelMoE.own_experts",
        "course_lib.ep.parallel:splits",
        "course_lib.ep.parallel:sorted_by_expert",
        "course_lib.ep.parallel:combine",
    ),
)
