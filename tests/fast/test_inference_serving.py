"""Serving compared: what the formulas say of layouts and batches, and its picture."""

from __future__ import annotations

import pytest
from inference_twin import requests_of

from course_lib import inference
from course_lib.bench import inference as bench
from course_lib.inference import Scheduler, Work
from course_lib.inference.replica import forward_span
from course_lib.mesh import Conditions, Links, RankContext, enter_rank, make_mesh
from course_lib.view import serving_plot

CONFIG = bench.config_for(4)
LINKS = Links(bench.INSIDE, bench.BETWEEN, 8)
APART = Links(bench.INSIDE, bench.BETWEEN, 4)
DP8, TP8, BOTH = bench.ONE_NODE


def speed(layout, batch, links=LINKS):
    return bench.predicted(CONFIG, layout, links, batch)


def test_replicas_take_what_one_gpu_takes():
    throughput, seconds = speed(DP8, 32)
    assert seconds == pytest.approx(0.320 + 4 * 0.016)
    assert throughput == pytest.approx(32 / 0.384)
    assert bench.token_bytes(CONFIG, DP8) == {}


def test_one_model_cut_in_eight_by_hand():
    """Nine all-reduces of 14 messages, one all-gather of 7, and their bytes at 2 MB/s."""
    row, pair = 8 * 64 * 4, 8 * 2 * 4
    messages = (9 * 14 + 7) * 1e-3 + (9 * 2 * 7 / 8 * row + 7 * pair) / 2e6
    assert speed(TP8, 8)[1] == pytest.approx((0.320 + 8 * 0.016) / 8 + messages)
    assert bench.token_bytes(CONFIG, TP8) == {"tp": 8 * (9 * 2 * 7 / 8 * 64 * 4 + 7 * 2 * 4)}


def test_a_pipeline_of_two_by_hand():
    config = CONFIG
    assert bench.token_bytes(config, BOTH) == {
        "tp": 4 * (9 * 2 * 3 / 4 * 64 * 4 + 3 * 2 * 4),
        "pp": 4 * (64 * 4 + 8),
    }
    row = 4 * 64 * 4  # half the requests of 8
    reduces = 5 * (6 * 1e-3 + 1.5 * row / 2e6)  # four of two layers, and the embedding's
    tick = (0.320 + 4 * 0.016) / 8 + reduces + 1e-3 + row / 2e6
    assert speed(BOTH, 8)[1] == pytest.approx(2 * tick)
    assert speed(BOTH, 8, APART)[1] > speed(BOTH, 8)[1], "the hop leaves the node"


def test_which_layout_is_best_depends_on_the_batch():
    assert speed(TP8, 8)[0] > speed(DP8, 8)[0], "few requests: the weights are read by all at once"
    assert speed(TP8, 128)[0] < speed(DP8, 128)[0], "many: its messages cost more than weights"
    assert speed(TP8, 8)[1] < speed(DP8, 8)[1], "one token comes sooner"


def test_tensor_parallelism_belongs_inside_a_node():
    across, inside, both = bench.TWO_NODES
    for batch in bench.BATCHES:
        assert speed(across, batch, APART)[0] < speed(inside, batch, APART)[0]
        assert speed(across, batch, APART)[0] < speed(both, batch, APART)[0]


def test_a_prefilled_book_only_decodes():
    scheduler = bench.prefilled(4, 3, 2)
    works = []
    while not scheduler.done:
        for group in range(2):
            works.append(scheduler.next_work(group))
            scheduler.record(works[-1], [7] * 2)
    assert len(works) == 6
    assert not any(work.is_prefill for work in works)


def test_a_paced_step_waits_for_its_tokens_and_its_stage():
    enter_rank(RankContext(conditions=Conditions({"F": 0.01, ("F", 1): 0.03, "token": 0.001})))
    try:
        mesh = make_mesh()
        decode = Work((0, 1), (0, 1), ((3,), (4,)), (1, 1))
        for stage, seconds in ((None, 0.012), (1, 0.032)):
            with forward_span(mesh, decode, stage=stage):
                pass
            assert mesh.trace.spans[-1].duration >= seconds
            assert mesh.trace.sleeps[-1].asked == pytest.approx(seconds)
        with forward_span(mesh, inference.scheduler.NOTHING):
            pass
        assert len(mesh.trace.sleeps) == 2, "no work takes no time"
        with forward_span(mesh, decode):  # what was sent meanwhile comes on top
            mesh.trace.add("all_reduce", 0.0, 0.02, axis="tp")
        assert mesh.trace.spans[-1].duration >= 0.032
    finally:
        enter_rank(RankContext())


def fake_result(late=0.01):
    rows = {}
    for node, (per_node, layouts) in bench.NODES.items():
        rows[node] = []
        for layout in layouts:
            for batch in bench.BATCHES:
                fast, slow = speed(layout, batch, Links(bench.INSIDE, bench.BETWEEN, per_node))
                sent = float(sum(bench.token_bytes(CONFIG, layout).values()))
                rows[node].append({
                    "layout": layout.name, "batch": batch, "overshoot": late,
                    "tokens_per_second": 0.9 * fast, "tokens_per_second_formula": fast,
                    "latency_ms": 1.1e3 * slow, "latency_ms_formula": 1e3 * slow,
                    "bytes_per_token": sent, "bytes_per_token_formula": sent,
                })  # fmt: skip
    batchings = {"continuous": {"steps": 28, "tokens_per_second": 60.0}}
    return {"ranks": 8, "tokens": 4, "layouts": rows, "batchings": batchings}


def test_the_bench_as_text_and_as_a_picture():
    said = bench.text(fake_result())
    assert "two nodes of 4" in said
    assert "dp2+tp4" in said
    assert "continuous     28 steps" in said
    assert "too busy" not in said
    assert "too busy" in bench.text(fake_result(0.2))
    picture = bench.picture(fake_result(), "one node of 8")
    assert picture.caption.startswith(
        "Points: measured. Lines: model. Highest throughput: tp4+pp2 at 8 (43 tokens per second), "
        "tp4+pp2 at 128 (214"
    )
    assert "too busy" in bench.picture(fake_result(0.2), "two nodes of 4").caption
    left, right = picture.get_axes()
    assert left.get_ylabel() == "tokens per second"
    assert right.get_ylabel() == "ms per token"
    assert [len(ax.lines) for ax in (left, right)] == [6, 6]  # points and a line of three layouts
    latencies = right.lines[0].get_ydata()
    assert list(latencies) == pytest.approx([1.1 * 336, 1.1 * 384, 1.1 * 576])


@pytest.mark.parametrize(
    ("measured", "models", "said"),
    [
        ({}, {}, "no points for any name"),
        ({"dp8": {}}, {}, "got no points for .'dp8'."),
        ({"dp8": {1: (1.0, 1.0)}}, {"tp8": lambda batch: (1, 1)}, "lines for .'tp8'."),
        ({str(n): {1: (1.0, 1.0)} for n in range(5)}, {}, "at most 4 names, got 5"),
    ],
)
def test_the_picture_refuses_what_it_cannot_show(measured, models, said):
    with pytest.raises(ValueError, match=said):
        serving_plot(measured, models)


def test_one_curve_needs_no_winner_and_no_model():
    picture = serving_plot({"dp8": {8: (1.0, 0.1)}}, {}, note="On two cores.")
    assert picture.caption == "Points: measured. On two cores."


def test_batchings_count_their_steps():
    requests = inference.make_requests([[1, 2, 3]] * len(bench.MIXED), bench.MIXED)
    steps = {}
    for kind in (Scheduler, inference.StaticScheduler):
        scheduler, steps[kind] = kind(requests, 4), 0
        while not scheduler.done:
            work = scheduler.next_work()
            scheduler.record(work, [0] * len(work.slots))
            steps[kind] += 1
    # Static: eight prefills, and as many decodes as the longest of each four but its first token.
    assert steps[inference.StaticScheduler] == 8 + (12 - 1) + (16 - 1)
    assert steps[Scheduler] < steps[inference.StaticScheduler]
    assert requests_of()[0].max_new_tokens == 6
