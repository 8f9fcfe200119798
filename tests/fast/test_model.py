"""The reference model against independent arithmetic, and the properties others rely on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from course_lib.data import batch
from course_lib.model import (
    IGNORE_INDEX,
    Attention,
    Block,
    Decoder,
    ModelConfig,
    block_parameter_count,
    build_model,
    causal_attention,
    loss_sum,
    parameter_count,
    parameter_sizes,
    rotary_angles,
    rotate,
    tiny_config,
)

FAMILIES = ("llama", "gpt")
SMALL = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 20, "max_seq_len": 16}


def small(family: str = "llama", **changes) -> ModelConfig:
    return ModelConfig(**{"family": family, "dtype": torch.float64, **SMALL, **changes})


def tokens_of(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def scrambled(config: ModelConfig, seed: int = 1) -> Decoder:
    """A model whose biases and norm weights are no zeros and ones, so that they count."""
    model = build_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- config --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "bert"}, "family 'bert'.*llama, gpt"),
        ({"dtype": torch.float16}, "dtype torch.float16"),
        ({"layers": 0}, "layers=0"),
        ({"ffn": 1.5}, r"ffn=1\.5"),
        ({"heads": True}, "heads=True"),
        ({"heads": 7}, "heads=7 does not divide hidden=64"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8"),
        ({"kv_heads": 16}, "kv_heads=16 does not divide heads=8"),
        ({"hidden": 72}, "hidden=72 / heads=8 gives heads of 9"),
        ({"vocab": 255}, "vocab=255"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"dropout": -0.1}, r"dropout=-0\.1"),
        ({"rope_base": 1.0}, "rope_base"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_config_refuses_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_odd_heads_are_fine_without_rotary_positions():
    assert tiny_config(family="gpt", hidden=72).head_dim == 9


def test_tiny_config_cuts_by_two_four_and_eight():
    config = tiny_config()
    for size in (config.heads, config.hidden, config.ffn, config.vocab, config.max_seq_len):
        assert size % 8 == 0
    assert config.layers % 4 == 0
    assert config.kv_heads % 4 == 0
    assert 100_000 <= parameter_count(config) <= 300_000


# --- parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4, "layers": 3}, {"vocab": 260, "ffn": 36}])
def test_parameter_count_is_that_of_the_built_model(family, tied, changes):
    config = small(family, tied=tied, **changes)
    model = build_model(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        assert block_parameter_count(config) == sum(p.numel() for p in block.parameters())
    layers = config.layers
    for first, end in [(0, layers), (0, 1), (1, layers), (layers - 1, layers)]:
        sizes = [p.numel() for p in model.stage(first, end).parameters()]
        assert parameter_sizes(config, first, end) == sizes, "in order, by slice"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_from_config_and_seed_alone(family):
    config = small(family)
    torch.manual_seed(1)
    first = build_model(config, seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = build_model(config, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state), "the global random state was moved"
    other = build_model(config, seed=4).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        if value.dim() > 1:
            assert not torch.equal(value, other[name]), name


def test_all_dtypes_start_from_the_same_weights():
    double = build_model(small(), 5)
    for dtype in (torch.float32, torch.bfloat16):
        other = build_model(small(dtype=dtype), 5)
        for mine, theirs in zip(double.parameters(), other.parameters(), strict=True):
            assert theirs.dtype == dtype
            assert torch.equal(mine.to(dtype), theirs)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_torch_would_truncate_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed={seed}"):
        build_model(small(), seed)


@pytest.mark.parametrize(("family", "ends"), [("llama", "ffn.down"), ("gpt", "ffn.fc_out")])
def test_what_enters_the_residual_stream_is_scaled_by_depth(family, ends):
    config = tiny_config(family=family, layers=8)
    for name, weight in build_model(config).blocks[3].named_parameters():
        if weight.dim() < 2:
            expected = 1.0 if name.endswith("norm.weight") else 0.0
            assert torch.equal(weight, torch.full_like(weight, expected)), name
            continue
        scale = 4.0 if name in ("attn.o.weight", f"{ends}.weight") else 1.0  # sqrt(2 * 8)
        assert weight.std().item() * scale * weight.shape[1] ** 0.5 == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_position_weights_belong_to_gpt_alone(family):
    names = [name for name, _ in build_model(small(family)).named_parameters()]
    biases = [name for name in names if name.endswith("bias")]
    assert len(biases) == (2 * 8 + 1 if family == "gpt" else 0)  # 4 + 2 linears, 2 norms a block
    assert ("embedding.position.weight" in names) == (family == "gpt")


# --- the arithmetic, written a second time --------------------------------------------------


def naive_attention(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """One query row at a time, over the rows it may see."""
    repeats = q_BSHK.shape[2] // k_BSGK.shape[2]
    k_BSHK = k_BSGK.repeat_interleave(repeats, dim=2)
    v_BSHK = v_BSGK.repeat_interleave(repeats, dim=2)
    rows = []
    for i in range(q_BSHK.shape[1]):
        scores = torch.einsum("bhk,bthk->bht", q_BSHK[:, i], k_BSHK[:, : i + 1])
        weights = (scores / math.sqrt(q_BSHK.shape[-1])).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        rows.append(torch.einsum("bht,bthk->bhk", weights, v_BSHK[:, : i + 1]))
    return torch.stack(rows, dim=1)


def naive_rotate(x_BSHK: Tensor, positions_S: Tensor, base: float) -> Tensor:
    """The pair (r, r + K/2) as a complex number, times e^(i angle)."""
    half = x_BSHK.shape[-1] // 2
    result = torch.empty_like(x_BSHK)
    for s, position in enumerate(positions_S.tolist()):
        for r in range(half):
            angle = torch.tensor(position * base ** (-2 * r / (2 * half)), dtype=torch.float64)
            pair = torch.complex(x_BSHK[:, s, :, r], x_BSHK[:, s, :, r + half])
            turned = pair * torch.exp(1j * angle)
            result[:, s, :, r], result[:, s, :, r + half] = turned.real, turned.imag
    return result


def naive_norm(config: ModelConfig, norm: torch.nn.Module, x: Tensor) -> Tensor:
    if config.family == "llama":
        return x / ((x * x).mean(-1, keepdim=True) + config.norm_eps).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / (variance + config.norm_eps).sqrt() * norm.weight + norm.bias


def naive_linear(linear: torch.nn.Linear, x: Tensor) -> Tensor:
    y = torch.einsum("bsi,oi->bso", x, linear.weight)
    return y if linear.bias is None else y + linear.bias


def naive_block(block: Block, x: Tensor, positions: Tensor) -> Tensor:
    config, attn, ffn = block.config, block.attn, block.ffn
    h = naive_norm(config, block.attn_norm, x)
    q, k, v = (
        naive_linear(linear, h).reshape(*h.shape[:2], heads, config.head_dim)
        for linear, heads in (
            (attn.q, config.heads),
            (attn.k, config.kv_heads),
            (attn.v, config.kv_heads),
        )
    )
    if config.family == "llama":
        q = naive_rotate(q, positions, config.rope_base)
        k = naive_rotate(k, positions, config.rope_base)
    x = x + naive_linear(attn.o, naive_attention(q, k, v).reshape(x.shape))
    h = naive_norm(config, block.ffn_norm, x)
    if config.family == "llama":
        gate = naive_linear(ffn.gate, h)
        inner = gate / (1 + (-gate).exp()) * naive_linear(ffn.up, h)
        return x + naive_linear(ffn.down, inner)
    inner = naive_linear(ffn.fc_in, h)
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return x + naive_linear(ffn.fc_out, inner)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_formulas_in_its_docstrings(family, kv_heads):
    config = small(family, kv_heads=kv_heads)
    model = scrambled(config)
    tokens = tokens_of((3, 11))
    positions = torch.arange(11)
    x = model.embedding.token.weight[tokens]
    if family == "gpt":
        x = x + model.embedding.position.weight[positions]
    for block in model.blocks:
        expected = naive_block(block, x, positions)
        torch.testing.assert_close(block(x, positions), expected, rtol=0, atol=1e-12)
        x = expected
    logits = naive_linear(model.head, naive_norm(config, model.norm, x))
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=1e-12)


def test_attention_of_grouped_heads_is_that_of_repeated_heads():
    generator = torch.Generator().manual_seed(0)
    shape = (2, 9, 4, 6)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    for kv_heads in (1, 2, 4):
        core = causal_attention(q, k[:, :, :kv_heads], v[:, :, :kv_heads])
        naive = naive_attention(q, k[:, :, :kv_heads], v[:, :, :kv_heads])
        torch.testing.assert_close(core, naive, rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_block_are_those_of_finite_differences(family):
    config = small(family, hidden=8, heads=2, kv_heads=1, ffn=6, layers=1)
    block = scrambled(config).blocks[0]
    names = [name for name, _ in block.named_parameters()]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(4)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        weights = dict(zip(names, values, strict=True))
        return torch.func.functional_call(block, weights, (x, positions))

    assert torch.autograd.gradcheck(call, (x, *block.parameters()))


# --- positions -----------------------------------------------------------------------------


def test_rotated_products_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))

    def product(q_position: int, k_position: int) -> Tensor:
        rows = (
            rotate(x, rotary_angles(torch.tensor([position]), 8, 10_000.0, x.dtype))
            for x, position in ((q, q_position), (k, k_position))
        )
        return torch.mul(*rows).sum(-1)

    torch.testing.assert_close(product(7, 3), product(107, 103), rtol=0, atol=1e-12)
    assert (product(7, 3) - product(7, 4)).abs().min() > 1e-3


@pytest.mark.parametrize(("family", "moves"), [("llama", False), ("gpt", True)])
def test_only_learned_positions_notice_a_shift_of_all(family, moves):
    model = scrambled(small(family))
    tokens = tokens_of((2, 8))
    shifted = model(tokens, torch.arange(8) + 5)
    assert ((shifted - model(tokens)).abs().max() > 1e-6) == moves


def test_the_order_of_tokens_matters_to_rotary_positions():
    model = scrambled(small(layers=1))
    tokens = tokens_of((1, 8))
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    # without positions the last row would see the same set of tokens either way
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_angles_are_kept_in_float32_at_least(dtype, expected):
    angles = rotary_angles(torch.tensor([257, 258]), 8, 10_000.0, dtype)
    assert angles.dtype == expected
    assert angles.shape == (2, 4)
    assert angles[1, 0] - angles[0, 0] == 1  # in bfloat16 both would be 256 or 258
    x = torch.ones(1, 2, 1, 8, dtype=dtype)
    assert rotate(x, angles).dtype == dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_may_come_in_any_order_with_their_positions(family):
    model = scrambled(small(family))
    tokens = tokens_of((2, 12))
    expected = model(tokens)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = order[:, None] >= order[None, :]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    for block in model.blocks:
        block.attn.core = core
    permuted = model(tokens[:, order], order)
    torch.testing.assert_close(permuted, expected[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_past_logits_do_not_know_the_future(family):
    model = scrambled(small(family, dtype=torch.float32))
    tokens = tokens_of((2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert (difference[7:] > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_too_many_positions_are_refused(family):
    with pytest.raises(ValueError, match=r"17 positions.*max_seq_len=16"):
        build_model(small(family))(tokens_of((1, 17)))


# --- cuts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 2, 3, 4), (0, 3, 4), (0, 4)])
def test_stages_in_a_row_are_the_model(family, cuts):
    model = build_model(small(family, layers=4))
    stages = [model.stage(first, end) for first, end in pairwise(cuts)]
    x = tokens = tokens_of((2, 8))
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(tokens))
    held = [id(p) for stage in stages for p in stage.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (2, 1), (1, 1), (0, 3)])
def test_a_stage_outside_the_model_is_refused(first, end):
    with pytest.raises(ValueError, match=f"blocks {first} up to {end}.*<= 2"):
        build_model(small()).stage(first, end)


def test_blocks_know_their_number():
    model = build_model(small(layers=4))
    assert [block.layer for block in model.stage(2, 4).blocks] == [2, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_mlp_with_a_share_of_the_rows_give_a_share_of_the_sum(family):
    """What tensor parallelism relies on: cut q, k, v by rows and o by columns, then add up."""
    config = small(family)
    block = scrambled(config).blocks[0]
    x = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(6)
    total = torch.zeros_like(x)
    for part in range(2):
        share = Attention(config)
        for name in ("q", "k", "v"):
            whole = getattr(block.attn, name)
            linear = getattr(share, name)
            linear.weight = torch.nn.Parameter(whole.weight.chunk(2)[part])
            if whole.bias is not None:
                linear.bias = torch.nn.Parameter(whole.bias.chunk(2)[part])
        share.o.weight = torch.nn.Parameter(block.attn.o.weight.chunk(2, dim=1)[part])
        if share.o.bias is not None:
            share.o.bias = torch.nn.Parameter(block.attn.o.bias / 2)
        total = total + share(x, positions)
    torch.testing.assert_close(total, block.attn(x, positions), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_the_embedding(family):
    model = build_model(small(family, tied=True))
    assert model.head.weight is model.embedding.token.weight
    tokens = tokens_of((2, 8))
    total, _ = model.loss_sum(tokens, tokens)
    total.backward()
    # rows of tokens that never occur get their gradient from the head alone
    absent = [token for token in range(256) if token not in set(tokens.flatten().tolist())]
    assert (model.head.weight.grad[absent].abs().amax(1) > 0).all()
    untied = build_model(small(family))
    assert untied.head.weight.data_ptr() != untied.embedding.token.weight.data_ptr()


def test_dropout_acts_in_training_only():
    tokens = tokens_of((2, 8))
    model = build_model(small(dropout=0.5))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), build_model(small())(tokens))


# --- loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_that_of_guessing(family, tied):
    model = build_model(tiny_config(family=family, tied=tied))
    total, count = model.loss_sum(*batch(0, seed=0, batch_size=8, seq_len=64))
    assert count == 8 * 64
    assert (total / count).item() == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_is_a_sum_and_a_count_of_tokens():
    logits = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(0)).double()
    targets = tokens_of((2, 5))
    targets[1, 2:] = IGNORE_INDEX
    total, count = loss_sum(logits, targets)
    by_hand = [
        logits[b, s].exp().sum().log() - logits[b, s, targets[b, s]]
        for b, s in [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    ]
    assert count.item() == 7
    assert total.item() == pytest.approx(sum(by_hand).item(), abs=1e-12)
    rows = [loss_sum(logits[b : b + 1], targets[b : b + 1]) for b in range(2)]
    assert sum(n for _, n in rows) == count
    torch.testing.assert_close(sum(s for s, _ in rows), total)
    mean_of_means = sum(s / n for s, n in rows) / 2
    assert (mean_of_means - total / count).abs() > 1e-3, "the two means must be tellable apart"


def test_a_batch_without_targets_has_loss_zero_and_no_gradient():
    model = build_model(small())
    total, count = model.loss_sum(tokens_of((1, 4)), torch.full((1, 4), IGNORE_INDEX))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all((p.grad == 0).all() for p in model.parameters())


def test_the_loss_of_a_bfloat16_model_is_float32():
    model = build_model(small(dtype=torch.bfloat16))
    tokens = tokens_of((2, 8))
    total, _ = model.loss_sum(tokens, tokens)
    assert model(tokens).dtype == torch.bfloat16
    assert total.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss(family, one_thread):
    model = build_model(tiny_config(family=family))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(120):
        total, count = model.loss_sum(*batch(step, seed=0, batch_size=8, seq_len=64))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    assert losses[0] > 5.4
    # the frequencies of single bytes alone give 3.01: less means that it reads what came before
    assert sum(losses[-10:]) / 10 < 2.7
