"""The glossary has every standard term, in two languages, and its numbers are the library's."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from prose import TERMS

from course_lib.grading.syllabus import NAMES
from course_lib.interview.glossary import PAGE, TABLE, numbers, page, terms
from course_lib.ledger import wire
from course_lib.schedule import Costs, make, predicted_bubble, simulate

ROOT = Path(__file__).parents[2]
BY_ID = {term.id: term for term in terms()}
ENGLISH = " ".join(f"{term.en} {term.meaning_en}" for term in terms()).lower()
STANDARD = """
    single-process reference; saved activations; embedding and LM head; RoPE cache; copy_to;
    reduce_from; scatter_to; reduce_scatter_to; gather_from; gather_from_sequence; all-to-all;
    all_to_all_v; shard; reshard_after_forward; wait; flat parameter; two-dimensional context
    parallelism; USP; KV replication group; top_k; capacity; deferred weight gradient;
    split backward;
    input gradient; weight gradient; dgrad; wgrad; delays all W; V-shaped placement; scheduler;
    iteration; KV capacity; P2P exchange; padded compute time; paced; replicated; fully reduced;
    faulty; identity; no_op; stage boundary; P2P transfer; micro-batch; payload; wire bytes
"""
CHEAT_SHEETS = {  # words of each lesson's cheat-sheet
    "01": "state; activations; KV cache; MFU",
    "02": "all_gather; reduce_scatter; all_reduce; ring; tree; alpha; beta; bus bandwidth",
    "03": "gradients; all-reduce; bucket; exposed; micro-batch",
    "04": "reduce-scatter; all-gather; weights; micro-batch",
    "05": "identity; all-reduce; column; row; saved",
    "06": "all-gather; reduce-scatter; full recomputation; norms",
    "07": "stage; bubble; of total; of ideal; in flight; gpipe; 1f1b; micro-batch",
    "08": "interleaved; zb-h1; zb-h2; zb-v; dualpipe-v; span; in flight; boundar",
    "09": "ring; gather; ulysses; usp; zig-zag; grouped",
    "10": "router; expert; edp; all-to-all; ep",
    "11": "group; clock; split; one order; overlapping groups",
    "12": "norm; axis; mesh; ZeRO-1; overlap",
    "13": "cache; row; request; tp; dp",
    "14": "ZeRO-1; recomput; exposed; micro-batches; peak memory",
    "15": "master weights; axis; ZeRO; micro-batch; payload",
}
NAMED = re.compile(
    r"ZeRO-\d|1F1B|FP8|ZB-H\d|FSDP\d|P2P|3D|b?float\d\d|"  # names that contain digits
    r"(?:counted from |从 )0|\{\w+\}|`[^`]*`"
)


def words(text: str) -> list[str]:
    return [" ".join(each.split()).lower() for each in text.split(";")]


def plain(text: str) -> str:
    return re.sub(r"[_\s]+", " ", text.replace("-", " ")).lower()


def test_every_term_has_an_id_and_both_languages():
    assert Counter(term.id for term in terms()).most_common(1)[0][1] == 1
    assert Counter(term.en for term in terms()).most_common(1)[0][1] == 1
    assert len(terms()) >= 120
    for term in terms():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", term.id), term.id
        assert term.lesson in NAMES
        assert term.meaning_en.endswith("."), term.id
        assert term.meaning_zh.endswith("。"), term.id
        assert re.search("[\u4e00-\u9fff]", term.meaning_zh), term.id
        assert not re.search("[\u4e00-\u9fff]", term.en + term.meaning_en), term.id
        assert len(term.meaning_en.split()) <= 32, term.id
        assert not re.search(r"[,.;:!?]\s|[,;!?]$", term.meaning_zh), f"{term.id}: punctuation"
        touching = r"[\u4e00-\u9fff][A-Za-z0-9`]|[A-Za-z0-9`][\u4e00-\u9fff]"
        assert not re.search(touching, f"{term.zh} {term.meaning_zh}"), (
            f"{term.id}: a space is missing"
        )


def test_terms_are_in_the_order_of_the_lessons():
    lessons = [term.lesson for term in terms()]
    assert lessons == sorted(lessons)


@pytest.mark.parametrize("term", words(STANDARD))
def test_a_standard_term_is_in_the_glossary(term):
    assert plain(term) in plain(ENGLISH)


def test_the_terms_that_the_prose_check_recommends_are_in_the_glossary():
    skipped = {
        "no rank", "all ranks (of people: all readers)", "per rank, per layer, ...", "is sent",
        "is expected", "print, show", "American spelling", "drawback", "use it when",
        "subject, verb, object", "sync (copy back); wait", "split backward (I, W)",
        "faulty run, correct run", "P2P transfer; stage boundary", "all_to_all, exchange",
        "identity, no_op",
    }  # fmt: skip
    for term in TERMS.keys() - skipped:
        assert plain(term) in plain(ENGLISH), term


def test_the_words_of_all_cheat_sheets_are_in_the_glossary():
    found = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.py")):
        cells = path.read_text(encoding="utf-8").split("\n# %%")
        with_sheet = [
            cell for cell in cells if re.search(r"(\*\*|## )Cheat-sheet|cheat_sheet\(", cell)
        ]
        if with_sheet:
            found[path.name.partition("_")[0]] = plain(" ".join(with_sheet))
    assert found.keys() == CHEAT_SHEETS.keys()
    for lesson, text in CHEAT_SHEETS.items():
        for word in words(text):
            assert plain(word) in found[lesson], f"lesson {lesson} has no {word!r}"
            assert re.search(rf"\b{re.escape(plain(word))}", plain(ENGLISH)), word


def test_chinese_texts_use_the_terms_of_the_glossary():
    instead = (
        "流水并行 通信组 梯度累加 后向 混合切分 激活重算 上下文切分并行 微批量 优化器状况 "
        "完全重计算 全部重计算 规约 提示词 查询头 并行轴 交错调度 全局批次"
    )
    folder = TABLE.parent
    paths = [*folder.glob("*_zh.toml"), *folder.glob("concepts/zh/*.toml"), TABLE]
    paths += (ROOT / "docs").glob("*.zh.md")
    assert len(paths) >= 8
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert [term for term in instead.split() if term in text] == [], path.name
    chinese = " ".join(term.zh for term in terms())
    wanted = (
        "数据并行 张量并行 流水线并行 上下文并行 专家并行 序列并行 优化器状态 激活值 重计算 微批次 "
        "气泡 进程组 梯度累积 显存峰值"
    )
    assert [term for term in wanted.split() if term not in chinese] == []


def test_no_number_is_typed_by_hand():
    for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["term"]:
        for text in (entry["meaning_en"], entry["meaning_zh"]):
            assert not re.search(r"\d", NAMED.sub("", text)), entry["id"]
        for code in (r"\{\w+\}", r"`[^`]*`"):
            said = [Counter(re.findall(code, entry[f"meaning_{each}"])) for each in ("en", "zh")]
            assert said[0] == said[1], f"{entry['id']}: the languages differ"


def test_numbers_and_formulas_are_the_librarys():
    assert numbers() == {"state": "16", "optimizer": "12", "gib": "7"}
    assert formula("ring-all-reduce", "S", n=8, S=24) == wire("all_reduce", 24, 8)
    p, m = 4, 16
    schedule = make("1f1b", p, m)
    bubble = predicted_bubble("1f1b", p, m)
    assert float(formula("bubble-of-total", "p", p=p, m=m)) == pytest.approx(bubble)
    seen = simulate(schedule, Costs())
    assert float(formula("bubble-of-ideal", "p", p=p, m=m)) == pytest.approx(seen.bubble_of_ideal)


def formula(id: str, name: str, **values: int) -> Fraction:
    """The value of the first formula of a definition that uses ``name``."""
    found = next(each for each in re.findall(r"`(.*?)`", BY_ID[id].meaning_en) if name in each)
    python = re.sub(r"(?<=[\d)])\(", "*(", found.replace("·", "*"))
    exact = {key: Fraction(value) for key, value in values.items()}
    return eval(python, {"__builtins__": {}}, exact)


def test_the_page_is_todays():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m course_lib.interview.glossary"
    rows = page().count("\n| ") - 1
    assert rows == len(terms()), "a definition contains a bar"
    assert all(line.count("|") == 6 for line in page().splitlines() if line.startswith("|"))
