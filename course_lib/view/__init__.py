"""Pictures of the work, the traffic and the memory of ranks; all code that needs matplotlib.

Every picture is a Figure outside pyplot's state, with its caption in ``.caption``. Sliders need
ipywidgets and are imported separately from ``course_lib.view.sliders``.
"""

from course_lib.view.code import code_lines, show_source
from course_lib.view.export import perfetto
from course_lib.view.fit_plot import fit_plot
from course_lib.view.gantt import timeline
from course_lib.view.memory import live_plot, memory_plot
from course_lib.view.schedules import schedule_picture
from course_lib.view.serving import serving_plot
from course_lib.view.style import Picture
from course_lib.view.terminal import terminal_timeline
from course_lib.view.traffic import ledger_plot, traffic_plot
