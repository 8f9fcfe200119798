"""Traffic as pictures: the ledger by axis and operation, and bytes by sender and receiver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course_lib.ledger import Ledger, formula_matrices, summarize
from course_lib.trace.traffic import HEADER_BYTES
from course_lib.view.bars import Parts, size_text, stacked, unit_of
from course_lib.view.style import (
    BLUE,
    NORMAL,
    SMALL,
    WIDTH,
    Picture,
    caption_height,
    frame,
    ink_on,
    mix,
)

MARGIN, HEAD, FOOT = 0.48, 0.62, 0.1  # inches beside, above and below a matrix
SMALLEST_CELL, LARGEST_CELL = 0.23, 0.5  # inches
MINOR = 0.01  # an axis with a smaller share of all bytes is left out unless it is asked for

Matrix = Sequence[Sequence[float | Fraction]]  # bytes by [sender][receiver]


def ledger_plot(
    ledgers: Iterable[Ledger],
    *,
    formula: Mapping[str, float | Fraction] | None = None,
    title: str = "Bytes sent on each axis",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw the wire bytes of each axis (formula), stacked by operation, all ranks together.

    ``formula`` gives the bytes expected on an axis from shapes alone. A black line marks it, and
    the caption says by how much the ledger differs. Control traffic is left out of the bars; the
    caption has it. Raises ValueError when no rank sent anything and nothing was expected.
    """
    ledgers = list(ledgers)
    bars: dict[str, dict[str, float]] = defaultdict(dict)
    control = Fraction(0)
    for line in summarize(ledgers):
        if line.control:
            control += line.wire
        elif line.wire:
            sent = bars[line.axis]
            sent[line.op] = sent.get(line.op, 0.0) + float(line.wire)
    marks = {axis: float(value) for axis, value in (formula or {}).items()}
    for axis in marks:
        bars.setdefault(axis, {})
    if not bars:
        raise ValueError("there is nothing to draw: no rank sent anything on any axis of size > 1")
    caption = _ledger_caption(bars, marks, float(control), len(ledgers), note)
    return stacked(
        bars,
        marks=marks,
        where="sent by all ranks together (formula)",
        title=title,
        caption=caption,
        width=width,
    )


def _ledger_caption(
    bars: Mapping[str, Parts], marks: Parts, control: float, ranks: int, note: str
) -> str:
    sums = {axis: sum(parts.values()) for axis, parts in bars.items()}
    said = ", ".join(f"{value:,.0f} on {axis}" for axis, value in sums.items())
    calls = f"the calls of {ranks} {'rank' if ranks == 1 else 'ranks'}"
    text = f"Wire bytes (formula) of {calls}: {said}"
    if marks:
        off = max(abs(sums[axis] - value) for axis, value in marks.items())
        text += "; the bytes expected from shapes (black line) "
        text += f"differ by up to {off:,.0f}" if off > 1 else "are the same"
    if control:
        text += f"; {control:,.0f} of control traffic left out"
    return f"{text}. {note}".strip()


def traffic_plot(
    kernel_bytes: Mapping[str, Matrix] | None,
    ledgers: Iterable[Ledger],
    *,
    axes: Sequence[str] | None = None,
    title: str = "",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw the bytes that each rank sent to each other rank, one matrix for each axis.

    ``kernel_bytes`` is that of a run (:class:`course_lib.launch.Results`). Where it is None the
    picture shows the formula of ``ledgers`` and says so. ``axes`` selects axes and their order;
    otherwise all with at least 1 % of the bytes are drawn, the one with the most bytes first.
    Raises ValueError when no axis has any, and for an axis that does not exist.
    """
    by_axis = kernel_bytes if kernel_bytes is not None else formula_matrices(ledgers)
    sums = {axis: float(sum(map(sum, matrix))) for axis, matrix in by_axis.items()}
    total = sum(sums.values())
    busiest = sorted((axis for axis in sums if sums[axis]), key=lambda axis: -sums[axis])
    drawn = [axis for axis in busiest if sums[axis] >= MINOR * total] if axes is None else [*axes]
    if not busiest or not set(drawn) <= sums.keys():
        raise ValueError(
            f"no traffic to draw on {axes or 'any axis'}; axes with traffic: {busiest}"
        )
    source = "formula" if kernel_bytes is None else "counted by the kernel"
    title = title or f"{busiest[0]} carries {sums[busiest[0]] / total:.0%} of all bytes"
    title += f" ({source})"
    left_out = [f"{axis} ({size_text(sums[axis])})" for axis in busiest if axis not in drawn]
    if left_out:
        note = f"Not drawn: {', '.join(left_out)}. {note}"
    most = max(float(max(map(max, by_axis[axis]))) for axis in drawn)
    ranks = len(by_axis[drawn[0]])
    per_row = max(1, min(len(drawn), int((width - MARGIN) // (ranks * SMALLEST_CELL + MARGIN))))
    cell = min(LARGEST_CELL, ((width - MARGIN) / per_row - MARGIN) / ranks)
    panel = ranks * cell
    rows = -(-len(drawn) // per_row)
    caption = _matrix_caption(source, unit_of(most / 10)[1], note)
    picture = frame(width, rows * (panel + HEAD) + FOOT, title, caption)
    for place, axis in enumerate(drawn):
        row, column = divmod(place, per_row)
        corner = MARGIN + column * (panel + MARGIN), FOOT + (rows - 1 - row) * (panel + HEAD)
        ax = _matrix_axes(picture, corner, panel, ranks)
        name = f"{axis}: {size_text(sums[axis])}"
        ax.set_title(name, size=NORMAL, weight="bold", gid="lane", pad=29)
        _draw_cells(ax, by_axis[axis], most, cell)
    return picture


def _matrix_caption(source: str, unit: str, note: str) -> str:
    text = f"Numbers in {unit}. "
    if source == "formula":
        text += (
            "The kernel has no count here, so these are the bytes of the formula: a ring sends to "
            "the next rank, an all-to-all sends the same to each rank."
        )
    else:
        text += (
            f"The kernel counted what TCP sent. gloo adds {HEADER_BYTES} bytes per message: 96 "
            "from the sender and 48 from the receiver."
        )
    return f"{text} {note}".strip()


def _matrix_axes(picture: Picture, corner: tuple[float, float], panel: float, ranks: int) -> Axes:
    """Axes for a matrix, ``corner`` inches from the left and above the caption."""
    width, inches = picture.get_size_inches()
    bottom = corner[1] + caption_height(picture.caption, width)
    ax = picture.add_axes((corner[0] / width, bottom / inches, panel / width, panel / inches))
    ax.set_xlim(0, ranks)
    ax.set_ylim(ranks, 0)
    middles = [rank + 0.5 for rank in range(ranks)]
    ax.set_xticks(middles, [str(rank) for rank in range(ranks)], size=SMALL)
    ax.set_yticks(middles, [str(rank) for rank in range(ranks)], size=SMALL)
    ax.tick_params(length=0, pad=2, labeltop=True, labelbottom=False)
    ax.set_ylabel("from rank", size=SMALL, labelpad=1)
    ax.set_xlabel("to rank", size=SMALL, labelpad=4)
    ax.xaxis.set_label_position("top")
    return ax


def _draw_cells(ax: Axes, matrix: Matrix, most: float, inches: float) -> None:
    """Darker is more, by the square root, so that small numbers differ from none."""
    factor, _ = unit_of(most / 10)
    for sender, row in enumerate(matrix):
        for receiver, size in enumerate(map(float, row)):
            if sender == receiver:
                face, hatch = "#FFFFFF", "////"
            else:
                face, hatch = mix("#FFFFFF", BLUE, (size / most) ** 0.5), ""
            ax.add_patch(
                Rectangle((receiver, sender), 1, 1, fc=face, ec="#CCCCCC", hatch=hatch, lw=0.5)
            )
            if size:
                shown = size / factor
                text = f"{shown:,.0f}" if shown >= 10 else f"{shown:.2g}"
                ax.text(
                    receiver + 0.5,
                    sender + 0.5,
                    text,
                    size=min(SMALL, 72 * inches / (0.65 * max(4, len(text)))),
                    color=ink_on(face),
                    ha="center",
                    va="center",
                    gid="box",
                )
