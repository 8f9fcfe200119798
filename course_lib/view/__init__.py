"""Pictures of what ranks do, send and keep; the only part that needs matplotlib.

Every picture is a Figure that belongs to no pyplot state, with its sentence in ``.caption``.
"""

from course_lib.view.export import perfetto
from course_lib.view.gantt import timeline
from course_lib.view.style import Picture

__all__ = ["Picture", "perfetto", "timeline"]
