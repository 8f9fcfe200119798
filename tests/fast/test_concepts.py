"""Concept questions: both languages have the same form, numbers are right, pages are today's."""

from __future__ import annotations

import json
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
    pipelines-bubble context-sequence-or-context decision-70b decision-180b
""".split()
# Names with digits that a text may spell out. A model's size may follow its name.
NAMES = re.compile(
    r"\b(?:bf16|fp(?:8|16|32|64)|int[48]|[ABHV]\d00|(?:8|16|32|64)[- ](?:bits?|位)|1F1B|FSDP2"
    r"|(?:Llama [23]|GPT-[23J]|Falcon|Mixtral|DeepSeek-V3|Megatron)(?: \d+(?:x7)?(?:\.\d)?B\b)?"
    r"|arXiv:\d{4}\.\d{5})"
)
TYPED = re.compile(r"\d[\d.,]*\d")  # a number of more than one digit


def gb(value: float) -> str:
    """Bytes in GB as the texts show them."""
    return f"{value / 1e9:.3g} GB"


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


def of(topic: str, questions: tuple[Concept, ...] = ENGLISH) -> list[Concept]:
    return [one for one in questions if one.topic == topic]


@pytest.mark.parametrize("topic", topics())
class TestEnglish:
    def test_the_form_of_an_answer(self, topic):
        for one in of(topic):
            assert one.id.startswith(f"{topic}-")
            assert one.lesson in LESSONS, one.id
            assert 110 <= len(one.short.split()) <= 160, one.id
            assert 4 <= len(one.whiteboard) <= 8, one.id
            assert 2 <= len(one.follow_ups) <= 4, one.id
            assert one.title.endswith("?")
            assert all(text[-1] in ".?!" for text in shown(one)), one.id

    def test_the_drawing_fits_on_a_page(self, topic):
        for one in of(topic):
            lines = one.drawing.split("\n")
            assert 3 <= len(lines) <= 16, one.id
            assert max(map(len, lines)) <= 72, one.id

    def test_the_whiteboard_has_computed_numbers(self, topic):
        for one in of(topic):
            assert len(set().union(*map(names, RAW["en"][one.id]["whiteboard"]))) >= 3, one.id

    def test_no_word_that_the_prose_lint_forbids(self, topic):
        assert not [bad for one in of(topic) for text in shown(one) for bad in prose.findings(text)]


@pytest.mark.parametrize("topic", topics())
def test_no_number_is_typed_that_the_library_computes(topic):
    """Beside names, and numbers of the question itself; a quoted wrong answer has its own."""
    for id in [one.id for one in of(topic)]:
        asked = set(TYPED.findall(RAW["en"][id]["title"]))
        for language in LANGUAGES:
            raw = RAW[language][id]
            quoted = {raw["title"], raw["wrong"], *(each["ask"] for each in raw["follow_ups"])}
            for text in set(texts(raw)) - quoted:
                plain = NAMES.sub(" ", re.sub(r"\{[^}]+\}", " ", text))
                assert set(TYPED.findall(plain)) <= asked, (language, text)


BADLY_SET = re.compile(
    r"[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9%][\u4e00-\u9fff]"  # no space between the scripts
    r"|[\u4e00-\u9fff][,.;:?!(]|[,;:?!)][\u4e00-\u9fff]"  # the other script's punctuation
    r"|[\u4e00-\u9fff] [\u4e00-\u9fff]| [，。；：？！（）]|[，。；：？！（）] "  # a space too many
)


@pytest.mark.parametrize("topic", topics())
def test_chinese_is_set_as_chinese_is(topic):
    for one in of(topic, CHINESE):
        assert 150 <= len(one.short) <= 420, one.id
        for text in shown(one):
            assert re.search("[\u4e00-\u9fff]", text), text
            assert not BADLY_SET.search(text), text


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_pages_are_todays(language):
    assert target(language).read_text(encoding="utf-8") == page(language)


def test_an_unknown_question_or_language_is_a_sentence():
    with pytest.raises(ValueError, match="data-what-is"):
        concept("data-what-si")
    with pytest.raises(ValueError, match="expected a language of en, zh"):
        concepts("fr")
    assert concept("data-what-is", "zh").given == concept("data-what-is").given


# Values that follow from a second computation, by hand or by another formula.
XL, LLAMA_8B, LLAMA_405B = 1_557_611_200, 8_030_261_248, 405_853_388_800
BY_HAND = {
    "data.what_is": {
        "gradients": gb(4 * XL),
        "sent": gb(2 * 7 / 8 * 4 * XL),
        "sent_many": gb(2 * 63 / 64 * 4 * XL),
        "states": gb(18 * XL),
    },
    # A middle stage sends onward and back, shards of 8,192 x 8,192 elements.
    "data.against_model": {"pp_calls": "64", "pp_sent": gb(64 * 8192 * 8192 * 2 / 8)},
    # Two all-to-alls in 32 layers, two experts per token, 7/8 of the rows leave.
    "data.in_inference": {"expert_bytes": f"{32 * 2 * 2 * 7 / 8 * 4096 * 2 / 1e3:.3g} kB"},
    # Twice 7 steps of 3.4 us inside the node and 7 of 14 us between nodes.
    "data.buckets": {"buckets": "238", "latency": "240 us"},
    "data.zero_or_tp": {"x": f"{8192 * 8192 * 2 / 1e6:.3g} MB", "replicas": "512", "tokens": "34"},
    "data.reshard": {
        "freed": gb(3 * 63 / 64 * 2 * LLAMA_8B),
        "stays": gb(2 * 63 / 64 * 2 * LLAMA_8B),
        "freed_m": gb(8 * 3 * 63 / 64 * 2 * LLAMA_8B),
        "dp_fp32": gb(2 * 63 / 64 * 4 * LLAMA_8B),
    },
    "memory.what": {
        "weights": gb(2 * LLAMA_8B),
        "gradients": gb(4 * LLAMA_8B),
        "optimizer": gb(12 * LLAMA_8B),
        "cache": gb(8192 * 2 * 32 * 8 * 128 * 2),
    },
    "memory.per_parameter": {"per_1": "7.5", "held_20": gb(20 * LLAMA_8B), "largest": "4.7"},
    # Korthikanti et al., arXiv:2205.05198, equations 1, 2 and 4; 5as/h = 5 x 96 x 2048 / 12288.
    "memory.activations": {
        "all": "34",
        "inside": "24",
        "outside": "10",
        "scores": "80",
        "per_tp": "13",
        "per_sp": "4.25",
    },
    "combining.three_d": {
        "group_tp": "72, 73, ..., 79",
        "group_pp": "69, 77, ..., 125",
        "group_dp": "13, 77, ..., 461",
        "sent_pp": gb(2 * 192 * 2048 * 12288 * 2 / 8),
    },
    "combining.divide": {
        "state": f"{18 * LLAMA_405B / 1e12:.3g} TB",
        "b_bubble": f"{100 * 7 / (32 + 7):.2g} %",
        "f_dp": "16",
    },
    "combining.principle": {"sent_pp": gb(2 * 32 * 4096 * 5120 * 2 / 2), "outer_tp": "2"},
    "combining.purpose": {
        "all": str(8 + 8 + 4 + 2),
        "group_pp": "2, 6, 10, 14",
        "first_layer": "10",
        "last_head": "19",
    },
    "combining.inside_a_node": {"node": "371 GB/s", "network": "50 GB/s"},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_numbers_by_hand(name):
    found = {key: str(value) for key, value in computed(name).items()}
    assert {key: found[key] for key in BY_HAND[name]} == BY_HAND[name]


# What a lesson prints, and the same figures here.
PRINTED = [
    ("04", r"  64 +31\.41 +16\.64 +1\.88", "data.zero_stages",
     {"held_1": "31.4 GB", "held_2": "16.6 GB", "held_3": "1.88 GB"}),
    ("04", r"stage 2 .* 124\.0 +4\.50(.|\n)*stage 3 .* 330\.8 +12\.00", "data.accumulation",
     {"sent_2": "124 GB", "times_2": "4.5", "sent_3": "331 GB", "times_3": "12"}),
    ("06", r"selective: 0\.9% more operations, 70% less stored", "memory.recompute",
     {"more_selective": "0.9 %", "share": "70 %"}),
    ("06", r"'nothing': 4, 'selective': 4, 'full': 6", "memory.recompute",
     {"calls": "4", "calls_full": "6"}),
    ("10", r"\n  8 +11\.3 +3\.2", "combining.experts",
     {"own_experts": "11.3 GB", "dense": "3.21 GB"}),
    ("11", r"64 ranks, TP 8, PP 4, DP 2 +8 +16 +32 +56", "combining.isolation",
     {"n_tp": "8", "n_pp": "16", "n_dp": "32", "all": "56"}),
]  # fmt: skip


@pytest.mark.parametrize(("lesson", "line", "name", "values"), PRINTED)
def test_a_lesson_prints_the_same_figures(lesson, line, name, values):
    notebook = json.loads(LESSONS[lesson].with_suffix(".ipynb").read_text(encoding="utf-8"))
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", ())]
    printed = "\n".join("".join(out.get("text", ())) for out in outputs)
    assert re.search(line, printed)
    assert {key: str(computed(name)[key]) for key in values} == values
