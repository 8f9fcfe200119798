"""Answers to katas 16b-4 to 16b-6 that must be rejected or accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attacks_07 as pipeline
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attack import Attacks
from torch import Tensor, nn

from course_lib import comm, cp
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.graders.runner.lesson_16b import AdamW
from course_lib.mesh import Axis, rank_context

REFUSAL = "this is what you are asked to write"
OUTSIDE = "expected its calls to use the group of the axis"
Group = dist.ProcessGroup
Options = dict[str, Any]


def _axis(group: Group) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis("tp", dist.get_rank(group), len(ranks), ranks, group, rank_context())


# --- 16b-4
def _row(p: int, m: int, rank: int, limit: bool = True) -> pipeline.Row:
    """1F1B. ``limit``: it begins with m forwards at most."""
    begin = min(p - 1 - rank, m) if limit else p - 1 - rank
    row = [("F", mb) for mb in range(begin)]
    for mb in range(m - begin):
        row += [("F", begin + mb), ("B", mb)]
    return row + [("B", mb) for mb in range(max(m - begin, 0), m)]


def _loop(step: pipeline.Step, **row: Any) -> Answer:
    """An answer to 07-5 as one to the kata: it gets its row and a group in place of an axis."""

    def answer(stage: nn.Module, batches: Any, loss: Any, group: Group) -> Any:
        axis = _axis(group)
        return step(_row(axis.size, len(batches), axis.rank, **row), stage, batches, loss, axis)

    return answer


def _in_the_world(stage: nn.Module, batches: Any, loss: Any, group: Group) -> Any:
    return _loop(pipeline.Step())(stage, batches, loss, dist.group.WORLD)


class _GroupRanks(pipeline.Step):
    """Takes the rank in the group for the global rank."""

    def send(self, x: Tensor, to: int) -> None:
        self.messages.append(x.detach().contiguous())
        self.sent.append(dist.isend(self.messages[-1], to, group=self.axis.group))


class _SendsAndWaits(pipeline.Step):
    """Two neighbors that both send wait for each other."""

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.detach().contiguous(), self.axis.ranks[to], group=self.axis.group)


class _IntoTheInput(pipeline.Step):
    def receive(self, like: Tensor, source: int) -> Tensor:
        dist.recv(like.detach(), self.axis.ranks[source], group=self.axis.group)
        return like.detach()


class _AddsUp(pipeline.Step):
    """The loss of the first call is in that of the second."""

    before = 0.0

    def __call__(self, *args: Any) -> float:
        type(self).before += super().__call__(*args)
        return type(self).before


def _keeps_inputs(stage: nn.Module, batches: Any, loss: Any, group: Group) -> Any:
    """The stage's inputs are in a list until the end."""
    inputs: list[Any] = []
    watching = stage.register_forward_pre_hook(lambda _, given: inputs.append(given))
    total = _loop(pipeline.Step())(stage, batches, loss, group)
    watching.remove()
    return total


def _alone(stage: nn.Module, batches: Any, loss: Any, group: Group) -> Any:
    """On one rank, a single backward at the end."""
    if dist.get_world_size(group) > 1:
        return _loop(pipeline.Step())(stage, batches, loss, group)
    total = sum(loss(stage(x), target) for x, target in batches) / len(batches)
    total.backward()
    return total.item()


def _divides_all(stage: nn.Module, batches: Any, loss: Any, group: Group) -> Any:
    """The sum over micro-batches, then .grad / m, with what was in it before."""
    m = len(batches)
    total = _loop(pipeline.Step())(stage, batches, lambda *pair: m * loss(*pair), group)
    for p in stage.parameters():
        p.grad /= m
    return total / m


def _mean_over_ranks(stage: nn.Module, batches: Any, loss: Any, group: Group) -> Any:
    k = len(batches) / dist.get_world_size(group)
    return _loop(pipeline.Step())(stage, batches, lambda *pair: k * loss(*pair), group) / k


class _ByComm(pipeline.Step):
    def send(self, x: Tensor, to: int) -> None:
        comm.send(x.detach(), self.axis, to)


def _in_pairs(
    stage: nn.Module, batches: Any, loss: Callable[..., Tensor], group: Group
) -> float | Tensor:
    """As Megatron-LM does: a send to a neighbor and a receive from it in one batch."""
    p, rank, m = dist.get_world_size(group), dist.get_rank(group), len(batches)
    before, behind = rank - 1, rank + 1
    stored: list[tuple[Tensor, Tensor]] = []
    losses: list[Tensor] = []

    def talk(to: int = -1, x: Tensor | None = None, source: int = -1) -> Tensor | None:
        operations, got = [], None
        if x is not None and 0 <= to < p:
            message = x.detach().contiguous()
            operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=to))
        if 0 <= source < p:
            got = torch.zeros_like(batches[0][0])
            operations.append(dist.P2POp(dist.irecv, got, group=group, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return got

    def forward(mb: int, arrived: Tensor | None) -> Tensor:
        x = batches[mb][0] if arrived is None else arrived.requires_grad_()
        y = stage(x)
        if behind == p:
            y = loss(y, batches[mb][1]).div(m)
            losses.append(y.detach())
        stored.append((x, y))
        return y

    def backward(gradient: Tensor | None) -> Tensor | None:
        x, y = stored.pop(0)
        torch.autograd.backward([y], None if gradient is None else [gradient])
        return x.grad

    begin = min(p - 1 - rank, m)
    for mb in range(begin):
        talk(behind, forward(mb, talk(source=before)))
    arrived = talk(source=before) if begin < m else None
    for mb in range(begin, m):
        gradient = backward(talk(behind, forward(mb, arrived), behind))
        arrived = talk(before, gradient, before if mb + 1 < m else -1)
    for _ in range(begin):
        talk(before, backward(talk(source=behind)))
    return torch.stack(losses).sum() if losses else 0.0


# --- 16b-5
def _adamw(
    w: Tensor, g: Tensor, state: Options, options: Options, *, corrected: bool, coupled: bool
) -> Tensor:
    (b_1, b_2), rate, decay = options["betas"], options["lr"], options["weight_decay"]
    g, w = (g + decay * w, w) if coupled else (g, w * (1 - rate * decay))
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = b_1 * state.get("m", torch.zeros_like(g)) + (1 - b_1) * g
    state["v"] = b_2 * state.get("v", torch.zeros_like(g)) + (1 - b_2) * g * g
    c_1, c_2 = (1 - b_1**t, 1 - b_2**t) if corrected else (1, 1)
    return w - rate * state["m"] / c_1 / ((state["v"] / c_2).sqrt() + options["eps"])


class _Zero:
    """A right answer whose parts may be overridden: sums by all-to-all."""

    scale, world, corrected, coupled = 1.0, False, True, False

    def __call__(
        self, weights: Tensor, gradients: Tensor, state: Options, options: Options, group: Group
    ) -> Tensor:
        self.group = dist.group.WORLD if self.world else group
        self.n, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        g = self.reduced(gradients) * self.scale
        w = self.updated(self.cut(weights)[self.rank], g, state, options)
        return self.gathered(w.contiguous(), weights)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.pad(x, (0, -len(x) % self.n)).chunk(self.n)

    def reduced(self, gradients: Tensor) -> Tensor:
        pieces = torch.stack(self.cut(gradients))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=self.group)
        return received.sum(0)

    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        return _adamw(w, g, state, options, corrected=self.corrected, coupled=self.coupled)

    def gathered(self, w: Tensor, weights: Tensor) -> Tensor:
        parts = [torch.empty_like(w) for _ in range(self.n)]
        self.wait(dist.all_gather(parts, w, group=self.group, async_op=True))
        return torch.cat(parts)[: len(weights)]

    def wait(self, work: Any) -> None:
        work.wait()


class _ZeroByTorch(_Zero):
    """torch's own AdamW on a parameter that lives in the state, and calls on one tensor."""

    def reduced(self, gradients: Tensor) -> Tensor:
        flat = torch.cat(self.cut(gradients))
        own = flat.new_empty(len(flat) // self.n)
        dist.reduce_scatter_single(own, flat, group=self.group)
        return own

    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        if not state:
            state["w"] = nn.Parameter(w.clone(memory_format=torch.contiguous_format))
            state["optimizer"] = torch.optim.AdamW([state["w"]], **options)
        state["w"].grad = g
        state["optimizer"].step()
        return state["w"].detach()

    def gathered(self, w: Tensor, weights: Tensor) -> Tensor:
        full = w.new_empty(self.n * len(w))
        dist.all_gather_single(full, w, group=self.group)
        return full[: len(weights)].clone()


class _KeepsAView(_Zero):
    """The weights in the state are a view of all weights."""

    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        new = super().updated(w, g, state, options)
        state.setdefault("w", w)
        return new


class _Averages(_Zero):
    def __call__(self, *given: Any) -> Tensor:
        self.scale = 1 / dist.get_world_size(given[-1])
        return super().__call__(*given)


class _InTheWorld(_Zero):
    world = True


class _Uncorrected(_Zero):
    corrected = False


class _Coupled(_Zero):
    coupled = True


class _AllReduces(_Zero):
    def reduced(self, gradients: Tensor) -> Tensor:
        total = gradients.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return self.cut(total)[self.rank]


class _DropsTheRest(_Zero):
    """n shards of P // n elements."""

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[: len(x) // self.n * self.n].chunk(self.n)

    def gathered(self, w: Tensor, weights: Tensor) -> Tensor:
        new = super().gathered(w, weights)
        return torch.cat((new, weights[len(new) :]))


class _NoState(_Zero):
    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        return super().updated(w, g, {}, options)


class _Shared(_Zero):
    """The moments of all instances are in one place."""

    moments: dict[Any, Options] = {}  # noqa: RUF012

    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        return super().updated(w, g, self.moments.setdefault(w.shape, {}), options)


class _StateOfAll(_Zero):
    """Moments of all shards, of which it uses its own."""

    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        zeros = [torch.zeros_like(g)] * self.n
        own = slice(self.rank * len(g), (self.rank + 1) * len(g))
        full_w, full_g = (
            torch.cat([*zeros[: self.rank], x, *zeros[self.rank + 1 :]]) for x in (w, g)
        )
        return super().updated(full_w, full_g, state, options)[own]


class _NeverWaits(_Zero):
    def wait(self, work: Any) -> None:
        while not work.is_completed():
            pass


class _InPlace(_Zero):
    def gathered(self, w: Tensor, weights: Tensor) -> Tensor:
        return weights.copy_(super().gathered(w, weights))


class _PadsInFront(_Zero):
    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.pad(x, (-len(x) % self.n, 0)).chunk(self.n)

    def gathered(self, w: Tensor, weights: Tensor) -> Tensor:
        parts = [torch.empty_like(w) for _ in range(self.n)]
        dist.all_gather(parts, w, group=self.group)
        return torch.cat(parts)[-len(weights) :]


@dataclass
class _Slips(_Zero):
    """The update of one classic mistake."""

    slip: str

    def updated(self, w: Tensor, g: Tensor, state: Options, options: Options) -> Tensor:
        rule = state.setdefault("rule", AdamW(options["lr"], self.slip))
        new = rule(w, g)
        state["moments"] = rule.moments
        return new


class _ZeroByComm(_Zero):
    def reduced(self, gradients: Tensor) -> Tensor:
        return comm.reduce_scatter(torch.cat(self.cut(gradients)), _axis(self.group))


# --- 16b-6
class _Ring:
    """A right answer whose parts may be overridden: K and V as two messages."""

    world, group_ranks, waits = False, False, "after"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], group: Group
    ) -> tuple[Tensor, Tensor]:
        self.n, self.rank, self.lengths = dist.get_world_size(group), dist.get_rank(group), lengths
        self.group, self.q, self.found = group, q, []  # type: Any, Any, list[Any]
        block = [k.contiguous(), v.contiguous()]
        for turn in range(self.turns()):
            works, arriving = [], block
            if turn + 1 < self.n:
                arriving = [self.place(x, lengths[(self.rank - turn - 1) % self.n]) for x in block]
                works = self.exchange(block, arriving)
            if self.waits == "before":
                self.wait(works)
            self.compute(turn, block)
            if self.waits == "after":
                self.wait(works)
            block = arriving
        return self.result()

    def turns(self) -> int:
        return self.n

    def peer(self, rank: int) -> int:
        return rank % self.n if self.group_ranks else dist.get_global_rank(
            self.group, rank % self.n
        )  # fmt: skip

    def place(self, like: Tensor, rows: int) -> Tensor:
        return like.new_empty((like.shape[0], rows, *like.shape[2:]))

    def exchange(self, block: list[Tensor], arriving: list[Tensor]) -> list[Any]:
        group = None if self.world else self.group
        to, source = self.peer(self.rank + 1), self.peer(self.rank - 1)
        sends = [dist.isend(x, to, group=group) for x in block]
        return sends + [dist.irecv(x, source, group=group) for x in arriving]

    def wait(self, works: list[Any]) -> None:
        for work in works:
            work.wait()

    def compute(self, turn: int, block: list[Tensor]) -> None:
        if turn <= self.rank:
            self.found.append(self.attend(*block, turn == 0))

    def scores(self, k: Tensor, causal: bool) -> Tensor:
        scores = torch.einsum("bshk,bthk->bsht", self.q, k) / self.q.shape[-1] ** 0.5
        if causal:
            hidden = torch.ones(self.q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        return scores

    def attend(self, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self.scores(k, causal)
        return torch.einsum("bsht,bthk->bshk", scores.softmax(-1), v), scores.logsumexp(-1)

    def result(self) -> Any:
        out, lse = self.found[0]
        for out_2, lse_2 in self.found[1:]:
            out = out + torch.sigmoid(lse_2 - lse)[..., None] * (out_2 - out)
            lse = torch.logaddexp(lse, lse_2)
        return out, lse


class _RingByKernel(_Ring):
    """torch's own kernel on each block, and one softmax over all blocks."""

    def attend(self, k: Tensor, v: Tensor, causal: bool) -> Any:
        heads = [x.contiguous().transpose(1, 2) for x in (self.q, k, v)]
        found = torch._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal)
        return [x.transpose(1, 2) for x in found]

    def result(self) -> Any:
        outs, lses = (torch.stack(each) for each in zip(*self.found, strict=True))
        return (outs * lses.softmax(0)[..., None]).sum(0), lses.logsumexp(0)


class _InTheWorldsGroup(_Ring):
    world = True


class _GroupRanksInRing(_Ring):
    group_ranks = True


class _WaitsFirst(_Ring):
    waits = "before"


class _WaitsForReceives(_Ring):
    def wait(self, works: list[Any]) -> None:
        super().wait(works[2:])


class _StopsEarly(_Ring):
    def turns(self) -> int:
        return self.rank + 1


class _EqualShards(_Ring):
    def place(self, like: Tensor, rows: int) -> Tensor:
        return super().place(like, self.lengths[self.rank])


class _Gathers(_Ring):
    """All blocks by one all-gather, padded to the longest."""

    def exchange(self, block: list[Tensor], arriving: list[Tensor]) -> list[Any]:
        if len(self.found) == 0:
            pad = max(self.lengths) - block[0].shape[1]
            own = F.pad(torch.stack(block), (0, 0, 0, 0, 0, pad))
            self.parts = [torch.empty_like(own) for _ in range(self.n)]
            dist.all_gather(self.parts, own, group=self.group)
            self.source = self.rank
        self.source = (self.source - 1) % self.n
        for place, part in zip(arriving, self.parts[self.source], strict=True):
            place.copy_(part[:, : place.shape[1]])
        return []


class _NoMaximum(_Ring):
    """Sums of exponentials as they are, or relative to ``top`` at least."""

    def attend(self, k: Tensor, v: Tensor, causal: bool) -> Any:
        weights = (self.scores(k, causal) - self.top(k, causal)).exp()
        return torch.einsum("bsht,bthk->bshk", weights, v), weights.sum(-1)

    def top(self, k: Tensor, causal: bool) -> Any:
        return 0.0

    def result(self) -> Any:
        out, total = (sum(each) for each in zip(*self.found, strict=True))
        return out / total[..., None], total.log()


class _LocalMask(_Ring):
    def scores(self, k: Tensor, causal: bool) -> Tensor:
        return super().scores(k, True)


class _EqualOffsets(_Ring):
    """The positions of rank r begin at r times the length of the own shard."""

    def compute(self, turn: int, block: list[Tensor]) -> None:
        self.turn = turn
        super().compute(turn, block)

    def scores(self, k: Tensor, causal: bool) -> Tensor:
        s = self.q.shape[1]
        hidden = torch.arange(k.shape[1]) > (self.turn * s + torch.arange(s))[:, None]
        return super().scores(k, False).masked_fill(hidden[:, None], -torch.inf)


class _WaitsBetween(_Ring):
    """Waits after the scores, before the product with V."""

    works: tuple[Any, ...] | list[Any] = ()

    def exchange(self, *blocks: Any) -> list[Any]:
        self.works = super().exchange(*blocks)
        return []

    def compute(self, turn: int, block: list[Tensor]) -> None:
        super().compute(turn, block)
        self.wait(list(self.works))
        self.works = ()

    def scores(self, k: Tensor, causal: bool) -> Tensor:
        found = super().scores(k, causal)
        self.wait(list(self.works))
        self.works = ()
        return found


class _NotCausal(_Ring):
    def compute(self, turn: int, block: list[Tensor]) -> None:
        self.found.append(self.attend(*block, False))


class _LocalMaskOnAll(_Ring):
    def compute(self, turn: int, block: list[Tensor]) -> None:
        self.found.append(self.attend(*block, True))


class _OwnKeyHidden(_Ring):
    def scores(self, k: Tensor, causal: bool) -> Tensor:
        hidden = torch.ones(self.q.shape[1], k.shape[1], dtype=torch.bool).triu()
        return super().scores(k, False).masked_fill(hidden[:, None] & causal, -torch.inf)


class _LseWithout(_Ring):
    """The log-sum-exp without the largest score, or that score alone."""

    alone = False

    def scores(self, k: Tensor, causal: bool) -> Tensor:
        found = super().scores(k, causal)
        self.most = torch.maximum(found.amax(-1), self.most if self.found else found.amax(-1))
        return found

    def result(self) -> Any:
        out, lse = super().result()
        return out, self.most if self.alone else lse - self.most


class _LseIsMost(_LseWithout):
    alone = True


class _Unscaled(_Ring):
    def scores(self, k: Tensor, causal: bool) -> Tensor:
        return super().scores(k, causal) * self.q.shape[-1] ** 0.5


class _ScalesInPlace(_Ring):
    def __call__(self, q: Tensor, *others: Any) -> Any:
        return super().__call__(q.mul_(1.0), *others)


class _LseOfLast(_Ring):
    def result(self) -> Any:
        return super().result()[0], self.found[-1][1]


class _Cached(_Ring):
    """The K of the first call, used again where it fits."""

    first: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, *others: Any) -> Any:
        if self.first is None or self.first.shape != k.shape:
            type(self).first = k.clone()
        return super().__call__(q, type(self).first, *others)  # type: ignore[arg-type]


def _by_library(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], group: Group) -> Tensor:
    return cp.ring_attention(q, k, v, _axis(group), cp.CONTIGUOUS)


ATTACKS: dict[str, Attacks] = {
    "16b-4": Attacks(
        wrong=(
            Wrong(_loop(pipeline.AllForwardsFirst()), words="rank r begins with min(p - 1 - r, m)"),
            Wrong(_loop(pipeline.Step(), limit=False), words="list index out of range"),
            Wrong(
                _loop(pipeline.KeepsGraphs()), words="the activations of 2 micro-batches at most"
            ),
            Wrong(_loop(pipeline.WholeMean()), words="counts 1/m"),
            Wrong(_loop(pipeline.ForgetsItsSends()), words="never waited for"),
            Wrong(_loop(_AddsUp()), words="in the second call"),
            Wrong(_loop(_IntoTheInput()), words="the input micro-batches to be unchanged"),
            Wrong(_loop(_GroupRanks()), words="the peer of a message is a global rank"),
            Wrong(_loop(_SendsAndWaits()), words="every rank waits in send"),
            Wrong(_keeps_inputs, words="drop x, y and the graph of the loss"),
            Wrong(_alone, words="rank r begins with min(p - 1 - r, m)"),
            Wrong(_divides_all, words="what .grad held before the step is divided by m too"),
            Wrong(_mean_over_ranks, words="expected 1/m, for the mean over micro-batches"),
            Wrong(_loop(_ByComm()), words=REFUSAL),
            Wrong(_in_the_world, words=OUTSIDE),
        ),
        right=(_loop(pipeline.Step()), _in_pairs),
    ),
    "16b-5": Attacks(
        wrong=(
            Wrong(_Averages(), words="the gradients are averaged over the ranks"),
            Wrong(_InTheWorld(), words=OUTSIDE),
            Wrong(_AllReduces(), words="each with a reduce-scatter of the padded gradients"),
            Wrong(_DropsTheRest(), words="weights after step"),
            Wrong(_NoState(), words="the moments of the first step are lost"),
            Wrong(_Shared(), words="weights after step"),
            Wrong(_StateOfAll(), words="store the moments of the own shard only"),
            Wrong(_KeepsAView(), words="clone what is a view of a larger tensor"),
            Wrong(_Uncorrected(), words="not divided by 1 - beta**t"),
            Wrong(_Coupled(), words="AdamW takes it off the weights"),
            Wrong(_NeverWaits(), words="never waited for"),
            Wrong(_InPlace(), words="the input weights to be unchanged"),
            Wrong(_PadsInFront(), words="with its padding at the end"),
            Wrong(_Slips("decay without lr"), words="the weight decay is not multiplied by lr"),
            Wrong(_Slips("decay last"), words="after the update: apply it before"),
            Wrong(_Slips("eps inside"), words="eps is inside the square root"),
            Wrong(_Slips("eps first"), words="eps is added before v is divided"),
            Wrong(_Slips("t stays 1"), words="t is 1 in every step"),
            Wrong(_ZeroByComm(), words=REFUSAL),
        ),
        right=(_Zero(), _ZeroByTorch(), _Slips("")),
    ),
    "16b-6": Attacks(
        wrong=(
            Wrong(lambda *given: _Ring()(*given)[0], words="expected 2 values"),
            Wrong(_NoMaximum(), words="exponentials of large scores overflow"),
            Wrong(_LocalMask(), words="the causal mask was used on blocks of earlier ranks too"),
            Wrong(_EqualOffsets(), words="takes all shards to be equally long"),
            Wrong(_NotCausal(), words="no score is masked"),
            Wrong(_LocalMaskOnAll(), words="add the position where each block begins"),
            Wrong(_OwnKeyHidden(), words="a query sees its own key"),
            Wrong(_LseWithout(), words="lacks the largest score"),
            Wrong(_LseIsMost(), words="this is the largest score"),
            Wrong(_WaitsBetween(), words="both matrix products on one block"),
            Wrong(_Unscaled(), words="not divided by sqrt(K)"),
            Wrong(_LseOfLast(), words="log-sum-exp: "),
            Wrong(_Gathers(), words="messages only, got all_gather"),
            Wrong(_WaitsFirst(), words="start the exchange, compute, then wait"),
            Wrong(_WaitsForReceives(), words="never waited for"),
            Wrong(_InTheWorldsGroup(), words=OUTSIDE),
            Wrong(_GroupRanksInRing(), words="the peer of a message is a global rank"),
            Wrong(_EqualShards(), words="has the length of another rank's shard"),
            Wrong(_ScalesInPlace(), words="the input q to be unchanged"),
            Wrong(_Cached(), words="in the second call"),
            Wrong(_StopsEarly(), words="must still pass on the blocks"),
            Wrong(_by_library, words=REFUSAL),
        ),
        right=(_Ring(), _RingByKernel()),
    ),
}
