"""Mixture of experts: many MLPs replace one MLP, and each token uses a few of them. No network.

Shazeer et al. 2017, arXiv:1701.06538. For a token x with router logits W x and K = top_k experts:

    p = softmax(W x)        over all E experts, in float32 at least
    w_k = p_k / sum_k p_k   over the K largest alone: Mixtral's convention, arXiv:2401.04088
    y = sum_k w_k expert_k(x)  [+ shared(x)]

W learns through the weights w; the choice of experts has no gradient. With K = 1 the weight would
always be 1 and W would learn nothing, so w = p there (Switch Transformer).

Without a capacity every pair of a token and an expert is computed (dropless). With capacity factor
f an expert takes at most f T K / E pairs (rounded up) of T tokens: first come, first served, the
first choices of all tokens before any second choice (GShard, arXiv:2006.16668). A pair that exceeds
the capacity adds nothing: the token passes by on the residual. The T tokens are those of one rank,
so that each rank decides alone.

Letters: T tokens (B S), E experts, K experts of a token (top_k), P pairs of a token and an expert,
first choices first: pair k T + t is choice k of token t. B, S, D as in :mod:`course_lib.model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_lib.model import accumulation_dtype

NOWHERE = -1  # the expert of a pair that exceeds the capacity
Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Routes:
    """The experts of T tokens."""

    experts_KT: Tensor  # int64, or NOWHERE
    weights_KT: Tensor
    chosen_E: Tensor  # int64: pairs that chose each expert, dropped ones too
    probability_E: Tensor  # of each expert, summed over the tokens


def route(logits_TE: Tensor, top_k: int, capacity: int | None = None) -> Routes:
    """Choose ``top_k`` experts for each token; an expert takes ``capacity`` pairs, None: all."""
    experts = logits_TE.shape[1]
    probabilities_TE = logits_TE.softmax(-1)
    weights_TK, experts_TK = probabilities_TE.topk(top_k)
    if top_k > 1:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    experts_KT = experts_TK.t().contiguous()
    chosen_PE = nn.functional.one_hot(experts_KT.flatten(), experts)
    if capacity is not None:
        before_P = (chosen_PE.cumsum(0) * chosen_PE).sum(-1) - 1  # how many came before this one
        experts_KT = experts_KT.masked_fill((before_P >= capacity).view_as(experts_KT), NOWHERE)
    return Routes(experts_KT, weights_TK.t(), chosen_PE.sum(0), probabilities_TE.sum(0))


def balance_loss(probability_E: Tensor, chosen_E: Tensor) -> Tensor:
    """Return ``E sum_e f_e p_e``: f_e is the fraction of all pairs that chose e.

    p_e is ``probability_E``, summed over tokens, as the model's loss is. Divided by the number of
    tokens, the result is 1 when all experts are chosen equally often, and more when the experts
    chosen often also have high probability. f_e has no gradient. Sources: GShard; Fedus et al.
    2021, Switch Transformer, arXiv:2101.03961, section 2.2, who count one choice; we count all K,
    as Megatron-LM does.
    """
    fraction_E = chosen_E.to(probability_E.dtype) / chosen_E.sum().clamp(min=1)
    return len(chosen_E) * (fraction_E * probability_E).sum()


@dataclass(frozen=True)
class Load:
    """How many pairs of each rank's tokens went to each expert in one forward, [rank][expert].

    ``chosen`` counts the routers' choices, ``kept`` those within capacity. Rank r of n computes
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
        """Fraction of the pairs that exceeded the capacity."""
        wanted = sum(map(sum, self.chosen))
        return 1 - sum(map(sum, self.kept)) / wanted if wanted else 0.0


def imbalance(counts: Iterable[int]) -> float:
    """Return largest over mean. All ranks wait for the busiest: a layer takes that much longer."""
    counts = list(counts)
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


class MoE(nn.Module):
    """x (B, S, D) to (B, S, D) by the ``experts``, named by their number, and a ``shared`` one.

    ``router`` is a linear D -> E without bias. After a forward, ``load`` has the pairs of each
    expert and ``auxiliary`` is the :func:`balance_loss`, until auxiliary_loss takes it.
    """

    def __init__(
        self,
        router: nn.Linear,
        experts: Mapping[str, nn.Module],
        top_k: int,
        capacity_factor: float | None = None,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleDict(experts)
        self.top_k, self.capacity_factor = top_k, capacity_factor
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
        """Return the experts of this rank's tokens; the router computes in float32 at least."""
        wide = accumulation_dtype(x_TD.dtype)
        logits_TE = nn.functional.linear(x_TD.to(wide), self.router.weight.to(wide))
        capacity = None
        if self.capacity_factor is not None:
            pairs = self.top_k * len(x_TD)
            capacity = math.ceil(self.capacity_factor * pairs / self.router.out_features)
        return route(logits_TE, self.top_k, capacity)

    def survey(self, routes: Routes) -> Load:
        """Return the counts as Python numbers; on a GPU this waits for the router."""
        experts_KT = routes.experts_KT
        kept_E = experts_KT[experts_KT != NOWHERE].bincount(minlength=len(routes.chosen_E))
        counts_n2E = self.of_every_rank(torch.stack([routes.chosen_E, kept_E]))
        chosen, kept = counts_n2E.unbind(1)
        return Load(tuple(map(tuple, chosen.tolist())), tuple(map(tuple, kept.tolist())))

    def of_every_rank(self, counts_2E: Tensor) -> Tensor:
        """Return the counts of the n ranks that divide the experts, [n, 2, E]."""
        return counts_2E[None]

    def over_all_tokens(self, chosen_E: Tensor) -> Tensor:
        """Return the counts of the whole batch."""
        return chosen_E

    def through_experts(self, x_TD: Tensor, routes: Routes, load: Load) -> Tensor:
        """Apply each expert to the tokens that chose it: the definition, in a loop.

        An expert without tokens runs too, on no rows: its gradients are zeros, not missing.
        """
        y_TD = torch.zeros_like(x_TD)
        weights_KT = routes.weights_KT.to(x_TD.dtype)
        for number, expert in self.experts.items():
            choice, token = (routes.experts_KT == int(number)).nonzero(as_tuple=True)
            rows = expert(x_TD.index_select(0, token)) * weights_KT[choice, token, None]
            y_TD = y_TD.index_add(0, token, rows)
        return y_TD
