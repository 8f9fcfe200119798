"""The mock interview: a whole one from a list of answers, its score sheet, and how it ends."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import prose
import pytest

from course_lib import cli
from course_lib.interview import mock, quiz
from course_lib.interview.agenda import FOLLOW_UPS, group_of, make_plan
from course_lib.interview.cases import CASES
from course_lib.interview.concepts import Concept
from course_lib.interview.design import Described
from course_lib.interview.questions import Question, texts
from course_lib.interview.sheet import FollowedUp, Item, Keeper, Sheet
from course_lib.interview.written import written

SEED = 3
PROPOSALS = ["tp=8 pp=4 zero=2", "tp=8 pp=4"]  # of dense-180b: a mistake, then none


def spelled(question: Question) -> str:
    """The first classic mistake of a question, with its unit."""
    value = next(iter(question.mistakes.values()))
    if question.unit == "share":
        return f"{100 * value!r} %"
    return f"{value!r} " + {"byte": "B", "byte/s": "B/s", "token/s": "tokens/s"}.get(
        question.unit, "" if question.unit == "count" else question.unit
    )


def answers(plan) -> list[str]:
    """A wrong numeric answer, then a right one; notes, and points by turns; two proposals."""
    given: list[str] = []
    numeric = 0
    for one in plan.asked:
        if isinstance(one, Question):
            given += [one.answer if numeric else spelled(one), f"spoken {numeric}", "", "y"]
            numeric += 1
        elif isinstance(one, Concept):
            points = ["yn"[at % 2] for at in range(len(one.whiteboard))]
            given += [f"notes on {one.id}", "", *points, "", "n"]
        else:
            for text in PROPOSALS:
                given += [text, f"because of {text}", "", "y"]
            given += [""]
    return given


class Candidate:
    """Gives the answers one after another, then ends the input."""

    def __init__(self, given, end=EOFError):
        self.given, self.end, self.said = list(given), end, []

    def ask(self, prompt):
        self.said.append(prompt)
        if not self.given:
            raise self.end
        return self.given.pop(0)

    def say(self, text):
        self.said.append(text)

    @property
    def heard(self) -> str:
        return " ".join("\n".join(self.said).split())


def held(plan, given, keep=lambda _: None, seconds=60.0, end=EOFError):
    """Hold an interview; the clock goes on by ``seconds`` whenever it is read."""
    sheet = Sheet(plan.seed, plan.language, plan.minutes, len(plan.asked), "2026-01-02")
    candidate, ticks = Candidate(given, end), count()
    clock = lambda: next(ticks) * seconds  # noqa: E731
    mock.play(plan, sheet, ask=candidate.ask, say=candidate.say, keep=keep, clock=clock)
    return sheet, candidate


@pytest.fixture(scope="module", params=["en", "zh"])
def plan(request):
    return make_plan(SEED, language=request.param, case="dense-180b")


def test_a_whole_interview(plan, tmp_path):
    keeper = Keeper(tmp_path)
    sheet, candidate = held(plan, answers(plan), keeper)
    said, spoken = written("interview", plan.language), texts(plan.language)
    assert not candidate.given
    assert sheet.finished
    wrong, right, *concepts, case = sheet.items
    assert (wrong.points, wrong.of, wrong.mistake) == (0, 1, next(iter(plan.asked[0].mistakes)))
    assert wrong.follow_ups == [
        FollowedUp(said["follow-ups"][group_of(wrong.mistake)]["ask"], ["spoken 0"], 1)
    ]
    assert wrong.score == (1, 2)
    assert (right.points, right.mistake, right.score) == (1, None, (2, 2))
    assert right.follow_ups[0].ask == said["topics"][plan.asked[1].topic]["ask"]
    assert spoken["mistakes"][wrong.mistake].replace(" ", "") in candidate.heard.replace(" ", "")
    for item, one in zip(concepts, plan.asked[2:-1], strict=True):
        assert item.answers == [f"notes on {one.id}"]
        assert (item.points, item.of) == (-(-len(one.whiteboard) // 2), len(one.whiteboard))
        assert item.follow_ups[0].ask in [each.ask for each in one.follow_ups]
        assert one.drawing in "\n".join(candidate.said)
    assert case.answers == PROPOSALS
    took = said["loop"]["took"].format(used="1.0", planned=f"{case.planned:g}")
    assert took.replace(" ", "") in candidate.heard.replace(" ", "")
    assert [row["mistake"] for row in case.proposals] == ["zero-rounds", None]
    assert (case.points, case.of, case.score) == (4, 4, (6, 6))
    assert len(case.follow_ups) == 2
    assert json.loads(keeper.path.read_text(encoding="utf-8")) == sheet.as_dict()
    assert keeper.path.name == f"2026-01-02-{SEED}.json"


def test_the_score_sheet_says_points_time_and_what_to_read(plan):
    sheet, _ = held(plan, answers(plan))
    points, of = sheet.score
    assert (points, of) == tuple(map(sum, zip(*(item.score for item in sheet.items), strict=True)))
    shown = " ".join(str(sheet).split())
    assert str(points) in shown
    assert str(of) in shown
    lost = {item.lesson: 1 - item.score[0] / item.score[1] for item in sheet.items}
    assert sheet.read_first() == sorted((k for k in lost if lost[k]), key=lambda k: -lost[k])[:3]
    assert sum(item.planned for item in sheet.items) == pytest.approx(45, abs=0.3)
    assert [item.seconds for item in sheet.items] == [60.0] * len(sheet.items)
    assert "{" not in shown


def test_no_mark_depends_on_the_clock(plan):
    slow, fast = (held(plan, answers(plan), seconds=each)[0] for each in (3600.0, 0.0))
    assert slow.score == fast.score
    assert slow.read_first() == fast.read_first()


def test_nothing_is_lost_wherever_it_ends():
    plan = make_plan(SEED, case="dense-180b")
    given = answers(plan)
    for stop in range(len(given) + 1):
        kept, end = [], (EOFError, KeyboardInterrupt)[stop % 2]
        keep = lambda sheet, kept=kept: kept.append(json.dumps(sheet.as_dict()))  # noqa: E731
        if stop < len(given):
            with pytest.raises(end):
                held(plan, given[:stop], keep, end=end)
        else:
            held(plan, given, keep)
        rows = json.loads(kept[-1])["items"] if kept else []
        found = [text for row in rows for text in row["answers"]]
        found += [text for row in rows for each in row["follow_ups"] for text in each["answers"]]
        assert sorted(found) == sorted(set(given[:stop]) - {"", "y", "n"})
        assert sum(row["finished"] for row in rows) >= len(rows) - 1
        assert bool(kept) == (stop > 0)


def test_every_typed_line_is_kept_before_the_next_one_is_asked():
    plan, kept, typed = make_plan(SEED, case="dense-180b"), [""], []

    class Watched(Candidate):
        def ask(self, prompt):
            assert all(text in kept[0] for text in typed)
            answer = super().ask(prompt)
            typed.extend({answer} - {"", "y", "n"})
            return answer

    candidate = Watched(answers(plan))
    sheet = Sheet(SEED, "en", 45, len(plan.asked), "2026-01-02")
    keep = lambda sheet: kept.__setitem__(0, json.dumps(sheet.as_dict()))  # noqa: E731
    mock.play(plan, sheet, ask=candidate.ask, say=candidate.say, keep=keep)
    assert len(typed) == 10


def test_skipped_and_malformed_answers(plan):
    given = ["12 bananas", "", "s", "skip", "s", "what?", "tp=8 pq=4", "s"]
    given = given[:3] + ["s"] + ["s"] * len(plan.asked[2:-1]) + given[5:]
    sheet, candidate = held(plan, given)
    assert sheet.finished
    assert all(item.skipped for item in sheet.items)
    assert sheet.score == (0, sum(item.of for item in sheet.items))
    assert "'pq'" in candidate.heard or "“pq”" in candidate.heard
    assert plan.asked[-1].case.good in candidate.heard
    assert not any(str(each).endswith(("?.", "？。", "？.")) for each in candidate.said)


def test_a_yes_or_no_is_asked_again():
    plan = make_plan(SEED, part="numbers")
    sheet, candidate = held(plan, [plan.asked[0].answer, "", "maybe", "", "YES", "s"])
    assert candidate.said.count("Please answer y or n.") == 2
    assert sheet.items[0].score == (2, 2)


def test_the_same_mistake_has_one_follow_up():
    plan = make_plan(SEED, part="design", case="dense-180b")
    first, other = "tp=8 pp=4 zero=2", "tp=8 zero=3"
    sheet, _ = held(plan, [first, "", "y", other, "tp=8 pp=2", "", "n"])
    assert [row["mistake"] for row in sheet.items[0].proposals] == ["zero-rounds"] * 2 + ["states"]
    assert [row.points for row in sheet.items[0].follow_ups] == [1, 0]
    assert (sheet.items[0].points, sheet.items[0].of) == (3, 4)


def test_every_numeric_mistake_and_topic_has_a_follow_up():
    names = [name for group in FOLLOW_UPS.values() for name in group.split()]
    assert sorted(names) == sorted(texts()["mistakes"])
    said = written("interview")
    assert set(said["follow-ups"]) == {*FOLLOW_UPS, "unrecognized"}
    assert list(said["topics"]) == quiz.topics()
    assert group_of(None) == "unrecognized"
    sentences = [str(part) for part in (said["follow-ups"], said["topics"], said["loop"])]
    assert not [found for text in sentences for found in prose.findings(text)]


def test_a_seed_draws_the_same_questions_of_different_topics():
    assert make_plan(5) == make_plan(5)
    drawn = [make_plan(seed) for seed in range(12)]
    assert {plan.asked[-1].case.id for plan in drawn} == {case.id for case in CASES}
    for plan in drawn:
        numbers = [one.topic for one in plan.asked if isinstance(one, Question)]
        concepts = [one.id for one in plan.asked if isinstance(one, Concept)]
        assert len(set(numbers)) == 2
        assert len(set(concepts)) == len(concepts) == 2
        assert isinstance(plan.asked[-1], Described)
    assert len({plan.asked[0].id for plan in drawn}) > 3
    assert [item.part for item in make_plan(5, part="design").items()] == ["design"]
    assert make_plan(5, part="design").minutes == 20
    longer = make_plan(5, minutes=90)
    assert longer.minutes == 90
    assert [item.planned for item in longer.items()] == [10, 10, 15, 15, 40]


def test_points_of_an_item_count_follow_ups():
    item = Item("numbers", "a", "A", "03", 5.0, points=1, of=1)
    item.follow_ups = [FollowedUp("why?", [], 0), FollowedUp("how?")]
    assert item.score == (1, 2)
    assert not item.answered
    empty = Sheet(1, "en", 45, 4, "2026-01-02", [item])
    assert str(empty) == written("interview")["sheet"]["no-answer"]


def test_no_file_is_overwritten(tmp_path):
    sheet = Sheet(1, "en", 45, 4, "2026-01-02")
    keepers = [Keeper(tmp_path) for _ in range(3)]
    for keeper in keepers:
        keeper(sheet)
        keeper(sheet)
    names = ["2026-01-02-1.json", "2026-01-02-1-2.json", "2026-01-02-1-3.json"]
    assert [keeper.path.name for keeper in keepers] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    with pytest.raises(FileExistsError):
        Keeper(tmp_path, taken)(sheet)
    assert taken.read_text() == "mine"


def interviewed(given: list[str], *arguments: str, end: str = "") -> subprocess.CompletedProcess:
    """Run the command without a terminal; it must not import torch."""
    code = (
        "import sys; from course_lib import cli; code = cli.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "interview", "--seed", str(SEED), *arguments],
        input="".join(f"{line}\n" for line in given).encode() + end.encode("latin-1"),
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_the_command_with_piped_input_and_bytes_that_are_no_text(tmp_path):
    out = tmp_path / "new" / "sheet.json"
    plan = make_plan(SEED, case="dense-180b")
    given = answers(plan)[:-1]
    result = interviewed(
        given, "--case", "dense-180b", "--out", str(out), "--json", end="\xff\xfe\n"
    )
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["file"] == str(out)
    assert data["plan"] == json.loads(json.dumps(plan.as_dict()))
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert data["sheet"] == kept
    assert not kept["finished"]  # the last line was no proposal, and then the input ended
    assert [row["finished"] for row in kept["items"]] == [True] * 4 + [False]
    heard = " ".join(result.stderr.decode().split())
    assert "Score sheet, seed 3" in heard
    assert f"is in {out}" in heard


def test_an_interrupt_keeps_the_sheet(tmp_path, monkeypatch, capfd):
    plan = make_plan(SEED, language="zh")
    candidate = Candidate([plan.asked[0].answer, "讲了一点"], KeyboardInterrupt)
    monkeypatch.setattr("builtins.input", lambda: candidate.ask(""))
    out = tmp_path / "a.json"
    arguments = ["interview", "--seed", str(SEED), "--language", "zh", "--out", str(out)]
    assert cli.main(arguments) == 130
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert kept["items"][0]["follow_ups"][0]["answers"] == ["讲了一点"]
    assert (kept["points"], kept["of"], kept["finished"]) == (1, 1, False)
    assert "评分表" in capfd.readouterr().out
    assert cli.main(arguments) == 2
    assert "expected --out to name a new file" in capfd.readouterr().err
    assert json.loads(out.read_text(encoding="utf-8")) == kept


def test_a_full_disk_does_not_end_the_interview(tmp_path, monkeypatch, capfd):
    def no_space(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = make_plan(SEED)
    candidate = Candidate([plan.asked[0].answer, "I would say that.", "", "y"])
    monkeypatch.setattr("builtins.input", lambda: candidate.ask(""))
    monkeypatch.setattr(Path, "write_text", no_space)
    out = tmp_path / "sheet.json"
    assert cli.main(["interview", "--seed", str(SEED), "--out", str(out)]) == 3
    heard = capfd.readouterr()
    assert "Score sheet, seed 3" in heard.out
    assert "could not be written: [Errno 28] No space left" in heard.err
    assert list(tmp_path.iterdir()) == [out]  # no second file is left


def test_an_empty_input_writes_no_file(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("builtins.input", _ended)
    assert cli.main(["interview", "--seed", "1", "--out", str(tmp_path / "a.json")]) == 0
    assert capfd.readouterr().out.rstrip().endswith("no score sheet was written.")
    assert not list(tmp_path.iterdir())


def _ended(*_):
    raise EOFError


def test_list_shows_no_answer_without_json(capfd):
    plan = make_plan(SEED)
    assert cli.main(["interview", "--list", "--seed", str(SEED)]) == 0
    listed = capfd.readouterr().out
    assert [item.title in listed for item in plan.items()] == [True] * len(plan.asked)
    assert plan.asked[-1].case.good not in listed
    assert cli.main(["interview", "--list", "--seed", str(SEED), "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data == json.loads(json.dumps(plan.as_dict()))
    assert data["questions"][0]["answer"] == plan.asked[0].answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--minutes 0", "expected --minutes from 1 to 600, got 0"),
        ("--minutes nan", "expected --minutes from 1 to 600"),
        ("--minutes 1e9", "expected --minutes from 1 to 600"),
        ("--minutes soon", "--minutes"),
        ("--seed -1", "--seed"),
        ("--seed 1.5", "--seed"),
        ("--language de", "expected a language of en, zh, got 'de'"),
        ("--part desing", "no part is called 'desing'; choose numbers, concepts or design"),
        ("--case experst", "no case is called 'experst'; did you mean experts?"),
        ("--case latency --part numbers", "case latency belongs to the part design"),
        ("--out tests", "expected --out to name a new file"),
        ("--out README.md/a.json", "--out README.md"),
        ("now", "now"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capfd, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("builtins.input", _ended)
    assert cli.main(["interview", *arguments.split()]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
