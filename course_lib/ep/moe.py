"""Mixture of experts: many MLPs in the place of one, of which each token uses a few. No network.

Shazeer et al. 2017, arXiv:1701.06538. For a token x with router logits W x, over its C choices c:

    p = softmax(W x)        over all E experts, in float32 at least
    w_c = p_c / sum_c p_c   over the C largest alone: Mixtral's convention, arXiv:2401.04088
    y = sum_c w_c expert_c(x)  [+ shared(x)]

W learns through w, which says how much of each expert is wanted; *which* experts are taken has no
gradient. With one choice w would always be 1 and W would learn nothing: then w = p (Switch).

Without a capacity every pair (token, choice) is served (dropless). With capacity factor f an expert
takes at most f T C / E pairs (rounded up) of T tokens: first come, first served, all first choices
before any second one (GShard, arXiv:2006.16668). A pair that finds no room adds nothing: the token
passes by on the residual. The T tokens are those of one rank, so that each rank decides alone.

Letters beside those of :mod:`course_lib.model`: T tokens (B S), E experts, C choices of a token,
P pairs of a token and a choice, first choices first: pair c T + t is choice c of token t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NOWHERE = -1  # the expert of a pair that found no room
Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Routes:
    """Where the pairs of T tokens go."""

    experts_CT: Tensor  # int64, or NOWHERE
    weights_CT: Tensor
    chosen_E: Tensor  # int64: pairs that chose each expert, dropped ones too
    probability_E: Tensor  # of each expert, summed over the tokens


def route(logits_TE: Tensor, choices: int, room: int | None = None) -> Routes:
    """Choose ``choices`` experts for each token; an expert takes ``room`` pairs, or all (None)."""
    experts = logits_TE.shape[1]
    probabilities_TE = logits_TE.softmax(-1)
    weights_TC, experts_TC = probabilities_TE.topk(choices)
    if choices > 1:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    experts_CT = experts_TC.t().contiguous()
    chosen_PE = nn.functional.one_hot(experts_CT.flatten(), experts)
    if room is not None:
        before_P = (chosen_PE.cumsum(0) * chosen_PE).sum(-1) - 1  # how many came before this one
        experts_CT = experts_CT.masked_fill((before_P >= room).view_as(experts_CT), NOWHERE)
    return Routes(experts_CT, weights_TC.t(), chosen_PE.sum(0), probabilities_TE.sum(0))


def balance_loss(probability_E: Tensor, chosen_E: Tensor) -> Tensor:
    """``E sum_e f_e p_e``: f_e is the share of all pairs that chose e, p_e is probability_E.

    Summed over tokens as the model's loss is. Divided by their number it is 1 when every expert
    is chosen alike, and more when some are chosen with more probability. f_e has no gradient.
    Sources: GShard; Fedus et al. 2021, Switch Transformer, arXiv:2101.03961, section 2.2, who have
    one choice to count; all C are counted here, as Megatron-LM does.
    """
    share_E = chosen_E.to(probability_E.dtype) / chosen_E.sum().clamp(min=1)
    return len(chosen_E) * (share_E * probability_E).sum()


@dataclass(frozen=True)
class Load:
    """How many pairs of each rank's tokens went to each expert in one forward, [rank][expert].

    ``chosen`` is what the routers wanted, ``kept`` what capacity left of it. Rank r of n computes
    experts r E/n up to (r+1) E/n. Without expert parallelism there is one rank.
    """

    chosen: Counts
    kept: Counts

    @property
    def by_expert(self) -> list[int]:
        """Pairs that each expert computes."""
        return [sum(column) for column in zip(*self.kept, strict=True)]

    @property
    def by_rank(self) -> list[int]:
        """Pairs that each rank computes."""
        counts, ranks = self.by_expert, len(self.kept)
        own = len(counts) // ranks
        return [sum(counts[rank * own : (rank + 1) * own]) for rank in range(ranks)]

    @property
    def dropped(self) -> float:
        """Share of the pairs that found no room."""
        wanted = sum(map(sum, self.chosen))
        return 1 - sum(map(sum, self.kept)) / wanted if wanted else 0.0


def imbalance(counts: Iterable[int]) -> float:
    """Largest over mean: all wait for the busiest, so this is how much longer a layer takes."""
    counts = list(counts)
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


class MoE(nn.Module):
    """x (B, S, D) to (B, S, D) by the ``experts``, named by their number, and a ``shared`` one.

    ``router`` is a linear D -> E without bias. After a forward ``load`` says who was busy, and
    ``auxiliary`` is its :func:`balance_loss`, until auxiliary_loss takes it.
    """

    def __init__(
        self,
        router: nn.Linear,
        experts: Mapping[str, nn.Module],
        choices: int,
        capacity: float | None = None,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleDict(experts)
        self.choices, self.capacity = choices, capacity
        self.shared = shared
        self.load: Load | None = None
        self.auxiliary: Tensor | None = None

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, -2)
        routes = self.route(x_TD)
        load = self.load = self.survey(routes)
        chosen_E = self.over_all_tokens(routes.chosen_E)
        self.auxiliary = balance_loss(routes.probability_E, chosen_E)
        y_TD = self.through_experts(x_TD, routes, load)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x_BSD)

    def route(self, x_TD: Tensor) -> Routes:
        """The router's answer for this rank's tokens, in float32 at least."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = nn.functional.linear(x_TD.to(wide), self.router.weight.to(wide))
        room = None
        if self.capacity is not None:
            pairs = self.choices * len(x_TD)
            room = math.ceil(self.capacity * pairs / self.router.out_features)
        return route(logits_TE, self.choices, room)

    def survey(self, routes: Routes) -> Load:
        """The counts as numbers of Python: on a GPU this waits for the router."""
        chosen, kept = self.of_every_rank(torch.stack([routes.chosen_E, _kept(routes)])).unbind(1)
        return Load(tuple(map(tuple, chosen.tolist())), tuple(map(tuple, kept.tolist())))

    def of_every_rank(self, counts_2E: Tensor) -> Tensor:
        """[n, 2, E]: the counts of the ranks that share the experts."""
        return counts_2E[None]

    def over_all_tokens(self, chosen_E: Tensor) -> Tensor:
        """The counts of the whole batch."""
        return chosen_E

    def through_experts(self, x_TD: Tensor, routes: Routes, load: Load) -> Tensor:
        """Each expert on the tokens that chose it: the definition, in a loop.

        An expert that nobody chose runs too, on no rows: its gradients are zeros, not missing.
        """
        y_TD = torch.zeros_like(x_TD)
        weights_CT = routes.weights_CT.to(x_TD.dtype)
        for number, expert in self.experts.items():
            choice, token = (routes.experts_CT == int(number)).nonzero(as_tuple=True)
            rows = expert(x_TD.index_select(0, token)) * weights_CT[choice, token, None]
            y_TD = y_TD.index_add(0, token, rows)
        return y_TD


def _kept(routes: Routes) -> Tensor:
    """Pairs that each expert takes, E."""
    experts = len(routes.chosen_E)
    return (routes.experts_CT.flatten() - NOWHERE).bincount(minlength=experts + 1)[1:]
