"""The arena: every illegal move has its reason, stars are within reach, the board remembers."""

from __future__ import annotations

import json

import pytest

from course_lib.grading import arena
from course_lib.grading.arena import judge
from course_lib.grading.arena.judge import waits
from course_lib.schedule import ScheduleError, make, simulate, validate, write_csv
from course_lib.schedule.validate import reasons

ONE_F_ONE_B = """
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""
NAIVE = "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
# Shorter than the library's best in level 4; found by trying random exchanges.
RECORD = """
0F0 0F1 0F2 0I0 0W0 0F3 0I2 0W2 0F4 0I1 0W1 0F5 0I3 0W3 0F6 0I4 0W4 0F7 0I5 0W5 0I6 0W6 0I7 0W7
1F0 1F2 1F1 1I0 1I2 1W0 1F3 1I1 1W2 1W1 1F4 1I3 1F5 1W3 1I4 1W4 1F6 1F7 1I5 1W5 1I6 1W6 1I7 1W7
2F0 2F2 2I0 2F1 2I2 2W2 2W0 2I1 2F3 2I3 2F4 2W3 2F5 2I4 2I5 2W1 2F6 2W4 2F7 2I6 2W6 2I7 2W5 2W7
3F0 3I0 3F2 3I2 3F1 3W0 3I1 3W2 3F3 3I3 3W1 3W3 3F4 3I4 3F5 3I5 3W4 3W5 3F6 3I6 3F7 3I7 3W7 3W6
"""


@pytest.fixture
def right_gradients(monkeypatch):
    """Stands in for the ranks."""
    monkeypatch.setattr(judge, "on_real_ranks", lambda schedule, costs, unit: (0.0, None))


@pytest.mark.parametrize("level", arena.LEVELS, ids=lambda level: level.title)
def test_every_star_of_a_level_can_be_won(level):
    best = level.rivals["searched"].schedule
    validate(best, peak=[level.limit] * level.ranks)
    schedule, problems = arena.read(level, write_csv(best))
    assert problems == []
    assert schedule is not None
    assert schedule.rows == best.rows
    assert level.bound <= level.best + 1e-9 < level.par < level.rivals["1f1b"].makespan
    steps = [level.best, level.par, level.rivals["1f1b"].makespan, 1e3]
    assert [level.stars(step) for step in steps] == [4, 3, 2, 1]


@pytest.mark.parametrize("level", arena.LEVELS, ids=lambda level: level.title)
def test_rows_to_begin_with_are_legal_and_leave_stars_to_win(level):
    start = arena.begin_with(level.number)
    attempt = arena.play(level.number, start, on_ranks=False)
    assert attempt.reasons == []
    assert level.stars(attempt.simulation.makespan) <= 2
    split = arena.play(level.number, arena.split_backwards(level.number, start), on_ranks=False)
    assert split.reasons == []
    assert split.simulation.makespan < attempt.simulation.makespan


def test_rows_that_are_no_schedule_are_not_split():
    assert arena.split_backwards(1, "0F0 oops") == "0F0 oops"


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("0X0 0F0\n1F0 B", ["'0X0' is no action", "'B' is no action"]),
        ("0F0 0B0", ["expected 2 rows, one per rank, got 1"]),
        ("", ["expected 2 rows, one per rank, got 0"]),
        ([["0F0", 7], 3], ["'7' is no action", "'3' is no action"]),
        (
            ONE_F_ONE_B.replace("0F0 0F1 0B0", "0B0 0F1 0F0").replace("1F0 1B0", "1B0 1F0"),
            ["0B0 comes before 0F0", "1B0 comes before 1F0"],
        ),
        (ONE_F_ONE_B.replace("0F3", "1F3"), ["which is on rank 1"]),
        (
            ONE_F_ONE_B.replace("0B3", "0B2").replace("1B3", "1B2"),
            ["0B2 is done a second time", "1B2 is done a second time"],
        ),
        (
            ONE_F_ONE_B.replace(" 0B3", "").replace("1B3", "1I3"),
            ["stage 0 has no backward", "stage 1 has half a backward"],
        ),
        (NAIVE.replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1"), ["deadlock: no rank can continue"]),
        (
            ONE_F_ONE_B.replace("3", "4"),
            ["numbered from 0, got 4 as the last one", "micro-batch 3 on stage 0"],
        ),
    ],
)
def test_every_illegal_move_has_its_reason(rows, wanted):
    attempt = arena.play(1, rows, on_ranks=False)
    assert not attempt.ok
    assert attempt.stars == 0
    for words in wanted:
        assert any(words in reason for reason in attempt.reasons), attempt.reasons
    assert f"{len(attempt.reasons)} illegal move" in str(attempt)


def test_rows_may_be_a_text_a_list_or_a_schedule():
    which, wanted = arena.level(1), make("1f1b", 2, 4)
    lists = [[str(action) for action in row] for row in wanted.rows]
    for rows in (ONE_F_ONE_B, write_csv(wanted), lists, [" ".join(row) for row in lists], wanted):
        schedule, problems = arena.read(which, rows)
        assert problems == []
        assert schedule.rows == wanted.rows
    assert arena.read(which, None)[1] == [
        "expected rows as a text or a list of lists, got NoneType"
    ]


def test_a_slip_of_the_finger_has_one_reason_and_a_flood_is_cut():
    (reason,) = arena.play(1, ONE_F_ONE_B.replace("0F3", "0F333333333"), on_ranks=False).reasons
    assert "expected 4 micro-batches, numbered from 0, got 333333333 as the last one" in reason
    flood = arena.play(4, "\n".join(f"{rank}F0 {rank}F7" for rank in range(4)), on_ranks=False)
    assert len(flood.reasons) == 32
    assert str(flood).endswith("and 20 more")


def test_too_much_in_flight():
    rows = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert not arena.play(1, rows, on_ranks=False).reasons
    (reason,) = arena.play(2, rows, on_ranks=False).reasons
    assert "0F2 makes 3 in flight, 2 are allowed" in reason


def test_validate_raises_the_first_reason():
    schedule, _ = arena.read(arena.level(1), ONE_F_ONE_B)
    wrong = schedule.__class__("wrong", (schedule.rows[0][::-1], schedule.rows[1]), (0, 1))
    found = reasons(wrong)
    assert len(found) > 1
    with pytest.raises(ScheduleError) as caught:
        validate(wrong)
    assert str(caught.value) == found[0]


def test_the_longest_waits_are_told_with_what_is_missing():
    level = arena.level(9)
    schedule, _ = arena.read(level, arena.begin_with(9))
    assert next(waits(simulate(schedule, level.costs))) == (
        "rank 0 waits 9 from 4 on: its 0B0 needs 1B0"
    )
    assert len(list(waits(simulate(schedule, level.costs), most=2))) == 2


def test_stars_and_the_board(tmp_path, right_gradients):
    board = tmp_path / "arena.json"
    assert arena.play(1, NAIVE, "Ada", board=board).stars == 1
    assert arena.play(1, ONE_F_ONE_B, "Ada", board=board).stars == 2
    arena.play(1, ONE_F_ONE_B, "Ada", board=board)
    split = write_csv(make("zb-h1", 2, 4))
    assert arena.play(1, split, "Emmy", board=board).stars == 4
    said = arena.leaderboard(1, board)
    order = [said.index(name) for name in ("Emmy #1", "Ada #2", "Ada #1")]
    assert order == sorted(order), "shortest first"
    assert said.count("Ada") == 2, "the same rows count once"
    for name in ("[1f1b]", "[zb-h1]", "[zb-v]", "[searched]"):
        assert name in said
    assert "other stages" in said
    assert arena.stars(board) == {1: 4} | {level.number: 0 for level in arena.LEVELS[1:]}
    assert "[" not in arena.picture(1, board).caption
    board.write_text("{")
    assert "Ada" not in arena.leaderboard(1, board)
    assert board.with_suffix(".unreadable.json").exists()


def test_a_board_that_was_edited_gives_no_stars(tmp_path):
    board = tmp_path / "arena.json"
    for rows in ("0F0,0B0\n1F0", write_csv(make("1f1b", 2, 3)), "0F0,0X0"):
        entry = {"level": 1, "name": "Mallory", "rows": rows, "makespan": 1}
        board.write_text(json.dumps({"attempts": [entry]}))
        assert "Mallory" not in arena.leaderboard(1, board)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (None, "None"),
        ({"Ada"}, "{'Ada'}"),
        (7, "7"),
        ("", "''"),
        ("   ", "' '"),
        ("Ada\nEmmy", "'Ada\\nEmmy'"),
        ("\x1b[31mAda\x1b[0m", "'\\x1b[31mAda\\x1b[0m'"),
        ("A\u202eda", "'A\\u202eda'"),
        ("A" * 41, f"'{'A' * 41}'"),
        ("A" * 1_000_000, f"'{'A' * 55} ..."),
        ("[searched]", "'[searched]'"),
        (" [you] ", "'[you]'"),
        ("Searched", "'Searched'"),
        ("zb-h1", "'zb-h1'"),
    ],
    ids=range(14),
)
def test_a_name_that_is_no_label_is_refused(tmp_path, right_gradients, name, shown):
    board = tmp_path / "arena.json"
    with pytest.raises(ValueError, match="^expected a name") as caught:
        arena.play(1, NAIVE, name, board=board)
    assert f"got {shown}; choose one such as" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
    assert not board.exists()


def test_a_name_may_have_spaces_and_any_letters(tmp_path, right_gradients):
    board = tmp_path / "arena.json"
    for name in (" Ada Lovelace ", "Émilie 7", "李", "A" * 40):
        arena.play(1, NAIVE, name, board=board)
        assert f"  {name.strip()[:25]} " in arena.leaderboard(1, board)


WHOLE = {"level": 1, "name": "Mallory", "rows": NAIVE}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (["level", "name", "rows"], "expected an object with level (int), name (str), rows (str)"),
        (None, "got None; delete the entry"),
        ({"level": 1, "name": "Mallory"}, "got None as rows; delete the entry"),
        (WHOLE | {"level": "1"}, "got '1' as level; delete the entry"),
        (WHOLE | {"level": [1]}, "got [1] as level; delete the entry"),
        (WHOLE | {"level": True}, "got True as level; delete the entry"),
        (WHOLE | {"name": None}, "got None as name; delete the entry"),
        (WHOLE | {"name": {"a": 1}}, "got {'a': 1} as name; delete the entry"),
        (WHOLE | {"rows": [["0F0"]]}, "got [['0F0']] as rows; delete the entry"),
        (WHOLE | {"name": "Mallory\nAda"}, "expected a name of 1 to 40 printable characters"),
        (WHOLE | {"name": "M" * 10**6}, "expected a name of 1 to 40 printable characters"),
        (WHOLE | {"name": "[searched]"}, "expected a name without a bracket in front"),
    ],
    ids=range(12),
)
def test_an_entry_of_the_wrong_form_is_left_out(tmp_path, right_gradients, entry, words):
    board = tmp_path / "arena.json"
    ada = WHOLE | {"name": "Ada"}
    for entries, more in (([ada, entry], ""), ([ada, entry, 3], " (and 1 more)")):
        board.write_text(json.dumps({"attempts": entries}))
        *table, said = arena.leaderboard(1, board).splitlines()
        assert said.startswith(f"entry 2 of arena.json is left out{more}: expected ")
        assert words in said
        assert len(said) < 250
        assert sum("Ada #1" in line for line in table) == 1
        assert not any("Mallory" in line for line in table)
        assert arena.stars(board)[1] == 1
        assert arena.picture(1, board)
        arena.play(1, ONE_F_ONE_B, "Ada", board=board)
        assert json.loads(board.read_text())["attempts"][:-1] == entries, "nothing is deleted"


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"attempts": 3}', '{"attempts": {"a": 1}}', "[" * 10**5]
)
def test_a_board_of_the_wrong_form_is_put_aside(tmp_path, text):
    board = tmp_path / "arena.json"
    board.write_text(text)
    assert arena.leaderboard(1, board) == arena.leaderboard(1, tmp_path / "none.json")
    assert board.with_suffix(".unreadable.json").read_text() == text


def test_the_library_can_be_beaten(tmp_path, right_gradients):
    attempt = arena.play(4, RECORD, "Grace", board=tmp_path / "arena.json")
    assert attempt.stars == 5
    assert "shorter than the library's best" in str(attempt)


def test_wrong_gradients_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "on_real_ranks", lambda schedule, costs, unit: (0.1, None))
    board = tmp_path / "arena.json"
    attempt = arena.play(1, ONE_F_ONE_B, board=board)
    assert attempt.stars == 0
    assert "WRONG" in str(attempt)
    assert not board.exists()


def test_levels_that_are_not_there():
    with pytest.raises(ValueError, match="a level from 1 to 10, got 11"):
        arena.play(11, ONE_F_ONE_B)
