"""The plan arena: every star can be won, what is refused has its reason, the board remembers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from fractions import Fraction

import pytest

from course_lib.grading import plans
from course_lib.grading.plans import judge, ranks
from course_lib.launch.faults import RankError

CHOICES = "tp cp pp ep zero schedule chunks micro_batch recompute".split()


def choices_of(estimate) -> dict:
    plan = asdict(estimate.configuration)
    return {name: plan[name] for name in CHOICES}


@pytest.fixture
def proven(monkeypatch):
    """Stands in for ranks that carry what the planner says."""

    def run_plan(which, plan):
        found = which.predict(plan)
        sent = {axis: Fraction(one.wire_bytes) for axis, one in found.communication.items()}
        return ranks.Ran(1e-15, sent, (int(found.memory.total),), (0,), 1.0)

    monkeypatch.setattr(ranks, "run_plan", run_plan)


@pytest.mark.parametrize("level", plans.LEVELS, ids=lambda level: level.title)
def test_bars_are_of_today_s_search_and_every_star_can_be_won(level, proven):
    found, bars = level.search()
    assert bars == pytest.approx(level.bars, abs=1e-5)
    steps = [one.step_seconds for one in found[:30]]
    assert steps == sorted(steps)
    assert all(one.fits for one in found)
    best = plans.play(level.number, "Ada", **choices_of(found[0]))
    assert best.ok
    assert best.stars == 4
    assert [level.stars(step) for step in (*reversed(bars), 1e3)] == [4, 3, 2, 1]


def test_no_plan_that_fits_is_missing_from_the_search():
    """By another enumeration: all products of powers of two, and every micro-batch."""
    level = plans.level(1)
    found = {one.configuration for one in level.search()[0]}
    count = 0
    for tp, cp, pp in ((a, b, c) for a in (1, 2, 4) for b in (1, 2, 4) for c in (1, 2, 4)):
        if 4 % (tp * cp * pp):
            continue
        for zero in range(4):
            for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
                for micro_batch in range(1, 9):
                    for recompute in ("none", "full"):
                        choices = {
                            "tp": tp, "cp": cp, "pp": pp, "zero": zero, "schedule": schedule,
                            "chunks": chunks, "micro_batch": micro_batch, "recompute": recompute,
                        }  # fmt: skip
                        if pp == 1 and schedule != "1f1b":
                            continue
                        attempt = plans.play(1, on_ranks=False, **choices)
                        if attempt.reasons:
                            continue
                        if cp * 4 // (tp * cp * pp) == 1 and zero:
                            continue  # nothing to shard
                        count += 1
                        assert attempt.estimate.configuration in found, choices
    assert count == len(found)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"tp": 3}, "tp"),
        ({"zero": 0}, "MB more than the limit; the largest part is optimizer"),
        ({"zero": 5}, "zero"),
        ({"schedule": "1f2b", "pp": 2}, "1f1b"),
        ({"recompute": "selective"}, "got recompute=selective"),
        ({"pp": 2, "recompute": "full"}, "got recompute=full and pp=2"),
        ({"pp": 2, "zero": 2}, "zero=2 with pp=2"),
        ({"ep": 2}, "ep"),
        ({"global_batch": 4}, "which the level fixes"),
        ({"dtype": "bf16"}, "expected a plan without dtype"),
    ],
)
def test_a_plan_that_is_refused_has_a_reason(choices, said):
    attempt = plans.play(1, on_ranks=False, **choices)
    assert not attempt.ok
    assert attempt.stars == 0
    assert said in " ".join(attempt.reasons)
    assert said in " ".join(str(attempt).split())


def test_wrong_levels_names_and_choices():
    with pytest.raises(ValueError, match="expected a level from 1 to 6, got 7"):
        plans.play(7)
    with pytest.raises(ValueError, match="printable"):
        plans.play(1, "")
    for name in ("tensor", "overlap_tp", "stage_layers"):  # the ranks would do something else
        with pytest.raises(TypeError, match=f"{name} is not a choice of the plan arena; choose"):
            plans.play(1, **{name: 2})


def test_what_the_ranks_find_decides(monkeypatch):
    level = plans.level(1)

    def ran(**changes):
        found = level.predict(level.plan(tp=4))
        sent = {axis: Fraction(one.wire_bytes) for axis, one in found.communication.items()}
        return replace(ranks.Ran(1e-15, sent, (4_000_000,), (0,), 1.0), **changes)

    monkeypatch.setattr(ranks, "run_plan", lambda which, plan: ran())
    good = plans.play(1, tp=4)
    assert good.ok
    assert "are as predicted" in str(good)
    for off in (1e-3, math.nan):
        monkeypatch.setattr(ranks, "run_plan", lambda which, plan, off=off: ran(off=off))
        wrong = plans.play(1, tp=4)
        assert not wrong.ok
        assert wrong.stars == 0
        assert "are WRONG" in str(wrong)
    monkeypatch.setattr(ranks, "run_plan", lambda which, plan: ran(sent={"tp": Fraction(8)}))
    assert "tp 8 counted" in str(plans.play(1, tp=4))

    def dies(which, plan):
        error = ranks.OutOfMemory("9 bytes of saved activations")
        raise RankError("rank 2 raised", kind="raised", rank=2, exception=error)

    monkeypatch.setattr(ranks, "run_plan", dies)
    dead = plans.play(1, tp=4)
    assert not dead.ok
    assert "no star: rank 2 is out of memory: 9 bytes" in str(dead)


def test_the_board_remembers_and_cannot_be_cheated(tmp_path, proven):
    board = tmp_path / "plans.json"
    assert plans.stars(board) == dict.fromkeys(range(1, 7), 0)
    plans.play(1, "Ada", tp=4, board=board)
    plans.play(1, "Ada", tp=4, board=board)
    plans.play(1, "Bob", zero=3, board=board)
    plans.play(1, "Bob", zero=0, board=board)  # does not fit
    entries = json.loads(board.read_text())["attempts"]
    assert [entry["name"] for entry in entries] == ["Ada", "Bob"]
    said = plans.leaderboard(1, board)
    assert said.index("[best") < said.index("Ada")
    assert "tp=4" in said
    assert plans.stars(board)[1] == max(plans.level(1).stars(step) for step in _steps(board))
    cheats = [
        {"level": 1, "name": "Eve", "choices": {"zero": 0}},
        {"level": 1, "name": "Eve", "choices": {"seq": 1}},
        {"level": 1, "name": "Eve"},
        {"level": 1, "name": "Eve", "choices": [1]},
        7,
    ]
    board.write_text(json.dumps({"attempts": [*entries, *cheats]}))
    assert "Eve" not in plans.leaderboard(1, board)
    assert plans.leaderboard(1, board) == said


def _steps(board) -> list[float]:
    level = plans.level(1)
    return [
        level.predict(level.plan(**entry["choices"])).step_seconds
        for entry in json.loads(board.read_text())["attempts"]
    ]


def test_an_attempt_without_a_run_has_no_picture():
    with pytest.raises(ValueError, match="did not run"):
        plans.play(1, tp=4, on_ranks=False).picture()
    assert judge.Attempt(plans.level(1), "you", {}).bytes_off == {}
