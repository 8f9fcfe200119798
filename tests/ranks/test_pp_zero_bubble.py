"""Backward in halves, and schedules of several chunks: equal to one process, and light."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality import assert_bitwise
from pipelines import (
    F64,
    GPT,
    SEQ,
    WORLDS,
    batches,
    check,
    check_bytes,
    own,
    parallel,
    prepare,
    serial,
    tokens_of,
)

from course_lib import pp, recompute
from course_lib.mesh import make_mesh
from course_lib.model import build_model, loss_sum
from course_lib.schedule import Action, Schedule, make, one_f_one_b, read_csv, write_csv
from course_lib.trace import PeakLiveBytes, SavedActivations

NAMES = ("interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def with_layers(config, schedule):
    """``config`` with one layer for each stage at least."""
    return replace(config, layers=max(config.layers, schedule.stages))


# --- equal to one process -------------------------------------------------------------------


@pytest.mark.parametrize("p", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_serial(worlds, name, p):
    schedule = make(name, p, 4)
    config = with_layers(F64, schedule)
    results = worlds(p).run(parallel, schedule, config)
    check(results, serial(config, 4))
    check_bytes(results, schedule, config)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_equals_serial_when_tied_and_with_biases(worlds, name, p):
    schedule = make(name, p, 5)
    results = worlds(p).run(lambda: parallel(schedule, GPT, steps=2))
    check(results, serial(GPT, 5, steps=2), 1e-14)
    check_bytes(results, schedule, GPT)


@pytest.mark.parametrize("m", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_micro_batches(worlds, name, m):
    schedule = make(name, 4, m)
    results = worlds(4).run(lambda: parallel(schedule, F64, steps=1))
    check(results, serial(F64, m, steps=1))
    check_bytes(results, schedule, F64)


def test_rows_of_a_learner_run_as_csv(worlds):
    """Two ranks that hold one stage and two, whole backwards beside halves."""
    text = "0F0,0F1,,0I0,0B1,0W0\n1F0,2F0,2B0,1I0,1F1,2F1,1W0,2I1,1B1,2W1\n"
    schedule = read_csv(text, "mine")
    assert read_csv(write_csv(schedule), "mine") == schedule
    for config, tolerance in ((F64, 1e-13), (GPT, 1e-14)):  # stage 0 adds micro-batch 1 before 0
        results = worlds(2).run(lambda config=config: parallel(schedule, config, steps=2))
        check(results, serial(config, 2, steps=2), tolerance)
        check_bytes(results, schedule, config)


@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt"])
def test_frozen_parameters(worlds, config):
    """The first stage has nothing to train, the second one has a linear whose input has no past."""
    frozen = ("embedding.", "blocks.0", "blocks.1", "blocks.2.attn_norm", "blocks.3.attn.q")
    results = worlds(4).run(lambda: parallel(make("zb-h1", 4, 3), config, steps=2, frozen=frozen))
    check(results, serial(config, 3, steps=2, frozen=frozen), 1e-13 if config.tied else 0)


# --- the two halves -------------------------------------------------------------------------


def halved(schedule):
    """Each B as I and W."""
    rows = [
        [Action(op, a.stage, a.mb) for a in row for op in ("IW" if a.op == "B" else a.op)]
        for row in schedule.rows
    ]
    return Schedule("halved", tuple(map(tuple, rows)), schedule.placement)


def one_step(schedule, config, change=None, frozen=()):
    """Gradients of one step, by name, and the largest error of whole backwards: 0."""
    mesh = make_mesh(pp=schedule.ranks)
    micro_batches = batches(schedule.microbatches)
    tokens, gradients = tokens_of(micro_batches), []
    for rows in (schedule, halved(schedule)):
        model = prepare(config, frozen)
        if change is not None:
            change(model)
        stages = pp.cut(model, schedule, mesh.pp.rank)
        pp.run(rows, stages, mesh, micro_batches, lambda y, t: loss_sum(y, t)[0] / tokens)
        gradients.append({n: p.grad for n, p in own(model, stages).items() if p.grad is not None})
    return gradients


CHANGES = {"": None, "recomputed": recompute.full, "selective": recompute.selective}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("config", [F64, replace(GPT, tied=False)], ids=["llama", "gpt"])
def test_halves_add_up_bitwise(worlds, config, change):
    for whole, halves in worlds(2).run(one_step, one_f_one_b(2, 3), config, CHANGES[change]):
        assert whole.keys() == halves.keys()
        assert_bitwise(halves, whole, "I and W against B")


def test_weights_later_in_reverse_order_is_caught(worlds):
    """Another order of the same sums: right to rounding, and not the same bits."""
    schedule = make("zb-h1", 4, 4)
    rows = []
    for row in schedule.rows:
        backwards = iter(sorted((a for a in row if a.op == "W"), key=lambda a: -a.mb))
        order = [a for a in row if a.op != "W"] + list(backwards)
        rows.append(tuple(order))
    wrong = replace(schedule, rows=tuple(rows))
    results = worlds(4).run(lambda: parallel(wrong, F64, steps=1))
    check(results, serial(F64, 4, steps=1), 1e-12)
    with pytest.raises(AssertionError, match=r"attn\.[qkvo].weight differs|ffn.*differs"):
        check(results, serial(F64, 4, steps=1))


def stage_by_hand(config, sequences=2):
    """A stage of two blocks, its input and the gradient of its output."""
    generator = torch.Generator().manual_seed(1)
    stage = build_model(config, seed=3).stage(1, 3)
    x, dy = (
        torch.randn(sequences, SEQ, config.hidden, dtype=config.dtype, generator=generator)
        for _ in range(2)
    )
    return stage, x.requires_grad_(), dy


def between_the_halves(config, sequences):
    """Bytes of x and dy of every linear of a block; q, k and v share x, and so do gate and up."""
    kv = config.kv_heads * config.head_dim
    inputs = 3 * config.hidden + config.ffn
    outputs = 3 * config.hidden + 2 * kv + config.ffn * (2 if config.family == "llama" else 1)
    return sequences * SEQ * (inputs + outputs) * config.dtype.itemsize


@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt"])
def test_only_what_w_needs_is_kept_between_the_halves(config):
    stage, x, dy = stage_by_hand(config)
    with SavedActivations(stage) as saved:
        stage(x).backward(dy)
    whole = {name: p.grad for name, p in stage.named_parameters()}
    dx, x.grad = x.grad, None
    stage.zero_grad()
    later = pp.WeightsLater()
    with SavedActivations(stage) as halves, PeakLiveBytes(stage) as live:
        with later:
            y = stage(x)
        assert halves.now == saved.peak, "forward keeps no more than for a whole backward"
        with later:
            y.backward(dy)
        del y
        assert halves.now == 2 * between_the_halves(config, len(x))
        own = sum(p.grad.nbytes for p in stage.parameters() if p.grad is not None)
        assert live.now < halves.now + own + x.nbytes + 2000, "nothing else is alive"
        assert torch.equal(x.grad, dx), "I alone gives the gradient of the input"
        assert all(p.grad is None for p in stage.parameters() if p.dim() > 1)
        later.run()
        assert halves.now == 0
    assert_bitwise({n: p.grad for n, p in stage.named_parameters()}, whole, "I and W against B")


def test_torch_keeps_everything_between_the_halves():
    """What its way costs, measured: see the head of pp/split.py."""
    from torch.distributed.pipelining._backward import stage_backward_input

    stage, x, dy = stage_by_hand(F64)
    with SavedActivations(stage) as saved:
        y = stage(x)
        _, groups = stage_backward_input([y], [dy], [x], stage.parameters())
        del y
        assert groups
        assert saved.now == saved.peak
        assert saved.now > between_the_halves(F64, len(x))


def test_hooks_on_parameters_hear_of_w():
    stage, x, dy = stage_by_hand(F64)
    heard = []
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    later = pp.WeightsLater()
    with later:
        stage(x).backward(dy)
    assert heard
    assert all("norm" in name for name in heard)
    later.run()
    assert sorted(heard) == sorted(name for name, _ in stage.named_parameters())
