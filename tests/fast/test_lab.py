"""Break-it labs: what is drawn, what is told of a diagnosis, and what is noted of it."""

from __future__ import annotations

import json

import pytest

from course_lib.grading import Lab, lab
from course_lib.grading.progress import Progress

FAULTS = {
    "healthy": (None, None),
    "late": ("all_gather", "all"),
    "shifted": ("reduce_scatter", range(4)),
    "bias": (None, "all"),
    "own block": (["reduce_scatter", "all_gather"], range(4)),
}
SEEDS = range(20)
NOTHING = (None, None, None)


def made(seed=0, **more) -> Lab:
    return Lab("04", seed, FAULTS, **more)


def truth(ward: Lab) -> dict:
    return {patient.letter: patient.truth for patient in ward}


def test_every_seed_draws_other_patients():
    wards = [truth(made(seed)) for seed in SEEDS]
    assert len({str(ward) for ward in wards}) == len(wards)
    for ward in wards:
        assert "".join(ward) == "ABCDE"
        assert sorted(cause for cause, *_ in ward.values()) == sorted(FAULTS)
    found = {one for ward in wards for one in ward.values()}
    assert {rank for cause, _, rank in found if cause == "shifted"} == set(range(4))
    assert {op for cause, op, _ in found if cause == "own block"} == set(FAULTS["own block"][0])
    for letter in "ABCDE":  # any letter may have anything
        assert {ward[letter][0] for ward in wards} == set(FAULTS)


def test_the_same_seed_draws_the_same():
    assert truth(made(3)) == truth(made(3))
    assert truth(made(3)) != truth(Lab("05", 3, FAULTS)), "lessons share no key"


def test_fewer_patients_than_causes():
    wards = [truth(made(seed, patients=3)) for seed in SEEDS]
    assert all("".join(ward) == "ABC" for ward in wards)
    assert {cause for ward in wards for cause, *_ in ward.values()} == set(FAULTS)


def test_a_patient_does_what_he_has():
    for ward in map(made, SEEDS):
        by_cause = {patient.cause: patient for patient in ward}
        shifted, late = by_cause["shifted"], by_cause["late"]
        ill = [rank for rank in range(4) if shifted.has("shifted", rank)]
        assert ill == [shifted.rank]
        assert shifted.where == "reduce_scatter"
        assert not shifted.has("late")
        assert all(late.has("late", rank) for rank in range(4))
        assert shifted.pick(range(9)) == shifted.pick(range(9))
    assert len({next(iter(made(seed))).pick(range(4)) for seed in SEEDS}) == 4


def test_nothing_printed_tells():
    ward = made()
    said = f"{ward} {ward!r} {list(ward)} {ward.grade(dict.fromkeys('ABCDE', NOTHING))}"
    assert not any(cause in said for cause in FAULTS)
    assert repr(ward) == "lab of lesson 04: patients A, B, C, D, E"


def test_untouched_nothing_is_right(capsys):
    for nothing in ({}, dict.fromkeys("ABCDE"), dict.fromkeys("ABCDE", NOTHING)):
        assert repr(made().grade(nothing)) == "0 of 5 right: nothing is diagnosed yet"
    assert not capsys.readouterr().out


def test_each_field_is_judged_by_itself():
    for seed in SEEDS:
        ward = made(seed)
        right = truth(ward)
        assert repr(ward.grade(right)).startswith("5 of 5 right\n")
        for letter, (cause, op, rank) in right.items():
            wrong = "late" if cause != "late" else "bias"
            result = ward.grade(right | {letter: (wrong, op, rank)})
            assert result.right == 4
            assert result.rows[letter] == ["look again", "right", "right"]
            result = ward.grade({letter: (cause, op, 7)})
            assert (result.right, result.rows[letter][2]) == (0, "look again")
            assert cause not in str(result)
            result = ward.grade({letter: (None, op, rank)})
            assert result.rows[letter][0] == "-", "without a cause nothing is healthy"
            assert result.right == 0


def test_the_table():
    ward = made()
    right = truth(ward)
    letter = next(each for each in right if right[each][0] == "late")
    said = {letter: ("late", "all_gather", 2)}
    lines = str(ward.grade(said)).splitlines()
    assert lines[:2] == ["0 of 5 right", "   cause           collective      rank"]
    assert f"{letter}  right           right           look again" in lines
    assert lines.count(letter) == 0
    assert sum(line.endswith("-               -               -") for line in lines) == 4


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"F": ("late", "all_gather", 1)}, "there is no patient 'F'; they are A, B, C, D, E"),
        ({"A": ("lat", None, 1)}, "A  'lat' is no cause of this lab; choose from \"healthy\", "),
        ({"A": (7, None, 1)}, "A  7 is no cause of this lab"),
        ({"A": ("late", "all_reduce", 1)}, '"all_gather", "reduce_scatter"'),
        ({"A": ("late", None)}, "A  say it as (cause, collective, rank), in this order"),
        ({"A": ("late", None, 1, 2)}, "A  say it as (cause, collective, rank), in this order"),
        ({"A": "late"}, "A  say it as (cause, collective, rank), in this order"),
        ({"A": 3}, "A  say it as"),
        ({"A": ("late", None, "two")}, "A  'two' is no rank: a number, \"all\" or None"),
        ({"A": ("late", None, True)}, "A  True is no rank"),
        ({"A": ([1] * 99, None, 1)}, "... is no cause"),
        (None, 'a diagnosis is a table such as {"A": (cause, collective, rank), ...}'),
        ("late", "a diagnosis is a table"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(said, words):
    result = made().grade(said)
    lines = [line for line in str(result).splitlines() if words in line]
    assert len(lines) == 1
    assert result.right == 0
    assert not result.begun


def test_one_bad_entry_does_not_spoil_the_others():
    ward = made()
    right = truth(ward)
    assert ward.grade(right | {"A": ("lat", None, 1), "F": NOTHING}).right == 4


def test_two_fields():
    ward = Lab("08", 1, {"healthy": (None,), "lost W": (range(4),)}, fields=("cause", "rank"))
    lost = next(patient for patient in ward if patient.has("lost W"))
    assert lost.rank in range(4)
    assert ward.grade({lost.letter: ("lost W", lost.rank)}).right == 1


def test_a_lab_that_cannot_be():
    with pytest.raises(ValueError, match="'late' needs an answer for each of"):
        Lab("04", 1, {"late": ("all_gather",)})
    with pytest.raises(ValueError, match="'late' needs an answer"):
        Lab("04", 1, {"late": "ab"})


def test_the_answers_appear_on_request(capsys):
    ward = made()
    assert ward.reveal() is None
    lines = capsys.readouterr().out.splitlines()
    for letter, (cause, op, rank) in truth(ward).items():
        assert f"{letter}  {cause:16}{op!s:16}{rank}" in lines


def test_in_work_it_is_progress(tmp_path, monkeypatch):
    ward = made()
    right = truth(ward)
    (tmp_path / "work" / "notebooks").mkdir(parents=True)
    elsewhere = tmp_path / "notebooks"
    elsewhere.mkdir()
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "course_lib" / "grading" / "lab.py"))
    monkeypatch.chdir(elsewhere)
    ward.grade(right)
    monkeypatch.chdir(tmp_path / "work" / "notebooks")
    ward.grade(dict.fromkeys("ABCDE", NOTHING))
    assert not Progress(tmp_path).labs, "neither another folder nor an untouched table"
    for letters in ("A", "ABCDE", "AB"):
        ward.grade({letter: right[letter] for letter in letters})
    found = Progress(tmp_path).lab("04")
    assert (found.attempts, found.best, found.total, found.done) == (3, 5, 5, True)


def test_progress_of_before_labs_is_read(tmp_path):
    path = tmp_path / "work" / ".course" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"exercises": {"04-1": {"attempts": 2}}}))
    progress = Progress(tmp_path)
    assert progress.of("04-1").attempts == 2
    assert progress.labs == {}
