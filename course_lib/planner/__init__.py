"""Plan a run before renting a GPU: memory, traffic, bubble and step time of a configuration.

Nothing here imports torch. The closed forms of each technique are in :mod:`course_lib.formulas`.
"""

from course_lib.planner.catalog import Dtype, Model, custom_model, model, models
from course_lib.planner.compare import compare, sensitivity
from course_lib.planner.configuration import Configuration, configure
from course_lib.planner.estimate import estimate
from course_lib.planner.hardware import Hardware, Link, hardware, hardware_names
from course_lib.planner.search import search
from course_lib.planner.serve import serve
