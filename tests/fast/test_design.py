"""System design: the numbers are the planner's, and each mistake is recognized by its name."""

from __future__ import annotations

from string import Formatter

import prose
import pytest

from course_lib.interview import design, proposal
from course_lib.interview.cases import CASES, find
from course_lib.interview.design import Margin
from course_lib.interview.lines import columns, folded
from course_lib.interview.written import written
from course_lib.planner import configure, estimate, hardware, model, serve
from course_lib.planner.mixed import estimate_mixed

IDS = [case.id for case in CASES]
GOOD = {  # another proposal than the reference that keeps all limits
    "dense-180b": "tp=4 pp=8",
    "long-context": "tp=8 cp=8 pp=4",
    "experts": "tp=2 pp=4 ep=8",
    "two-kinds": "tp=8 pp=2 layers=24,56",
    "latency": "tp=8 dp=2 batch=32 dtype=fp8",
}
MISTAKES = {
    "gpus-unused": ("dense-180b", "tp=8 pp=4 dp=2"),
    "too-many-gpus": ("dense-180b", "tp=8 pp=4 dp=8"),
    "gpus-divide": ("dense-180b", "tp=29 pp=4"),
    "heads": ("dense-180b", "tp=16 pp=4"),
    "layers": ("dense-180b", "pp=128"),
    "no-experts": ("dense-180b", "tp=8 pp=4 ep=4"),
    "experts-divide": ("experts", "ep=16"),
    "ep-data": ("experts", "tp=8 pp=2 ep=8"),
    "dp-over-batch": ("long-context", "pp=4"),
    "batch-divide": ("dense-180b", "tp=8 pp=4 microbatch=3"),
    "context-serving": ("latency", "tp=8 cp=2 batch=1"),
    "impossible": ("dense-180b", "tp=8 pp=4 schedule=1f1b chunks=2"),
    "no-zero": ("dense-180b", "tp=8 pp=4 zero=0"),
    "no-ep": ("experts", "tp=8"),
    "no-cp": ("long-context", "tp=8 pp=4"),
    "micro-batch": ("dense-180b", "tp=8 pp=4 microbatch=4"),
    "gpipe": ("dense-180b", "tp=8 pp=4 schedule=gpipe"),
    "weights": ("dense-180b", "pp=4"),
    "states": ("dense-180b", "tp=8 pp=2"),
    "activations": ("long-context", "tp=8 cp=8"),
    "tp-across-nodes": ("long-context", "tp=16 cp=16"),
    "zero-rounds": ("dense-180b", "tp=8 pp=4 zero=2"),
    "ep-across-nodes": ("experts", "tp=4 pp=2 ep=8 recompute=full"),
    "two-kinds-in-a-stage": ("two-kinds", "tp=8 zero=3"),
    "uneven-layers": ("dense-180b", "tp=8 pp=4 zero=1 layers=18,18,18,26"),
    "no-pipeline": ("dense-180b", "tp=8 pp=4 zero=1 schedule=naive"),
    "even-layers": ("two-kinds", "tp=8 pp=4"),
    "recompute": ("dense-180b", "tp=8 pp=4 recompute=full"),
    "few-micro-batches": ("long-context", "tp=8 cp=2 pp=8 recompute=full"),
    "tp-exposed": ("two-kinds", "tp=8 pp=2 zero=3 layers=24,56"),
    "serve-weights": ("latency", "batch=1"),
    "serve-cache": ("latency", "tp=8 batch=2000"),
    "prefill-batch": ("latency", "tp=8 batch=128"),
    "pp-latency": ("latency", "tp=2 pp=2 batch=32"),
    "batch-large": ("latency", "tp=8 batch=64"),
    "weights-read": ("latency", "tp=2 batch=32 dtype=fp8"),
    "batch-small": ("latency", "tp=8 batch=4"),
}


def fields(part, at=()):
    """Yield the place and the sorted names in braces of every text."""
    if isinstance(part, str):
        yield at, sorted({name for _, name, _, _ in Formatter().parse(part) if name})
    else:
        for key, each in part.items():
            yield from fields(each, (*at, key))


@pytest.mark.parametrize("name", ["design", "interview"])
def test_both_languages_have_the_same_ids_and_names_in_braces(name):
    english, chinese = (dict(fields(written(name, language))) for language in ("en", "zh"))
    assert english.keys() == chinese.keys()
    assert {at: (a, chinese[at]) for at, a in english.items() if a != chinese[at]} == {}
    bad = [prose.findings(str(part)) for part in written(name)["loop"].values()]
    assert not any(bad)


def test_the_texts_are_those_of_the_cases_and_of_the_mistakes():
    said = written("design")
    assert list(said["cases"]) == IDS
    assert len(IDS) >= 5
    assert set(said["mistakes"]) == set(MISTAKES)
    sentences = [
        text
        for part in ("mistakes", "limits")
        for one in said[part].values()
        for text in one.values()
    ]
    assert not [found for text in sentences for found in prose.findings(text)]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("id", IDS)
def test_the_reference_and_another_proposal_keep_all_limits(id, language):
    described = design.case(id, language)
    assert "{" not in repr(described)
    for text in (described.case.good, GOOD[id]):
        answer = design.answer(id, text, language=language)
        assert answer.holds
        assert (answer.mistake, answer.broken) == (None, [])
        smallest = min(answer.margins, key=lambda one: 1 - one.used)
        assert answer.margins[0] == smallest
        assert design.shown(smallest.value, smallest.unit) in answer.message.split("\n")[0]
        assert "{" not in f"{answer.message}{answer.follow_up}"
        assert max(map(columns, repr(answer).split("\n"))) <= 80


def test_the_numbers_are_those_of_the_planner():
    h100 = hardware("h100")
    made = configure(model("falcon-180b"), 128, tp=8, pp=4, zero=2, seq=2048, global_batch=2048)
    expected = estimate(model("falcon-180b"), h100, made)
    answer = design.answer("dense-180b", "tp=8 pp=4 zero=2")
    values = {one.name: one.value for one in answer.margins}
    assert answer.result == expected
    assert values == {
        "memory": expected.memory.total,
        "mfu": expected.mfu,
        "bubble": expected.parts["bubble"] / expected.step_seconds,
        "exposed": pytest.approx(
            (expected.parts["tp"] + expected.parts["dp"]) / expected.step_seconds
        ),
    }
    assert f"{expected.step_seconds:.0f} s" in answer.message
    plan = configure(model("llama-3-70b"), 16, tp=8)
    served = serve(model("llama-3-70b"), h100, plan, batch=64, prompt=1024, generate=512)
    answer = design.answer("latency", "tp=8 batch=64")
    values = {one.name: one.value for one in answer.margins}
    assert values == {
        "memory": served.weights_bytes + served.kv_bytes,
        "ttft": served.ttft_seconds,
        "tpot": served.tpot_seconds,
        "throughput": served.tokens_per_second,
    }


def test_two_kinds_of_gpu_are_one_kind_where_they_are_equal():
    sizes, h100 = model("llama-3-70b"), hardware("h100")
    for degrees in (
        {"tp": 8, "pp": 4},
        {"tp": 4, "pp": 8, "zero": 2},
        {"tp": 8, "pp": 4, "schedule": "zb-v"},
    ):
        plan = configure(sizes, 64, seq=8192, global_batch=512, **degrees)
        assert estimate_mixed(sizes, [(h100, 32), (h100, 32)], plan) == estimate(sizes, h100, plan)


def test_the_slower_kind_sets_the_pace_unless_it_has_fewer_layers():
    even, uneven = (
        design.answer("two-kinds", f"tp=8 pp=4{layers}").result
        for layers in ("", " layers=12,12,28,28")
    )
    slow = estimate(model("llama-3-70b"), hardware("a100-80"), even.configuration)
    assert 0.9 * slow.step_seconds < even.step_seconds < slow.step_seconds  # its LM head is faster
    assert uneven.step_seconds < 0.65 * even.step_seconds


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_recognized_and_chooses_the_follow_up(name):
    id, text = MISTAKES[name]
    for language in ("en", "zh"):
        answer = design.answer(id, text, language=language)
        own = written("design", language)["mistakes"][name]
        assert answer.mistake == name
        assert not answer.holds
        if not fields_of(own["ask"]):
            assert answer.follow_up.ask == own["ask"]
        first = own["why"].split("{")[0]
        assert first in answer.message
        assert "{" not in f"{answer.message}{answer.follow_up}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tp=8 pp=4 schedule=gpipe chunks=2", "gpipe"),
        ("tp=8 pp=4 schedule=naive chunks=2 zero=1", "no-pipeline"),
        ("tp=8 pp=4 zero=1 layers=10,10,10,50", "uneven-layers"),
        ("tp=8 pp=4 zero=0 layers=20,20,20,20", "no-zero"),
    ],
)
def test_the_cause_is_named_and_not_its_effect(text, name):
    assert design.answer("dense-180b", text).mistake == name


def fields_of(text: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(text) if name]


def test_a_case_names_its_numbers():
    text = " ".join(design.case("experts").text.split())
    assert (
        "mixtral-8x7b, which has 47 billion parameters and 32 layers, on 64 H100 in 8 nodes" in text
    )
    assert "Each layer has 8 experts, and each token visits 2 of them." in text
    assert "A sequence has 8,192 tokens, and a step has 512 sequences." in text
    assert "may use 78.1 GB" in text
    assert (
        "at most 25 % of a step and the bubble at most 10 %. The MFU must be at least 42 %." in text
    )
    text = " ".join(design.case("latency").text.split())
    assert "within 3 s, each further token within 9 ms" in text
    assert "at least 7,000 tokens/s" in text
    text = design.case("two-kinds").text
    assert "32 A100-80 in 4 nodes and 32 H100 in 4 nodes of 8" in text
    text = design.answer("dense-180b", "tp=8 pp=4 microbatch=3").message
    assert "4 x 3 = 12 does not divide the 2,048 sequences" in text
    assert len(design.cases("zh")) == len(CASES)


def test_a_mistake_has_the_number_of_the_plan_without_it():
    base = design.answer("dense-180b", "tp=8 pp=4").result
    zero = design.answer("dense-180b", "tp=8 pp=4 zero=2")
    times = zero.result.step_seconds / base.step_seconds
    assert f"{times:.1f} times as long" in zero.message
    again = design.answer("dense-180b", "tp=8 pp=4 recompute=full")
    assert f"the MFU is {100 * base.mfu:.1f} %" in again.message
    assert f"needs {base.memory.total / 1e9:.1f} GB" in again.message


def test_a_proposal_is_compared_with_the_one_before():
    first = design.answer("dense-180b", "tp=8 pp=2")
    second = design.answer("dense-180b", "tp=8 pp=4", first)
    assert "Better than the last proposal: " in second.message
    memory = [f"{one.result.memory.total / 1e9:.1f} GB" for one in (first, second)]
    assert f"memory {memory[0]} -> {memory[1]}" in second.message
    assert "Worse than the last" in design.answer("dense-180b", "tp=8 pp=2", second).message
    assert "those of the last" in design.answer("dense-180b", "tp=8 pp=4 dp=4", second).message
    impossible = design.answer("dense-180b", "tp=7", second)
    assert "was impossible" in design.answer("dense-180b", "tp=8 pp=4", impossible).message


def test_memory_that_does_not_fit_is_the_first_reason():
    answer = design.answer("dense-180b", "dp=128 zero=3")
    assert answer.broken == ["memory", "exposed", "mfu"]
    used = [one.used for one in answer.margins if not one.holds]
    assert used[0] < used[1]


def test_a_margin():
    assert Margin("memory", 60.0, 80.0).used == pytest.approx(0.75)
    assert Margin("mfu", 0.5, 0.4).used == pytest.approx(0.8)
    assert not Margin("mfu", 0.3, 0.4).holds
    assert Margin("throughput", 0.0, 7000.0).as_dict()["holds"] is False


SPELLINGS = [
    "tp=8 pp=4 dp=4 zero=1",
    "tp=8, pp=4, dp=4, zero=1",
    "tp = 8  pp = 4 dp=4 zero=1;",
    "--tp 8 --pp 4 --dp 4 --zero 1",
    "TP8 PP4 DP4 ZeRO-1",
    "ｔｐ＝８，pp=4 dp=4 zero=1",
    "`tp=8 pp=4 dp=4 zero=1 gpus=128 seq=2,048`",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_spellings_of_one_proposal(text):
    assert proposal.read(find("dense-180b"), text) == {"tp": 8, "pp": 4, "dp": 4, "zero": 1}


def test_layers_and_words_of_a_proposal():
    read = proposal.read(find("two-kinds"), "layers=5x4,15x4 tp=4 micro-batch=2 overlap_tp=on")
    expected = {"stage_layers": (5, 5, 5, 5, 15, 15, 15, 15), "tp": 4, "micro_batch": 2}
    assert read == expected | {"overlap_tp": True}


BAD = [
    ("", "expected a proposal, got an empty line"),
    ("   ", "expected a proposal, got an empty line"),
    ("tp", "expected settings such as tp=8 pp=4, got 'tp'"),
    ("tp=", "expected settings"),
    ("=8", "expected settings"),
    ("tp=8=8", "expected settings"),
    ("use tensor parallelism", "expected settings such as tp=8 pp=4, got 'use'"),
    ("{tp}=8", "no key is called '{tp}'"),
    ("recomput=full", "no key is called 'recomput'; did you mean recompute?"),
    ("gpu=128", "no key is called 'gpu'; did you mean gpus?"),
    ("tp=8 tp=4", "tp is set twice"),
    ("mbs=1 microbatch=1", "microbatch is set twice"),
    ("tp=eight", "expected tp to be a whole number from 1 to 1,048,576, got 'eight'"),
    ("tp=0", "expected tp to be a whole number from 1"),
    ("tp=-8", "got '-8'"),
    ("tp=8.0", "got '8.0'"),
    ("tp=" + "9" * 300, "expected tp to be a whole number"),
    ("zero=4", "expected zero to be a whole number from 0 to 3"),
    ("recompute=some", "expected recompute to be one of none, selective, full, got 'some'"),
    ("schedule=best", "expected schedule to be one of"),
    ("overlap_tp=yes", "expected overlap_tp to be one of on, off"),
    ("layers=a,b", "expected layers per stage such as 10,10,30,30"),
    ("layers=1x999999", "expected layers per stage"),
    ("seq=4096", "the case fixes seq=2,048; leave seq out"),
    ("gpus=64", "the case fixes gpus=128"),
    ("batch=8", "no key is called 'batch'; did you mean microbatch"),
    ("color=8", "the keys of this case are tp, pp, cp, dp, ep, zero, chunks, microbatch"),
    ("tp=8 " * 200, "at most 400 characters"),
    ("tp=\x00", "expected tp to be a whole number"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_input_is_one_sentence(text, message):
    with pytest.raises(ValueError) as raised:
        design.answer("dense-180b", text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError) as raised:
        design.answer("dense-180b", text, language="zh")
    assert any("一" <= letter <= "鿿" for letter in str(raised.value))


def test_other_bad_input():
    with pytest.raises(ValueError, match="add, for example, batch=8"):
        design.answer("latency", "tp=8")
    with pytest.raises(ValueError, match=r"did you mean .*long-context"):
        design.answer("long-contxt", "tp=8")
    with pytest.raises(ValueError, match="expected a language of en, zh"):
        design.case("experts", "de")


def test_lines_are_folded_by_columns():
    assert folded("- " + "word " * 20).split("\n")[1].startswith("  word")
    assert folded("12. " + "word " * 20).split("\n")[1].startswith("    word")
    lines = folded("并行" * 50 + "，完。" + "25 %").split("\n")
    assert max(map(columns, lines)) <= 82  # a mark may stand in the margin
    assert not any(line.startswith(("，", "。", "%")) for line in lines)
    assert folded("a\nb") == "a\nb"
