"""Flash cards: ids that stay, text that Anki reads, decks that update on a second import."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
import zipfile
from collections import Counter
from html import unescape

import pytest

from course_lib import cli
from course_lib.interview.cards import COLUMNS, DECKS, MODEL, Card, cards, tsv, write_anki
from course_lib.interview.claims import table
from course_lib.interview.concepts import concepts
from course_lib.interview.formula_rows import SECTIONS
from course_lib.interview.glossary import terms

ENGLISH, CHINESE = cards(), cards("zh")
ODD = Card("odd", 'a\tb\n"c" <i> & d', "#\n\nx", ("one", "two"), "  +--+\n  |a<")


def rows(text: str) -> list[list[str]]:
    """The rows as Anki reads them: a CSV with tabs, whose first lines with # are settings."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return list(csv.reader(lines, delimiter="\t"))


def shown(html: str) -> str:
    return unescape(html.replace("<br>", "\n"))


@pytest.mark.parametrize("made", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_each_id_is_there_once(made):
    assert Counter(card.id for card in made).most_common(1)[0][1] == 1
    for card in made:
        assert card.front.strip(), card.id
        assert card.back.strip(), card.id
        assert all(" " not in tag for tag in card.tags)
        assert len(card.tags) == 2


def test_every_source_has_its_cards():
    ids = {card.id for card in ENGLISH}
    claims = [claim for claim in table().claims if claim.verdict != "illustrative"]
    assert {f"term-{term.id}" for term in terms()} <= ids
    assert {f"{kind}-{one.id}" for one in concepts() for kind in ("concept", "wrong")} <= ids
    assert {f"claim-{claim.id}" for claim in claims} <= ids
    count = len(terms()) + 2 * len(concepts()) + len(claims) + sum(map(len, SECTIONS.values()))
    assert len(ENGLISH) == count
    bilingual = [card.id for card in ENGLISH if card.tags[0] in ("glossary", "concepts")]
    assert [card.id for card in CHINESE] == bilingual


def test_the_answer_is_on_the_back():
    by_id = {card.id: card for card in ENGLISH}
    claim = next(claim for claim in table().claims if claim.verdict == "wrong")
    assert by_id[f"claim-{claim.id}"].back == f"False. {claim.statement()}"
    assert claim.claim in by_id[f"claim-{claim.id}"].front
    one = concepts()[0]
    assert by_id[f"concept-{one.id}"].back.startswith(one.short)
    assert by_id[f"concept-{one.id}"].drawing == one.drawing
    assert one.drawing.splitlines()[0] in by_id[f"concept-{one.id}"].answer
    bubble = by_id["formula-gpipe-and-1f1b-of-the-ideal-time"]
    assert bubble.back == "(p-1)/M"
    assert "M: micro-batches" in bubble.front
    assert by_id["term-rank"].back.endswith("\nrank（进程编号）")


@pytest.mark.parametrize("made", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_no_card_shows_a_name_in_braces(made):
    named = re.compile(r"\{[a-z_]+(:[^}]*)?\}")
    assert [card.id for card in made if named.search(f"{card.front} {card.answer}")] == []


def test_a_topic_is_a_tag_and_an_unknown_one_is_suggested():
    assert {card.tags[0] for card in cards(topic="claims")} == {"claims"}
    assert {card.tags[1] for card in cards("zh", "lesson-05")} == {"lesson-05"}
    with pytest.raises(ValueError, match="did you mean glossary"):
        cards(topic="glosary")
    with pytest.raises(ValueError, match="English only"):
        cards("zh", "claims")
    with pytest.raises(ValueError, match="en, zh"):
        cards("fr")


def test_the_text_has_one_line_per_card_and_reads_back():
    made = [*ENGLISH, ODD]
    found = rows(tsv(made))
    assert [len(row) for row in found] == [len(COLUMNS)] * len(made)
    for card, (id, front, back, tags) in zip(made, found, strict=True):
        assert id == f"{card.id}-en"
        assert shown(front) == card.front
        body, _, drawing = back.removesuffix("</pre>").partition("<pre>")
        assert (shown(body), shown(drawing)) == (card.back, card.drawing)
        assert tuple(tags.split()) == card.tags
    assert "#columns:" + "\t".join(COLUMNS) in tsv(made).splitlines()
    assert tsv([ODD]).splitlines()[-1].startswith("odd-en\ta&#9;b<br>&quot;c&quot; &lt;i&gt; &amp;")


def notes(path) -> dict[str, tuple]:
    """The notes of a deck by guid: model, fields, tags, time of change."""
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["collection.anki2", "media"]
        assert json.loads(archive.read("media")) == {}
        base = sqlite3.connect(":memory:")
        base.deserialize(archive.read("collection.anki2"))
    found = base.execute("SELECT guid, mid, flds, tags, mod FROM notes").fetchall()
    decks, models = base.execute("SELECT decks, models FROM col").fetchone()
    assert {int(each) for each in json.loads(decks)} - {1} <= set(DECKS.values())
    assert str(MODEL) in json.loads(models)
    assert base.execute("SELECT count(*) FROM cards").fetchone() == (len(found),)
    assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return {guid: rest for guid, *rest in found}


def test_a_deck_has_one_note_per_card_and_a_second_import_updates_it(tmp_path):
    pytest.importorskip("genanki")
    made = [*ENGLISH, ODD]
    write_anki(made, tmp_path / "first.apkg", 1e9)
    changed = [Card(card.id, card.front, "new", card.tags) for card in made]
    write_anki(changed, tmp_path / "later.apkg", 2e9)
    write_anki(CHINESE, tmp_path / "zh.apkg", 1e9, "zh")
    first, later, chinese = (notes(tmp_path / f"{each}.apkg") for each in ("first", "later", "zh"))
    assert first.keys() == later.keys() == {f"{card.id}-en" for card in made}
    assert not first.keys() & chinese.keys()
    for card in made:
        model, fields, tags, changed_at = first[f"{card.id}-en"]
        assert (model, changed_at) == (MODEL, 10**9)
        assert shown(fields.split("\x1f")[0]) == card.front
        assert tuple(tags.split()) == card.tags
        assert later[f"{card.id}-en"][1].split("\x1f")[1] == "new"
        assert later[f"{card.id}-en"][3] > changed_at


def test_a_deck_is_the_same_for_the_same_time(tmp_path):
    pytest.importorskip("genanki")
    for name in ("a", "b"):
        write_anki([ODD], tmp_path / name, 1e9)
    assert notes(tmp_path / "a") == notes(tmp_path / "b")


def run(*argv) -> int:
    return cli.main(["cards", *map(str, argv)])


def test_the_command_writes_a_file_or_into_a_folder(tmp_path, capsys):
    pytest.importorskip("genanki")
    assert run("--out", tmp_path / "new", "--topic", "lesson-05") == 0
    assert run("--out", tmp_path / "deck.apkg", "--language", "zh") == 0
    assert run("--out", tmp_path / "deck.txt") == 0
    assert run("--out", tmp_path, "--format", "anki") == 0
    written = rows((tmp_path / "new" / "parallel-training-en.tsv").read_text(encoding="utf-8"))
    assert {row[3].split()[1] for row in written} == {"lesson-05"}
    assert len(notes(tmp_path / "deck.apkg")) == len(CHINESE)
    assert len(rows((tmp_path / "deck.txt").read_text(encoding="utf-8"))) == len(ENGLISH)
    assert len(notes(tmp_path / "parallel-training-en.apkg")) == len(ENGLISH)
    capsys.readouterr()
    assert run("--json", "--topic", "formulas") == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["cards"]) == sum(map(len, SECTIONS.values()))
    assert data["cards"][0].keys() == {*COLUMNS, "drawing"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "expected --out with a file or a folder, such as --out cards.tsv."),
        (("--out", "x.tsv", "--format", "anki"), "expected a name in .apkg for --format anki."),
        (("--out", "x", "--format", "csv"), "--format: expected tsv or anki, got 'csv'."),
        (("--out", "x", "--language", "fr"), "expected a language of en, zh, got 'fr'."),
        (("--out", "x", "--topic", "claim"), "did you mean claims"),
    ],
)
def test_bad_input_is_one_sentence(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_genanki_a_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "genanki", None)
    assert run("--out", tmp_path / "deck.apkg") == 3
    assert "pip install genanki" in capsys.readouterr().err
    assert not (tmp_path / "deck.apkg").exists()


def test_no_command_imports_torch():
    script = (
        "import sys; from course_lib.cli import main\n"
        "codes = main(['cards', '--json']), main(['review', 'due', '--new', '1'])\n"
        "assert codes == (0, 0) and not {'torch', 'numpy', 'genanki'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert io.StringIO(done.stdout).readline().startswith("{")
