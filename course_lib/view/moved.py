"""Sliders over any picture: a function of whole numbers that draws one is called at every move.

For a schedule use :mod:`course_lib.view.sliders`, which knows what its controls mean. Put a picture
of the first values above: where widgets do not live (GitHub, paper) nothing is seen.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from ipywidgets import HTML, Image, SelectionSlider, VBox

from course_lib.view.sliders import HEARD, HIDDEN, LOOK, SHOWN
from course_lib.view.style import Picture

Values = Sequence[int | float | str]


def picture_sliders(draw: Callable[..., Picture], **values: Values) -> PictureSliders:
    """A slider for each argument of ``draw``, over the values given for it, the first one first.

    ``draw`` may raise ValueError for what does not fit: its reason is shown in place of a picture.
    Return the result from a cell. Raises ValueError when there is nothing to choose from.
    """
    if empty := [name for name, options in values.items() if not len(options)]:
        raise ValueError(f"no values to choose from for {', '.join(empty)}")
    return PictureSliders(draw, values)


class PictureSliders(VBox):
    """The controls by name in ``controls``, the picture in ``image``, its sentence in
    ``message``."""

    def __init__(self, draw: Callable[..., Picture], values: dict[str, Values]) -> None:
        self.draw = draw
        self.controls = {
            name: SelectionSlider(
                options=list(options),
                description=name.replace("_", " "),
                continuous_update=False,
                **LOOK,
            )
            for name, options in values.items()
        }
        self.image = Image(format="png", layout={"max_width": "100%"})
        self.message = HTML()
        super().__init__([*self.controls.values(), self.message, self.image])
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._changed()

    def __repr__(self) -> str:
        """The same in every kernel, so that a stored output can be compared."""
        return f"PictureSliders({', '.join(self.controls)})"

    def _changed(self, change: object = None) -> None:
        try:
            picture = self.draw(**{name: each.value for name, each in self.controls.items()})
        except ValueError as error:
            self.message.value = f"<b>Not possible:</b> {html.escape(str(error))}."
            self.image.layout.display = HIDDEN
        else:
            self.image.value = picture._repr_png_()
            self.message.value = HEARD.format(html.escape(picture.caption))
            self.image.layout.display = SHOWN
