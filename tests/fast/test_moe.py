"""The mixture of experts of one process: against a loop over tokens, and what it promises."""

from __future__ import annotations

import math
from copy import deepcopy
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib import ep, recompute
from course_lib.ep.moe import NOWHERE
from course_lib.formulas.ep import mlp_parameters
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.trace.memory import SavedActivations

SMALL = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 24, "max_seq_len": 12}
F64 = ModelConfig(**SMALL, dtype=torch.float64)
GPT = ModelConfig(**SMALL, family="gpt", dtype=torch.float64)


def layer(config=F64, experts=4, top_k=2, **options):
    return ep.add_experts(build_model(config, seed=1), experts, top_k, **options).blocks[0].ffn


def tokens(rows=6, config=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(rows, config.hidden, generator=generator, dtype=torch.float64)
    return x_TD.to(config.dtype).requires_grad_()


def by_hand(moe, x_TD):
    """Token by token, choice by choice, in plain numbers of Python where it decides."""
    experts, rows = len(moe.experts), len(x_TD)
    capacity = math.inf
    if moe.capacity_factor is not None:
        capacity = math.ceil(moe.capacity_factor * rows * moe.top_k / experts)
    p_TE = torch.exp(x_TD @ moe.router.weight.T)
    p_TE = p_TE / p_TE.sum(1, keepdim=True)
    best = [sorted(range(experts), key=lambda e: -float(p_TE[t, e].detach()))[: moe.top_k]
            for t in range(rows)]  # fmt: skip
    y = [torch.zeros_like(x) for x in x_TD]
    taken = [0] * experts
    chosen = [0] * experts
    for choice in range(moe.top_k):
        for token in range(rows):
            expert = best[token][choice]
            chosen[expert] += 1
            if taken[expert] == capacity:
                continue
            taken[expert] += 1
            weight = p_TE[token, expert]
            if moe.top_k > 1:
                weight = weight / sum(p_TE[token, e] for e in best[token])
            y[token] = y[token] + weight * moe.experts[str(expert)](x_TD[token])
    y_TD = torch.stack(y)
    balance = experts * sum(
        chosen[e] / (rows * moe.top_k) * p_TE[:, e].sum() for e in range(experts)
    )
    return y_TD if moe.shared is None else y_TD + moe.shared(x_TD), balance, chosen, taken


def gradients(moe, output):
    moe.zero_grad()
    output.backward()
    return {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}


@given(
    config=st.sampled_from([F64, GPT]),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 3),
    capacity_factor=st.sampled_from([None, 0.25, 0.6, 1.0, 9.0]),
    shared=st.booleans(),
    rows=st.integers(1, 9),
)
def test_equals_a_loop_over_tokens(config, experts, top_k, capacity_factor, shared, rows):
    moe = layer(
        config, experts, min(top_k, experts), capacity_factor=capacity_factor, shared=shared
    )
    x = tokens(rows)
    y = moe(x)
    want, balance, chosen, taken = by_hand(moe, x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moe.auxiliary, balance, rtol=1e-12, atol=0)
    assert moe.load == ep.Load((tuple(chosen),), (tuple(taken),))
    assert moe.load.by_expert == taken
    assert moe.load.dropped == pytest.approx(1 - sum(taken) / sum(chosen))
    weight = tokens(rows, seed=5).detach()
    got = gradients(moe, (y * weight).sum() + 0.1 * moe.auxiliary)
    got_x, x.grad = x.grad.clone(), None
    twin = gradients(moe, (want * weight).sum() + 0.1 * balance)
    torch.testing.assert_close(got_x, x.grad, rtol=1e-11, atol=1e-12)
    for name, reference in twin.items():
        torch.testing.assert_close(got[name], reference, rtol=1e-11, atol=1e-12)
    idle = got.keys() - twin.keys()  # experts that nobody chose: zeros, not missing
    assert all(not got[name].any() for name in idle)
    assert len(got) == len(list(moe.parameters()))


def test_weights_are_mixtral_s():
    """Softmax over all, then the largest renormalised, is softmax over the largest logits."""
    logits_TE = torch.tensor([[1.0, 3.0, -2.0, 2.0], [0.0, 0.5, 4.0, 1.0]])
    routes = ep.route(logits_TE, 2)
    assert routes.experts_KT.tolist() == [[1, 2], [3, 3]]
    want_TC = torch.tensor([[3.0, 2.0], [4.0, 1.0]]).softmax(-1)
    torch.testing.assert_close(routes.weights_KT.T, want_TC)


def test_one_choice_weighs_with_its_probability_so_that_the_router_learns():
    moe = layer(top_k=1)
    moe(tokens()).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-3
    logits_TE = torch.tensor([[1.0, 3.0]])
    torch.testing.assert_close(
        ep.route(logits_TE, 1).weights_KT, logits_TE.softmax(-1)[:, 1:].view(1, 1)
    )


def test_first_choices_are_served_before_any_second_one():
    logits_TE = torch.tensor([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0], [0.0, 2.0, 1.0]])
    assert ep.route(logits_TE, 2).experts_KT.tolist() == [[0, 0, 1], [1, 2, 2]]
    routes = ep.route(logits_TE, 2, capacity=1)
    assert routes.experts_KT.tolist() == [[0, NOWHERE, 1], [NOWHERE, 2, NOWHERE]]
    assert routes.chosen_E.tolist() == [2, 2, 2]


def test_a_token_without_room_passes_by():
    moe = layer(top_k=1, capacity_factor=1e-9)  # room for one pair an expert
    x = tokens(40)
    dropped = (moe.route(x).experts_KT == NOWHERE)[0]
    assert int(dropped.sum()) == 36
    assert not moe(x)[dropped].any()
    assert moe.load.dropped == 0.9


def test_the_router_decides_in_float32():
    config = ModelConfig(**SMALL, dtype=torch.bfloat16)
    moe, x = layer(config), tokens(config=config)
    routes = moe.route(x)
    assert routes.weights_KT.dtype == torch.float32
    logits_TE = x.float() @ moe.router.weight.float().T
    torch.testing.assert_close(routes.probability_E, logits_TE.softmax(-1).sum(0))
    assert moe(x).dtype == torch.bfloat16


def test_the_balance_loss_is_1_a_token_when_all_are_chosen_alike():
    even = torch.full((4,), 2.0), torch.tensor([4, 4, 4, 4])  # 8 tokens, top_k 2
    assert float(ep.balance_loss(*even)) / 8 == 1
    skewed = torch.tensor([8.0, 0, 0, 0]), torch.tensor([8, 0, 0, 0])
    assert float(ep.balance_loss(*skewed)) / 8 == 4


def test_the_balance_loss_balances():
    """Its gradient alone makes the busiest experts less wanted."""
    moe, x = layer(experts=6), tokens(64).detach()
    moe.router.weight.data[0] += 0.5 * x.mean(0)
    before = None
    for _ in range(60):
        moe.zero_grad()
        moe(x)
        before = before or ep.imbalance(moe.load.by_expert)
        (moe.auxiliary / 64).backward()
        moe.router.weight.data -= moe.router.weight.grad
    assert before > 1.3
    assert ep.imbalance(moe.load.by_expert) < 1.12


def test_loads():
    kept = ((5, 0, 1, 2), (3, 1, 0, 0))
    load = ep.Load(((5, 2, 1, 2), (3, 1, 0, 2)), kept)
    assert load.by_expert == [8, 1, 1, 2]
    assert load.by_rank == [9, 3]
    assert load.dropped == 0.25
    assert ep.imbalance(load.by_rank) == 1.5
    assert ep.imbalance([0, 0]) == 1


def test_wire_bytes_count_the_pairs_whose_expert_is_elsewhere():
    load = ep.Load((), ((5, 0, 1, 2), (3, 1, 0, 0)))
    # rank 0 sends 3 rows and takes 4 in; both again in backward
    assert ep.wire_bytes(load, 0, row_bytes=10) == ep.wire_bytes(load, 1, row_bytes=10) == 2 * 70
    even = ep.Load((), ((3,) * 8,) * 4)
    for rank in range(4):
        assert ep.wire_bytes(even, rank, 10) == ep.even_wire_bytes(12, 2, 10, 4)
    assert ep.even_wire_bytes(12, 2, 10, 4) == 4 * Fraction(3, 4) * 12 * 2 * 10
    assert ep.wire_bytes(ep.Load((), ((3, 4),)), 0, 10) == ep.even_wire_bytes(7, 1, 10, 1) == 0


# --- a model with experts -------------------------------------------------------------------


@pytest.mark.parametrize("config", [F64, GPT])
def test_experts_follow_from_the_seed_alone(config):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = (
        ep.add_experts(build_model(config), 3, 2, shared=True, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    dense = build_model(config)
    for first, second, third, plain in zip(
        *(model.blocks for model in (one, same, other, dense)), strict=True
    ):
        for name, weight in first.ffn.state_dict().items():
            assert torch.equal(weight, second.ffn.state_dict()[name])
            if weight.dim() > 1 and not name.startswith("experts.0."):
                assert not torch.equal(weight, third.ffn.state_dict()[name])
        for name, weight in plain.ffn.state_dict().items():
            assert torch.equal(first.ffn.state_dict()[f"experts.0.{name}"], weight)
            for drawn in (f"experts.2.{name}", f"shared.{name}"):
                ratio = first.ffn.state_dict()[drawn].std() / weight.std()
                assert weight.dim() == 1 or 0.8 < ratio < 1.25
    assert not torch.equal(one.blocks[0].ffn.router.weight, one.blocks[1].ffn.router.weight)


def test_one_expert_alone_is_the_dense_model():
    """The weight of one choice of one expert is 1, and expert 0 is the MLP that was there."""
    inputs = torch.arange(24).view(2, 12)
    with torch.no_grad():
        dense = build_model(F64)(inputs)
        torch.testing.assert_close(ep.add_experts(build_model(F64), 1, 1)(inputs), dense)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("config", [F64, GPT])
def test_parameters_are_counted_without_building(config, shared):
    model = ep.add_experts(build_model(config), 6, 2, shared=shared)
    experts, rest = ep.expert_parameters(model), ep.shared_parameters(model)
    assert {*experts, *rest} == set(model.parameters())
    counts = tuple(sum(p.numel() for p in part) for part in (experts, rest))
    assert counts == ep.parameters_per_rank(config, 6, 1, shared=shared)
    third = ep.parameters_per_rank(config, 6, 3, shared=shared)
    assert third == (counts[0] // 3, counts[1])
    assert mlp_parameters(config) == sum(
        p.numel() for p in build_model(config).blocks[0].ffn.parameters()
    )


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_activations_are_counted_without_running(top_k, capacity_factor, family, dtype):
    """On one rank; tests of the ranks have the rest."""
    config = ModelConfig(**SMALL, family=family, dtype=dtype)
    mesh = make_mesh()
    model = ep.add_experts(build_model(config), 4, top_k, capacity_factor=capacity_factor)
    moe = ep.parallelize(model, mesh.ep, mesh.dp_cp).blocks[0].ffn
    x = tokens(12, config)
    with SavedActivations(moe) as saved:
        y = moe(x)
    assert y.grad_fn is not None
    assert saved.now == ep.saved_per_layer(config, 12, moe.load, 0, top_k)


def test_the_loss_takes_each_layer_s_auxiliary_loss_once():
    model = ep.add_experts(build_model(F64), 4, 2)
    inputs = torch.arange(24).view(2, 12)
    loss, count = ep.loss_sum(model, 0.5)(inputs, inputs)
    plain, _ = model.loss_sum(inputs, inputs)
    parts = [moe.auxiliary for moe in ep.moe_layers(model)]
    torch.testing.assert_close(loss, plain + 0.5 * sum(parts))
    assert count == 24
    torch.testing.assert_close(ep.auxiliary_loss(model), sum(parts))
    with pytest.raises(RuntimeError, match="layer 0 has had no forward since"):
        ep.auxiliary_loss(model)
    deepcopy(model)  # no tensor of a graph is left on it


def test_an_auxiliary_loss_without_a_graph_is_refused():
    model = ep.add_experts(build_model(F64), 4, 2)
    inputs = torch.arange(24).view(2, 12)
    recompute.full(model)
    model(inputs)
    with pytest.raises(RuntimeError, match="layer 0 has no graph"):
        ep.auxiliary_loss(model)
    with torch.no_grad():
        model(inputs)
        assert float(ep.auxiliary_loss(model)) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"experts": 0}, "expected top_k from 1 to experts=0, got top_k=2"),
        ({"top_k": 5}, "expected top_k from 1 to experts=4, got top_k=5"),
        ({"top_k": 0}, "got top_k=0"),
        ({"capacity_factor": 0.0}, "expected capacity_factor above 0 .* got capacity_factor=0.0"),
        ({"capacity_factor": math.nan}, "got capacity_factor=nan"),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        ep.add_experts(build_model(F64), **({"experts": 4, "top_k": 2} | arguments))


def test_a_model_without_or_with_experts_is_named():
    dense = build_model(F64)
    for wants_experts in (ep.moe_layers, ep.auxiliary_loss, ep.expert_parameters):
        with pytest.raises(ValueError, match="no experts: call add_experts"):
            wants_experts(dense)
    with pytest.raises(ValueError, match="has experts already"):
        ep.add_experts(ep.add_experts(dense, 2, 1), 2, 1)
