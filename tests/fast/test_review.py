"""Reviews: days from FSRS, notes that stay byte for byte, progress that no damage loses."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from fsrs import Rating
from hypothesis import given
from hypothesis import strategies as st

from course_lib import cli
from course_lib.cli import review as verbs
from course_lib.interview.cards import Card, cards
from course_lib.interview.front_matter import KEYS, parse
from course_lib.interview.review import (
    Progress,
    Reviews,
    band,
    due,
    fields,
    from_fields,
    graded,
    play,
    retrievability,
    unseen,
)  # fmt: skip
from course_lib.interview.review_notes import export_notes, import_notes, note_cards

DAY = date(2026, 1, 5)
NOTE = """---
created: '2025-10-19'
last_reviewed: null
next_review: '2025-10-19'
review_count: 0
difficulty: medium
mastery_level: 0.0
tags:
- interview/hot
- "two words"
related_outlines: []
---
# What does PP send?

Activations.
"""


def days(number: int) -> date:
    return DAY + timedelta(days=number)


def reviewed(note: str | bytes, tmp_path: Path, rating: Rating = Rating.Good) -> bytes:
    """The note after import, a review on DAY, and export on DAY."""
    data = note if isinstance(note, bytes) else note.encode()
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in" / "note.md").write_bytes(data)
    reviews = Reviews(tmp_path / "review")
    report = import_notes(reviews, tmp_path / "in", (), DAY)
    assert report.refused == []
    reviews.record({"note.md": graded(reviews.cards["note.md"], rating, DAY)})
    assert export_notes(reviews, note_cards(reviews), tmp_path / "out", DAY).added == ["note.md"]
    return (tmp_path / "out" / "note.md").read_bytes()


# --- days ----------------------------------------------------------------------------------------


def test_a_week_of_good_grades_moves_the_day_away():
    progress, seen = Progress(DAY, DAY), []
    for _ in range(5):
        today = progress.next_review
        progress = graded(progress, Rating.Good, today)
        seen.append((progress.next_review - today).days)
    assert seen[0] == 2
    assert seen == sorted(set(seen))
    assert progress.review_count == progress.graded == 5
    assert retrievability(progress, progress.last_reviewed) == 1
    assert retrievability(progress, progress.next_review) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_grades_give_the_same_days(seed):
    first, second = (
        [graded(Progress(DAY, DAY), rating, DAY) for rating in Rating] for _ in range(2)
    )
    assert first == second
    waits = [(one.next_review - DAY).days for one in first]
    assert waits == sorted(waits)
    assert waits[0] == 1
    assert [band(one.difficulty) for one in first] == ["medium", "medium", "easy", "easy"]


def test_forgetting_brings_the_card_back_tomorrow_and_makes_it_harder():
    known = graded(graded(Progress(DAY, DAY), Rating.Good, DAY), Rating.Good, days(2))
    lost = graded(known, Rating.Again, known.next_review)
    assert lost.next_review <= known.next_review + timedelta(days=2)
    assert lost.difficulty > known.difficulty
    assert lost.stability < known.stability


def test_due_cards_begin_with_the_least_remembered_and_new_ones_are_limited():
    good = graded(Progress(DAY, DAY), Rating.Good, DAY)
    again = graded(Progress(DAY, DAY), Rating.Again, DAY)
    reviews = {"good": good, "again": again, "later": replace(good, next_review=days(9))}
    assert due(reviews, DAY) == []
    assert due(reviews, days(1)) == ["again"]
    assert due(reviews, days(2)) == ["again", "good"]
    ids = ["again", "a", "b", "c", "d"]
    assert unseen(ids, reviews, DAY, 4) == ["a"]
    assert unseen(ids, reviews, days(1), 3) == ["a", "b", "c"]
    assert unseen(ids, reviews, DAY, 0) == []


@pytest.mark.parametrize("word", ["easy", "medium", "hard"])
def test_a_band_of_difficulty_survives_import_and_export(word):
    values = {"last_reviewed": DAY, "next_review": days(6), "difficulty": word, "review_count": 2}
    progress = from_fields(values, DAY)
    assert fields(progress, DAY)["difficulty"] == word
    assert progress.stability == 6
    assert retrievability(progress, days(6)) == pytest.approx(0.9)
    assert fields(progress, DAY).items() >= values.items()


def test_the_bands_are_thirds():
    assert [band(each) for each in (1, 3.9, 4.1, 6.9, 7.1, 10)] == [
        "easy", "easy", "medium", "medium", "hard", "hard",
    ]  # fmt: skip


# --- notes ---------------------------------------------------------------------------------------


def test_a_review_changes_only_the_lines_of_known_fields(tmp_path):
    after = reviewed(NOTE, tmp_path).decode()
    changed = [
        (old, new) for old, new in zip(NOTE.splitlines(), after.splitlines(), strict=True)
        if old != new
    ]  # fmt: skip
    assert changed == [
        ("last_reviewed: null", "last_reviewed: '2026-01-05'"),
        ("next_review: '2025-10-19'", "next_review: '2026-01-07'"),
        ("review_count: 0", "review_count: 1"),
        ("difficulty: medium", "difficulty: easy"),
        ("mastery_level: 0.0", "mastery_level: 1.0"),
    ]
    read = yaml.safe_load(after.split("---")[1])
    assert read["last_reviewed"] == "2026-01-05"
    assert read["created"] == "2025-10-19"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("review_count: 0  # of all", "review_count: 1  # of all"),
        ("review_count:    '0'", "review_count:    '1'"),
        ('"review_count" : "0"', '"review_count" : "1"'),
        ("review_count: 0\r", "review_count: 1\r"),
        ("review_count:", "review_count: 1"),
        ("review_count: ~ # none", "review_count: 1 # none"),
        ("review_count: 7\nreview_count: 0", "review_count: 7\nreview_count: 1"),
        ("last_reviewed: null", "last_reviewed: '2026-01-05'"),
        ("last_reviewed: null\ncreated: 2025-01-01",
         "last_reviewed: 2026-01-05\ncreated: 2025-01-01"),
        ('last_reviewed:\ncreated: "2025-01-01"',
         'last_reviewed: "2026-01-05"\ncreated: "2025-01-01"'),
        ("review_count: 0 # 1 # 2", "review_count: 1 # 1 # 2"),
        ("difficulty: hard\t# x", "difficulty: easy\t# x"),
        ("next_review: 2025-10-19T08:30:00", "next_review: 2026-01-07"),
        ("difficulty: easy", "difficulty: easy"),
        ("mastery_level: 1.00", "mastery_level: 1.00"),
    ],
)  # fmt: skip
def test_quotes_spaces_comments_and_line_ends_stay(before, after, tmp_path):
    note = f"---\nother: 'a # b'\n{before}\n# a comment\nlast: [1,\n  2]\n---\nText without an end"
    found = reviewed(note, tmp_path).decode()
    assert found.startswith(f"---\nother: 'a # b'\n{after}\n# a comment\nlast: [1,\n  2]\n")
    assert found.endswith("---\nText without an end")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_missing_fields_are_added_at_the_end_of_the_front_matter(end, mark, tmp_path):
    note = f"{mark}---{end}title: x{end}---{end}{end}Text{end}"
    after = reviewed(note.encode(), tmp_path).decode()
    added = [f"{key}: " for key in KEYS]
    lines = after.removeprefix(f"{mark}---{end}title: x{end}").split(end)
    assert [re.match(r"\w+: ", line)[0] for line in lines[:6]] == added
    assert end.join(lines[6:]) == f"---{end}{end}Text{end}"


@pytest.mark.parametrize(
    "note", ["# Title\n\nText", "", "\ufeffText\r\n", "---\nA rule\n---\n", "---\n"]
)
def test_a_note_without_front_matter_gets_one(note, tmp_path):
    after = reviewed(note.encode(), tmp_path).decode()
    assert after.endswith(note.removeprefix("\ufeff"))
    assert after.startswith("\ufeff---" if note.startswith("\ufeff") else "---")
    assert set(parse(after.encode()).values) == set(KEYS)


def by_yaml(front: bytes) -> dict:
    """The fields as YAML reads them; empty if it refuses them."""
    try:
        return yaml.safe_load(front.decode("utf-8-sig").strip().removesuffix("---"))
    except yaml.YAMLError:
        return {}


LINES = st.sampled_from(
    [
        "created: '2025-10-19'", "created: 2025-10-19 # day", "last_reviewed: null",
        "last_reviewed: '2025-11-01'", "next_review:", 'next_review: "2025-12-01"',
        "review_count: 3", "difficulty: hard", "difficulty: Medium", "mastery_level: 0.4",
        "tags: [a, b]", "tags:\n- a\n-   'b c'", "# comment", "", "title: 'it''s: # not one'",
        "other:\n  created: 1999-01-01\n  list:\n  - review_count: 9",
        "text: |\n  ---x\n  difficulty: no", "Created: yesterday",
        "标题: 数据并行", "key without colon",
    ]
)  # fmt: skip
ENDS = st.sampled_from(["\n", "\r\n"])


@given(
    lines=st.lists(LINES, max_size=9),
    end=ENDS,
    body=st.binary(max_size=60).map(lambda body: body.replace(b"\0", b"")),
    mark=st.sampled_from(["", "\ufeff"]),
    rating=st.sampled_from(list(Rating)),
)
def test_import_and_export_keep_every_other_byte(lines, end, body, mark, rating, tmp_path_factory):
    head = "".join(f"{line}\n" for line in ["title: x", *lines]).replace("\n", end)
    data = f"{mark}---{end}{head}---{end}".encode() + body
    tmp_path = tmp_path_factory.mktemp("notes")
    (tmp_path / "note.md").write_bytes(data)
    reviews = Reviews(tmp_path / "review")
    assert import_notes(reviews, tmp_path / "note.md", (), DAY).added == ["note.md"]
    assert export_notes(reviews, note_cards(reviews), tmp_path, DAY).unchanged == ["note.md"]
    assert (tmp_path / "note.md").read_bytes() == data
    export_notes(reviews, note_cards(reviews), tmp_path / "out", days(3))
    assert (tmp_path / "out" / "note.md").read_bytes() == data

    reviews.record({"note.md": graded(reviews.cards["note.md"], rating, DAY)})
    export_notes(reviews, note_cards(reviews), tmp_path, DAY)
    after = (tmp_path / "note.md").read_bytes()
    known = re.compile(rb"(?:%s)[ ]*:.*\n" % "|".join(KEYS).encode())
    start = len(data) - len(body)
    old = [line for line in data[:start].splitlines(keepends=True) if not known.fullmatch(line)]
    front = after[: len(after) - len(body)]
    new = [line for line in front.splitlines(keepends=True) if not known.fullmatch(line)]
    assert new == old
    assert after[len(front) :] == body
    assert parse(after).values.items() >= {"last_reviewed": DAY, "mastery_level": 1.0}.items()
    if before := by_yaml(data[:start]):
        later = by_yaml(front)
        assert {key: value for key, value in later.items() if key not in KEYS} == {
            key: value for key, value in before.items() if key not in KEYS
        }
        assert str(later["last_reviewed"]) == str(DAY)
        assert int(later["review_count"]) == parse(data).values.get("review_count", 0) + 1
    shutil.rmtree(tmp_path)


@given(data=st.binary(max_size=80) | st.text("-\n\r: a'#", max_size=40).map(str.encode))
def test_any_bytes_are_read_and_written_back(data):
    try:
        note = parse(data)
    except ValueError:
        return
    assert note.encoded() == data
    assert note.updated({}).encoded() == data


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("last_reviewed: yesterday", "line 3: expected a date such as '2026-01-31', or null after "
         "last_reviewed: on the same line, got 'yesterday'"),
        ("created: 2025-13-40", "expected a date"),
        ("created: '2025-10-19", "expected a date"),
        ("created:\n  '2025-10-19'", "on the same line, got several lines"),
        ("review_count: -1", "expected a count such as 3"),
        ("review_count: many", "expected a count such as 3"),
        ("review_count:\n- 1", "got several lines"),
        ("difficulty: 4", "expected easy, medium or hard"),
        ("difficulty: [easy]", "expected easy, medium or hard"),
        ("mastery_level: 90%", "expected a number from 0 to 1"),
        ("mastery_level: nan", "expected a number from 0 to 1"),
        ("mastery_level: 1.5", "expected a number from 0 to 1"),
    ],
)  # fmt: skip
def test_a_wrong_field_refuses_the_note_and_no_other(front, said, tmp_path):
    (tmp_path / "bad.md").write_text(f"---\ntitle: x\n{front}\n---\nText\n")
    (tmp_path / "good.md").write_text(NOTE)
    reviews = Reviews(tmp_path / "review")
    report = import_notes(reviews, tmp_path, (), DAY)
    assert report.added == ["good.md"]
    (sentence,) = report.refused
    assert sentence.startswith(f"{tmp_path / 'bad.md'}: ")
    assert said in sentence


@pytest.mark.parametrize(
    "front", ["{created: 2025-10-19}", "- a: 1", "  title: x", "[1: 2]", "? created\n: 2025-10-19"]
)
def test_front_matter_that_cannot_be_edited_is_refused(front):
    with pytest.raises(ValueError, match="expected fields that begin their line"):
        parse(f"---\n{front}\n---\n".encode())


def test_a_second_import_keeps_the_newer_progress(tmp_path):
    path = tmp_path / "note.md"
    path.write_text(NOTE)
    reviews = Reviews(tmp_path / "review")
    import_notes(reviews, path, (), DAY)
    reviews.record({"note.md": graded(reviews.cards["note.md"], Rating.Good, DAY)})
    path.write_text(NOTE.replace("Activations.", "Activations, and gradients."))
    assert import_notes(reviews, path, (), DAY).unchanged == ["note.md"]
    assert reviews.cards["note.md"].review_count == 1
    (card,) = note_cards(reviews)
    assert card == Card(
        "note.md", "What does PP send?", "Activations, and gradients.",
        ("notes", "interview/hot", "two words"),
    )  # fmt: skip
    path.write_text(NOTE.replace("review_count: 0", "review_count: 5"))
    assert import_notes(reviews, path, (), DAY).updated == ["note.md"]
    assert reviews.cards["note.md"].review_count == 5
    assert export_notes(reviews, note_cards(reviews), tmp_path, DAY).unchanged == ["note.md"]


def test_the_front_of_a_note_is_its_heading_or_its_title_or_its_name(tmp_path):
    for name, text in {
        "a.md": "---\ntitle: 'It''s TP'\n---\n# PP\nBody",
        "b.md": "---\ntitle: 'It''s TP'\n---\nBody",
        "c.md": "---\ntitle:\n---\nBody", "d.txt": "Body",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    reviews = Reviews(tmp_path / "review")
    import_notes(reviews, tmp_path, (), DAY)
    found = [(card.front, card.back) for card in note_cards(reviews)]
    assert found == [(front, "Body") for front in ("PP", "It's TP", "c", "d")]


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "utf16.md").write_bytes("# Note".encode("utf-16"))
    (sentence,) = import_notes(Reviews(tmp_path / "review"), tmp_path, (), DAY).refused
    assert sentence.endswith("utf16.md: expected text in UTF-8, got a zero byte")


def test_an_edited_note_keeps_its_text_when_progress_is_exported(tmp_path):
    reviewed(NOTE, tmp_path)
    target = tmp_path / "out" / "note.md"
    target.write_text(NOTE.replace("Activations.", "My words."))
    reviews = Reviews(tmp_path / "review").load()
    export_notes(reviews, note_cards(reviews), tmp_path / "out", days(1))
    assert "My words." in target.read_text()
    assert parse(target.read_bytes()).values["review_count"] == 1
    assert parse(target.read_bytes()).values["mastery_level"] < 1


def test_two_notes_of_one_name_are_not_mixed_up(tmp_path):
    top = tmp_path / "notes"
    for folder in ("a", "b", ".hidden"):
        (top / folder).mkdir(parents=True)
        (top / folder / "note.md").write_text(NOTE + folder)
    reviews = Reviews(tmp_path / "review")
    import_notes(reviews, top / "a", (), DAY)
    (sentence,) = import_notes(reviews, top / "b", (), DAY).refused
    assert f"another note of this name was imported from {top / 'a' / 'note.md'}" in sentence
    assert import_notes(reviews, top, (), DAY).added == ["a/note.md", "b/note.md"]
    assert len(note_cards(reviews)) == 3


def test_progress_with_cards_goes_through_notes_to_another_machine(tmp_path):
    made = cards()[:3]
    reviews = Reviews(tmp_path / "here")
    first = graded(Progress(DAY, DAY), Rating.Hard, DAY)
    reviews.record({made[0].id: graded(first, Rating.Good, first.next_review)})
    assert export_notes(reviews, made, tmp_path / "notes", days(4)).added == [f"{made[0].id}.md"]
    note = (tmp_path / "notes" / f"{made[0].id}.md").read_text(encoding="utf-8")
    read = yaml.safe_load(note.split("---")[1])
    assert list(read) == [*KEYS, "tags", "related_outlines"]
    assert read["review_count"] == 2
    assert made[0].front in note
    there = Reviews(tmp_path / "there")
    import_notes(there, tmp_path / "notes", {card.id for card in made}, days(4))
    ours, theirs = reviews.cards[made[0].id], there.cards[made[0].id]
    assert (ours.next_review, ours.last_reviewed) == (theirs.next_review, theirs.last_reviewed)
    assert export_notes(there, made, tmp_path / "notes", days(4)).refused == []
    assert yaml.safe_load((tmp_path / "notes" / f"{made[0].id}.md").read_text().split("---")[1])[
        "next_review"
    ] == read["next_review"]  # fmt: skip


# --- the file of the progress --------------------------------------------------------------------

GOOD = graded(Progress(DAY, DAY), Rating.Good, DAY)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"cards": 3}', '{"cards": [1]}', "\x00\xff", "[" * 100_000]
)
def test_a_damaged_file_is_renamed_and_said(text, tmp_path):
    for number in (1, 2):
        path = tmp_path / "state.json"
        path.write_bytes(text.encode("latin-1"))
        reviews = Reviews(tmp_path).load()
        assert reviews.cards == {}
        (sentence,) = reviews.said
        assert f"is now state.json.damaged-{number}" in sentence
        aside = tmp_path / f"state.json.damaged-{number}"
        assert aside.read_bytes() == text.encode("latin-1")
        assert Reviews(tmp_path).load().said == []


@pytest.mark.parametrize(
    "change",
    [
        {"next_review": "soon"}, {"created": None}, {"review_count": -1}, {"stability": "x"},
        {"stability": 0}, {"stability": None}, {"difficulty": 99}, {"last_reviewed": None},
        {"stability": float("nan")}, {"graded": 1.5},
    ],
)  # fmt: skip
def test_a_damaged_entry_costs_no_other_one(change, tmp_path):
    Reviews(tmp_path).record({"a": GOOD, "b": GOOD, "c": Progress(DAY, DAY)})
    data = json.loads((tmp_path / "state.json").read_text())
    data["cards"]["b"] |= change
    (tmp_path / "state.json").write_text(json.dumps(data))
    reviews = Reviews(tmp_path).load()
    assert reviews.cards == {"a": GOOD, "c": Progress(DAY, DAY)}
    assert "2 of 3 cards" in reviews.said[0]
    assert json.loads((tmp_path / "state.json.damaged-1").read_text())["cards"]["b"]
    assert Reviews(tmp_path).load().cards == reviews.cards


def test_an_id_cannot_leave_the_folder(tmp_path):
    Reviews(tmp_path).record({"../x": GOOD, "/x": GOOD, "a/b": GOOD})
    assert Reviews(tmp_path).load().cards.keys() == {"a/b"}


def test_sessions_at_the_same_time_lose_no_grade(tmp_path):
    ids = [[f"card-{session}-{n}" for n in range(15)] for session in range(4)]

    def session(own: list[str]) -> None:
        reviews = Reviews(tmp_path)
        for id in own:
            reviews.record({id: Progress(DAY, DAY)})

    with ThreadPoolExecutor() as pool:
        list(pool.map(session, ids))
    assert Reviews(tmp_path).load().cards.keys() == {id for own in ids for id in own}


def test_a_full_disk_leaves_a_damaged_file_where_it_is(tmp_path, monkeypatch):
    reviews = Reviews(tmp_path)
    reviews.record({"a": Progress(DAY, DAY), "b": Progress(DAY, DAY)})
    damaged = reviews.path.read_text().replace('"graded": 0', '"graded": -1', 1)
    reviews.path.write_text(damaged)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", _no_space)
        with pytest.raises(OSError, match="No space"):
            reviews.load()
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    assert reviews.path.read_text() == damaged
    again = Reviews(tmp_path).load()
    assert list(again.cards) == ["b"]
    assert "1 of 2 cards" in again.said[0]


def _no_space(path: Path, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def imported(tmp_path: Path, **notes: bytes) -> Reviews:
    """The progress with ``notes``, which were imported and reviewed once."""
    (tmp_path / "notes").mkdir()
    for name, data in notes.items():
        (tmp_path / "notes" / f"{name}.md").write_bytes(data)
    reviews = Reviews(tmp_path / "work")
    import_notes(reviews, tmp_path / "notes", (), DAY)
    reviews.record({id: graded(one, Rating.Good, DAY) for id, one in reviews.cards.items()})
    return reviews


def _fill(target: Path, data: bytes) -> None:
    target.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "data", "said"),
    [
        (_fill, b"# Another file\n", "no note that was exported"),
        (_fill, b"---\nreview_count: 50\n---\n# a", "50 reviews, and 1 are known here"),
        (_fill, b"\x89PNG\0", "a zero byte"),
        (lambda target, _: target.mkdir(), b"", "s a directory"),
    ],
    ids=["another", "newer", "binary", "folder"],
)
def test_an_export_refuses_one_file_and_writes_the_others(make, data, said, tmp_path):
    reviews = imported(tmp_path, a=b"# a", b=b"# b")
    (out := tmp_path / "out").mkdir()
    make(out / "a.md", data)
    report = export_notes(reviews, note_cards(reviews), out, DAY)
    assert (report.added, report.updated, report.unchanged) == (["b.md"], [], [])
    (sentence,) = report.refused
    assert said in sentence
    assert not data or (out / "a.md").read_bytes() == data


def test_a_link_to_itself_is_replaced(tmp_path):
    reviews = imported(tmp_path, a=b"# a")
    (out := tmp_path / "out").mkdir()
    (out / "a.md").symlink_to("a.md")
    assert export_notes(reviews, note_cards(reviews), out, DAY).added == ["a.md"]


def test_bytes_that_are_not_utf_8_stop_no_review(tmp_path):
    odd = os.fsdecode(b"caf\xe9")
    front = b"---\ntitle: caf\xe9\ntags: [\xe9]\n---\n"
    reviews = imported(tmp_path, a=front, **{odd: b"text"})
    made = note_cards(reviews)
    assert [card.front for card in made] == ["caf\ufffd", "caf\ufffd"]
    assert "\ufffd" in made[0].tags
    assert export_notes(reviews, made, tmp_path / "out", DAY).added == ["a.md", f"{odd}.md"]
    assert (tmp_path / "out" / "a.md").read_bytes().startswith(front[:20])


def test_a_damaged_copy_of_a_note_costs_no_other_note(tmp_path):
    reviews = imported(tmp_path, a=b"# a", b=b"\xef\xbb\xbf# b", c=b"# c")
    reviews.copy_of("a.md").write_bytes(b"---\n- x\n---\ntext")
    reviews.copy_of("c.md").unlink()
    reviews.copy_of("c.md").mkdir()
    assert [card.front for card in note_cards(reviews)] == ["a", "b"]


def test_a_note_whose_copy_cannot_be_written_is_refused_alone(tmp_path):
    reviews = imported(tmp_path, a=b"# a")
    (tmp_path / "more" / "a.md").mkdir(parents=True)
    for name in ("a.md/b.md", "c.md"):
        (tmp_path / "more" / name).write_bytes(b"# x")
    report = import_notes(reviews, tmp_path / "more", (), DAY)
    assert report.added == ["c.md"]
    assert "b.md" in report.refused[0]
    assert set(Reviews(tmp_path / "work").load().cards) == {"a.md", "c.md"}


def test_of_two_notes_with_one_card_the_one_with_more_reviews_counts(tmp_path):
    for name, count in (("a", 9), ("b", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "term-rank.md").write_text(f"---\nreview_count: {count}\n---\n")
    reviews = Reviews(tmp_path / "work")
    import_notes(reviews, tmp_path, ("term-rank",), DAY)
    assert reviews.cards["term-rank"].review_count == 9


def test_two_sessions_lose_no_grade(tmp_path):
    first, second = Reviews(tmp_path).load(), Reviews(tmp_path).load()
    first.record({"a": GOOD})
    second.record({"b": GOOD})
    assert Reviews(tmp_path).load().cards == {"a": GOOD, "b": GOOD}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


# --- the terminal --------------------------------------------------------------------------------


def session(queue, reviews, answers, today=DAY, language="en") -> tuple[int, str]:
    """The number of reviews and what was said, if the learner types ``answers``."""
    said, given = [], iter(answers)

    def ask(prompt: str) -> str:
        said.append(prompt)
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return play(queue, reviews, today, language, ask, said.append), "\n".join(said)


def test_a_session_shows_grades_and_repeats_what_was_forgotten(tmp_path):
    queue, reviews = cards()[:2], Reviews(tmp_path)
    done, said = session(queue, reviews, ["", "again", "", "x", "3", "", " G "])
    assert done == 3
    assert reviews.cards[queue[0].id].review_count == 2
    assert reviews.cards[queue[1].id].review_count == 1
    assert said.index(queue[0].front) < said.index(queue[0].back) < said.index(queue[1].front)
    assert "Please type 1, 2, 3 or 4" in said
    assert Reviews(tmp_path).load().cards == reviews.cards


def test_a_session_that_stops_keeps_the_grades(tmp_path):
    queue = cards("zh")[:3]
    done, said = session(queue, Reviews(tmp_path), ["", "4", ""], language="zh")
    assert done == 1
    assert "还剩 3 张" in said
    assert Reviews(tmp_path).load().cards.keys() == {queue[0].id}


def run(tmp_path, monkeypatch, *argv, answers=()) -> int:
    monkeypatch.setattr(verbs, "course_folder", lambda: tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{each}\n" for each in answers)))
    return cli.main(["review", *map(str, argv)])


def exported_day(tmp_path) -> str:
    return str(parse((tmp_path / "out" / "pp.md").read_bytes()).values["next_review"])


def test_a_week_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "pp.md").write_text(NOTE)
    assert run(tmp_path, monkeypatch, "import", tmp_path / "notes", "--today", DAY) == 0
    assert capsys.readouterr().out.startswith("Notes: 1 added")
    counts = []
    for number in range(7):
        today = days(number)
        assert run(tmp_path, monkeypatch, "due", "--json", "--new", 2, "--today", today) == 0
        data = json.loads(capsys.readouterr().out)
        counts.append((len(data["due"]), len(data["new"])))
        answers = ["", "3"] * sum(counts[-1])
        assert run(tmp_path, monkeypatch, "--new", 2, "--today", today, answers=answers) == 0
        assert f"Reviews: {sum(counts[-1])}." in capsys.readouterr().out
    assert counts == [(1, 2), (0, 2), (3, 2), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert run(tmp_path, monkeypatch, "--new", 2, "--today", days(6)) == 0
    assert f"Nothing is due on {days(6)}. The next card is due on" in capsys.readouterr().out
    assert run(tmp_path, monkeypatch, "export", tmp_path / "out", "--today", days(7)) == 0
    assert ": 15 added" in capsys.readouterr().out
    assert run(tmp_path, monkeypatch, "export", tmp_path / "mine", "--topic", "notes") == 0
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["pp.md"]
    assert run(tmp_path, monkeypatch, "due", "--topic", "notes", "--today", days(60)) == 0
    assert (
        f"\n{exported_day(tmp_path)}  What does PP send?\n1 due, 0 new" in capsys.readouterr().out
    )
    exported = parse((tmp_path / "out" / "pp.md").read_bytes()).values
    assert exported["review_count"] == 2
    assert 0.9 < exported["mastery_level"] < 1


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["import", "nowhere"], 2, "nowhere: there is no such file or folder."),
        (["import", "empty"], 2, "empty: expected notes (.md, .markdown, .txt), found none."),
        (["import", "bad.md"], 2, "bad.md: line 2: expected a count such as 3 after review_count:"),
        (["--today", "tomorrow"], 2, "expected a day such as 2026-01-31, got 'tomorrow'"),
        (["due", "--today", "9999-12-31"], 2, "expected a day such as 2026-01-31"),
        (["due", "--topic", "zero"], 2, "no card has the topic 'zero'"),
        (["due", "--new", "-1"], 2, "course review due --help"),
        (["--language", "fr"], 2, "expected a language of en, zh, got 'fr'."),
        (["grade"], 2, "No such command 'grade'"),
        (["export", "bad.md"], 2, "cannot make this folder"),
    ],
)
def test_bad_input_is_one_sentence(argv, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("bad.md").write_text("---\nreview_count: x\n---\n")
    assert run(tmp_path, monkeypatch, *argv) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_damage_is_said_on_the_command_line_and_the_review_goes_on(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "work" / "review"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{]")
    assert run(tmp_path, monkeypatch, "--today", DAY, answers=["", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == (
        "state.json was damaged and is now state.json.damaged-1; the progress with no card could "
        "be read.\n"
    )
    assert "Reviews: 1." in out
    assert (folder / "state.json.damaged-1").read_text() == "{]"


def test_an_option_before_a_command_is_refused_not_ignored(capsys):
    assert cli.main("review --topic memory due".split()) == 2
    assert "course review due --topic" in capsys.readouterr().err
