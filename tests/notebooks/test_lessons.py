"""Every committed notebook: built from its source, and Run All works in a kernel of this Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from course_lib.grading import build
from course_lib.grading.kernels import AsyncLocalKernelManager

ROOT = Path(__file__).parents[2]
FOLDERS = {kind: ROOT / kind for kind in build.KINDS}
SOURCES = sorted(FOLDERS["notebooks"].glob("[0-9][0-9]*_*.py"))
COMMITTED = [path for kind in build.KINDS for path in sorted(FOLDERS[kind].glob("*.ipynb"))]
EXECUTED = [path for path in COMMITTED if path.parent.name != "exercises"]
# Exercises and solutions are run by test_grade, where no cell may fail; those of 00 here as well.
RUN = [path for path in COMMITTED if path.parent.name == "notebooks" or path.stem[:3] == "00_"]


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def outputs(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells printed or returned."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(found)


@pytest.fixture(scope="module", params=RUN, ids=name)
def committed(request) -> Path:
    return request.param


@pytest.fixture(scope="module")
def executed(committed) -> nbformat.NotebookNode:
    """A committed notebook, run from top to bottom in a fresh kernel; raises at the first error."""
    notebook = nbformat.read(committed, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(committed.parent)}}
    kernels = {"kernel_name": "python3", "kernel_manager_class": AsyncLocalKernelManager}
    NotebookClient(notebook, timeout=60, resources=resources, **kernels).execute()
    return notebook


def verdicts(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The line under each check cell, by exercise."""
    return {
        cell.metadata.course.ex: cell.outputs[-1].data["text/plain"]
        for cell in notebook.cells
        if cell.metadata.get("course", {}).get("role") == "check"
    }


def test_notebooks_are_what_their_sources_build():
    wanted = build.rebuild(FOLDERS)
    differing = [name(path) for path in wanted if path.read_text() != wanted[path]]
    assert not differing, "make notebooks rebuilds them"
    assert not build.strays(FOLDERS, wanted), "no source builds these"
    assert {path.stem for path in COMMITTED} == {path.stem for path in SOURCES}


@pytest.mark.parametrize("path", EXECUTED, ids=name)
def test_lessons_and_solutions_are_committed_executed_in_order(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "make execute refreshes it"


def test_run_all(committed, executed):
    bad = [o for c in executed.cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert not bad
    lines = verdicts(executed)
    for ex, line in lines.items():
        passed, total = map(int, re.match(rf"{ex}: (\d+) of (\d+) ", line).groups())
        assert total > 0
        assert passed == (total if committed.parent.name == "solutions" else 0), line
    if committed.parent.name == "solutions":
        assert verdicts(nbformat.read(committed, as_version=4)) == lines
    SHOWS.get(name(committed), lambda notebook: None)(executed)


def lesson_00_shows_what_ranks_did(notebook):
    text = outputs(notebook)
    for rank in range(4):
        assert f"[rank {rank}] hello from rank {rank} of 4" in text
        assert f"rank {rank}: {{'before': {rank + 1:.1f}, 'after': 10.0}}" in text
        assert re.search(rf"^rank {rank}: sum 10, groups .* as ours$", text, re.MULTILINE)
    assert re.search(r"^\d+ of \d+ checks are ok$", text, re.MULTILINE)
    assert "[0, 10, 20, 30]" in text
    assert re.search(r"^dp +all_reduce +\w+ +4 +16,384 +24,576$", text, re.MULTILINE)
    assert "a rank sent 6144 bytes; formula 6144; your prediction None" in text
    assert "rank 2 raised ValueError: rank 2 has bad data" in text
    assert "rank 0 was at: all_reduce, cell 8 line 8" in text
    assert "dp  8 groups of 2, each inside one node" in text
    assert "rank 5 averages with [5, 7]; your prediction None" in text
    assert "groups that cross: pp; your prediction None" in text
    assert "8 ranks: a rank sends 7168 bytes, 1.75 times" in text
    assert text.count("your vote: None") == 2
    assert len(pictures(notebook)) == 1
    own, met = (list(map(int, found.split(", "))) for found in
                re.findall(r"done after +\[(.*)\] ms", text))  # fmt: skip
    assert len(own) == 4
    assert min(met) >= max(own), "nobody leaves before the last has come"


def pictures(notebook):
    return [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in str(o)]


def lesson_01_shows_three_limits(notebook):
    text = outputs(notebook)
    for line in (
        "gradients in both       1,706,240  5,118,720 10,237,596             20.000",
        "gradients in bfloat16   1,706,240  1,706,240 10,237,596             16.000",
        "405B      126  16,384   3,187,703,808   405,853,388,800      1.00",
        "   64     31.41     16.64      1.88",
        "measured 7,218,180 bytes, formula 7,218,180",
        "products 1,258,291,200; 6 x 819,200 x 256 tokens = 1,258,291,200",
        "64 GPUs between nodes: 5,192 tokens a GPU and step, of any model",
        "a block of 405B: 3,187,703,808 parameters, 6.38 GB",
        "0 of 5 right",
    ):
        assert line in text
    rows = re.findall(r"^[A-E ] +[0-3] +919,808 .*$", text, re.MULTILINE)
    others = [[int(number) for number in re.sub(",", "", row).split()[-3:]] for row in rows]
    assert len(others) == 20
    assert sum(first < last for first, _, last in others) == 1, "one rank's graph grows"
    assert len(pictures(notebook)) == 3  # and the sliders', which is a widget


def lesson_02_shows_collectives(notebook):
    text = outputs(notebook)
    for line in (
        "rank 0 was at: send, cell 4 line 7: dist.send(x, dst=(rank + 1) % n)",
        "[3, 0, 1, 2]",
        "all_reduce      1111 2222 3333 4444     1111 2222 3333 4444",
        "turn 3          1110    2202    3033     444",
        "bytes [1500000, 1500000, 1500000, 1500000], in all 6,000,000",
        "bytes [2000000, 1000000, 2000000, 1000000], in all 6,000,000",
        "crossing by formula 200,000 bytes",
        "raw ring and ours: equal to the last bit",
        "received: tensor([1., 1., 1., 0.])",
        "rank 0: send of float32 [3]",
        "1,085 GB at 300 GB/s: 3.6 s at best",
    ):
        assert line in text
    assert re.search(r"^[A-E] +3.0e\+00 +4.000 +0.0e\+00 +12 ", text, re.MULTILINE)
    one_piece = r"(\.xxx|x\.xx|xx\.x|xxx\.) \1 \1 \1"  # own block, in the reduce-scatter
    assert re.search(rf"  6,016   {one_piece}$", text, re.MULTILINE)
    assert "0 of 5 right" in text
    assert re.search(r"^all_reduce, ring +6 +[\d.]+ +600,000 +600,000 ", text, re.MULTILINE)
    assert len(pictures(notebook)) == 4


def lesson_03_shows_one_gradient(notebook):
    text = outputs(notebook)
    assert "{'own': 0.5, 'sum': 15.0}" in text
    for way, calls in (("naive", 39), ("bucketed", 3), ("overlapped", 3)):
        assert re.search(rf"^{way} +{calls} +1,379,712 +1,379,712 ", text, re.MULTILINE)
    for line in (
        "put every backward but the last of a step into `with sync.accumulate():`",
        "calls of each rank: [0, 0, 0, 0]",
        "0 of 6 right",
        "deadline: 3 of 4 ranks had not returned after 5 s.",
        "data parallel 612.5, tensor parallel 1,082.3",
    ):
        assert line in text
    assert re.search(r"^[A-F] +\S+ +\S+ +0 ", text, re.MULTILINE)  # no sync: nothing is sent
    assert re.search(r"^[A-F] .* 4.00  4.00  4.00  4.00 ", text, re.MULTILINE)  # n times
    assert re.search(r"^rank \d had returned$", text, re.MULTILINE)
    # Calls of different sizes: gloo ends the rank that receives too much, or leaves it waiting.
    assert re.search(r"signal 6 \(SIGABRT\), at: cell |lost its connection|not returned", text)
    assert len(pictures(notebook)) >= 2


def lesson_04_shows_shards(notebook):
    text = outputs(notebook)
    for line in (
        "   64     31.41     16.64      1.88",
        "rank 1: {'own': [2222.0], 'gathered': [1111.0, 2222.0, 3333.0, 4444.0], 'bytes': (24,",
        "rank 2: 11 elements, padded to 12; mine: 0.bias[0:2], 1.weight[0:1]",
        "1                   1.00     1.00     1.00     1.40   ",
        "4                   1.00     1.00     2.50     5.59",
        "state kept by ranks, bytes: [8133164, 8133164, 8009288, 8008260]",
        "0 of 6 right",
        "stage 2         15.3          234.3   4.25",
    ):
        assert line.rstrip() in text
    for way, sent, state in (
        ("dp", "8,070,912", "16,142,052"),
        ("zero 1", "8,070,912", "8,070,940"),
        ("zero 3", "11,269,632", "4,035,512"),
    ):
        assert re.search(rf"^{way} +[\d.]+ +{sent} +{sent} +[\d.]+ +{state} ", text, re.MULTILINE)
    table = re.findall(r"^(?:dp|zero \d) +([\d,]+) +\d\.\d\d(?: +[\d,]+)?$", text, re.MULTILINE)
    peaks = [int(found.replace(",", "")) for found in table]
    assert len(peaks) == 4
    assert peaks == sorted(peaks, reverse=True), "each stage has a lower peak"
    went_on = re.search(r"never stopped: (.*)", text)[1].strip()
    assert text.count(went_on) == 3, "a checkpoint goes on where it was, on other ranks"
    for ranks in ("....", "xxxx", "x...", "xx.x"):
        assert f"rank 2: {ranks}" in text
    assert len(pictures(notebook)) == 3


def lesson_05_shows_a_pair(notebook):
    text = outputs(notebook)
    for line in (
        "rank 1: {'h': [5.0], 'partial': [10.0, 5.0], 'y': [14.0, 5.0], 'own dx': [-3.0, 9.0],",
        "f and g:  {'y': [14.0, 5.0], 'dx': [-1.0, 10.0]} {'y': [14.0, 5.0], 'dx': [-1.0, 10.0]}",
        "g alone:  {'y': [14.0, 5.0], 'dx': [2.0, 1.0]} {'y': [14.0, 5.0], 'dx': [-3.0, 9.0]}",
        "equal; calls forward, backward: (1, 1)",
        "4 all-reduces per layer",
        "    4     929,792     929,792      0.44",
        "0 of 5 right",
    ):
        assert line in text
    for n, sent, kernel in ((2, "2,097,152", "2,106,368"), (4, "3,145,728", "3,173,376")):
        line = rf"^ +{n} +[\d.]+ +8 \+ 8 +{sent} +({kernel}|no count) "
        assert re.search(line, text, re.MULTILINE)
    for where in ("one", "two"):
        assert re.search(rf"^TP, {where} nodes? +\d+ +0 ", text, re.MULTILINE), "none hides"
    assert re.search(r"^DTensor, x enters once +16 calls, 3,145,728 bytes; ", text, re.MULTILINE)
    split = (
        r"^(one product|four blocks): 98,304 bytes, communication (\d+) ms, .* (\d+) ms exposed$"
    )
    (_, whole, waits), (_, ring, rest) = re.findall(split, text, re.MULTILINE)
    assert whole == waits, "one product hides nothing"
    assert int(rest) < int(ring), "some of the ring's messages hide"
    calls = sorted(re.findall(r"^[A-E]  (\d \+ \d) ", text, re.MULTILINE))
    assert calls == ["7 + 8", "8 + 4", "8 + 8", "8 + 8", "8 + 8"], "two ledgers show the illness"
    assert len(pictures(notebook)) == 4


def lesson_06_shows_rows(notebook):
    text = outputs(notebook)
    for line in (
        "rank 1: {'rows': [2222.0, 3333.0], 'bytes': (48, 48)}",
        "comm.gather_from_sequence {'x': [1.0, 2.0], 'dx': 5.0} {'x': [1.0, 2.0], 'dx': 5.0}",
        "comm.gather_from          {'x': [1.0, 2.0], 'dx': 2.0} {'x': [1.0, 2.0], 'dx': 3.0}",
        "gradients with dropout: equal to the last bit",
        "sent 9,216 bytes; your prediction None;",
        "Korthikanti, table 5, 175B: 2.7% more arithmetic",
        "0 of 5 right",
    ):
        assert line in text
    for way, sent in (
        ("tensor", "3,145,728"),
        ("rows, kept", "3,145,728"),
        ("rows, again", "3,932,160"),
    ):
        assert re.search(rf"^{way} +4 +{sent} +{sent} +([\d,]+) +\1 ", text, re.MULTILINE)
    calls = sorted(re.findall(r"^[A-E] +(\d+ +\d+ +\d+) ", text, re.MULTILINE))
    assert len(set(calls)) == 3, "gather lacks scatters, norms and heads lack a reduce"
    assert len(pictures(notebook)) == 1


def lesson_07_shows_pipelines(notebook):
    text = outputs(notebook)
    for line in (
        "rank 1 is at cell 1, 1F1, and waits for 0F1 of rank 0, which has it in cell 2",
        "1f1b   formula 786,432 bytes, 48 messages;",
        "p = 1: rank 0 has state 3,679,388, activations 1,518,852 bytes",
        "p = 4: rank 0 has state 1,050,664, activations 1,404,928 bytes",
        "GPT-3, p = 32: rank 0 has state    87 GB, activations 275 GB",
        "steps of different length: 0",
        "p = 4, m = 8: GPipe 39, 1F1B 49",
        "fastest at m = 8",
    ):
        assert line in text
    assert "0 of 5 right" in text
    for length in (r"1\.000", r"9\.000"):  # the correct run, and 1/m forgotten
        assert re.search(rf"^[A-E] +\S+ +{length}\d ", text, re.MULTILINE)
    assert len(pictures(notebook)) == 5


def lesson_08_shows_every_schedule(notebook):
    text = outputs(notebook)
    for line in (
        "gradients equal to the last bit",
        "no order of one stage per rank takes less than 27",
        "between I and W 131,072, formula 131,072; after W 0",
        "torch's own split saves 175,360",
        "0 of 5 right: nothing is diagnosed yet",
    ):
        assert line in text
    for name in ("interleaved", "zb-v"):
        assert re.search(rf"^{name} +gradients of torch's and ours differ by", text, re.MULTILINE)
    lab_runs = re.findall(r"^[A-E] +\d+ ms ((?: +\d\.\d{3}){4})", text, re.MULTILINE)
    shares = [sorted({"1.000", *lab_run.split()}) for lab_run in lab_runs]
    assert sorted(map(len, shares)) == [1, 1, 1, 2, 2], "one loses a W, one computes a W twice"
    assert text.count("your vote: None") == 2
    assert len(pictures(notebook)) == 8


def lesson_08b_shows_reasons(notebook):
    text = outputs(notebook)
    for words in (
        "'0X0' is no action",
        "0B0 comes before 0F0",
        "1B0 comes before 1F0",
        "deadlock: no rank can continue",
        "rank 0 waits 3 from 1 on: its 0B0 needs 1B0",
        "**  the next star is for par 14",
        "[zb-h1]",
    ):
        assert words in text
    assert text.count("gradients equal one process") == 3
    assert len(pictures(notebook)) == 3


def lesson_09_shows_rings(notebook):
    text = outputs(notebook)
    for line in (
        "merged:       out 2.25, sum 8.00",
        "rank 2 has in turns 0 to 3 the blocks of ranks [2, 1, 0, 3]",
        "a rank sends forward 24,576 bytes: 0.75 of all K and V",
        "forward and backward 73,728: 2.25",
        "counted by the kernel, with gloo's headers: ",
        "contiguous: busiest over mean 1.738",
        "zig-zag: busiest over mean 1.000",
        "  rank 3:  904 entries, by block [136, 256, 256, 256]",
        "  rank 1:  520 entries, by block [136, 128, 128, 128]",
        "shifted on the rank, 7 of 64 targets are wrong or missing",
        "ring                       73,728          294,912",
        "gather                     49,152          196,608",
        "ulysses                    73,728           98,304",
        "usp                        65,536          163,840",
        "gather again in backward: 73,728",
        "a ring hides from F/beta = 7,600 positions per rank; here, with zig-zag, 950 of 8,192",
        "0 of 5 right",
    ):
        assert line in text
    losses = re.findall(
        r"^(?:one process|ring|gather|ulysses|usp) +last loss ([\d.]+),", text, re.M
    )
    assert len(losses) == 5
    assert len(set(losses)) == 1, "all ways train like one process"
    assert re.search(r"^[A-E] .* 0e\+00 +0 +0 +0 +0 ", text, re.MULTILINE), "one is correct"
    assert re.search(r"^[A-E] .* 0\.0000( |$)", text, re.MULTILINE), "one loses dK and dV"
    assert len(pictures(notebook)) == 2


def lesson_09b_compares_ways(notebook):
    text = outputs(notebook)
    for line in (
        "  ring            294,912  294,912     18   67,584   67,584 ",
        "  gather twice     73,728   73,728      3   43,008   43,008 ",
        "  gather           49,152   49,152      2   67,584   67,584 ",
        "  ulysses          98,304   98,304      8   67,584   67,584 ",
        "  usp              65,536   65,536     14   43,008   43,008 ",
        "rank 1: chunks (6, 7) of 8; in group 0 it has half 1 of the heads",
        "    8      4         0.75*         0.75*         0.84          0.56",
        "    8      8         0.88          0.88          0.55*         0.66",
    ):
        assert line in text


def lesson_13_shows_serving(notebook):
    text = outputs(notebook)
    for line in (
        "   8 heads of keys and values:   2.68 GB",
        "reading and arithmetic take the same time at 295 requests at once",
        "rank 3: requests [3, 7], 0 calls, 0 bytes",
        "rank 0 offers (logit, token) [4.0, 1.0] and takes token 4",
        "2 a layer, one for the embedding, one for the choice; your prediction None",
        "TP8: 50 / 8 + 8 = 14.25 ms a token, not 58",
        " 8 requests: TP4 has 1.57 times DP4's throughput",
        "64 requests: TP4 has 0.69 times DP4's throughput",
        "PP64: 96 layers / 64 = 1.5: does not divide",
        "equal to ours",
        "0 of 5 right",
    ):
        assert line in text
    for n in (2, 4):
        sent, formula = re.search(rf"^ +{n} +10 +([\d,]+) +([\d,]+) ", text, re.MULTILINE).groups()
        assert sent == formula
    for groups, busy, ticks in ((1, "0.25", 24), (2, "0.50", 25), (4, "1.00", 27), (6, "1.00", 39)):
        assert re.search(rf"^ +{groups} +{2 * groups} +{busy} +{ticks} ", text, re.MULTILINE)
    for layout, calls in (("dp4", 0), ("tp4", 10), (r"dp2\+tp2", 10), (r"tp2\+pp2", 10)):
        assert re.search(rf"^{layout} +8 +[\d,]+ +{calls} +\d+ ", text, re.MULTILINE)
    rows = re.findall(r"^[A-E] +(\d+) +(yes|no) +(yes|no) +(\d+)   \[", text, re.MULTILINE)
    assert sorted(int(row[0]) for row in rows) == [16, 16, 16, 16, 512], "who gathers all logits"
    assert [row[1] for row in rows].count("no") == 1, "whose ranks take different tokens"
    assert [row[2] for row in rows].count("yes") == 1, "one is correct"
    assert len(pictures(notebook)) == 3


def lesson_11_shows_groups(notebook):
    text = outputs(notebook)
    for line in (
        "between two ranks a bucket takes 51 ms, a small call 11 ms",
        "tp pp dp pp dp dp",
        "ranks 0, 1, 2 and 3 wait for each other for ever:",
        "right is [2.0, 200.0]; your prediction: None",
        "returned [[101.0, 101.0], [101.0, 101.0]]",
        "the ranks do not make the same groups:",
        "rank 63's pp group: the note [63, 71, 79, 87]; right [39, 47, 55, 63]",
        "{'tp': 8, 'pp': 16, 'dp': 32}, 56; your prediction: None",
        "0 of 5 right",
    ):
        assert line in text
    assert text.count("returned [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]") == 1
    assert len(pictures(notebook)) == 5


def lesson_12_shows_all_axes(notebook):
    text = outputs(notebook)
    for line in (
        "64 ranks: the note's line is right for 16 of them",
        "512 ranks: the note's line is right for 64 of them",
        "stages on node 0: {0}",
        "32 stages of 2 and 32 of 1",
        "zero=2 with pp=2: a pipeline needs many micro-batches",
        "h = 64: 3h = 192 tokens; in the 2 x 2 mesh 96",
        "rank 5: {'tp': [4, 5], 'dp': [5, 7], 'pp': [1, 5]}; theirs are equal; you said None",
        "0 of 5 right",
        "5D ran on 16 ranks",
        "Llama 3 405B: 16,384 GPUs, 16 M tokens per step",
        "TP, two all-reduces forward at 600 GB/s: 0.29 ms per layer",
        "PP, one activation at 25 GB/s: 2.0 ms per micro-batch",
    ):
        assert line in text
    for name, ranks in (("3D", 8), ("4D", 16), ("5D", 16)):
        assert re.search(rf"^{name} +{ranks} +[\d.]+ +\de[-+]\d\d +\de[-+]\d\d +True$", text, re.M)
    for axis in ("tp", "dp_cp", "cp", "pp"):
        counted = re.search(rf"^4D +{axis} +[\d,]+ +([\d,]+) +([\d,]+) +\d+$", text, re.M)
        assert counted[1] == counted[2]
    saved = re.search(r"loaded by 1: loss ([\d.]+)", text)[1]
    assert re.search(rf"one process all along: +{saved[:-2]}", text)
    assert len(pictures(notebook)) == 3


def lesson_10_shows_tokens_that_travel(notebook):
    text = outputs(notebook)
    for line in (
        "rank 0  [1, 0, 1, 0]   [1.0, 20.0]               [1.5, 0.5]     [0.5, 1.5]",
        "rank 2  [1, 0, 0, 1]   [0.0, 10.0, 11.0, 30.0] ",
        "ep (0, 1)  edp (1, 3)  dp (0, 1, 2, 3)",
        "if routing were even, ep = 4 would send 196,608 bytes",
        "rows by rank [128, 128, 128, 128]",
        "0 of 5 right",
    ):
        assert line in text
    for name, experts in (
        ("summed, ep = 4", "1.00"),
        ("averaged, ep = 2", "2.00"),
        ("averaged, ep = 4", "4.00"),
    ):
        assert re.search(rf"^{name} +{experts} +1.00 +1.00$", text, re.MULTILINE)
    assert re.search(r"^[A-E] .* \[\d+, 0, \d+\]$", text, re.MULTILINE), "one sums over ep"
    assert len(pictures(notebook)) == 3  # and the slider's, which is a widget


SHOWS = {  # what a lesson must show
    "notebooks/00_start_here": lesson_00_shows_what_ranks_did,
    "notebooks/01_why": lesson_01_shows_three_limits,
    "notebooks/02_collectives": lesson_02_shows_collectives,
    "notebooks/03_data_parallelism": lesson_03_shows_one_gradient,
    "notebooks/04_zero": lesson_04_shows_shards,
    "notebooks/05_tensor_parallelism": lesson_05_shows_a_pair,
    "notebooks/06_sequence_parallelism": lesson_06_shows_rows,
    "notebooks/07_pipelines_1": lesson_07_shows_pipelines,
    "notebooks/08_pipelines_2": lesson_08_shows_every_schedule,
    "notebooks/08b_schedule_arena": lesson_08b_shows_reasons,
    "notebooks/09_context_parallelism": lesson_09_shows_rings,
    "notebooks/09b_other_ways": lesson_09b_compares_ways,
    "notebooks/11_groups_in_anger": lesson_11_shows_groups,
    "notebooks/12_five_axes": lesson_12_shows_all_axes,
    "notebooks/13_inference": lesson_13_shows_serving,
    "notebooks/10_expert_parallelism": lesson_10_shows_tokens_that_travel,
}


def test_the_kernel_is_this_python(executed):
    assert executed.metadata.kernelspec.name == "python3"
    version = executed.metadata.language_info.version
    assert version == ".".join(map(str, sys.version_info[:3]))


SOURCE = """\
# ---
# jupyter:
#   course:
#     lesson: '05'
# ---

# %%
import sys

for text in "abc":
    print(text, end="", flush=True)
print(" in pieces", flush=True)

# %%
LAST
"""


@pytest.mark.parametrize(
    ("last", "complaint"),
    [
        ('sys.stderr.write("d\\n")', ""),
        ("1 / 0", "notebooks/05_x.ipynb: .*ZeroDivisionError"),
        ("print('/tmp' + '/here')", r"notebooks/05_x.ipynb: cell 2 \(05-start-2\) prints '/tmp/h'"),
    ],
)
def test_execute_stores_what_is_fit_and_nothing_else(tmp_path, capsys, last, complaint):
    for kind in build.KINDS:
        (tmp_path / kind).mkdir()
    (tmp_path / "notebooks" / "05_x.py").write_text(SOURCE.replace("LAST", last))
    folders = [str(tmp_path / kind) for kind in build.KINDS]
    code = build.main([*folders, "--execute"])
    built = tmp_path / "notebooks" / "05_x.ipynb"
    if complaint:
        assert code == 2
        assert re.match(complaint, capsys.readouterr().err, re.DOTALL)
        assert not built.exists()
        return
    assert code == 0
    first, second = nbformat.read(built, as_version=4).cells
    assert [(o.name, o.text) for o in first.outputs] == [("stdout", "abc in pieces\n")]
    assert [o.output_type for o in second.outputs] == ["stream", "execute_result"]
    assert first.metadata == {}, "no timing"
    assert build.main([*folders, "--check"]) == 0
