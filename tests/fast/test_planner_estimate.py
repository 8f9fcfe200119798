"""The estimate: seconds by hand, properties, and the bubble by formula and by simulation."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from course_lib.formulas.moves import Move
from course_lib.ledger import wire
from course_lib.planner import Configuration, configure, hardware, model
from course_lib.planner.communication import stage_moves, step_moves
from course_lib.planner.configuration import stages_of
from course_lib.planner.estimate import estimate, rank_moves
from course_lib.planner.hardware import Link
from course_lib.planner.links import Span, axis_span, seconds, span
from course_lib.planner.pipeline import StageSeconds, pipeline
from course_lib.schedule import Costs, make, predicted_bubble, simulate

# Numbers that one can multiply in the head: 100 and 10 bytes a second, 1 and 2 seconds per step.
ROUND = replace(hardware("h100"), gpus_per_node=4, node=Link(100.0, 1.0), network=Link(10.0, 2.0))
LLAMA, H100 = model("llama-3-70b"), hardware("h100")


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "size", "world", "expected"),
    [
        (1, 4, 64, Span(4, 1)),
        (1, 8, 64, Span(4, 2)),
        (2, 4, 64, Span(2, 2)),
        (4, 16, 64, Span(1, 16)),
        (8, 2, 64, Span(1, 2)),
        (1, 3, 3, Span(3, 1)),  # the only group
        (1, 3, 6, Span(1, 3)),  # the second group has ranks 3, 4 and 5 on two nodes
        (1, 1, 8, Span(1, 1)),
    ],
)
def test_a_group_spans_so_many_gpus_of_so_many_nodes(stride, size, world, expected):
    assert span(stride, size, 4, world) == expected


def test_the_axes_are_placed_from_tp_outwards():
    plan = Configuration(tp=2, cp=2, dp=4, pp=2, ep=2)
    links = {axis: axis_span(axis, plan, 4) for axis in ("tp", "cp", "dp", "dp_cp", "ep", "pp")}
    assert links == {
        "tp": Span(2, 1),
        "cp": Span(2, 1),
        "dp": Span(1, 4),
        "dp_cp": Span(2, 4),
        "ep": Span(2, 1),
        "pp": Span(1, 2),
    }
    assert axis_span("edp", plan, 4) == Span(1, 4)
    assert [links[axis].link for axis in ("tp", "dp", "dp_cp")] == [
        "node",
        "network",
        "node+network",
    ]


@pytest.mark.parametrize(
    ("move", "over", "expected"),
    [
        # 2 x 3 steps of 400/4 bytes at 100 B/s and 1 s each
        (Move("all_reduce", 400, 4), Span(4, 1), 6 * (1 + 1)),
        # 3 steps of the shard of 100 bytes
        (Move("all_gather", 100, 4), Span(4, 1), 3 * (1 + 1)),
        (Move("reduce_scatter", 400, 4), Span(4, 1), 3 * (1 + 1)),
        # over the network 2 x 3 steps of 100 bytes at 10 B/s and 2 s each
        (Move("all_reduce", 400, 4), Span(1, 4), 6 * (2 + 10)),
        # 1 step of 400/2 in the node, 1 of 400/4 between the nodes, and back
        (Move("all_reduce", 400, 4), Span(2, 2), 2 * ((1 + 2) + (2 + 10))),
        # 1 peer in the node, 2 on the other one, 100 bytes to each
        (Move("all_to_all", 400, 4), Span(2, 2), (1 + 1) + 2 * (2 + 10)),
        (Move("send", 100, 2), Span(4, 1), 1 + 1),
        (Move("send", 100, 2), Span(1, 4), 2 + 10),
        (Move("send", 100, 2, calls=3), Span(1, 4), 3 * 12),
        (Move("all_reduce", 400, 1), Span(1, 1), 0),
    ],
)
def test_seconds_by_hand(move, over, expected):
    assert seconds([move], over, ROUND) == pytest.approx(expected, rel=1e-12)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_without_latency_a_call_takes_its_wire_bytes_on_the_links(op, inside, nodes):
    """What leaves a GPU inside the node and between nodes adds up to the ledger's wire bytes."""
    n = inside * nodes
    assume(n > 1)
    one = replace(ROUND, node=Link(1.0, 0.0), network=Link(1.0, 0.0))
    move = Move(op, 720720, n)
    assert seconds([move], Span(inside, nodes), one) == pytest.approx(float(move.wire), rel=1e-12)


# --- bubbles ------------------------------------------------------------------------------------

EQUAL = StageSeconds(1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 64), (8, 24), (8, 256)])
def test_the_bubble_by_formula_is_that_of_the_simulation(name, p, m):
    """Equal stages and free messages: the textbook's case."""
    chunks = 2 if name == "interleaved" else 1
    stages = [EQUAL] * (p * chunks)
    found = pipeline(name, p, m, stages, chunks=chunks)
    assert found.of_total == pytest.approx(predicted_bubble(name, p, m, chunks), rel=1e-12)
    assert found.by_formula == pytest.approx(found.of_total, rel=1e-12)
    by_formula = pipeline(name, p, m, stages, chunks=chunks, simulated=False)
    assert by_formula.seconds == pytest.approx(found.seconds, rel=1e-12)
    assert (by_formula.simulated, found.simulated <= max(4 * p, 1024 // p)) == (0, True)


@pytest.mark.parametrize(
    ("name", "chunks", "bar"),
    [
        ("1f1b", 1, 1e-9),
        ("gpipe", 1, 1e-9),
        ("interleaved", 2, 1e-9),
        ("interleaved", 4, 1e-9),
        ("zb-h1", 1, 0.01),
        ("zb-h2", 1, 0.01),
        ("zb-v", 2, 0.01),
        ("dualpipe-v", 2, 0.01),
    ],
)
@pytest.mark.parametrize("message", [0.0, 0.05, 0.3])
def test_a_short_simulation_stands_for_a_long_one(name, chunks, bar, message):
    """Uneven stages, an LM head on the last, and messages: 96 micro-batches on 8 ranks."""
    p, m = 8, 96
    stages = [StageSeconds(1 + 0.05 * (s % 3), 1.1, 0.9) for s in range(p * chunks)]
    stages[-1] = StageSeconds(1.2, 1.2, 1.1)
    found = pipeline(name, p, m, stages, chunks=chunks, message=message)
    costs = Costs(1.0, 1.0, 1.0, message, per_stage=tuple((f, i, w) for f, i, w in stages))
    whole = simulate(make(name, p, m, chunks, costs), costs)
    assert found.simulated < m or p * chunks * m <= 1024
    assert found.work == pytest.approx(whole.work, rel=1e-12)
    assert found.seconds == pytest.approx(whole.makespan, rel=bar)


@pytest.mark.parametrize(("name", "p", "chunks"), [("zb-h1", 20, 1), ("zb-v", 20, 2)])
def test_many_ranks_are_simulated_as_fewer(name, p, chunks):
    stages = [StageSeconds(1.0, 1.1, 0.9)] * (p * chunks)
    found = pipeline(name, p, 2 * p, stages, chunks=chunks, message=0.05)
    costs = Costs(1.0, 1.1, 0.9, 0.05)
    whole = simulate(make(name, p, 2 * p, chunks, costs), costs)
    assert found.seconds == pytest.approx(whole.makespan, rel=0.01)


def test_the_slowest_stage_is_the_busiest_rank():
    stages = [EQUAL, EQUAL, StageSeconds(2.0, 1.0, 1.0), EQUAL]
    found = pipeline("1f1b", 4, 8, stages)
    assert (found.rank, found.work) == (2, 32.0)
    assert found.of_ideal == pytest.approx(found.of_total / (1 - found.of_total))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_formula_knows_the_slowest_stage(name):
    """The rank of the LM head waits for the work of the others, not for as much as its own."""
    stages = [EQUAL, EQUAL, EQUAL, StageSeconds(1.5, 1.5, 1.5)]
    simulated = pipeline(name, 4, 16, stages, message=0.0)
    by_formula = pipeline(name, 4, 16, stages, simulated=False)
    assert by_formula.seconds == pytest.approx(simulated.seconds, rel=1e-12)
    assert by_formula.by_formula == pytest.approx(3 / 19)


def test_as_many_stages_as_the_schedule_has():
    with pytest.raises(ValueError, match="expected the seconds of 8 stages for interleaved on 4"):
        pipeline("interleaved", 4, 8, [EQUAL] * 4, chunks=2)


# --- estimates ----------------------------------------------------------------------------------


@st.composite
def plans(draw):
    """A plan of Llama 3 70B on 64 GPUs."""
    tp, cp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    pp = draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    return configure(
        LLAMA,
        64,
        tp=tp,
        cp=cp,
        pp=pp,
        chunks=chunks,
        zero=draw(st.integers(0, 3)),
        micro_batch=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        global_batch=256,
    )


@settings(max_examples=40, deadline=None)
@given(plans())
def test_the_parts_add_up_and_nothing_is_negative(plan):
    found = estimate(LLAMA, H100, plan)
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds, rel=1e-12)
    assert min(found.parts.values()) >= 0
    assert found.bubble_of_total == pytest.approx(
        found.bubble_of_ideal / (1 + found.bubble_of_ideal), rel=1e-9
    )
    for axis, one in found.communication.items():
        assert one.exposed_seconds == pytest.approx(found.parts.get(axis, 0.0))
        assert one.exposed_seconds <= one.seconds * (1 + 1e-9), axis
    assert 0 < found.mfu <= found.hfu < H100.efficiency_of("bf16") * 1.001
    assert found.mfu < found.mfu_full_attention
    free = 0.92 * H100.capacity_bytes
    assert found.fits == (found.memory.total <= free) == (found.headroom_bytes >= 0)
    assert bool(found.reasons) != found.fits


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from(["node", "network"]), st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(plan, link, factor):
    wider = replace(getattr(H100, link), bandwidth=getattr(H100, link).bandwidth * factor)
    faster = replace(H100, **{link: wider})
    before = estimate(LLAMA, H100, plan, simulated=False)
    after = estimate(LLAMA, faster, plan, simulated=False)
    assert after.step_seconds <= before.step_seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_wire_bytes_are_the_ledgers_wire_of_the_calls(plan):
    found = estimate(LLAMA, H100, plan, simulated=False).communication
    of_stages, ranks = stage_moves(LLAMA, plan), [rank for rank, _ in stages_of(LLAMA, plan)]
    most: dict[str, Fraction] = {}
    for rank in range(plan.pp):
        own = [moves for owner, moves in zip(ranks, of_stages, strict=True) if owner == rank]
        for axis, moves in rank_moves(plan, own, step_moves(LLAMA, plan, rank)).items():
            sent = sum((m.calls * wire(m.op, m.payload, m.n) for m in moves), Fraction(0))
            most[axis] = max(sent, most.get(axis, Fraction(0)))
    assert {axis: one.wire_bytes for axis, one in found.items()} == pytest.approx(
        {axis: float(sent) for axis, sent in most.items()}, rel=1e-12
    )


def test_bytes_of_llama_by_hand():
    """70B on 64 GPUs, tp 8 and pp 2: what one would write on a whiteboard."""
    plan = configure(LLAMA, 64, tp=8, pp=2, global_batch=64)
    found = estimate(LLAMA, H100, plan).communication
    m, x_bytes = 16, 8192 * 8192 * 2
    # The last stage: 4 gathers and 4 reduce-scatters in each of 40 layers, 2 gathers again; the
    # head 1, 1 and 1; the loss 3 numbers of 4 bytes a token; and the gradients of the norms.
    activations = m * (40 * 10 + 3) * 7 / 8 * x_bytes
    loss = m * 3 * 2 * 7 / 8 * 8192 * 4
    norms = 2 * 7 / 8 * (81 * 8192) * 4 / 4
    assert found["tp"].wire_bytes == pytest.approx(activations + loss + norms, rel=1e-12)
    # A boundary, both ways, an eighth of the rows.
    assert found["pp"].wire_bytes == m * x_bytes / 8
    # ZeRO-1 over 4: fp32 gradients and bf16 weights of the larger stage.
    layer = (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) / 8 + 2 * 8192
    held = 40 * layer + 128256 / 8 * 8192 + 8192
    assert found["dp"].wire_bytes == pytest.approx(3 / 4 * held * (4 + 2), rel=1e-9)
    assert {axis: one.link for axis, one in found.items()} == {
        "tp": "node",
        "pp": "network",
        "dp": "network",
    }


@pytest.mark.parametrize("zero", range(4))
def test_what_data_parallelism_hides(zero):
    """With a link as fast as one likes nothing is exposed, with a slow one nearly all of it."""
    llama = model("llama-3-8b")
    plan = configure(llama, 16, zero=zero, global_batch=32)
    fast = replace(H100, node=Link(1e15, 0.0), network=Link(1e15, 0.0))
    slow = replace(H100, network=Link(1e6, 0.0))
    assert estimate(llama, fast, plan).communication["dp"].exposed_seconds < 1e-4
    traffic = estimate(llama, slow, plan).communication["dp"]
    assert traffic.exposed_seconds > 0.9 * traffic.seconds


def test_dualpipe_hides_the_tokens_of_experts():
    mixtral = model("mixtral-8x7b")
    exposed = {}
    for schedule in ("interleaved", "dualpipe-v"):
        plan = configure(mixtral, 64, pp=4, ep=8, chunks=2, schedule=schedule)
        exposed[schedule] = estimate(mixtral, H100, plan).communication["ep"]
    assert exposed["interleaved"].exposed_seconds == pytest.approx(exposed["interleaved"].seconds)
    assert exposed["dualpipe-v"].exposed_seconds == 0
    assert exposed["dualpipe-v"].wire_bytes == exposed["interleaved"].wire_bytes


def test_selective_recomputation_and_full_cost_what_hfu_counts():
    none, selective, full = (
        estimate(LLAMA, H100, configure(LLAMA, 64, tp=8, pp=4, recompute=kind))
        for kind in ("none", "selective", "full")
    )
    assert none.hfu == none.mfu
    assert none.mfu > selective.mfu > full.mfu
    blocks = 1 - 128256 * 8192 / 70.6e9  # of the FLOPs, nearly: the LM head is not run again
    assert full.hfu / full.mfu == pytest.approx(1 + blocks / 3, rel=0.01)


def test_an_unknown_number_format_is_refused():
    plan = configure(LLAMA, 64, tp=8, dtype="fp8")
    with pytest.raises(ValueError, match="a100-80 has no fp8 peak .* choose dtype bf16 or"):
        estimate(LLAMA, hardware("a100-80"), plan)


def test_a_plan_that_does_not_fit_says_what_is_largest():
    found = estimate(LLAMA, H100, configure(LLAMA, 8, tp=8, zero=0, global_batch=8))
    assert not found.fits
    assert "GB more than the 78.1 GB that h100 leaves after a reserve of 8 %." in found.reasons[0]
    assert found.reasons[1].startswith("The largest part is optimizer: raise")


def test_a_smaller_reserve_leaves_more():
    plan = configure(LLAMA, 64, tp=8, pp=4)
    held = estimate(LLAMA, H100, plan, reserve=0.0)
    assert held.headroom_bytes == pytest.approx(H100.capacity_bytes - held.memory.total)


def test_llama_drops_a_layer_at_both_ends():
    """126 layers on 16 ranks: a last stage of 7 layers and the LM head is faster than one of 8."""
    llama = model("llama-3-405b")
    options = {"tp": 8, "pp": 16, "seq": 8192, "global_batch": 2048}
    full_end, both_ends = (
        estimate(llama, H100, configure(llama, 8192, **options, stage_layers=layers))
        for layers in ((7, 7, *[8] * 14), (7, *[8] * 14, 7))
    )
    assert both_ends.parts["compute"] < full_end.parts["compute"]
    assert both_ends.step_seconds < full_end.step_seconds


def test_assumptions_are_sentences():
    found = estimate(LLAMA, H100, configure(LLAMA, 64, tp=8, cp=2, pp=2))
    assert len(found.assumptions) >= 7
    for sentence in found.assumptions:
        assert sentence[0].isupper(), sentence
        assert sentence.endswith("."), sentence


def test_a_link_efficiency_counts():
    half = replace(H100.node, efficiency=H100.node.efficiency / 2)
    plan = configure(LLAMA, 64, tp=8)
    slower = estimate(LLAMA, replace(H100, node=half), plan)
    assert slower.parts["tp"] > 1.7 * estimate(LLAMA, H100, plan).parts["tp"]
