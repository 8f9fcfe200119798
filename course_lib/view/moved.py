"""Sliders for any picture: each move of a slider calls a function that draws the picture.

For a schedule use :mod:`course_lib.view.sliders`, which has controls for schedules. Put a picture
of the first values above the sliders, because widgets are not visible on GitHub and on paper.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from ipywidgets import HTML, Image, SelectionSlider, VBox

from course_lib.view.sliders import HEARD, HIDDEN, LOOK, SHOWN
from course_lib.view.style import Picture

Values = Sequence[int | float | str]


def picture_sliders(draw: Callable[..., Picture], **values: Values) -> PictureSliders:
    """Return one slider per argument of ``draw``, over the given values, set to the first value.

    ``draw`` may raise ValueError for impossible values: the message is then shown instead of the
    picture. Return the result from a cell. Raises ValueError for an argument without values.
    """
    if empty := [name for name, options in values.items() if not len(options)]:
        raise ValueError(f"expected at least one value for {', '.join(empty)}, got none")
    return PictureSliders(draw, values)


class PictureSliders(VBox):
    """The controls by name in ``controls``, the picture in ``image``, its caption in
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
        """Return the same text in every kernel, so that a stored output can be compared."""
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
