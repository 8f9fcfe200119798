"""The numbers of docs/open-questions.md, and that its command prints and draws them."""

import pytest

from course_lib.bench.questions import __main__ as command
from course_lib.bench.questions import context, ring, rules, stages, volume
from course_lib.planner.search import search


def percent(share: float) -> float:
    return round(100 * share, 1)


# --- 1. zero bubble on unequal stages ------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return stages.rows()


@pytest.fixture(scope="module")
def middle(rows):
    """The rows of a slow middle rank, by speed and whether layers were moved."""
    equal = (stages.LAYERS // stages.RANKS,) * stages.RANKS
    return {
        (round(row.speed, 2), row.layers != equal): row for row in rows if row.place == "middle"
    }


def test_the_gain_of_zero_bubble_shrinks_with_the_slow_rank(middle):
    saved = {
        at: [percent(row.saved(name)) for name in stages.SCHEDULES[1:]]
        for at, row in middle.items()
    }
    assert saved == {
        (1.0, False): [10.0, 13.3, 13.3, 16.7, 16.7, 16.7],
        (0.8, False): [10.5, 9.5, 12.4, 13.3, 13.3, 13.3],
        (0.5, False): [4.5, 5.2, 5.2, 5.8, 5.8, 5.8],
        (0.33, False): [1.4, 1.8, 1.8, 2.3, 2.3, 2.3],
        (0.8, True): [12.6, 11.5, 17.0, 17.2, 16.7, 17.2],
        (0.5, True): [13.8, 10.3, 15.5, 15.5, 15.5, 15.5],
        (0.33, True): [8.4, 12.2, 14.1, 15.4, 14.3, 15.4],
    }  # fmt: skip


def test_moved_layers_gain_more_than_any_schedule(middle):
    assert [middle[0.5, moved].makespans["1f1b"] for moved in (False, True)] == [77.0, 53.25]
    assert middle[0.5, True].layers == (10, 4, 9, 9)
    for speed in (0.5, 0.33):
        equal, moved = middle[speed, False].makespans, middle[speed, True].makespans
        assert moved["1f1b"] < min(equal.values())


def test_the_bound_of_what_a_schedule_can_save(rows):
    for row in rows:
        assert min(row.makespans.values()) >= row.busiest
        # A V reaches its own bound within 1.1 %, and the search finds nothing shorter.
        assert row.makespans["zb-v"] <= 1.011 * row.bound
        assert row.makespans["searched"] == pytest.approx(row.makespans["zb-v"], rel=1e-9)
        if len(set(row.layers)) == 1:
            waits = row.makespans["1f1b"] / row.busiest - 1
            assert waits <= row.speed * (stages.RANKS - 1) / stages.MICRO_BATCHES + 1e-9


# --- 2. ring attention ---------------------------------------------------------------------------


def test_the_share_of_ideal_by_layout():
    counted = {layout: percent(ring.share_of_ideal(layout, 8, 8192)) for layout in ring.LAYOUTS}
    assert counted == {"contiguous": 53.4, "zig-zag": 100.0, "striped": 98.7}
    assert percent(ring.share_of_ideal("striped", 8, 1024)) == 90.3


@pytest.mark.parametrize(
    ("link", "kv_heads", "full", "causal", "backward"),
    [("node", 64, 2667, 5334, 6401), ("node", 8, 333, 667, 800),
     ("network", 64, 19780, 39560, 47472), ("network", 8, 2472, 4945, 5934)],
)  # fmt: skip
def test_the_smallest_block(link, kv_heads, full, causal, backward):
    assert round(ring.smallest_block(link, kv_heads, causal=False)) == full
    assert round(ring.smallest_block(link, kv_heads)) == causal
    assert round(ring.smallest_block(link, kv_heads, backward=True)) == backward


def test_the_published_runs_hide_their_transfer():
    assert round(ring.h800_block()) == 3601
    assert ring.h800_block() < 8192


def test_at_the_smallest_block_both_take_equally_long():
    block = ring.smallest_block("network", 8)
    assert ring.compute_seconds(block) == pytest.approx(ring.transfer_seconds(block, "network", 8))
    assert ring.compute_seconds(2 * block) > ring.transfer_seconds(2 * block, "network", 8)
    assert int(131072 / ring.smallest_block("network", 8, backward=True)) == 22
    assert int(131072 / ring.smallest_block("network", 64, backward=True)) == 2


# --- 3. context parallelism ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "recompute", "totals", "ring"),
    [("70B", "none", [43.4, 112.5, 389.0, 1494.9], [1, 2, 8, None]),
     ("70B", "full", [22.2, 27.9, 50.7, 142.0], [1, 1, 1, 4]),
     ("405B", "none", [89.2, 89.2, 89.2, 295.2], [2, 8, 32, None]),
     ("405B", "full", [25.8, 27.3, 33.3, 71.5], [1, 1, 1, 1])],
)  # fmt: skip
def test_memory_without_cp(run, recompute, totals, ring):
    plans = [context.planned(run, seq, recompute) for seq in context.LENGTHS]
    assert [plan.memory.total / 1e9 for plan in plans] == pytest.approx(totals, rel=0.02)
    assert [context.smallest_ring(run, seq, recompute) for seq in context.LENGTHS] == ring


def test_activations_are_what_does_not_fit():
    full = context.planned("70B", 524288, "full").memory
    assert full.activations / 1e9 == pytest.approx(121.7, rel=0.02)
    assert context.layer_inputs("70B", 524288) / 1e9 == pytest.approx(85.9, rel=1e-3)
    for (
        seq
    ) in context.LENGTHS:  # a fused kernel has nothing that selective recomputation could free
        none, again = (context.planned("70B", seq, how).memory for how in ("none", "selective"))
        assert none == again


def test_the_time_of_a_sequence_and_of_a_step():
    seconds = [context.sequence_seconds("70B", seq) for seq in (131072, 524288)]
    assert seconds == pytest.approx([40.8, 398.8], rel=0.05)
    seconds = [context.sequence_seconds("405B", seq) for seq in (131072, 524288)]
    assert seconds == pytest.approx([171, 1426], rel=0.05)
    alone, ring = (context.planned("405B", 131072, "full", cp, context.CHUNKS) for cp in (1, 16))
    assert [alone.step_seconds, ring.step_seconds] == pytest.approx([162, 12.7], rel=0.05)
    assert [percent(alone.bubble_of_total), percent(ring.bubble_of_total)] == pytest.approx(
        [93.3, 12.7], abs=1
    )
    assert alone.configuration.micro_batches == 1


# --- 4. rules of thumb ---------------------------------------------------------------------------

# By the search: what is fixed reproduces its plan, so that not every test searches again.
BEST = {
    "7B": {"tp": 1, "pp": 1, "cp": 1, "zero": 1},
    "13B": {"tp": 1, "pp": 2, "cp": 1, "zero": 1},
    "70B": {"tp": 2, "pp": 8, "cp": 4, "zero": 1},
    "180B": {"tp": 2, "pp": 16, "cp": 2, "zero": 1},
    "405B": {"tp": 4, "pp": 32, "cp": 4, "zero": 1},
    "405B, 128k": {"tp": 8, "pp": 16, "cp": 32, "zero": 1},
}
BEST_HIDDEN = {
    "7B": BEST["7B"],
    "13B": BEST["13B"],
    "70B": {"tp": 8, "pp": 2, "cp": 1, "zero": 1},
    "180B": {"tp": 8, "pp": 4, "cp": 1, "zero": 1},
    "405B": {"tp": 16, "pp": 32, "cp": 2, "zero": 1},
    "405B, 128k": {"tp": 16, "pp": 8, "cp": 16, "zero": 1},
}
LOSSES = {  # percent of the best step: the rule and the amended rule, TP exposed; both, TP hidden
    "7B": (2.9, 0.0, 2.9, 0.0),
    "13B": (42.9, 4.8, 6.2, 1.8),
    "70B": (20.7, 12.9, 9.3, 0.0),
    "180B": (18.9, 10.2, 12.0, 0.0),
    "405B": (50.0, 9.3, 50.3, 10.1),
    "405B, 128k": (28.3, 0.0, 40.1, 5.1),
}


@pytest.mark.parametrize("case", rules.RULES)
def test_what_a_rule_loses(case):
    rule, losses = rules.RULES[case], []
    for overlap_tp, found in ((False, BEST), (True, BEST_HIDDEN)):
        least = rules.best(case, overlap_tp=overlap_tp, **found[case]).step_seconds
        for fixed in (rule.degrees, rule.amended):
            one = rules.best(case, overlap_tp=overlap_tp, **fixed)
            assert one.fits
            losses.append(100 * (one.step_seconds / least - 1))
    assert losses == pytest.approx(LOSSES[case], abs=1.5)


@pytest.mark.parametrize("case", ["7B", "13B"])
def test_the_search_finds_the_best_plan(case):
    found = rules.best(case, overlap_tp=False)
    assert {axis: getattr(found.configuration, axis) for axis in BEST[case]} == BEST[case]


def test_the_rule_for_405b_without_cp_recomputes_and_was_run_faster():
    ours = rules.best("405B", overlap_tp=False, **rules.RULES["405B"].degrees)
    assert ours.configuration.recompute == "full"
    assert ours.fits
    found = search(
        ours.model,
        context.h100(),
        16384,
        top=1,
        recompute="none",
        **{**rules.RULES["405B"].degrees, **rules.RULES["405B"].batch, "zero": 1},
    )
    assert not found.plans
    slower = rules.best("405B", overlap_tp=False, recompute="none", **rules.RULES["405B"].degrees)
    assert slower.configuration.zero == 2
    assert slower.step_seconds > 1.15 * ours.step_seconds
    assert rules.published_seconds() == pytest.approx(6.5, abs=0.1)


# --- 5. TP > DP > PP -----------------------------------------------------------------------------


def test_the_crossings_by_formula():
    hidden = volume.HIDDEN.values()
    assert [volume.tp_equals_dp(h, 8, 8) for h in hidden] == [600, 1536, 3072, 6144]
    assert volume.tp_equals_dp(8192, 2, 8) == 21504
    assert volume.dp_equals_pp(8192, 80, 4, 8) == 1_720_320
    assert volume.dp_equals_pp(8192, 80, 16, 8) == 430_080
    assert volume.link_ratio() == pytest.approx(7.4, abs=0.05)


def test_the_crossings_by_the_planner():
    table = volume.curves_by_tokens()
    tp, one, three, pp = table.values()
    assert [tp[4], one[4]] == pytest.approx([11.921, 11.922], rel=0.01)
    assert tp[4] < three[4]
    assert all(tp[k] > three[k] for k in tp if k >= 8)
    assert tp[1024] / three[1024] == pytest.approx(1.54, abs=0.02)
    assert pp[2048] < one[2048]
    assert pp[4096] > one[4096]


# --- the page ------------------------------------------------------------------------------------


def test_every_question_prints_a_table():
    for question, first in zip((stages, ring, volume), "125", strict=True):
        lines = list(question.text())
        assert lines[0].startswith(f"{first}. ")
        assert len(lines) > 5


def test_the_plots_are_small():
    pictures = command.pictures()
    assert list(pictures) == ["stages", "ring", "context", "volume"]
    for picture in pictures.values():
        assert len(picture._repr_png_()) < 80_000
