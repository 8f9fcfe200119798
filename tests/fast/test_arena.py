"""The arena: every illegal move has its reason, pars are within the rules, the board remembers."""

from __future__ import annotations

import pytest

from course_lib.grading import arena
from course_lib.schedule import ScheduleError, make, simulate, validate, write_csv
from course_lib.schedule.validate import reasons

ONE_F_ONE_B = """
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""


def typed(schedule):
    return write_csv(schedule)


@pytest.mark.parametrize("level", arena.LEVELS, ids=lambda level: level.title)
def test_a_par_is_legal_within_the_limit_and_above_the_bound(level):
    reference = level.reference()
    assert reference.placement == level.placement
    assert reference.microbatches == level.microbatches
    validate(reference, peak=[level.limit] * level.ranks)
    assert level.par >= level.bound - 1e-9
    schedule, problems = arena.read(level, typed(reference))
    assert problems == []
    assert schedule is not None
    assert schedule.rows == reference.rows


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("0X0 0F0\n1F0 B", ["'0X0' is no action", "'B' is no action"]),
        ("0F0 0B0", ["there are 1 rows; 2 ranks have one each"]),
        (
            ONE_F_ONE_B.replace("0F0 0F1 0B0", "0B0 0F1 0F0").replace("1F0 1B0", "1B0 1F0"),
            ["0B0 comes before 0F0", "1B0 comes before 1F0"],
        ),
        (ONE_F_ONE_B.replace("0F3", "1F3"), ["which lives on rank 1"]),
        (
            ONE_F_ONE_B.replace("0B3", "0B2").replace("1B3", "1B2"),
            ["0B2 is done a second time", "1B2 is done a second time"],
        ),
        (
            ONE_F_ONE_B.replace(" 0B3", "").replace("1B3", "1I3"),
            ["stage 0 has no backward", "stage 1 has half a backward"],
        ),
        (
            "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3",
            ["deadlock: nobody can go on"],
        ),
        (ONE_F_ONE_B.replace("3", "4"), ["the last micro-batch is 4", "micro-batch 3 on stage 0"]),
    ],
)
def test_every_illegal_move_has_its_reason(rows, wanted):
    attempt = arena.play(1, rows, on_ranks=False)
    assert not attempt.ok
    for words in wanted:
        assert any(words in reason for reason in attempt.reasons), attempt.reasons


def test_too_much_in_flight():
    rows = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert not arena.play(1, rows, on_ranks=False).reasons
    (reason,) = arena.play(2, rows, on_ranks=False).reasons
    assert "0F2 makes 3 in flight, 2 are allowed" in reason


def test_validate_raises_the_first_reason():
    which = arena.level(1)
    schedule, _ = arena.read(which, ONE_F_ONE_B)
    wrong = schedule.__class__("wrong", (schedule.rows[0][::-1], schedule.rows[1]), (0, 1))
    found = reasons(wrong)
    assert len(found) > 1
    with pytest.raises(ScheduleError) as caught:
        validate(wrong)
    assert str(caught.value) == found[0]


def test_stars_and_the_board(tmp_path, monkeypatch):
    board = tmp_path / "arena.json"
    monkeypatch.setattr(arena, "_on_ranks", lambda schedule, costs, unit: (0.0, None))
    slow = "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert arena.play(1, slow, "Ada", board=board).stars == 1
    assert arena.play(1, ONE_F_ONE_B, "Ada", board=board).stars == 3
    split = typed(make("zb-h1", 2, 4))
    assert arena.play(1, split, "Emmy", board=board).stars == 4
    said = arena.leaderboard(1, board)
    assert said.index("Emmy") < said.index("Ada")
    assert said.count("Ada") == 1
    board.write_text("{")
    assert "Ada" not in arena.leaderboard(1, board)
    assert board.with_suffix(".unreadable.json").exists()


def test_wrong_gradients_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(arena, "_on_ranks", lambda schedule, costs, unit: (0.1, None))
    board = tmp_path / "arena.json"
    attempt = arena.play(1, ONE_F_ONE_B, board=board)
    assert attempt.stars == 0
    assert "WRONG" in str(attempt)
    assert not board.exists()


def test_levels_that_are_not_there():
    with pytest.raises(ValueError, match="the levels are 1 to 8"):
        arena.play(9, ONE_F_ONE_B)


def test_the_best_schedules_of_the_library_reach_par():
    assert simulate(make("zb-v", 4, 8), arena.HALF).makespan == arena.level(4).par
