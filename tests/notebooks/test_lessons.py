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
from course_lib.interview.claims import table

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
        "gradients in both       1,706,240  5,118,720 10,237,596               20.000",
        "gradients in bfloat16   1,706,240  1,706,240 10,237,596               16.000",
        "405B      126  16,384  405,853,388,800          812      6,494       6,048    82",
        "eager SwiGLU: measured 7,218,180 bytes, formula 7,218,180",
        "fused SwiGLU: measured 6,431,748 bytes, formula 6,431,748",
        "70B                 8,192    287.6         250.0      2.68",
        "34 h bytes per token and block, with the sizes of 70B: 183 GB",
        "counted 1,258,291,200; 6 x 819,200 x 256 tokens = 1,258,291,200",
        "70B     1.5e+13  6.3e+24        15%      185,777    509               11.3",
        "8 GPUs inside a node: 1,282 tokens per GPU and step, of any model",
        "64 GPUs between nodes: 12,981 tokens per GPU and step, of any model",
        "a block of 405B: 3,187,703,808 parameters, 6.38 GB",
        "0 of 5 right",
    ):
        assert line in text
    rows = re.findall(r"^[A-E ] +[0-3] +919,808 .*$", text, re.MULTILINE)
    others = [[int(number) for number in re.sub(",", "", row).split()[-3:]] for row in rows]
    assert len(others) == 20
    assert sum(first < last for first, _, last in others) == 1, "one rank's graph grows"
    assert len(pictures(notebook)) == 2  # and the sliders', which is a widget


def lesson_02_shows_collectives(notebook):
    text = outputs(notebook)
    for line in (
        "rank 0 was at: send, cell 2 line 19: dist.send(x, dst=(rank + 1) % n)",
        "[3, 0, 1, 2]",
        "all_reduce      1111 2222 3333 4444     1111 2222 3333 4444",
        "turn 3          1110    2202    3033     444",
        "ring formula    1,500,000  1,500,000  1,500,000  1,500,000 6,000,000",
        "tree formula    2,000,000  1,000,000  2,000,000  1,000,000 6,000,000",
        "{'ring': [6, 6, 6, 6], 'tree': [2, 1, 2, 1]}",
        "crossing by formula 200,000 bytes",
        "raw ring and ours: equal to the last bit",
        "busbw reported   481 GB/s",
        "sent by a GPU    309 GB/s; the link carries 450 each way, a ring about 370",
        "1,085 GB at 300 GB/s: 3.6 s at best",
    ):
        assert line in text
    assert re.search(r"^[A-E] +3.0e\+00 +4.000 +0.0e\+00 +12 ", text, re.MULTILINE)
    one_piece = r"(\.xxx|x\.xx|xx\.x|xxx\.) \1 \1 \1"  # own block, in the reduce-scatter
    assert re.search(rf"  6,016   {one_piece}$", text, re.MULTILINE)
    assert "0 of 5 right" in text
    kernel = r"(60\d,\d{3}|no count)$"
    assert re.search(rf"^all_reduce, ring +6 +[\d.]+ +600,000 +{kernel}", text, re.MULTILINE)
    assert re.search(r"^ring kernel +(1,50\d,\d{3} +|no count *){4}", text, re.MULTILINE)
    assert len(pictures(notebook)) == 4


def lesson_03_shows_one_gradient(notebook):
    text = outputs(notebook)
    assert "{'own': 0.5, 'sum': 15.0}" in text
    for way, calls, kernel in (
        ("naive", 39, r"1,4\d\d,\d{3}"),
        ("bucketed", 3, r"1,38\d,\d{3}"),
        ("overlapped", 3, r"1,38\d,\d{3}"),
    ):
        line = rf"^{way} +{calls} +1,379,712 +({kernel}|no count) "
        assert re.search(line, text, re.MULTILINE)
    for line in (
        "bucket 0 is full after 12 of 39 gradients",
        "128 ranks against 64: 1.008; you predicted None",
        "2 micro-batches            3     1,379,712          1,519,884",
        "2, sent each time          6     2,759,424",
        "mean of means: off by 29%; your vote: None",
        "rows that rank 0 reads first, in epochs 0 and 1: [12, 19, 6, 3] [5, 7, 31, 28]",
        "without set_epoch: [12, 19, 6, 3] [12, 19, 6, 3]",
        "0 of 6 right",
        "deadline: 3 of 4 ranks had not returned after 5 s.",
        "     64              27.6     1.10",
    ):
        assert line in text
    assert re.search(r"^[A-F] +\S+ +\S+ +0 ", text, re.MULTILINE)  # no sync: nothing is sent
    assert re.search(r"^[A-F] .* 4.00  4.00  4.00  4.00 ", text, re.MULTILINE)  # n times
    assert re.search(r"^rank \d had returned$", text, re.MULTILINE)
    # Calls of different sizes: gloo ends the rank that receives too much, or leaves it waiting.
    assert re.search(r"signal 6 \(SIGABRT\), at: cell |lost its connection|not returned", text)
    assert 'def finish(self) -> None:\n    """Send the buckets' not in text  # 03-4's answer
    assert len(pictures(notebook)) == 2


def lesson_04_shows_shards(notebook):
    text = outputs(notebook)
    for line in (
        "   64     31.41     16.64      1.88",
        "rank 1: {'own': [2222.0], 'gathered': [1111.0, 2222.0, 3333.0, 4444.0], 'bytes': (24,",
        "rank 2: 11 elements, padded to 12; mine: 0.bias[0:2], 1.weight[0:1]",
        "1                   1.00     1.00     1.00     1.40   ",
        "4                   1.00     1.00     2.50     5.59",
        "reshard after forward         402      8.0        0.0",
        "keep for the step              19      0.4       19.0",
        "state stored by ranks, bytes: [4035684, 4035684, 4035684, 4035684]",
        "0 of 6 right",
        "DP         112.00     27.6   1.00     27.6   1.00",
        "stage 2     15.53     27.6   1.00    124.0   4.50",
        "stage 3      1.75     41.3   1.50    330.8  12.00",
    ):
        assert line.rstrip() in text
    for way, sent, state in (
        ("dp", "8,070,912", "16,142,052"),
        ("zero 1", "8,070,912", "8,070,940"),
        ("zero 3", "11,269,632", "4,035,512"),
    ):
        line = rf"^{way} +[\d.]+ +{sent} +([\d,]+|no count) +[\d.]+ +{state} "
        assert re.search(line, text, re.MULTILINE)
    table = re.findall(r"^(?:dp|zero \d) +peak +([\d,]+) bytes, ", text, re.MULTILINE)
    peaks = [int(found.replace(",", "")) for found in table]
    assert len(peaks) == 4
    assert peaks == sorted(peaks, reverse=True), "each stage has a lower peak"
    for ranks in ("....", "xxxx", "x...", "xx.x"):
        assert f"rank 2: {ranks}" in text
    assert len(pictures(notebook)) == 3


def lesson_04b_shows_fsdp(notebook):
    text = outputs(notebook)
    rows = dict(re.findall(r"^(.+?) +\d\.\d{4} +\d+ +([\d.]+ +[\d.]+)$", text, re.MULTILINE))
    figures = {name: [float(one) for one in found.split()] for name, found in rows.items()}
    peaks = [figures[f"FSDP2, {unit}"][1] for unit in ("the model", "each block", "each linear")]
    assert peaks == sorted(peaks, reverse=True), "smaller units, lower peak"
    assert figures["keep for the step, M = 2"][0] == 8.07, "the bytes of data parallelism"
    assert figures["reshard, M = 2"][0] == pytest.approx(2 * figures["reshard, M = 1"][0], abs=0.02)
    for line in (
        "1.48 of DP with gradients of 2 bytes",
        "0.99 of DP with gradients of 4 bytes",
        "HSDP, 2 x 2: state 8.07 MB, rank 0 sends in group",
    ):
        assert line in text
    went_on, loaded = re.findall(
        r"^(?:4 ranks, never stopped|loaded by 2 ranks): +(.*)$", text, re.M
    )
    assert went_on == loaded, "a checkpoint goes on where it was, on other ranks"


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
        "tensor        10 + 24/n            34.00     36.16            22.00     24.09",
        "rows, kept            4.3271  1,017,108    3,213,960   3,582,720",
        "   5             4.32705   4.32772 ",
        "selective: 0.9% more operations, 70% less stored where scores are stored",
        "{'nothing': 4, 'selective': 4, 'full': 6, 'full, torch': 5}",
        "copied 2,514,944 bytes of a block that stores 2,121,728",
        "all of it from h = 8,854 on",
        "norm weights after a step: as in one process, on all ranks",
        "gradients with dropout: equal to the last bit",
        "0 of 5 right",
    ):
        assert line in text
    for way, calls, sent, kernel, fraction in (
        ("tensor", 16, "3,145,728", "3,173,376", "0.44"),
        ("rows, kept", 32, "3,145,728", "3,166,464", "0.34"),
        ("rows, again", 40, "3,932,160", "3,959,808", "0.25"),
    ):
        line = rf"^{way} +{calls} +{sent} +({kernel}|no count) +[\d,]+ +{fraction}$"
        assert re.search(line, text, re.MULTILINE)
    calls = sorted(re.findall(r"^[A-E] +(\d+ +\d+ +\d+) ", text, re.MULTILINE))
    assert len(set(calls)) == 3, "gather lacks scatters, norms and heads lack a reduce"
    assert text.count("your vote: None") == 2
    assert len(pictures(notebook)) == 1


def lesson_06b_shows_details(notebook):
    text = outputs(notebook)
    for line in (
        "rank 3: logits [8, 64, 65], 2 of its words are padding",
        "calls: [('all_reduce', 2048), ('all_reduce', 2048), ('all_reduce', 2048)]",
        "sent 9,216 bytes; you predicted None; gathering logits 399,360",
        "4,096 bytes per rank",
    ):
        assert line in text
    loss, unmasked = re.search(r"^loss per token ([\d.]+); .* 0: ([\d.]+)$", text, re.M).groups()
    assert 0 < float(unmasked) - float(loss) < 0.02, "a padding word takes some probability"
    masks = re.findall(r"^(.{24}) rank \d: ([x.]{24})  .* ([\d.]{6})$", text, re.M)
    (_, same, a), (_, same_too, b), (_, one, c), (_, other, d), *skewed = masks
    assert (same, a) == (same_too, b), "tensor parallelism: one mask on all ranks"
    assert one != other, "rows: a mask for each rank"
    assert c == d, "rows: the common stream stays common"
    assert skewed[0][1:] != skewed[1][1:], "seeded by rank: x differs"
    for rank, group in ((0, "(0, 1)"), (3, "(2, 3)")):
        assert re.search(rf"^rank {rank}: k \[8, 64\], group {re.escape(group)}; ", text, re.M)


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
        "bytes after forward 175,360; between I and W 131,072, formula 131,072; after W 0",
        "0 of 5 right: nothing is diagnosed yet",
    ):
        assert line in text
    for name in ("interleaved", "zb-v"):
        assert re.search(rf"^{name} +gradients of torch's and ours differ by", text, re.MULTILINE)
    lab_runs = re.findall(r"^[A-E] +\d+ ms ((?: +\d\.\d{3}){4})", text, re.MULTILINE)
    shares = [sorted({"1.000", *lab_run.split()}) for lab_run in lab_runs]
    assert sorted(map(len, shares)) == [1, 1, 1, 2, 2], "one loses a W, one computes a W twice"
    for paper in ("1f1b   bubble 24.3%", "zb-h2  bubble 10.8%"):
        assert paper in text
    assert text.count("your vote: None") == 2
    assert len(pictures(notebook)) == 9


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


def lesson_14b_shows_plans(notebook):
    text = outputs(notebook)
    for words in (
        "MB more than the limit; the largest part is optimizer",
        "expected tp",
        "loss and gradients equal one process",
        "bytes on each axis are as predicted",
        "the next star needs a step of",
        "[best of the search]",
    ):
        assert words in text
    assert text.count("loss and gradients equal one process") == 2
    assert len(pictures(notebook)) == 2


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
        "a ring hides from F/beta = 19,780 positions per rank; here, with zig-zag, 2,472 of 8,192",
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
        "8,030,261,248 parameters, of which a token uses 7,504,924,672",
        "by arithmetic: 65,890 tokens per second",
        "by memory:     223 tokens per second",
        "H100: both limits are equal at 295 rows",
        "the same tokens: 1,654 rows without a cache, 157 with it; share 0.09",
        "measured 1,048,576, formula 1,048,576; your prediction None",
        "   8 heads of keys and values:   2.68 GB",
        "    8,192     1.07    59        32         14.7     2,171",
        "in 1, 4 and 8 slots: 'And God said, ",
        "rank 0 offers (logit, token) [3.0, 1.0] and takes token 2",
        "rank 1 offers (logit, token) [3.5, 2.0] and takes token 2",
        "request 4: 20 tokens on 4 ranks, equal to one process",
        "0 of 5 right",
        "  512 positions: 32 requests take 1.14 times as long as one",
        "8,192 positions: 32 requests take 3.07 times as long as one",
        "H100 to A100, memory: 1.64",
        "your votes: None, None",
    ):
        assert line in text
    for way, steps, cache in (
        ("one at a time", 100, "262,144"),
        ("static, 4 slots", 50, "1,048,576"),
        ("continuous, 4 slots", 34, "1,048,576"),
    ):
        assert re.search(rf"^{way} +{steps} +\d+ +\d+ +{cache}$", text, re.MULTILINE)
        if steps < 100:
            assert f"{way}: {steps} steps" in text
    assert len(re.findall(r"^  slot \d  [.\d]{50}$", text, re.MULTILINE)) == 4
    assert len(re.findall(r"^  slot \d  [.\d]{34}$", text, re.MULTILINE)) == 4
    rows = re.findall(r"^[A-E] +(\d+) +(yes|no) +(yes|no) +(\d+)   \[", text, re.MULTILINE)
    assert sorted(int(row[0]) for row in rows) == [16, 16, 16, 16, 512], "who gathers all logits"
    assert [row[1] for row in rows].count("no") == 1, "whose ranks take different tokens"
    assert [row[2] for row in rows].count("yes") == 1, "one is correct"
    assert len(pictures(notebook)) == 1


def lesson_13b_shows_many_ranks(notebook):
    text = outputs(notebook)
    for line in (
        "dp, rank 3: requests [3, 7], 0 calls",
        "2 per layer, one for the embedding, one for the choice; your prediction None",
        "Llama 3 70B, tp 16: 0.34 GB of cache per rank, 5.37 in all",
        "        50.0       0.0    50   14.25   DP8 160, TP8 561",
        "         9.1      40.9    50   50.00   DP8 160, TP8 160",
        "         3.6      46.4    50   54.84   DP8 160, TP8 146",
        "         0.0      50.0    50   58.00   DP8 160, TP8 138",
        "DP4 is ahead from 28 requests",
        "GPT-3 in bfloat16, TP8: 43.7 GB per rank",
        "merging sends 18.5 MB per token, gathering 131,072 rows 37,581 MB",
        "sent 28,680 bytes: cache 28,672 and a token of 8",
        "so a prefill takes as long as 69 decode steps of a small batch",
        "  one link of 100 Gb/s       215 ms, 59.7% of the prefill",
        "  eight links of 400 Gb/s      7 ms,  1.9% of the prefill",
        " 8 requests: TP4 has 1.57 times DP4's throughput",
        "64 requests: TP4 has 0.69 times DP4's throughput",
        "two nodes, dp2+tp2: a token takes 229 ms",
        "two nodes, tp2+pp2: a token takes 249 ms",
        "your votes: None, None",
    ):
        assert line in text
    for n in (2, 4):
        sent, formula = re.search(rf"^{n} +10 +([\d,]+) +([\d,]+) ", text, re.MULTILINE).groups()
        assert sent == formula
    for groups, busy, ticks in ((1, "0.25", 24), (2, "0.50", 25), (4, "1.00", 27), (6, "1.00", 39)):
        assert re.search(rf"^ +{groups} +{2 * groups} +{busy} +{ticks} ", text, re.MULTILINE)
    for layout, calls in (("dp4", 0), ("tp4", 10), (r"dp2\+tp2", 10), (r"tp2\+pp2", 10)):
        assert re.search(rf"^{layout} +8 +[\d,]+ +{calls} +\d+ ", text, re.MULTILINE)
    steps = re.findall(
        r"^experts, rank \d: (\d+) tokens for its requests, (\d+) steps$", text, re.M
    )
    assert len({tokens for tokens, _ in steps}) == 4
    assert len({step for _, step in steps}) == 1, "all replicas take every step"
    assert len(pictures(notebook)) == 2


def lesson_11_shows_groups(notebook):
    text = outputs(notebook)
    for line in (
        "between two ranks a bucket takes 51 ms, a small call 11 ms",
        "ranks 0, 1, 2 and 3 wait for each other for ever:",
        "right is [2.0, 200.0]; your prediction: None",
        "returned [[101.0, 101.0], [101.0, 101.0]]",
        "the ranks do not make the same groups:",
        "rank 63's pp group: these lines [63, 71, 79, 87]; right [39, 47, 55, 63]",
        "{'tp': 8, 'pp': 16, 'dp': 32}, 56; your prediction: None",
        "0 of 5 right",
    ):
        assert line in text
    assert text.count("returned [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]") == 1
    for way, formula, calls in (
        ("links apart", 379, 12),
        ("one link, at once", 442, 12),
        ("one link, held and split", 406, 16),
    ):
        row = rf"^{way} +{formula} ms +\d+ ms +\d+ ms +{calls} +112,000$"
        assert re.search(row, text, re.MULTILINE)
    assert "def stuck(" not in text  # the answer of 11-3
    assert len(pictures(notebook)) == 3


def lesson_12_shows_all_axes(notebook):
    text = outputs(notebook)
    for line in (
        "state:   1,975,296 bytes: weights, gradients, two moments",
        "one rank                         1,975,296         7,305",
        "tp                                 992,256           913",
        "tp and pp                          562,176            62",
        "tp, pp, and ZeRO-1 over dp         421,632            21",
        "pp  4 groups of 2, across nodes",
        "zero=2 with pp=2: a pipeline needs many micro-batches",
        "together 562,256 of 600,000",
        "TP, payload over 600 GB/s:               5.4 ms per layer",
        "TP, bytes sent over 600 GB/s:            9.4 ms",
        "TP, bytes sent over 300 GB/s each way:  18.8 ms",
        "PP, payload over 25 GB/s:               64.4 ms per batch",
        "h = 64: 3h = 192 tokens; in the 2 x 2 mesh 96",
        "alternatives of equal degree, 3h:             49,152 tokens",
        "its mesh, tp=8 and dp=128:                     6,967",
        "bfloat16 weights, float32 gradients:          10,450",
        "the same by the library, from all shapes:     10,409",
        "ZeRO-2: reduce per micro-batch                    209           4.2         6.4",
        "rank 5: {'tp': [4, 5], 'dp': [5, 7], 'pp': [1, 5]}; theirs are equal; you said None",
        "0 of 5 right",
        "the product for 5D: 32; it ran on 16 ranks",
        "Llama 3 405B: 16,384 GPUs, {'tp': 8, 'pp': 16, 'dp': 128}, 16 M tokens per step",
    ):
        assert line in text
    for name, ranks in (("3D", 8), ("4D", 16), ("5D", 16)):
        assert re.search(rf"^{name} +{ranks} +[\d.]+ +\de[-+]\d\d +\de[-+]\d\d +True$", text, re.M)
    for axis in ("tp", "dp_cp", "cp", "pp"):
        found = re.search(rf"^4D +{axis} +[\d,]+ +([\d,]+) +([\d,]+|no count) +\d+$", text, re.M)
        formula, kernel = (cell.replace(",", "") for cell in found.groups())
        assert kernel == "no count" or int(formula) <= int(kernel) <= 1.3 * int(formula)
    assert re.search(r"^all ranks, all of it: +[\d.]+, 1.92 times$", text, re.M)
    assert len(pictures(notebook)) == 2  # and the slider's, which is a widget


def lesson_14_shows_a_decision(notebook):
    text = outputs(notebook)
    for line in (
        "70B on  4 GPUs: {'dp': 1, 'tp': 8, 'pp': 0}, which are 0 GPUs",
        "70B on 20 GPUs: {'dp': 1, 'tp': 8, 'pp': 2}, which are 16 GPUs",
        "512 micro-batches per replica",
        "  pp  4 groups of 4, across nodes",
        "[0 4 8 12] [1 5 9 13] [2 6 10 14] [3 7 11 15]",
        "pipeline_parallel_degree = 2",
        "0 of 5 right",
        "your votes: 1 None; 2 None",
    ):
        assert line in text
    plans = re.findall(r"^(\S.*\S) +[\d.]+ +[\d.]+ +([\d.]+) +(yes|no) +([\d.]+) ", text, re.M)
    found = {name: (float(gb), fits, float(step)) for name, gb, fits, step in plans}
    assert found["tp8 dp8, ZeRO-1"][1] == "no"
    assert found["tp8 dp8, ZeRO-2"][1] == found["tp8 pp2 dp4, ZeRO-1"][1] == "yes"
    assert found["tp8 pp4 dp4, ZeRO-2"][2] > 2 * found["tp8 pp4 dp4, ZeRO-1"][2]
    rules = re.findall(r"^(?:dp|tp|pp), .* ([\d.]+) +([\d.]+) +([\d.]+)$", text, re.M)
    assert len(rules) == 4
    for _, formula, measured in rules:
        assert float(measured) < 1.1 * float(formula), "the run is slower than alpha-beta"
    even, fitted = (int(n.replace(",", "")) for n in re.findall(r"\): ([\d,]+) units", text))
    assert fitted < 0.6 * even
    assert len(pictures(notebook)) == 1  # and the slider's, which is a widget


def lesson_15_shows_verdicts(notebook):
    text = outputs(notebook)
    claims = [table().claim(name) for names in table().lesson.values() for name in names]
    for n, claim in enumerate(claims, 1):
        line = f"^{n} +{claim.verdict}, by {claim.by} \\(your vote: none\\)$"
        assert re.search(line, text, re.MULTILINE), claim.id
        assert claim.statement() in re.sub(r"\n +", " ", text)
    for line in (
        "DDP                    15.0       15.0       90.0  120.0     90.0",
        "64 stages,   357 micro-batches: bubble 15%",
        "dst=1                    Global rank 1 is not part of group",
        "dst=2                    42.0",
        "dst=2, async_op=True     send() got an unexpected keyword argument 'async_op'",
        "all_reduce, async_op=True 42.0",
        "own groups               activation 1, gradient 100",
        "default group            activation 100, gradient 1",
        "missing 1 required positional argument: 'transformer_layer_cls'",
        "with its layer class     [3, 3]",
        "async def, called        statements that ran: 0",
        "4 layers: 2 per layer in forward, 4 in a step",
        "def dp_across_nodes() -> Numbers:",
        "all                 25              0        25",
    ):
        assert line in text
    assert re.search(r"^own group only +(\[1001\.0, 110\.0,|deadline: \d of 4 ranks)", text, re.M)
    rows = re.findall(r"^(\d+) +[\d.]+ +[\d.]+ +[\d.]+   (.*)$", text, re.MULTILINE)
    orders = [order.split(" > ") for _, order in rows]
    assert [n for n, _ in rows] == ["1", "32", "256", "1024"]
    assert orders == [["TP", "DP", "PP"]] * 3 + [["TP", "PP", "DP"]]
    assert re.search(r"^11 new_groups +3 +56 +0.05 ", text, re.MULTILINE)


def lesson_16_shows_how_to_answer(notebook):
    text = outputs(notebook)
    for line in (
        "58.5 GB  Not quite. You forgot the fp32 master weights",
        "13 GB    Not quite. That is ZeRO-3",
        "61.75    Please add a unit",
        "13e9 x 4.75 bytes = 61.75 GB.",
        "volume-dp: 0.50 of the answer.",
        "rank 1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7\nyours equal: None",
        "your votes: None None",
        "What is data parallelism?",
        "[2, 2]",
        "[2, 1, 1]",
        "2 of 4 limits broken. The worst: exposed communication",
        "Nothing breaks. The smallest margin: MFU",
    ):
        assert line in text
    close, kinds = map(int, re.search(r"^(\d+) of (\d+) kinds of questions", text, re.M).groups())
    assert kinds / 2 < close < kinds
    steps = re.findall(r"^(\w+) +([\d.]+) time units, (bubble .*), at most (\d+) in", text, re.M)
    (gpipe, *same, eight), (one_f_one_b, *same_too, four) = steps
    assert (gpipe, one_f_one_b, eight, four) == ("gpipe", "1f1b", "8", "4")
    assert same == same_too
    assert text.count("\n1. Draw") == 1


def lesson_10_shows_tokens_that_travel(notebook):
    text = outputs(notebook)
    for line in (
        "rank 0  [1, 0, 1, 0]   [1.0, 20.0]               [1.5, 0.5]     [0.5, 1.5]",
        "rank 2  [1, 0, 0, 1]   [0.0, 10.0, 11.0, 30.0] ",
        "ep (0, 1)  edp (1, 3)  dp (0, 1, 2, 3)",
        "if routing were even, ep = 4 would send 196,608 bytes",
        "rows by rank [128, 128, 128, 128]",
        "a row: 14,336 bytes in bfloat16, 7,392 in FP8 with scales",
        "a pair: 57,344 bytes in bfloat16, 43,456 with FP8 (0.76)",
        "skew 0, capacity factor 1.0: 0.117 dropped",
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
    biased, alone = (
        float(re.search(rf"^{name} .* 59: ([\d.]+) \(", text, re.MULTILINE)[1])
        for name in ("bias", r"auxiliary loss, 0\.0")
    )
    assert biased < alone, "the bias balances the load"
    assert len(pictures(notebook)) == 2


SHOWS = {  # what a lesson must show
    "notebooks/00_start_here": lesson_00_shows_what_ranks_did,
    "notebooks/01_why": lesson_01_shows_three_limits,
    "notebooks/02_collectives": lesson_02_shows_collectives,
    "notebooks/03_data_parallelism": lesson_03_shows_one_gradient,
    "notebooks/04_zero": lesson_04_shows_shards,
    "notebooks/04b_fsdp_in_practice": lesson_04b_shows_fsdp,
    "notebooks/05_tensor_parallelism": lesson_05_shows_a_pair,
    "notebooks/06_sequence_parallelism": lesson_06_shows_rows,
    "notebooks/06b_vocabulary_seeds_heads": lesson_06b_shows_details,
    "notebooks/07_pipelines_1": lesson_07_shows_pipelines,
    "notebooks/08_pipelines_2": lesson_08_shows_every_schedule,
    "notebooks/08b_schedule_arena": lesson_08b_shows_reasons,
    "notebooks/09_context_parallelism": lesson_09_shows_rings,
    "notebooks/09b_other_ways": lesson_09b_compares_ways,
    "notebooks/11_groups_in_anger": lesson_11_shows_groups,
    "notebooks/12_five_axes": lesson_12_shows_all_axes,
    "notebooks/13_inference": lesson_13_shows_serving,
    "notebooks/13b_parallel_serving": lesson_13b_shows_many_ranks,
    "notebooks/14_the_decision": lesson_14_shows_a_decision,
    "notebooks/14b_plan_arena": lesson_14b_shows_plans,
    "notebooks/15_true_or_false": lesson_15_shows_verdicts,
    "notebooks/16_interview_day": lesson_16_shows_how_to_answer,
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
