"""Break-it labs can be solved: the rules of the lesson find every fault, for several seeds.

Each reader below sees the output of the lab and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbclient import NotebookClient

from course_lib.grading import build
from course_lib.grading.kernels import AsyncLocalKernelManager
from course_lib.grading.source import read_lesson

ROOT = Path(__file__).parents[2]
SEEDS = (1, 2, 3, 4)
ROUNDING = 1e-5
Diagnosis = tuple[str, str | None, int | str | None]
CORRECT: Diagnosis = ("correct", None, None)


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d[\d.]*(?:e[+-]\d+)?", text.replace(",", ""))]


def odd_one(values: list) -> int | None:
    """Return the index of the one value that differs from all others."""
    alone = [place for place, value in enumerate(values) if values.count(value) == 1]
    return alone[0] if len(alone) == 1 else None


def reads_01(told: str, head: str) -> tuple[str, int | None]:
    found = numbers(told)
    ranks = [found[at + 1 : at + 7] for at in range(0, 28, 7)]
    usual = [min(column) for column in zip(*ranks, strict=True)]
    for rank, (_, gradients, optimizer, first, _, last) in enumerate(ranks):
        if gradients > usual[1]:
            return "gradients", rank
        if optimizer > usual[2]:
            return "moments", rank
        if last > usual[-1]:
            return "graph" if last > first else "copy", rank
    return "correct", None


def reads_02(told: str, head: str) -> Diagnosis:
    error, _, apart, messages, *_ = numbers(told)
    pieces = re.findall(r"[.x]{4}", told)
    if messages == 12:
        return "summed twice", "all_reduce", "all"
    if messages == 3:
        gathered = error < ROUNDING and apart > 0
        return ("own order", "reduce_scatter", "all") if gathered else (
            "half-way", "all_gather", "all")  # fmt: skip
    if error < ROUNDING:
        return CORRECT
    if len(set(pieces)) == 1:
        return "own block", "reduce_scatter", (pieces[0].index(".") + 1) % 4
    return "own block", "all_gather", next(r for r in range(4) if pieces[r].count(".") == 1)


def reads_03(told: str, head: str) -> Diagnosis:
    if found := re.search(r"rank (\d) (?:had|has) returned", told):
        return "skipped", "all_reduce", int(found[1])
    if "do not agree" in told:
        return "shapes", "all_reduce", odd_one(re.findall(r"rank \d: (.*), cell", told))
    _, _, sent, norm, *rest = numbers(told)
    sums = rest[3:]
    if sent == 0:
        return "no sync", "all_reduce", "all"
    if norm == 4:
        return "n times", None, "all"
    alone = odd_one(sums)
    return CORRECT if alone is None else ("seeds", "broadcast", alone)


def reads_04(told: str, head: str) -> Diagnosis:
    norm = numbers(told)[2]
    rows = re.findall(r"rank \d: ([.x]{4})", told)
    if norm != 1:
        return ("twice", "reduce_scatter", "all") if norm < 1 else ("double", "all_reduce", "all")
    if rows == [".xxx", "x.xx", "xx.x", "xxx."]:
        return "late", "all_gather", "all"
    if "".join(rows).count("x") == 0:
        return CORRECT
    if len(set(rows)) == 1:
        return "shifted", "reduce_scatter", rows[0].index("x")
    return "stale", "all_gather", next(rank for rank in range(4) if "x" in rows[rank])


def reads_05(told: str, head: str) -> Diagnosis:
    forward, backward, first, last, *rest = numbers(told)
    sums = rest[3:]
    if forward < 8:
        return "no sum", "forward", "all"
    if backward < 8:
        return "no f", "backward", "all"
    if first > ROUNDING:
        return "heads", None, next(r for r in range(4) if sums[r] == sums[(r + 1) % 4])
    return ("bias", None, "all") if last > ROUNDING else CORRECT


def reads_06(told: str, head: str) -> Diagnosis:
    gathers, scatters, _, first, _, _, norms, keys, *finite = numbers(told)
    if first > ROUNDING:
        return "padding", None, len(finite) - 1  # the last words are padding
    if scatters < gathers:
        return "gather", "reduce_scatter", "all"
    if norms > ROUNDING:
        return "norms", "all_reduce", "all"
    return ("heads", "all_reduce", "all") if keys > ROUNDING else CORRECT


def reads_07(told: str, head: str) -> Diagnosis:
    loss, length, _, *off, copies_apart = numbers(told)
    wrong = [rank for rank in range(4) if off[rank] > ROUNDING]
    if length > 4:
        return "forgotten", None, "all"
    if copies_apart > ROUNDING:
        return "tied", "all_reduce", 0
    if not wrong:
        return CORRECT
    culprit = min(set(range(1, 4)) - set(wrong), default=3)
    # with culprit 3 all are off, as with a mean of means; but that changes the loss too
    reference = numbers(head.split("\nreference")[1])[0]
    if abs(loss - reference) > 1e-3:
        return "mean of means", None, "all"
    return "lost", "send", culprit


def reads_08(told: str, head: str) -> tuple[str, int | None]:
    _, *rest = numbers(told)
    shares, first, kept = rest[:4], rest[4:8], rest[8:12]
    wrong = [rank for rank in range(4) if abs(shares[rank] - 1) > 0.005]
    if wrong:
        return "lost W" if shares[wrong[0]] < 1 else "W twice", wrong[0]
    if max(kept) > 4:
        return "delays all W", kept.index(max(kept))
    gaps = [first[rank - 1] - first[rank] for rank in range(1, 4)]
    if max(gaps) > 30:  # ms: one I takes 20, and one W
        return "whole B", 1 + gaps.index(max(gaps))
    return "correct", None


def reads_09(told: str, head: str) -> Diagnosis:
    _, _, gradient, *rest = numbers(told)
    wrong = [rank for rank in range(4) if rest[rank]]
    norms = rest[4:]
    if 0 in norms:
        return "lost", "backward", norms.index(0)
    if not gradient:
        return CORRECT
    if len(wrong) == 1:
        return "labels", "forward", wrong[0]
    return ("positions", "forward", "all") if wrong else ("mean", "backward", "all")


def reads_10(told: str, head: str) -> Diagnosis:
    *losses, factor, _, _, routers, over_ep, _, _ = numbers(told)
    wrong = [rank for rank in range(4) if losses[rank] > ROUNDING]
    if wrong:
        return "order", "ep", wrong[0]
    if over_ep:
        return "group", "edp", "all"
    if abs(factor - 1) > 0.1:
        return "divided", "edp", "all"
    return ("router", "dp", "all") if routers > ROUNDING else CORRECT


def reads_13(told: str, head: str) -> Diagnosis:
    agree, reference = re.findall(r"\b(yes|no)\b", told)
    _, largest, *rows = numbers(told)
    if agree == "no":
        return "own dice", "all_gather", "all"
    if largest < 64:  # words that a rank has
        return "local names", "all_gather", "all"
    if len(set(rows)) > 1:
        return "lost rows", None, odd_one(rows)
    return CORRECT if reference == "yes" else ("own noise", None, "all")


def reads_14(told: str, head: str) -> Diagnosis:
    compute, tp, dp = (numbers(told)[at : at + 4] for at in (0, 4, 8))
    planned = numbers(head)[-3:]
    late = [rank for rank in range(4) if compute[rank] > 1.5 * planned[0]]
    if late:
        return "slow", "compute", late[0]
    if min(compute) > 1.2 * planned[0]:
        return "recompute", "compute", "all"
    if min(tp) > 5 * planned[1]:
        return "order", "tp", "all"
    return ("link", "dp", "all") if min(dp) > 2 * planned[2] else CORRECT


READERS = {
    "01": reads_01,
    "02": reads_02,
    "03": reads_03,
    "04": reads_04,
    "05": reads_05,
    "06": reads_06,
    "07": reads_07,
    "08": reads_08,
    "09": reads_09,
    "10": reads_10,
    "13": reads_13,
    "14": reads_14,
}


def diagnoses(number: str, printed: str) -> dict[str, Diagnosis]:
    """Return a reader's diagnosis of each run, whose lines begin with its letter."""
    head, *parts = re.split(r"^([A-H])(?= )", printed, flags=re.MULTILINE)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {letter: READERS[number](told, head) for letter, told in pairs}


def labs(number: str) -> Iterator[tuple[str, str]]:
    """Yield the output of the lab for each seed, and the grade of a reader's diagnosis."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.py")
    notebook = build.build(read_lesson(path))["notebooks"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    at = next(place for place, cell in enumerate(code) if cell.source.startswith("SEED = "))
    notebook.cells = code[: at + 2]
    resources = {"metadata": {"path": str(path.parent)}}
    kernels = {"kernel_name": "python3", "kernel_manager_class": AsyncLocalKernelManager}
    client = NotebookClient(notebook, timeout=120, resources=resources, **kernels)
    with client.setup_kernel():
        for place in range(at):
            client.execute_cell(notebook.cells[place], place)

        def printed(source: str) -> str:
            cell = notebook.cells[at]
            cell.source = source
            client.execute_cell(cell, at)
            return "".join(
                each.get("text") or each.get("data", {}).get("text/plain", "")
                for each in cell.outputs
                if each.get("name") != "stderr"
            )

        for seed in SEEDS:
            printed(f"SEED, CHECKED = {seed}, True")
            told = printed(code[at + 1].source)
            yield told, printed(f"lab.grade({diagnoses(number, told)!r})")


@pytest.mark.long
@pytest.mark.parametrize("number", READERS)
def test_the_rules_of_the_lesson_find_every_fault(number):
    for told, grade in labs(number):
        right, total = re.match(r"(\d) of (\d) right", grade).groups()
        assert right == total >= "5", f"{told}\n{grade}"
