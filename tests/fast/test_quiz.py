"""The quiz: every template over 20 seeds, marking by units, the mistakes and the terminal loop."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from math import ceil
from string import Formatter

import prose
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import cli
from course_lib.interview import quiz
from course_lib.interview.marking import near, recognized
from course_lib.interview.questions import Amount, make, texts
from course_lib.interview.templates import TEMPLATES
from course_lib.interview.units import (
    EXAMPLES,
    UNITS,
    UnitMissing,
    Unreadable,
    half_step,
    read,
    show,
)

SEEDS = range(20)
IDS = [template.id for template in TEMPLATES]


def drawn(template):
    return [make(template, seed) for seed in SEEDS]


def spellings(question) -> list[str]:
    """The answer in at least three spellings, each with another unit or another number format."""
    value = question.value
    return {
        "byte": [f"{value / 1e9!r} GB", f"{value!r} bytes", f"{value * 8 / 1e6!r} Mbit",
                 f"{value / 2**30!r} GiB"],
        "byte/s": [f"{value / 1e9!r} GB/s", f"{value!r} bytes per second", f"{value * 8!r} bit/s"],
        "s": [f"{value!r} s", f"{value * 1e3!r} ms", f"{value / 3600!r} hours",
              f"{value / 86400!r} days", f"{value / 3600!r} GPU hours"],
        "flop": [f"{value!r} FLOPs", f"{value / 1e12!r} TFLOP", f"{value / 1e15!r} petaflop"],
        "token/s": [f"{value!r} tokens/s", f"{value:,.1f} tokens per second", f"{value!r} tok/s"],
        "share": [f"{100 * value!r} %", f"{100 * value!r} percent",
                  f"{value!r}" if value <= 1 else f"{100 * value!r}%"],
        "count": [f"{value:,.0f}", f"{value!r}", f"{value / 1e9!r} B", f"{value:.12e}"],
    }[question.unit]  # fmt: skip


def test_there_are_forty_templates_over_all_topics():
    assert len(TEMPLATES) >= 40
    assert len(set(IDS)) == len(IDS)
    assert {template.topic for template in TEMPLATES} == set(quiz.topics())
    assert {template.unit for template in TEMPLATES} <= set(UNITS)
    assert min(len(quiz.templates(topic)) for topic in quiz.topics()) >= 4


def test_every_template_names_a_lesson_that_is_there():
    from course_lib.cli import place

    lessons = {path.name.split("_")[0] for path in (place.ROOT / "notebooks").glob("*.py")}
    assert {template.lesson for template in TEMPLATES} <= lessons


@pytest.mark.parametrize("template", TEMPLATES, ids=IDS)
class TestTemplates:
    def test_the_answer_is_positive_and_finite_and_right_in_any_spelling(self, template):
        for question in drawn(template):
            assert 0 < question.value < float("inf")
            for text in [question.answer, *spellings(question)]:
                assert question.mark(text).kind == "right", (question.seed, text)

    def test_every_mistake_is_recognized_and_is_no_right_answer(self, template):
        offered = set()
        for question in drawn(template):
            for name, value in question.mistakes.items():
                assert not near(value, question.value, template.tolerance), name
                assert recognized(question, value) == name
                spelled = f"{value!r} {unit_of(template)}"
                if template.unit == "share" and value > 1:
                    spelled = f"{100 * value!r} %"
                verdict = question.mark(spelled)
                assert (verdict.kind, verdict.mistake) == ("mistake", name)
                assert texts()["mistakes"][name] in verdict.message
                offered.add(name)
        assert len(offered) >= 2

    def test_the_text_names_every_number_with_its_unit_and_the_steps_end_in_the_answer(
        self, template
    ):
        for question in drawn(template):
            for name, number in question.given.items():
                unit = "" if re.search(r"[A-Za-z]", number) else r"[ -]?(?:[A-Za-z%]|\))"
                coordinate = rf"(?:{name}=|{name.rstrip('123')}=|(?:tp|cp|dp|pp|rank) |ZeRO-)"
                found = re.search(
                    rf"(?<![\d.,]){re.escape(number)}{unit}|{coordinate}{re.escape(number)}\b",
                    question.text,
                )
                assert found, (name, number, question.text)
            assert question.answer in question.steps[-1]
            assert question.text.endswith(("?", ".", ")"))
            assert question.answer not in question.text or question.unit == "count"

    def test_the_arithmetic_of_the_last_step_gives_the_answer(self, template):
        for question in drawn(template):
            value = computed(question.steps[-1], question.answer)
            if value is not None:
                assert value == pytest.approx(question.value, rel=5e-3), question.steps[-1]

    def test_a_seed_asks_the_same_and_another_seed_other_numbers(self, template):
        assert make(template, 3) == make(template, 3)
        assert len({question.text for question in drawn(template)}) > 2


def unit_of(template) -> str:
    return {"share": "", "count": "", "flop": "flop", "token/s": "tokens/s", "s": "s"}.get(
        template.unit, template.unit
    )


SIZES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "ms": 1e-3, "hours": 3600, "%": 0.01}


def computed(step: str, answer: str) -> float | None:
    """The value of the last formula before the answer; None where the step has words."""
    parts = step.removesuffix(".").split(" = ")
    if parts[-1] not in (answer, f"{answer} of GPU time") or len(parts) < 2:
        return None
    formula = parts[-2].split(": ")[-1].replace(",", "")
    formula = re.sub(r" (?:bytes|layers|GPUs|micro-batches|FLOP/s)\b", "", formula)
    for name, size in SIZES.items():
        amount = rf"([\d.]+) {re.escape(name)}(?:/s)?(?![\w/])"
        formula = re.sub(amount, rf"(\1*{size})", formula)
    formula = formula.replace(" x ", "*")
    if not re.fullmatch(r"[\d.e+*/() -]+", formula):
        return None
    return eval(formula)


def test_the_arithmetic_is_checked_in_most_templates():
    checked = [
        template.id
        for template in TEMPLATES
        if (q := make(template, 0)) and computed(q.steps[-1], q.answer) is not None
    ]
    assert len(checked) >= 35, sorted(set(IDS) - set(checked))


BY_HAND = {  # what the steps say in words, from the numbers of the text
    "bubble-fewest": lambda g: ceil((g["stages"] - 1) * (100 - g["percent"]) / g["percent"] - 1e-9),
    "days-run": lambda g: run_seconds(g) / g["gpus"],
    "days-gpu-hours": lambda g: run_seconds(g),
    "days-gpus": lambda g: ceil(run_seconds(g) / g["days"] / 86400),
    "days-throughput": lambda g: g["gpus"] * reached(g) / (6 * g["billions"] * 1e9),
    "flops-mfu": lambda g: 6e9 * g["billions"] * g["rate"] / (g["teraflops"] * 1e12),
    "kv-token": lambda g: 4 * g["layers"] * g["kv_heads"] * g["head_dim"],
    "layouts-stage": lambda g: g["rank"] // (g["tp"] * g["cp"] * g["dp"]),
    "layouts-stride-dp": lambda g: g["tp"] * g["cp"],
    "layouts-stride-pp": lambda g: g["tp"] * g["cp"] * g["dp"],
    "memory-in-flight": lambda g: min(g["stages"] - g["rank"], g["microbatches"]),
    "memory-logits": lambda g: 4 * g["batch"] * g["seq"] * g["vocab"],
    "volume-dp": lambda g: 4e9 * g["billions"] * (1 - 1 / g["ranks"]),
    "volume-ring": lambda g: (
        4 * g["seq"] * g["kv_heads"] * g["head_dim"] * (g["ranks"] - 1) / g["ranks"]
    ),
    "fits-ranks": lambda g: power_of_two(16e9 * g["billions"] / g["room"]),
    "fits-stages": lambda g: power_of_two(
        (4 + 12 / g["dp"]) * 1e9 * g["billions"] / g["tp"] / g["room"]
    ),
    "fits-zero": lambda g: next(
        stage
        for stage, per in enumerate([16, 4 + 12 / g["ranks"], 2 + 14 / g["ranks"], 16 / g["ranks"]])
        if per * 1e9 * g["billions"] <= g["room"]
    ),
    "fits-which": lambda g: next(
        number
        for number in (1, 2, 3)
        if g["billions"]
        * 1e9
        / g[f"tp{number}"]
        / g[f"pp{number}"]
        * (4 + 12 / (g[f"dp{number}"] if g[f"zero{number}"] else 1))
        <= g["room"]
    ),
    "kv-requests": lambda g: (g["room"] - g["weights"]) // (g["token"] * g["length"]),
    "volume-sp": lambda g: 8 * g["batch"] * g["seq"] * g["hidden"] * (1 - 1 / g["ranks"]),
}


def power_of_two(least: float) -> int:
    return next(2**n for n in range(20) if 2**n >= least)


def reached(g: dict[str, float]) -> float:
    return g["teraflops"] * 1e12 * g["percent"] / 100


def run_seconds(g: dict[str, float]) -> float:
    return 6 * g["billions"] * 1e9 * g["trillions"] * 1e12 / reached(g)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_answer_by_hand(name):
    for seed in SEEDS:
        question = quiz.question(name, seed)
        numbers = {
            key: read(text, "byte" if text.endswith("B") else "count")
            for key, text in question.given.items()
        }
        assert BY_HAND[name](numbers) == pytest.approx(question.value, rel=4e-3), question.text


def test_every_message_is_used_and_has_its_fields():
    written = texts()
    used = {name for template in TEMPLATES for q in drawn(template) for name in q.mistakes}
    assert used == set(written["mistakes"])
    assert set(written["questions"]) == set(IDS)
    fields = {name for _, name, _, _ in Formatter().parse(written["marks"]["mistake"]) if name}
    assert fields == {"why", "answer"}


def test_chinese_has_every_text_of_english_and_its_numbers():
    def shape(part):
        if isinstance(part, str):
            return sorted({name for _, name, _, _ in Formatter().parse(part) if name})
        if isinstance(part, list):
            return [shape(each) for each in part]
        return {key: shape(each) for key, each in part.items() if key != "units"}

    assert shape(texts("zh")) == shape(texts("en"))
    for template in TEMPLATES:
        ours, theirs = make(template, 4), make(template, 4, "zh")
        assert re.search("[\u4e00-\u9fff]", theirs.text)
        assert (ours.value, ours.mistakes) == (theirs.value, theirs.mistakes)
        assert theirs.answer in theirs.steps[-1]
        assert theirs.mark(theirs.answer).message == f"正确：{theirs.answer}。"


@pytest.mark.parametrize(
    ("answer", "unit", "value"),
    [
        ("3.5 天", "s", 3.5 * 86400),
        ("２．５ＧＢ", "byte", 2.5e9),
        ("约 12 小时", "s", 43200),
        ("64 个", "count", 64),
        ("35％", "share", 0.35),
        ("12000 token/秒", "token/s", 12000),
        ("10 GPU 小时", "s", 36000),
        ("3.5 万 GPU 小时", "s", 3.5e4 * 3600),
        ("120 亿字节", "byte", 12e9),
        ("12 GB/卡", "byte", 12e9),
        ("12 GB 每张卡", "byte", 12e9),
        ("大约 12 GB。", "byte", 12e9),
        ("6×10²⁴ 次浮点运算", "flop", 6e24),
        ("2³⁰ 字节", "byte", 2**30),
        ("1.2 万 tokens 每秒", "token/s", 12000),
        ("700 亿参数", "count", 70e9),
        ("第 3 级", "count", 3),
        ("阶段 2", "count", 2),
        ("16 个微批次", "count", 16),
    ],
)
def test_units_as_people_write_them_in_chinese(answer, unit, value):
    assert read(answer, unit, texts("zh")["units"]) == pytest.approx(value)


def test_the_texts_have_no_word_that_the_prose_lint_forbids():
    def sentences(part):
        if isinstance(part, str):
            yield part
        else:
            for each in part.values() if isinstance(part, dict) else part:
                yield from sentences(each)

    bad = [found for sentence in sentences(texts()) for found in prose.findings(sentence)]
    assert not bad


@pytest.mark.parametrize(
    ("answer", "unit", "value"),
    [
        ("12.5 GB", "byte", 12.5e9),
        ("12.5GB", "byte", 12.5e9),
        ("12.5 gb", "byte", 12.5e9),
        ("12.5e9 bytes", "byte", 12.5e9),
        ("12.5 x 10^9 bytes", "byte", 12.5e9),
        ("~12,500 MB", "byte", 12.5e9),
        ("100 Gbit", "byte", 12.5e9),
        ("100 Gb", "byte", 12.5e9),
        ("1 GiB", "byte", 2**30),
        ("1 gib", "byte", 2**30),
        ("2 gigabytes", "byte", 2e9),
        ("1 gibibyte", "byte", 2**30),
        ("8 megabits", "byte", 1e6),
        ("512 KiB", "byte", 2**19),
        ("1 byte", "byte", 1),
        ("400 Gb/s", "byte/s", 50e9),
        ("50 GB per second", "byte/s", 50e9),
        ("35 %", "share", 0.35),
        ("35%", "share", 0.35),
        ("35 percent", "share", 0.35),
        ("0.35", "share", 0.35),
        ("3/11", "share", 3 / 11),
        ("7/4", "share", None),
        ("35", "share", None),
        ("2 days", "s", 172800),
        ("90 min", "s", 5400),
        ("250 ms", "s", 0.25),
        ("10 GPU-hours", "s", 36000),
        ("3 PFLOP", "flop", 3e15),
        ("3e15 FLOPS", "flop", 3e15),
        ("12,000 tokens/s", "token/s", 12000),
        ("70 B", "count", 70e9),
        ("70 billion parameters", "count", 70e9),
        ("64 GPUs", "count", 64),
        ("64", "count", 64),
        ("ZeRO-2", "count", 2),
        ("layout 3", "count", 3),
        ("16 micro-batches", "count", 16),
        ("16 micro batches", "count", 16),
        ("(3/11)", "share", 3 / 11),
        ("３５％", "share", 0.35),
        ("12.5 billion bytes", "byte", 12.5e9),
        ("12.5 GB per GPU", "byte", 12.5e9),
        ("12.5 GB/rank", "byte", 12.5e9),
        ("12 B per GPU", "byte", 12),
        ("12 500 MB", "byte", 12.5e9),
        ("2^30 bytes", "byte", 2**30),
        ("2³⁰ bytes", "byte", 2**30),
        ("10⁻³ GB", "byte", 1e6),
        ("6·10^24 FLOPs", "flop", 6e24),
        ("1.5 million GPU hours", "s", 5.4e9),
        ("1.5M H100-hours", "s", 5.4e9),
        ("10 GPU·h", "s", 36000),
        ("12k tokens/s", "token/s", 12000),
        ("12.5 billion", "byte", None),
        ("12.5", "byte", None),
        ("12", "s", None),
    ],
)
def test_units_as_people_write_them(answer, unit, value):
    if value is None:
        with pytest.raises(UnitMissing):
            read(answer, unit)
    else:
        assert read(answer, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "unit"),
    [
        ("", "byte"),
        ("no idea", "byte"),
        ("GB", "byte"),
        ("12.5 bananas", "byte"),
        ("12.5 days", "byte"),
        ("12,5 GB", "byte"),
        ("1/0 GB", "byte"),
        ("1e999 GB", "byte"),
        ("1 x 10^999 GB", "byte"),
        ("9^999 GB", "byte"),
        ("0^-1 GB", "byte"),
        ("1e300 TB", "byte"),
        ("1e308 B", "count"),
        ("12 GB²", "byte"),
        ("1½ GB", "byte"),
        ("12 GB or 13 GB", "byte"),
        ("9**9**9**9 GB", "byte"),
        ("12 GB/s/s", "byte"),
        ("12 __import__('os')", "byte"),
        ("1" * 200, "byte"),
        ("12 GB", "share"),
        ("12 GB", "count"),
        ("12 %", "count"),
        ("nan", "share"),
        ("12 bananas", "count"),
        ("12 %", "byte"),
        ("12 rad", "share"),
    ],
)  # fmt: skip
def test_nonsense_is_a_sentence(answer, unit):
    with pytest.raises(Unreadable) as caught:
        read(answer, unit)
    question = next(make(each, 0) for each in TEMPLATES if each.unit == unit)
    verdict = question.mark(answer)
    assert verdict.kind == "unreadable"
    assert caught.value.got in verdict.message
    assert re.search(r"got '|unit of another quantity", verdict.message)
    assert verdict.message.endswith("An answer is, for example, " + EXAMPLES[unit] + ".")


@pytest.mark.parametrize("answer", ["0 GB", "-1 GB", "1e-320 GB", "1e250 GB"])
def test_an_answer_far_off_is_only_wrong(answer):
    verdict = quiz.question("memory-states").mark(answer)
    assert (verdict.kind, verdict.mistake) == ("wrong", None)
    assert verdict.message.startswith("Not right: the answer is ")


def test_an_answer_without_a_unit_is_not_marked_wrong():
    question = quiz.question("memory-states", seed=3)
    verdict = question.mark("12")
    assert (verdict.kind, verdict.counts) == ("unit", False)
    assert "GB" in verdict.message
    verdict = question.mark("12 apples")
    assert (verdict.kind, verdict.counts) == ("unreadable", False)
    assert question.mark("-3 GB").kind == "wrong"


positive = st.floats(1e-3, 1e15)


@given(positive, st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "Gbit", "Mb"]))
def test_scaling_a_unit_changes_no_value(number, unit):
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(unit[0], 1.0)
    if "i" in unit and "bit" not in unit:
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}[unit[0]]
    scale /= 8 if unit.endswith(("bit", "b")) else 1
    assert read(f"{number!r} {unit}", "byte") == pytest.approx(number * scale)


@given(positive, st.sampled_from(["byte", "byte/s", "s", "flop"]))
def test_what_is_shown_is_read_again(value, unit):
    assert read(show(value, unit), unit) == pytest.approx(value, rel=1e-3)
    assert str(Amount(value, unit)) == show(value, unit)


@given(st.text(max_size=40))
def test_any_text_gets_a_verdict(answer):
    verdict = quiz.question("memory-states", seed=1).mark(answer)
    assert verdict.kind in ("right", "mistake", "wrong", "unit", "unreadable")
    assert verdict.message


@given(st.floats(0.5, 2.0), st.sampled_from(IDS))
def test_marking_does_not_depend_on_the_unit(factor, name):
    question = quiz.question(name, seed=2)
    if question.unit == "byte":
        value = question.value * factor
        kinds = {question.mark(f"{value / s!r} {u}").kind for s, u in ((1e9, "GB"), (1, "bytes"))}
        assert len(kinds) == 1


def test_a_question_in_a_notebook_shows_no_answer():
    question = quiz.question("memory", seed=3)
    assert repr(question) == str(question) == question.text
    assert question == quiz.question("memory", seed=3)
    verdict = question.mark(question.answer)
    assert verdict.right
    assert repr(verdict) == verdict.message


def test_the_classic_mistakes_by_name():
    states = quiz.question("memory-states", seed=0)
    assert states.mark(show(states.value * 12 / 16, "byte")).mistake == "no-master"
    assert states.mark(states.answer.replace("B", "iB")).mistake == "gb-as-gib"
    bubble = quiz.question("bubble-total", seed=0)
    assert bubble.mark(str(bubble.value / (1 - bubble.value))).mistake == "bubble-of-ideal"
    assert quiz.question("memory-split", seed=0).mistakes.keys() >= {"no-pp", "dp-divides"}
    seconds = quiz.question("volume-seconds", seed=0)
    assert seconds.mark(show(seconds.value / 8, "s")).mistake == "bits-for-bytes"


def test_questions_of_a_topic_do_not_repeat_before_all_came():
    found = quiz.questions("bubble", seed=1, count=10)
    own = [template.id for template in quiz.templates("bubble")]
    assert sorted(q.id for q in found[: len(own)]) == sorted(own)
    assert len({q.text for q in found}) == 10
    with pytest.raises(ValueError, match="did you mean memory"):
        quiz.question("memry")
    with pytest.raises(ValueError, match="expected count"):
        quiz.questions(count=0)
    with pytest.raises(ValueError, match="expected a language of en"):
        quiz.question("memory", language="xx")


@pytest.mark.parametrize("seed", range(5))
def test_the_diagnosis_asks_twelve_over_all_topics(seed):
    found = quiz.diagnosis(seed)
    assert len(found) == len({q.id for q in found}) == 12
    assert {q.topic for q in found} == set(quiz.topics())


def test_the_diagnosis_says_what_to_read_first():
    score = quiz.Score()
    for one in quiz.diagnosis(0):
        answer = "0 %" if one.topic == "bubble" else one.answer
        score.marked.append((one, one.mark(answer if one.unit != "count" else one.answer)))
    wrong = [q for q, verdict in score.marked if not verdict.right]
    assert {q.topic for q in wrong} <= {"bubble"}
    assert set(score.read_first()) == {q.lesson for q in wrong}
    assert "All answers" not in str(score)


def quiz_of(typed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "course_lib.cli", "quiz", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_terminal_loop_piped():
    first, second, third = quiz.questions("memory", seed=3, count=3)
    name, wrong = next(iter(second.mistakes.items()))
    shown = f"{wrong!r} B" if second.unit == "byte" else f"{wrong!r}"
    typed = f"{first.answer}\n{shown}\n12 bananas\ns\n"
    result = quiz_of(typed, "--topic", "memory", "--seed", "3", "--count", "3")
    assert (result.returncode, result.stderr) == (0, "")
    flat = " ".join(result.stdout.split())
    assert f"Right: {first.answer}." in flat
    assert texts()["mistakes"][name] in flat
    assert "Please answer again" in flat
    assert f"Skipped. The answer is {third.answer}." in flat
    for one in (first, second, third):
        assert " ".join(one.steps[-1].split()) in flat
    assert "1 of 3 right." in flat
    assert "Read first:" in flat


def test_the_end_of_the_input_ends_with_the_score():
    result = quiz_of("", "--seed", "1")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.rstrip().endswith("No question was answered.")


def test_bytes_that_are_no_text_are_asked_again(monkeypatch, capsys):
    one = quiz.questions(seed=1, count=1)[0]
    typed = b"\xff\xfe 12\n" + one.answer.encode() + b"\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    assert cli.main(["quiz", "--seed", "1", "--count", "1"]) == 0
    said = capsys.readouterr().out
    assert "Please answer again" in said
    assert "1 of 1 right" in said


def test_an_interrupt_ends_with_the_score(monkeypatch, capfd):
    def interrupted(prompt):
        raise KeyboardInterrupt

    play = quiz.play
    monkeypatch.setattr(quiz, "play", lambda asked, score: play(asked, score, ask=interrupted))
    assert cli.main(["quiz", "--seed", "1"]) == 130
    assert capfd.readouterr().out.rstrip().endswith("No question was answered.")


def test_json_has_the_answers_for_a_teacher(capfd):
    assert cli.main("quiz --diagnose --seed 4 --json".split()) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["seed"] == 4
    assert data["questions"] == json.loads(
        json.dumps([question.as_dict() for question in quiz.diagnosis(4)])
    )
    keys = {"id", "topic", "lesson", "seed", "text", "answer", "tolerance", "steps", "mistakes"}
    assert all(set(question) == keys for question in data["questions"])


def test_list_names_every_template(capfd):
    assert cli.main(["quiz", "--list"]) == 0
    listed = capfd.readouterr().out
    assert all(f"  {name} " in listed for name in IDS)
    assert cli.main(["quiz", "--list", "--topic", "kv", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert {row["topic"] for row in data["templates"]} == {"kv"}


def test_an_unknown_topic_is_suggested(capfd):
    assert cli.main(["quiz", "--topic", "bubbel"]) == 2
    assert "did you mean bubble?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("160 GB", 5 / 160),
        ("156 GB", 0.5 / 156),
        ("1.6e2 GB", 0.05 / 1.6),
        ("0.0160 TB", 0.00005 / 0.016),
        ("1,600 MB", 50 / 1600),
        ("200 GB", 0),
        ("2 GB", 0),
        ("0 GB", 0),
        ("3/11", 0),
        ("no number", 0),
    ],
)
def test_half_a_step_of_the_last_digit(answer, share):
    assert half_step(answer) == pytest.approx(share)


@pytest.mark.parametrize("template", TEMPLATES, ids=IDS)
def test_two_digits_are_enough_for_a_right_answer_and_for_a_mistake(template):
    if not template.tolerance:
        return
    scale = {"share": 100}.get(template.unit, 1)
    unit = {"share": "%", "count": "", "flop": "flop"}.get(template.unit, template.unit)
    for question in drawn(template):
        rounded = question.mark(f"{question.value * scale:.1e} {unit}")
        off = abs(float(f"{question.value:.1e}") / question.value - 1)
        closer = any(
            abs(float(f"{question.value:.1e}") / each - 1) < off
            for each in question.mistakes.values()
        )
        assert rounded.right or closer, (question.seed, rounded.message)
        for name, value in question.mistakes.items():
            verdict = question.mark(f"{value * scale:.1e} {unit}")
            assert verdict.kind in ("mistake", "right"), (name, verdict.message)


def test_what_readers_type_for_a_topic_is_suggested():
    for typed, topic in (("pipeline", "bubble"), ("PP", "bubble"), ("tensor", "volume")):
        with pytest.raises(ValueError, match=f"use {topic}$"):
            quiz.templates(typed)
    assert set(quiz.ALIASES.values()) <= set(quiz.topics())
