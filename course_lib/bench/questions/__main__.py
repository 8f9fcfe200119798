"""``python -m course_lib.bench.questions [--out FOLDER]``: the numbers, and the plots as PNGs."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from course_lib.bench.questions import context, ring, rules, stages, volume
from course_lib.view.curves import curves
from course_lib.view.style import Picture


def pictures() -> dict[str, Picture]:
    """Return the plots by the name of their file."""
    return {
        "stages": curves(
            stages.curves_by_speed(),
            linear=True,
            across="speed of the slow rank; the other three have speed 1",
            up="step time / perfect time",
            title="Zero bubble with one slow rank",
            note="Simulated: 4 ranks, 12 micro-batches, F = I = W, the second rank is slow.",
        ),
        "ring": curves(
            ring.curves_by_block(),
            across="block c of a rank, tokens",
            up="milliseconds per turn",
            title="When a turn of ring attention hides its transfer",
            note="Lines: formula. H100 at its peak, 64 query heads of 128. A turn is hidden to the "
            "right of the point where its line meets compute.",
        ),
        "context": curves(
            context.curves_by_length(),
            across="tokens per sequence, in units of 1,024",
            up="GB per GPU",
            title="Memory without context parallelism",
            note="Lines: the planner. 70B: TP 8 and ZeRO-3 on 64 H100. 405B: TP 8, PP 16 and "
            "ZeRO-1 on 16,384 H100. Attention is fused.",
        ),
        "volume": curves(
            volume.curves_by_tokens(),
            across="tokens per replica and step, in units of 1,024",
            up="GB per GPU and step",
            title="Bytes that a GPU sends: TP > DP > PP?",
            note="Lines: the planner. 70B, TP 8 with sequence parallelism, PP 4, DP 8; one "
            "sequence of up to 8,192 tokens per micro-batch.",
        ),
    }


def main() -> None:
    """Print all numbers; with ``--out`` also draw the plots."""
    parser = ArgumentParser(prog="python -m course_lib.bench.questions", description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder for open-questions-*.png")
    out = parser.parse_args().out
    for question in (stages, ring, context, rules, volume):
        for line in question.text():
            print(line, flush=True)
        print()
    if out:
        for name, picture in pictures().items():
            path = out / f"open-questions-{name}.png"
            path.write_bytes(picture._repr_png_())
            print(path)


if __name__ == "__main__":
    main()
