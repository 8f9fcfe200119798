"""Sliders for a simulated schedule: each move simulates and draws it again.

The picture is a PNG in an ``ipywidgets.Image``: no pyplot, no ``interact``, no ``Output``. Put a
:func:`schedule_picture` above the sliders, because widgets are not visible on GitHub and on paper.
"""

from __future__ import annotations

import html
from typing import Any

from ipywidgets import HTML, Checkbox, Dropdown, FloatSlider, GridBox, Image, IntSlider, VBox

from course_lib.schedule import SCHEDULES, Costs, make, simulate
from course_lib.schedule.named import CHUNKS
from course_lib.view.schedules import schedule_picture

Settings = tuple[tuple[str, int, int, int], Costs]  # name, p, m, chunks
HIDDEN, SHOWN = "none", ""
LAYOUT = {"width": "auto", "margin": "2px"}
LOOK: dict[str, Any] = {"layout": LAYOUT, "style": {"description_width": "8.5em"}}
GRID = {"grid_template_columns": "repeat(auto-fit, minmax(340px, 1fr))"}  # 2 in a row of Lab
# The caption is part of the picture; this is the same text for a screen reader.
HEARD = (
    "<span role='status' style='position:absolute;width:1px;height:1px;overflow:hidden;"
    "clip-path:inset(50%)'>{}</span>"
)


def schedule_sliders(
    name: str = "1f1b",
    ranks: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    *,
    f: float = 1.0,
    b: float = 2.0,
    comm: float = 0.0,
) -> ScheduleSliders:
    """Return controls for schedule, p, m, chunks, F, B (or I and W) and P2P transfer time.

    A change of the schedule sets its usual number of chunks. For an impossible combination, the
    reason is shown instead of the picture. Return the result from a cell. Raises ValueError when
    the first values are impossible.
    """
    simulate(make(name, ranks, microbatches, chunks), Costs.make(f, b, comm=comm))
    return ScheduleSliders(
        {
            "schedule": Dropdown(
                options=list(SCHEDULES), value=name, description="schedule", **LOOK
            ),
            "p": _whole("ranks p", ranks, 16),
            "m": _whole("micro-batches m", microbatches, 32),
            "chunks": _whole(
                "chunks per rank", CHUNKS.get(name, 1) if chunks is None else chunks, 4
            ),
            "comm": _cost("P2P transfer", comm, 4.0),
            "split": Checkbox(value=False, description="split B into I and W", layout=LAYOUT),
            "f": _cost("F", f, 4.0),
            "b": _cost("B", b, 8.0),
            "i": _cost("I", b / 2, 4.0),
            "w": _cost("W", b / 2, 4.0),
        }
    )


class ScheduleSliders(VBox):
    """The controls by name in ``controls``, the picture in ``image``, its caption in ``message``.

    If the settings are impossible, there is no picture, and ``message`` has the reason.
    """

    def __init__(self, controls: dict[str, Any]) -> None:
        self.controls = controls
        self.image = Image(format="png", layout={"max_width": "100%"})
        self.message = HTML()
        grid = GridBox(list(controls.values()), layout=GRID)
        super().__init__([grid, self.message, self.image])
        self.drawn: Settings | None = None
        self.sentence = ""
        controls["split"].observe(self._keep_b, names="value")
        controls["schedule"].observe(self._usual_chunks, names="value")
        for control in controls.values():
            control.observe(self._changed, names="value")
        self._changed()

    def __repr__(self) -> str:
        """Return the same text in every kernel, so that a stored output can be compared."""
        return f"ScheduleSliders({', '.join(self.controls)})"

    def _keep_b(self, change: object) -> None:
        """Keep B equal to I + W when the user splits B or joins I and W."""
        b, i, w = (self.controls[name] for name in "biw")
        if self.controls["split"].value:
            i.value = w.value = b.value / 2
        else:
            b.value = i.value + w.value

    def _usual_chunks(self, change: object) -> None:
        self.controls["chunks"].value = CHUNKS.get(self.controls["schedule"].value, 1)

    def _changed(self, change: object = None) -> None:
        """Show the controls of the costs in use, then the picture or the reason for its absence."""
        split = self.controls["split"].value
        for name, seen in (("b", not split), ("i", split), ("w", split)):
            self.controls[name].layout.display = SHOWN if seen else HIDDEN
        try:
            self._draw(self._settings())
        except ValueError as error:
            self.message.value = f"<b>Not possible:</b> {html.escape(str(error))}."
            self.image.layout.display = HIDDEN
        else:
            self.message.value = HEARD.format(html.escape(self.sentence))
            self.image.layout.display = SHOWN

    def _settings(self) -> Settings:
        now = {name: control.value for name, control in self.controls.items()}
        halves = {"i": now["i"], "w": now["w"]} if now["split"] else {"b": now["b"]}
        costs = Costs.make(now["f"], comm=now["comm"], **halves)
        return (now["schedule"], now["p"], now["m"], now["chunks"]), costs

    def _draw(self, settings: Settings) -> None:
        if settings != self.drawn:
            size, costs = settings
            picture = schedule_picture(simulate(make(*size, costs), costs))
            self.image.value, self.sentence = picture._repr_png_(), picture.caption
            self.drawn = settings


def _whole(description: str, value: int, most: int) -> IntSlider:
    """Return a slider from 1 to ``most``, or to ``value`` if that is larger."""
    most = max(most, value)
    return IntSlider(value, 1, most, description=description, continuous_update=False, **LOOK)


def _cost(description: str, value: float, most: float) -> FloatSlider:
    """Return a slider from 0 to ``most``, or to ``value`` if that is larger."""
    sizes = {"min": 0, "max": max(most, value), "step": 0.1}
    return FloatSlider(value, **sizes, description=description, continuous_update=False, **LOOK)
