"""Break-it labs: the drawn runs, the marks of a diagnosis and the saved progress."""

from __future__ import annotations

import json

import pytest

from course_lib.grading import Lab, lab
from course_lib.grading.progress import Progress

FAULTS = {
    "correct": (None, None),
    "late": ("all_gather", "all"),
    "shifted": ("reduce_scatter", range(4)),
    "bias": (None, "all"),
    "own block": (["reduce_scatter", "all_gather"], range(4)),
}
SEEDS = range(20)
NOTHING = (None, None, None)


def made(seed=0, **more) -> Lab:
    return Lab("04", seed, FAULTS, **more)


def truth(some: Lab) -> dict:
    return {lab_run.letter: lab_run.truth for lab_run in some}


def test_every_seed_draws_other_runs():
    truths = [truth(made(seed)) for seed in SEEDS]
    assert len({str(drawn) for drawn in truths}) == len(truths)
    for drawn in truths:
        assert "".join(drawn) == "ABCDE"
        assert sorted(cause for cause, *_ in drawn.values()) == sorted(FAULTS)
    found = {one for drawn in truths for one in drawn.values()}
    assert {rank for cause, _, rank in found if cause == "shifted"} == set(range(4))
    assert {op for cause, op, _ in found if cause == "own block"} == set(FAULTS["own block"][0])
    for letter in "ABCDE":  # any letter may have anything
        assert {drawn[letter][0] for drawn in truths} == set(FAULTS)


def test_the_same_seed_draws_the_same():
    assert truth(made(3)) == truth(made(3))
    assert truth(made(3)) != truth(Lab("05", 3, FAULTS)), "lessons share no key"


def test_fewer_runs_than_causes():
    truths = [truth(made(seed, runs=3)) for seed in SEEDS]
    assert all("".join(drawn) == "ABC" for drawn in truths)
    assert {cause for drawn in truths for cause, *_ in drawn.values()} == set(FAULTS)


def test_a_run_has_its_fault():
    for drawn in map(made, SEEDS):
        by_cause = {lab_run.cause: lab_run for lab_run in drawn}
        shifted, late = by_cause["shifted"], by_cause["late"]
        faulty = [rank for rank in range(4) if shifted.has("shifted", rank)]
        assert faulty == [shifted.rank]
        assert shifted.where == "reduce_scatter"
        assert not shifted.has("late")
        assert all(late.has("late", rank) for rank in range(4))
        assert shifted.pick(range(9)) == shifted.pick(range(9))
    assert len({next(iter(made(seed))).pick(range(4)) for seed in SEEDS}) == 4


def test_nothing_printed_tells():
    drawn = made()
    said = f"{drawn} {drawn!r} {list(drawn)} {drawn.grade(dict.fromkeys('ABCDE', NOTHING))}"
    assert not any(cause in said for cause in FAULTS)
    assert repr(drawn) == "lab of lesson 04: runs A, B, C, D, E"


def test_untouched_nothing_is_right(capsys):
    for nothing in ({}, dict.fromkeys("ABCDE"), dict.fromkeys("ABCDE", NOTHING)):
        assert repr(made().grade(nothing)) == "0 of 5 right: nothing is diagnosed yet"
    assert not capsys.readouterr().out


def test_a_run_is_marked_as_a_whole():
    for seed in SEEDS:
        drawn = made(seed)
        right = truth(drawn)
        assert repr(drawn.grade(right)).startswith("5 of 5 right in attempt 1\n")
        for letter, (cause, op, rank) in right.items():
            other = "late" if cause != "late" else "bias"
            wrongs = [
                (other, op, rank),
                (cause, "all_gather" if op != "all_gather" else "reduce_scatter", rank),
                (cause, op, 7),
                (other, op, 7),
                (other, None, None) if (op, rank) != (None, None) else (other, op, 7),
            ]
            for wrong in wrongs:
                result = drawn.grade(right | {letter: wrong})
                assert result.right == 4
                assert result.marks[letter] == "look again", "the same for every wrong field"
                assert cause not in str(result)
            result = drawn.grade({letter: (None, op, rank)})
            assert result.marks[letter] == "-", "without a cause no run is correct"
            assert (result.right, result.begun) == (0, False)


def test_the_table():
    drawn = made()
    right = truth(drawn)
    first, second = [letter for letter in right if right[letter][0] in ("late", "bias")]
    said = {first: right[first], second: (*right[second][:2], 2)}
    for attempt in (1, 2):
        lines = str(drawn.grade(said)).splitlines()
        assert lines[0] == f"1 of 5 right in attempt {attempt}"
        marks = {first: "right", second: "look again"}
        assert lines[1:] == [f"{letter}  {marks.get(letter, '-')}" for letter in "ABCDE"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"F": ("late", "all_gather", 1)}, "expected the runs A, B, C, D, E, got 'F'"),
        ({"A": ("lat", None, 1)}, 'A  expected a cause of this lab ("correct", "late", '),
        ({"A": (7, None, 1)}, '"own block"), got 7'),
        ({"A": ("late", "all_reduce", 1)}, '"all_gather", "reduce_scatter"'),
        ({"A": ("late", None)}, "A  expected (cause, collective, rank) in this order, got "),
        ({"A": ("late", None, 1, 2)}, "A  expected (cause, collective, rank) in this order, got "),
        ({"A": "late"}, "A  expected (cause, collective, rank) in this order, got "),
        ({"A": 3}, "A  expected (cause, collective, rank) in this order, got 3"),
        ({"A": ("late", None, "two")}, "A  expected a rank: a number, \"all\" or None, got 'two'"),
        ({"A": ("late", None, True)}, 'A  expected a rank: a number, "all" or None, got True'),
        ({"A": ([1] * 99, None, 1)}, "), got [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ..."),
        (None, 'expected a dict such as {"A": (cause, collective, rank), ...}, got None'),
        ("late", "expected a dict such as"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(said, words):
    result = made().grade(said)
    lines = [line for line in str(result).splitlines() if words in line]
    assert len(lines) == 1
    assert result.right == 0
    assert not result.begun


def test_one_bad_entry_does_not_spoil_the_others():
    drawn = made()
    right = truth(drawn)
    assert drawn.grade(right | {"A": ("lat", None, 1), "F": NOTHING}).right == 4


def test_a_saved_diagnosis_may_say_healthy():
    drawn = made()
    right = truth(drawn)
    saved = {
        letter: ("healthy", *rest) if cause == "correct" else (cause, *rest)
        for letter, (cause, *rest) in right.items()
    }
    assert saved != right
    assert repr(drawn.grade(saved)) == repr(made().grade(right))


def test_two_fields():
    drawn = Lab("08", 1, {"correct": (None,), "lost W": (range(4),)}, fields=("cause", "rank"))
    lost = next(lab_run for lab_run in drawn if lab_run.has("lost W"))
    assert lost.rank in range(4)
    assert drawn.grade({lost.letter: ("lost W", lost.rank)}).right == 1


def test_a_lab_that_cannot_be():
    with pytest.raises(ValueError, match="expected a tuple of .* for the cause 'late', got"):
        Lab("04", 1, {"late": ("all_gather",)})
    with pytest.raises(ValueError, match="expected a tuple of .* for the cause 'late', got 'ab'"):
        Lab("04", 1, {"late": "ab"})


def test_the_answers_appear_on_request(capsys):
    drawn = made()
    assert drawn.reveal() is None
    lines = capsys.readouterr().out.splitlines()
    for letter, (cause, op, rank) in truth(drawn).items():
        assert f"{letter}  {cause:16}{op!s:16}{rank}" in lines


def test_in_work_it_is_progress(tmp_path, monkeypatch):
    drawn = made()
    right = truth(drawn)
    (tmp_path / "work" / "notebooks").mkdir(parents=True)
    elsewhere = tmp_path / "notebooks"
    elsewhere.mkdir()
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "course_lib" / "grading" / "lab.py"))
    monkeypatch.chdir(elsewhere)
    drawn.grade(right)
    monkeypatch.chdir(tmp_path / "work" / "notebooks")
    drawn.grade(dict.fromkeys("ABCDE", NOTHING))
    assert not Progress(tmp_path).labs, "neither another folder nor an untouched table"
    for letters in ("A", "ABCDE", "AB"):
        drawn.grade({letter: right[letter] for letter in letters})
    found = Progress(tmp_path).lab("04")
    assert (found.attempts, found.best, found.total, found.done) == (3, 5, 5, True)
    assert repr(made().grade({"A": right["A"]})).startswith("1 of 5 right in attempt 4\n")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return the root of a course, and a function that goes to a folder of it."""
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "course_lib" / "grading" / "lab.py"))

    def go(folder: str) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)

    return tmp_path, go


def test_in_work_each_learner_has_runs_of_their_own(folders):
    root, go = folders
    go("notebooks")
    committed = truth(made(3))
    assert not (root / "work").exists(), "the committed lessons read and write nothing"
    go("work/notebooks")
    saved = root / "work" / ".course" / "labs.json"
    found = []
    for _ in range(20):
        found.append(truth(made(3)))
        assert truth(made(3)) == found[-1], "the seed is drawn once"
        assert truth(made(4)) != found[-1], "SEED draws other runs here too"
        assert [path.name for path in saved.parent.iterdir()] == ["labs.json"]
        saved.unlink()
    assert len({str(one) for one in found} - {str(committed)}) >= 19
    go("notebooks")
    assert truth(made(3)) == committed


def test_a_lab_that_was_begun_before_keeps_its_runs(folders):
    root, go = folders
    go("notebooks")
    committed = {lesson: truth(Lab(lesson, 1, FAULTS)) for lesson in ("04", "05")}
    progress = Progress(root)
    progress.lab("04").attempt(2, 5)
    progress.save()
    go("work/notebooks")
    for _ in range(2):
        assert Lab("04", 1, FAULTS).grade(committed["04"]).right == 5
        assert truth(Lab("05", 1, FAULTS)) != committed["05"]
        Lab("05", 1, FAULTS).grade(truth(Lab("05", 1, FAULTS)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seed": "x", "committed": []}', "\0"])
def test_a_seed_that_cannot_be_read_is_put_aside(folders, text):
    root, go = folders
    go("work/notebooks")
    saved = root / "work" / ".course" / "labs.json"
    saved.parent.mkdir()
    saved.write_text(text)
    assert truth(made()) == truth(made())
    assert saved.with_suffix(".unreadable.json").read_text() == text
    assert set(json.loads(saved.read_text())) == {"seed", "committed"}


def test_progress_of_before_labs_is_read(tmp_path):
    path = tmp_path / "work" / ".course" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"exercises": {"04-1": {"attempts": 2}}}))
    progress = Progress(tmp_path)
    assert progress.of("04-1").attempts == 2
    assert progress.labs == {}
