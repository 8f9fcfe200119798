"""Split backward, and schedules of several chunks: equal to one process, with less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensor_parallel
import torch
from equality import assert_bitwise, assert_equal
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
    sequences,
    serial,
    tokens_of,
)
from tensor_parallel import AGAIN, RINGS, SP, TP

from course_lib import comm, cp, pp, recompute
from course_lib.data import batch
from course_lib.launch import RankError
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
        stages = pp.make_stages(model, schedule, mesh.pp.rank)
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


@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt"])
def test_only_what_w_needs_is_kept_between_the_halves(config):
    stage, x, dy = stage_by_hand(config)
    with SavedActivations(stage) as saved:
        stage(x).backward(dy)
    whole = {name: p.grad for name, p in stage.named_parameters()}
    dx, x.grad = x.grad, None
    stage.zero_grad()
    later = pp.DeferredWeightGradients(pp.weights_of(stage))
    with SavedActivations(stage) as halves, PeakLiveBytes(stage) as live:
        with later:
            y = stage(x)
        assert halves.now == saved.peak, "forward keeps no more than for a whole backward"
        with later:
            y.backward(dy)
        del y
        assert halves.now == pp.saved_for_wgrad(config, len(x), SEQ, 1, 3)
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
        assert saved.now > pp.saved_for_wgrad(F64, len(x), SEQ, 1, 3)


def test_hooks_on_parameters_hear_of_w():
    stage, x, dy = stage_by_hand(F64)
    heard = []
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    later = pp.DeferredWeightGradients(pp.weights_of(stage))
    with later:
        stage(x).backward(dy)
    assert heard
    assert all("norm" in name for name in heard)
    later.run()
    assert sorted(heard) == sorted(name for name, _ in stage.named_parameters())


# --- memory ---------------------------------------------------------------------------------


def peaks(schedules, m):
    """What each schedule keeps on this rank at most: pairs in flight, bytes saved, bytes alive."""
    mesh = make_mesh(pp=4)
    equal = [batch(mb, seed=1, batch_size=2, seq_len=SEQ) for mb in range(m)]
    tokens = [tensor for pair in equal for tensor in pair]
    found = []
    for schedule in schedules:
        stages = pp.make_stages(build_model(F64), schedule, mesh.pp.rank)
        live, saved = PeakLiveBytes(), SavedActivations(*stages.values(), tokens)
        with saved, live:
            outcome = pp.run(schedule, stages, mesh, equal, lambda y, t: loss_sum(y, t)[0])
        assert saved.now == 0
        found.append((outcome.peak_in_flight, saved.peak, live.peak))
    return found


def test_what_each_schedule_keeps(worlds):
    """ZB-H1 what 1F1B's first rank keeps, ZB-H2 nearly twice as much; a V spreads it evenly."""
    schedules = [make(name, 4, 8) for name in ("1f1b", *NAMES)]
    by_rank = worlds(4).run(peaks, schedules, 8, timeout=150)
    for rank, found in enumerate(by_rank):
        for schedule, (in_flight, _, _) in zip(schedules, found, strict=True):
            assert in_flight == schedule.peak_in_flight()[rank]
    saved = {
        schedule.name: [found[at][1] for found in by_rank] for at, schedule in enumerate(schedules)
    }
    first = {name: kept[0] for name, kept in saved.items()}
    assert 1 <= first["zb-h1"] / first["1f1b"] < 1.02
    assert 1.7 < first["zb-h2"] / first["1f1b"] < 1.8, "2p-1 pairs in flight, not p"
    # 1F1B keeps one pair on the last rank, ZB-H1 p of them, logits and all.
    assert saved["zb-h1"][-1] > 3 * saved["1f1b"][-1]
    for name, pairs in (("zb-v", 8), ("dualpipe-v", 9)):
        assert len(set(saved[name][1:])) == 1, (
            "a V: equal on every rank, except for embedding and LM head"
        )
        assert saved[name][1] / first["1f1b"] == pytest.approx(pairs / 2 / 4, abs=0.02)


def test_memory_does_not_grow_with_the_number_of_micro_batches(worlds):
    def rank():
        return [[peaks([make(name, 4, m)], m)[0][1:] for m in (9, 15)] for name in NAMES[1:]]

    for found in worlds(4).run(rank, timeout=150):
        for name, (few, many) in zip(NAMES[1:], found, strict=True):
            assert many[0] == few[0], f"{name} saves more"
            assert many[1] < few[1] + 2 * SEQ * F64.hidden * 8, f"{name} has more alive"


def test_weights_that_wait_for_the_end_are_caught_by_the_meter(worlds):
    """The classic mistake: every W stashed until all micro-batches are through."""

    def stashed(m):
        schedule = make("zb-h1", 4, m)
        rows = [[a for a in row if a.op != "W"] for row in schedule.rows]
        rows = [tuple(row + [Action("W", r, mb) for mb in range(m)]) for r, row in enumerate(rows)]
        return replace(schedule, rows=tuple(rows))

    def rank():
        return [peaks([stashed(m)], m)[0][1] for m in (9, 19)]

    for few, many in worlds(4).run(rank):
        assert many > few + 8 * pp.saved_for_wgrad(F64, 2, SEQ, 0, 1)


# --- when a stage is done -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", *NAMES])
@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt"])
def test_each_stage_says_once_that_its_gradients_are_complete(worlds, name, config):
    def rank():
        mesh, schedule = make_mesh(pp=4), make(name, 4, 4)
        stages = pp.make_stages(prepare(config), schedule, mesh.pp.rank)
        done, left = {}, []

        def on_stage_done(stage):
            assert stage not in done
            done[stage] = [p.grad.clone() for p in stages[stage].parameters()]
            left.append(len(schedule.rows[mesh.pp.rank]) - len(pp_spans(mesh)))

        pp.run(schedule, stages, mesh, batches(4), lambda y, t: loss_sum(y, t)[0], on_stage_done)
        for stage, module in stages.items():
            for then, now in zip(done[stage], module.parameters(), strict=True):
                assert torch.equal(then, now.grad)
        assert done.keys() == stages.keys()
        return left

    def pp_spans(mesh):
        return [span for span in mesh.trace.spans if span.stage is not None]

    left = worlds(4).run(rank)
    if name != "1f1b" and name != "zb-h1" and name != "zb-h2" and not config.tied:
        assert any(actions[0] > 0 for actions in left), "a chunk is done before its rank is"


# --- stages that are cut further ------------------------------------------------------------


WAYS = {"tp": TP, "sp": SP, "sp again": AGAIN, "rings": RINGS}


def cut_further(schedule, config, way):
    """Tensor parallelism in a pipeline: loss, gradients with the ranks' parts joined, bytes."""
    mesh = make_mesh(tp=2, pp=schedule.ranks)
    model = way.cut(tensor_parallel.disturbed(config), mesh.tp)
    stages = pp.make_stages(model, schedule, mesh.pp.rank)
    micro_batches = batches(schedule.microbatches)
    tokens = tokens_of(micro_batches)

    def share(y, targets):
        return model.cross_entropy(y, targets)[0] / tokens

    loss = pp.run(schedule, stages, mesh, micro_batches, share).loss
    sent = {axis: mesh.ledger.wire_bytes(axis) for axis in ("pp", "tp")}
    mine = torch.nn.ModuleList(stages.values())
    tensor_parallel.reduce_gradients(mine, mesh.tp, way)
    joined = tensor_parallel.joined(mine, mesh.tp, lambda p: p.grad)
    names = {p: name for name, p in model.named_parameters()}
    gradients = {names[p]: joined[name] for name, p in mine.named_parameters()}
    return float(comm.all_reduce(loss, mesh.pp)), gradients, sent


def twin_of_one_step(config, m):
    """Loss and gradients of one process."""
    model, total = tensor_parallel.disturbed(config), 0.0
    for inputs, targets in batches(m):
        share = model.loss_sum(inputs, targets)[0] / tokens_of(batches(m))
        share.backward()
        total += float(share.detach())
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe-v"])
@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt"])
def test_stages_cut_by_tensor_and_sequence_parallelism(worlds, name, way, config):
    schedule = make(name, 2, 4)
    results = worlds(4).run(cut_further, schedule, config, WAYS[way])
    loss, twin = twin_of_one_step(config, 4)
    for got_loss, gradients, _ in results:
        assert abs(got_loss - loss) < 1e-11
        mine = {name: twin[name] for name in gradients}
        assert_equal(gradients, mine, 1e-12, f"gradients in {name} over {way}")
    activations = sequences(4) * SEQ * config.hidden * 8
    tied = config.vocab * config.hidden * 8 // 2 if config.tied else 0  # a rank has half of it
    each = activations // (2 if WAYS[way].by_rows else 1)
    assert sum(sent["pp"] for *_, sent in results) == 2 * pp.wire_bytes(schedule, each, tied)
    if name != "dualpipe-v":
        whole = worlds(4).run(cut_further, one_f_one_b(2, 4), config, WAYS[way])
        assert [r[2] for r in results] == [r[2] for r in whole], "halves send no byte more"


def halves_by_hand(config, way):
    """Bytes sent in each half of a stage's backward, and those kept between them."""
    mesh = make_mesh(tp=2)
    model = way.cut(build_model(config, seed=3), mesh.tp)
    stage, positions = model.stage(1, 3), torch.arange(SEQ)
    rows = len(stage.own_rows(positions))
    x = torch.ones(2, rows, config.hidden, dtype=config.dtype, requires_grad=True)
    later = pp.DeferredWeightGradients(pp.weights_of(stage))
    with SavedActivations(stage) as saved:
        with later:
            stage(x, positions).sum().backward()
        between, kept = mesh.ledger.wire_bytes("tp"), saved.now
        later.run()
    return kept, mesh.ledger.wire_bytes("tp") - between


def test_w_sends_nothing_unless_it_gathers_again(worlds):
    """Gathered in I, the input would stay whole until W; gathered in W it need not."""
    kept = {}
    for name, way in {"tp": TP, "sp": SP, "sp again": AGAIN}.items():
        for kept[name], sent in worlds(2).run(halves_by_hand, F64, way):
            share = 2 * SEQ * F64.hidden * 8 // 2
            assert sent == (2 * 2 * share if name == "sp again" else 0)  # two a block
    # norms' outputs, the input of q, k and v and that of gate and up, in two blocks
    assert kept["sp"] - kept["sp again"] == 2 * 2 * 2 * SEQ * F64.hidden * 8 // 2


def test_context_parallel_stages(worlds):
    def rank():
        mesh, schedule = make_mesh(cp=2, pp=2), make("zb-h1", 2, 4)
        model = prepare(F64)
        cp.parallelize(model, cp.ring_attention, mesh.cp, cp.ZIGZAG)
        stages = pp.make_stages(model, schedule, mesh.pp.rank)
        whole = batches(4)
        micro_batches = [cp.shard(*one, mesh.cp, cp.ZIGZAG) for one in whole]
        tokens = tokens_of(whole)
        pp.run(schedule, stages, mesh, micro_batches, lambda y, t: loss_sum(y, t)[0] / tokens)
        mine = own(model, stages)
        sent = mesh.ledger.wire_bytes("pp")
        return {name: comm.all_reduce(p.grad, mesh.dp_cp) for name, p in mine.items()}, sent

    twin, results = serial(F64, 4, steps=1)[1], worlds(4).run(rank)
    for gradients, _ in results:
        mine = {name: twin[name] for name in gradients}
        assert_equal(gradients, mine, 1e-12, "gradients of a pipeline over cp")
    activations = sequences(4) * SEQ * F64.hidden * 8
    assert sum(sent for _, sent in results) == pp.wire_bytes(make("zb-h1", 2, 4), activations)


def test_a_message_of_another_shape_is_refused(worlds):
    def rank():
        mesh, schedule = make_mesh(tp=2, pp=2), one_f_one_b(2, 2)
        model = SP.cut(build_model(F64), mesh.tp)
        model.own_rows = lambda positions: positions  # as if the rows were not shared
        stages = pp.make_stages(model, schedule, mesh.pp.rank)
        pp.run(schedule, stages, mesh, batches(2), lambda y, t: model.cross_entropy(y, t)[0])

    with pytest.raises(RankError, match=r"0F0 made \(2, 6, 16\).*expects \(2, 12, 16\)"):
        worlds(4).run(rank, timeout=30)


# --- beside torch's own ---------------------------------------------------------------------

TORCH = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def beside_torch(name, m):
    """Gradients of this rank by our engine and by torch's. Torch's way to H1 has two chunks."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    def mean(logits, targets):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    mesh = make_mesh(pp=4)
    tokens, targets = batch(0, seed=7, batch_size=2 * m, seq_len=SEQ)
    schedule = make(name, 4, m)
    ours, theirs = build_model(F64, seed=3), build_model(F64, seed=3)
    stages = pp.make_stages(ours, schedule, mesh.pp.rank)
    cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
    outcome = pp.run(schedule, stages, mesh, cut, lambda y, t: mean(y, t) / m)
    shape = make("zb-v" if name in ("zb-v", "dualpipe-v") else "interleaved", 4, m)
    modules = pp.make_stages(theirs, shape, mesh.pp.rank)
    parts = [
        pipelining.PipelineStage(module, stage, shape.stages, mesh.device)
        for stage, module in modules.items()
    ]
    losses = []
    getattr(schedules, TORCH[name])(parts, m, loss_fn=mean).step(
        *([tokens] if 0 in modules else []),
        target=targets if shape.stages - 1 in modules else None,
        losses=losses,
    )
    loss = float(comm.all_reduce(outcome.loss, mesh.pp))
    if losses:
        assert abs(loss - float(torch.stack(losses).mean())) < 1e-12
    return (
        {n: p.grad for n, p in own(ours, stages).items()},
        {n: p.grad for n, p in own(theirs, modules).items()},
    )


@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(worlds, name):
    results = worlds(4).run(beside_torch, name, 8)
    theirs = {name: g for _, gradients in results for name, g in gradients.items()}
    for got, _ in results:
        assert_equal(got, {n: theirs[n] for n in got}, 1e-12, "gradients against torch")
