"""From one source to lesson, exercises and solutions: roles, stubs, ids, outputs, bad sources."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

from course_lib.comm import from_messages
from course_lib.grading import build as building
from course_lib.grading import registry
from course_lib.grading.build import KINDS, build, clean, keep_outputs, main
from course_lib.grading.source import (
    Cell,
    Lesson,
    SourceError,
    read_lesson,
    solution,
    stub,
    stub_of,
)

HEAD = """\
# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   course:
#     lesson: '07'
# ---

"""
BODY = '''\
# %% [markdown]
# # 07 Pipes
# Words.

# %%
one = 1
one

# %% [markdown]
# ## Filling: the pipe

# %% tags=["nbval-ignore-output"]
two = """
# %% no cell begins here
"""

# %% course={"role": "given"}
import math

# %% [markdown] course={"ex": "07-1"}
# ## 07-1 Square

# %% course={"ex": "07-1", "role": "given"}
numbers = [1, 2]

# %% course={"ex": "07-1", "role": "answer"}
def square(x):
    """x times x."""
    checked = float(x)
    # BEGIN SOLUTION
    secret = checked * checked
    return secret
    # END SOLUTION


# %% [markdown] course={"ex": "07-1", "role": "answer"}
# A remark on the secret.

# %% course={"ex": "07-1", "role": "check"}
from course_lib.grading import check

check("07-1", square)

# %% course={"ex": "07-2", "role": "answer"}
# BEGIN SOLUTION
messages = 6
# STUB
# messages = None  # how many?
# END SOLUTION

# %% course={"ex": "07-2", "role": "answer"}
# solution: course_lib.comm.from_messages:ring_all_reduce as my_sum

# %% course={"ex": "07-2", "role": "check"}
from course_lib.grading import check

check("07-2", messages, my_sum)
'''
CODE = HEAD + BODY


def lesson_of(tmp_path: Path, text: str, name: str = "07_pipes.py") -> Lesson:
    (tmp_path / name).write_text(text)
    return read_lesson(tmp_path / name)


@pytest.fixture
def lesson(tmp_path) -> Lesson:
    return lesson_of(tmp_path, CODE)


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """A course of one lesson; the arguments that name its folders."""
    for kind in KINDS:
        (tmp_path / kind).mkdir()
    (tmp_path / "notebooks" / "07_pipes.py").write_text(CODE)
    return [str(tmp_path / kind) for kind in KINDS]


def sources(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells]


def cell(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == name)


def test_reading(lesson):
    assert (lesson.number, lesson.title, lesson.exercises) == ("07", "07 Pipes", ("07-1", "07-2"))
    lines = CODE.splitlines()
    for one in lesson.cells:
        assert lines[one.line - 1].startswith("# %%")
        assert one.source.splitlines()[-1] in "\n".join(lines[one.line :]).replace("# ", "") + CODE
    assert len(lesson.cells) == 13
    assert lesson.cells[3].source.count("no cell begins here") == 1


def test_each_cell_goes_where_it_belongs(lesson):
    built = build(lesson)
    assert list(built) == list(KINDS)
    ids = {kind: [cell.id for cell in notebook.cells] for kind, notebook in built.items()}
    assert ids["notebooks"] == ["07-pipes-1", "07-pipes-2", "07-filling-the-pipe-1",
                                "07-filling-the-pipe-2"]  # fmt: skip
    theirs = ["07-title", "07-given", "07-1-text", "07-1-given", "07-1-answer", "07-1-check",
              "07-2-answer", "07-2-answer-2", "07-2-check"]  # fmt: skip
    assert ids["exercises"] == theirs
    assert ids["solutions"] == [*theirs[:5], "07-1-answer-text", *theirs[5:]]
    for notebook in built.values():
        assert notebook.metadata.course == {"lesson": "07"}
        assert notebook.metadata.kernelspec.name == "python3"
        nbformat.validate(notebook)
    answer = cell(built["exercises"], "07-1-answer")
    assert answer.metadata == {"course": {"ex": "07-1", "role": "answer"}}
    check = {"ex": "07-1", "role": "check", "points": registry.find("07-1").total}
    for kind in ("exercises", "solutions"):
        assert cell(built[kind], "07-1-check").metadata == {"course": check}
    assert built["notebooks"].cells[-1].metadata == {"tags": ["nbval-ignore-output"]}


def test_marked_lines_become_a_raise_and_the_rest_stays(lesson):
    built = build(lesson)
    solved = cell(built["solutions"], "07-1-answer").source
    unsolved = cell(built["exercises"], "07-1-answer").source
    start = 'def square(x):\n    """x times x."""\n    checked = float(x)\n'
    assert solved == start + "    secret = checked * checked\n    return secret"
    assert unsolved == (start + '    raise NotImplementedError("exercise 07-1: yours to write")')
    assert "secret" not in "".join(sources(built["exercises"]))


def test_a_stub_of_its_own(lesson):
    built = build(lesson)
    assert cell(built["solutions"], "07-2-answer").source == "messages = 6"
    assert cell(built["exercises"], "07-2-answer").source == "messages = None  # how many?"


def test_a_solution_is_taken_from_the_library(lesson):
    built = build(lesson)
    solved = cell(built["solutions"], "07-2-answer-2").source
    library = Path(from_messages.__file__).read_text()
    body = solved.removeprefix("def my_sum")
    assert "def ring_all_reduce" + body in library, "as it stands there, but for the name"
    unsolved = cell(built["exercises"], "07-2-answer-2").source
    function = ast.parse(unsolved).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert ast.unparse(function.args) == "x: Tensor, axis: Axis"
    assert ast.get_docstring(function) == ast.get_docstring(ast.parse(solved).body[0])
    assert [type(node) for node in function.body] == [ast.Expr, ast.Raise]


CHECK = '# %% course={"ex": "07-1", "role": "check"}\n'
CHECKED = CHECK + 'from course_lib.grading import check\n\ncheck("07-1", square)\n'


def answer(tmp_path: Path, text: str) -> Cell:
    lines = f'# %% course={{"ex": "07-1", "role": "answer"}}\n{text}\n'
    return lesson_of(tmp_path, HEAD + lines + "\n" + CHECKED).cells[0]


def test_a_class_from_the_library(tmp_path):
    taken = answer(tmp_path, "# solution: course_lib.mesh.conditions:Link as Wire")
    assert solution(taken).startswith("@dataclass(frozen=True)\nclass Wire:\n")
    assert 'f"Wire(alpha=' in solution(taken)
    assert "    alpha: float\n    beta: float\n" in stub(taken)
    end = '    def __post_init__(self) -> None:\n        raise NotImplementedError("exercise 07-1'
    assert end in stub(taken)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("    # the trick\n    return x", ""),
        ("    @cache\n    def inner(): ...\n    return inner", ""),
        ('    """Doc."""\n    # the trick\n    return x', '    """Doc."""\n'),
    ],
)
def test_a_stub_keeps_signature_and_docstring_only(tmp_path, body, kept):
    cell = Cell("code", "", {"course": {"ex": "07-1"}}, "07_pipes.py", 1)
    head = "@decorated\ndef f(\n    x,\n    y,  # of both\n) -> int:\n"
    made = stub_of(cell, head + body, 1)
    assert made == head + kept + '    raise NotImplementedError("exercise 07-1: yours to write")'
    with pytest.raises(SourceError, match="written on one line"):
        stub_of(cell, "def f(x): return x", 1)


def test_library_source_inside_marks_has_a_stub_of_its_own(tmp_path):
    text = "# BEGIN SOLUTION\n# solution: course_lib.ledger:wire\n# STUB\n# wire = None\n"
    taken = answer(tmp_path, text + "# END SOLUTION")
    assert solution(taken).startswith("def wire(")
    assert stub(taken) == "wire = None"


def test_what_the_percent_format_allows_shifts_no_line(tmp_path):
    extra = '# %% [markdown]\n# Words.\n#\n#\n\n# %% [markdown]\n"""\nquoted\n"""\n\n#%%\n1\n\n'
    lesson = lesson_of(tmp_path, HEAD + extra + BODY)
    lines = (HEAD + extra + BODY).splitlines()
    assert [lines[c.line - 1][:3] for c in lesson.cells[:3]] == ["# %", "# %", "#%%"]
    assert lines[lesson.cells[-1].line - 1] == '# %% course={"ex": "07-2", "role": "check"}'


def test_no_exercise_no_file(tmp_path):
    text = HEAD + "# %% [markdown]\n# # 07 Pipes\n\n# %%\n1 + 1\n"
    assert list(build(lesson_of(tmp_path, text))) == ["notebooks"]


def test_ids_depend_on_the_section_only(tmp_path):
    before = {c.source: c.id for c in build(lesson_of(tmp_path, CODE))["notebooks"].cells}
    more = CODE.replace("# %%\none = 1", "# %%\nzero = 0\n\n# %%\none = 1")
    after = build(lesson_of(tmp_path, more))["notebooks"].cells
    changed = [c.source for c in after if before.get(c.source) != c.id]
    assert changed == ["zero = 0", "one = 1\none"], "only in the section with the new cell"


def test_building_twice_gives_the_same_bytes(folders, tmp_path, capsys):
    assert main(folders) == 0
    assert capsys.readouterr().out.count("wrote ") == 3
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.suffix != ".py"}
    assert len(files) == 3
    assert main([*folders, "--check"]) == 0
    assert main(folders) == 0
    assert capsys.readouterr().out == ""
    assert {path: path.read_bytes() for path in files} == files


def test_an_exercise_without_a_grader_is_named_with_its_line(folders, tmp_path, capsys):
    (tmp_path / "notebooks" / "07_pipes.py").write_text(CODE.replace("07-2", "07-77"))
    assert main(folders) == 2
    said = capsys.readouterr().err
    assert re.match(r"07_pipes\.py:\d+: there is no exercise '07-77'; lesson 07 has 07-1, ", said)
    assert not list(tmp_path.rglob("*.ipynb"))


def store_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    count = 0
    for one in notebook.cells:
        if one.cell_type == "code":
            count += 1
            one.execution_count = count
            one.outputs = [nbformat.v4.new_output("stream", text=f"{count}\n")]
    notebook.metadata.widgets = {"state": {}}
    nbformat.write(notebook, path)


def test_outputs_are_kept_where_the_source_is_unchanged(folders, tmp_path):
    main(folders)
    for kind in KINDS:
        store_outputs(tmp_path / kind / "07_pipes.ipynb")
    source = tmp_path / "notebooks" / "07_pipes.py"
    source.write_text(CODE.replace("one = 1", "one = 1.0"))
    assert main([*folders, "--check"]) == 1
    assert main(folders) == 0
    read = {kind: nbformat.read(tmp_path / kind / "07_pipes.ipynb", 4) for kind in KINDS}
    lesson, exercises, solutions = (read[kind] for kind in KINDS)
    assert cell(lesson, "07-pipes-2").outputs == []
    assert cell(lesson, "07-filling-the-pipe-2").outputs[0].text == "2\n"
    assert cell(solutions, "07-2-check").outputs[0].text == "7\n"
    assert all(c.outputs == [] for c in exercises.cells if c.cell_type == "code")
    assert not any("widgets" in notebook.metadata for notebook in read.values())


def test_equal_cells_keep_their_own_outputs():
    def notebook(names, outputs):
        cells = [nbformat.v4.new_code_cell("run()", id=name) for name in names]
        for one, text in zip(cells, outputs, strict=True):
            one.outputs = [nbformat.v4.new_output("stream", text=text)] if text else []
        return nbformat.v4.new_notebook(cells=cells)

    new = notebook(["a", "b"], [None, None])
    keep_outputs(new, notebook(["b", "a"], ["of b", "of a"]))
    assert [c.outputs[0].text for c in new.cells] == ["of a", "of b"]
    new = notebook(["x", "y"], [None, None])
    keep_outputs(new, notebook(["b"], ["of b"]))
    assert [len(c.outputs) for c in new.cells] == [1, 0]


def test_cleaning():
    one = nbformat.v4.new_code_cell("f()", metadata={"execution": {"iopub.status.idle": "now"}})
    out = nbformat.v4.new_output
    one.outputs = [
        out("stream", text="a"),
        out("stream", text="b\n"),
        out("stream", name="stderr", text="c"),
        out("display_data", data={building.WIDGET: {}, "text/plain": "Image(value=b'…')"}),
    ]
    notebook = nbformat.v4.new_notebook(cells=[one], metadata={"widgets": {}})
    clean(notebook)
    assert [(o.name, o.text) for o in one.outputs] == [("stdout", "ab\n"), ("stderr", "c")]
    assert one.metadata == {}
    assert "widgets" not in notebook.metadata


@pytest.mark.parametrize("kind", KINDS)
def test_check_names_what_differs(folders, tmp_path, capsys, kind):
    main(folders)
    path = tmp_path / kind / "07_pipes.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][-1]["source"] = ["hand_made()"]
    path.write_text(json.dumps(notebook))
    capsys.readouterr()
    assert main([*folders, "--check"]) == 1
    assert capsys.readouterr().out == f"{path} is not what its source builds: make notebooks\n"
    path.unlink()
    assert main([*folders, "--check"]) == 1, "missing"
    assert not path.exists()


def test_a_stored_verdict_in_an_exercise_is_a_difference(folders, tmp_path):
    main(folders)
    store_outputs(tmp_path / "exercises" / "07_pipes.ipynb")
    assert main([*folders, "--check"]) == 1


def test_a_notebook_without_a_source_is_named_and_left(folders, tmp_path, capsys):
    stray = tmp_path / "exercises" / "08_gone.ipynb"
    stray.write_text("{}")
    assert main(folders) == 1
    assert f"{stray} has no source" in capsys.readouterr().out
    assert stray.exists()
    assert main([*folders, "--lesson", "07", "--check"]) == 0
    assert main([*folders, "--lesson", "09"]) == 2
    assert "no lesson 09_*.py" in capsys.readouterr().err


def changed(old: str, new: str) -> str:
    assert CODE.count(old) >= 1
    return CODE.replace(old, new, 1)


ANSWER = '# %% course={"ex": "07-1", "role": "answer"}'
REMARK = "# messages = None  # how many?\n"
TAKEN = "# solution: course_lib."
# what is wrong: the source, the start of the line that the error names, words of the message
BAD = {
    "lesson number": (changed("lesson: '07'", "lesson: '08'"), "# ---", "course: lesson: '07'"),
    "unquoted": (changed("lesson: '07'", "lesson: 07"), "# ---", "with quotes"),
    "bad header": (changed("#   course:\n", "#   kernelspec: [\n"), "# ---", "cannot be read: "),
    "no kernel name": (
        changed("#   course:\n", "#   kernelspec:\n#     name: x\n#   course:\n"),
        "# ---",
        "'display_name' is a required property",
    ),
    "no header": (BODY, "# %% [markdown]", "course: lesson: '07'"),
    "JSON": (changed('"role": "check"', "role: check"), CHECK[:25], "expected a head such as"),
    "role": (changed('"role": "check"', '"role": "test"'), CHECK[:25], "got 'test'"),
    "no role": (changed(', "role": "check"', ""), CHECK[:25], "got None"),
    "key": (
        changed('"role": "check"', '"kind": "check"'),
        CHECK[:25],
        "expected the keys ex and role",
    ),
    "other lesson": (changed(CHECK, CHECK.replace("07", "08")), CHECK[:18] + ' "08', "'08-1'"),
    "of no exercise": (changed(CHECK, '# %% course={"role": "check"}\n'), "# %% course=", "an ex"),
    "wrong check": (
        changed('check("07-1"', 'check("07-2"'),
        CHECK,
        'expected check("07-1", …) as the last',
    ),
    "check, then more": (changed("square)\n", "square)\nprint()\n"), CHECK, "as the last line"),
    "no import": (
        changed("from course_lib.grading import check\n", ""),
        CHECK,
        "as the first line",
    ),
    "empty check": (changed(CHECKED, CHECK), CHECK, "as the first line"),
    "syntax of a check": (changed("square)\n", "square\n"), CHECK, "is not Python"),
    "no check": (
        changed(CHECKED, ""),
        '# %% [markdown] course={"ex": "07-1"}',
        "one check in exercise 07-1, got given, answer",
    ),
    "solution in the open": (
        changed("    # BEGIN SOLUTION\n", "").replace("    # END SOLUTION\n", "", 1),
        ANSWER,
        "expected # BEGIN SOLUTION and # END SOLUTION",
    ),
    "no end": (changed("    # END SOLUTION\n", ""), "    # BEGIN SOLUTION", "without # END SOL"),
    "no begin": (changed("    # BEGIN SOLUTION\n", ""), "    # END SOLUTION", "without # BEGIN"),
    "two begins": (
        changed("messages = 6", "# BEGIN SOLUTION"),
        "# BEGIN SOLUTION",
        "expected one # BEGIN",
    ),
    "two stubs": (changed("# STUB\n", "# STUB\n# STUB\n"), "# STUB", "at most one # STUB"),
    "no stub": (changed("# STUB\n" + REMARK, ""), "# BEGIN SOLUTION", "write the stub too"),
    "a stub of code": (changed(REMARK, REMARK[2:]), REMARK[2:], "expected a comment in every line"),
    "marks elsewhere": (changed("one = 1\n", "# STUB\n"), "# %%", "a cell with the role answer"),
    "syntax": (changed("return secret", "return secret ("), ANSWER, "is not Python"),
    "no module": (
        changed("from_messages:", "by_mail:"),
        TAKEN,
        "no module course_lib.comm.by_mail",
    ),
    "no function": (changed(":ring_all_reduce", ":ring"), TAKEN, "no function or class ring"),
    "not the library": (
        changed(TAKEN, "# solution: os."),
        "# solution: os",
        "expected # solution:",
    ),
    "code before the first cell": (HEAD + "one = 1\n" + BODY, "one = 1", "expected a line '# %%'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_source_is_named_with_file_and_line(tmp_path, case):
    text, line, message = BAD[case]
    with pytest.raises(SourceError) as error:
        lesson_of(tmp_path, text)
    file, number, said = str(error.value).split(":", 2)
    assert file == "07_pipes.py"
    assert text.splitlines()[int(number) - 1].startswith(line.rstrip("\n")), error.value
    assert message in said


def test_a_file_needs_the_name_of_a_lesson(tmp_path):
    with pytest.raises(SourceError, match="NN_slug"):
        lesson_of(tmp_path, CODE, "pipes.py")


def test_a_bad_source_ends_in_one_sentence_and_writes_nothing(folders, tmp_path, capsys):
    (tmp_path / "notebooks" / "07_pipes.py").write_text(BAD["role"][0])
    assert main(folders) == 2
    assert capsys.readouterr().err.startswith(
        "07_pipes.py:49: expected one of the roles answer, check, given, got 'test'"
    )
    assert not list(tmp_path.rglob("*.ipynb"))


def test_a_large_notebook_is_refused(folders, tmp_path, capsys):
    main(folders)
    path = tmp_path / "notebooks" / "07_pipes.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="x" * 1_000_000)]
    nbformat.write(notebook, path)
    assert main(folders) == 2
    assert "notebooks/07_pipes.ipynb: 1,00" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["/tmp/x", "at /" + "home/ann/x.py", "pid 123", "<f at 0x7f12ab34cd>"]
)
def test_what_another_machine_would_print_otherwise(text):
    assert building.UNFIT.search(text)


@pytest.mark.parametrize("text", ["../work/x", "cell 6 line 8", "rapid 3", "3/home/x", "a/b/tmp"])
def test_what_is_fit_to_be_committed(text):
    assert not building.UNFIT.search(text)
