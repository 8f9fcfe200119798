"""The templates of all topics, in the order in which a reader meets the topics."""

from __future__ import annotations

from course_lib.interview.questions import Template
from course_lib.interview.templates import bubble, flops, layouts, memory, serving, volume

TEMPLATES: tuple[Template, ...] = (
    *memory.TEMPLATES,
    *volume.TEMPLATES,
    *bubble.TEMPLATES,
    *flops.TEMPLATES,
    *layouts.TEMPLATES,
    *serving.TEMPLATES,
    *memory.FITS,
)
