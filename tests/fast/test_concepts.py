"""Concept questions: both languages have the same form, numbers are right, pages are today's."""

from __future__ import annotations

import re
from string import Formatter

import prose
import pytest

from course_lib.interview.concepts import Concept, computed, concept, concepts, read, topics
from course_lib.interview.concepts.__main__ import LESSONS, anchor, page, target
from course_lib.interview.written import LANGUAGES

ENGLISH, CHINESE = concepts("en"), concepts("zh")
RAW = {
    language: {one["id"]: one for topic in topics() for one in read(language, topic)["question"]}
    for language in LANGUAGES
}
KEYS = {"id", "title", "short", "whiteboard", "wrong", "why_wrong", "follow_ups"}
NAMED = """
    combining-3d combining-divide combining-principle combining-purpose combining-isolation
    combining-experts combining-inside-a-node
    data-what-is data-against-model data-in-inference data-zero-or-tp
""".split()
# Names with digits that a text may spell out. A model's size may follow its name.
NAMES = re.compile(
    r"\b(?:bf16|fp(?:8|16|32|64)|int[48]|[ABHV]\d00|(?:8|16|32|64)[- ](?:bits?|位)|1F1B|FSDP2"
    r"|(?:Llama [23]|GPT-[23J]|Falcon|Mixtral|DeepSeek-V3|Megatron)(?: \d+(?:x7)?(?:\.\d)?B\b)?"
    r"|arXiv:\d{4}\.\d{5})"
)
TYPED = re.compile(r"\d[\d.,]*\d")  # a number of more than one digit


def texts(raw) -> list[str]:
    """Every text of a question as it is written, in order; the drawing last."""
    follow_ups = [each[part] for each in raw["follow_ups"] for part in ("ask", "answer")]
    single = [raw[name] for name in ("title", "short", "wrong", "why_wrong")]
    return [*single, *raw["whiteboard"], *follow_ups, raw.get("drawing", "")]


def names(text: str) -> set[str]:
    """The names in braces."""
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def shown(one: Concept) -> list[str]:
    """Every text of a question as it is shown, without the drawing."""
    follow_ups = [text for each in one.follow_ups for text in (each.ask, each.answer)]
    return [one.title, one.short, one.wrong, one.why_wrong, *one.whiteboard, *follow_ups]


def test_the_questions_that_were_asked_for_are_there():
    ids = [one.id for one in ENGLISH]
    assert len(ids) >= 35
    assert len(set(ids)) == len(ids)
    assert set(NAMED) <= set(ids)
    assert list(topics("en")) == list(topics("zh")) == list(read("en", "page")["topics"])
    assert list(read("en", "page")["topics"]) == list(read("zh", "page")["topics"])
    for questions in (ENGLISH, CHINESE):
        assert len({anchor(one.title) for one in questions}) == len(questions)


def test_both_languages_have_the_same_questions_and_numbers():
    assert list(RAW["en"]) == list(RAW["zh"])
    for id, english in RAW["en"].items():
        chinese = RAW["zh"][id]
        assert set(english) == KEYS | {"lesson", "numbers", "drawing"}, id
        assert KEYS <= set(chinese) <= KEYS | {"drawing"}, id
        ours, theirs = texts(english), texts({"drawing": english["drawing"]} | chinese)
        assert len(ours) == len(theirs), id
        for one, other in zip(ours, theirs, strict=True):
            assert names(one) == names(other), (id, one, other)
        assert set().union(*map(names, ours)) == set(computed(english["numbers"])), id


@pytest.mark.parametrize("one", ENGLISH, ids=lambda one: one.id)
class TestEnglish:
    def test_the_form_of_an_answer(self, one):
        assert one.id.startswith(f"{one.topic}-")
        assert one.lesson in LESSONS
        assert 110 <= len(one.short.split()) <= 160
        assert 4 <= len(one.whiteboard) <= 8
        assert 2 <= len(one.follow_ups) <= 4
        assert one.title.endswith("?")
        for text in shown(one):
            assert text[-1] in ".?!", text

    def test_the_drawing_fits_on_a_page(self, one):
        lines = one.drawing.split("\n")
        assert 3 <= len(lines) <= 16
        assert max(map(len, lines)) <= 72

    def test_the_whiteboard_has_computed_numbers(self, one):
        assert len(set().union(*map(names, RAW["en"][one.id]["whiteboard"]))) >= 3

    def test_no_word_that_the_prose_lint_forbids(self, one):
        assert not [found for text in shown(one) for found in prose.findings(text)]


@pytest.mark.parametrize("id", [one.id for one in ENGLISH])
def test_no_number_is_typed_that_the_library_computes(id):
    """Beside names, and numbers of the question itself; a quoted wrong answer has its own."""
    asked = set(TYPED.findall(RAW["en"][id]["title"]))
    for language in LANGUAGES:
        raw = RAW[language][id]
        answers = {*texts(raw)} - {
            raw["title"],
            raw["wrong"],
            *(f["ask"] for f in raw["follow_ups"]),
        }
        for text in answers:
            plain = NAMES.sub(" ", re.sub(r"\{[^}]+\}", " ", text))
            assert set(TYPED.findall(plain)) <= asked, (language, text)


@pytest.mark.parametrize("one", CHINESE, ids=lambda one: one.id)
def test_chinese_is_set_as_chinese_is(one):
    assert 150 <= len(one.short) <= 420
    for text in shown(one):
        assert re.search("[\u4e00-\u9fff]", text), text
        beside = r"[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9%][\u4e00-\u9fff]"
        assert not re.search(beside, text), f"a space is missing: {text}"
        assert not re.search(r"[\u4e00-\u9fff][,.;:?!(]|[,;:?!)][\u4e00-\u9fff]", text), text
        assert not re.search(r"[\u4e00-\u9fff] [\u4e00-\u9fff]", text), text
        assert not re.search(r" [，。；：？！（）]|[，。；：？！（）] ", text), text


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_pages_are_todays(language):
    assert target(language).read_text(encoding="utf-8") == page(language)


def test_an_unknown_question_or_language_is_a_sentence():
    with pytest.raises(ValueError, match="data-what-is"):
        concept("data-what-si")
    with pytest.raises(ValueError, match="expected a language of en, zh"):
        concepts("fr")
    assert concept("data-what-is", "zh").given == concept("data-what-is").given


# Names whose value follows from a second computation, by hand or by another formula.
GPT2_XL = 1_557_611_200
BY_HAND = {
    "data.what_is": {
        "gradients": f"{4 * GPT2_XL / 1e9:.3g} GB",
        "sent": f"{2 * 7 / 8 * 4 * GPT2_XL / 1e9:.3g} GB",
        "sent_many": f"{2 * 63 / 64 * 4 * GPT2_XL / 1e9:.3g} GB",
        "states": f"{18 * GPT2_XL / 1e9:.3g} GB",
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_numbers_by_hand(name):
    found = {key: str(value) for key, value in computed(name).items()}
    assert {key: found[key] for key in BY_HAND[name]} == BY_HAND[name]
