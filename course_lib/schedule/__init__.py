"""Pipeline schedules as data, and the one Span type. No torch."""

from course_lib.schedule.data import (
    Action,
    Schedule,
    ScheduleError,
    check_sizes,
    from_rows,
    looped,
    read_csv,
    v_shape,
    write_csv,
)
from course_lib.schedule.named import (
    SCHEDULES,
    gpipe,
    interleaved,
    make,
    naive,
    one_f_one_b,
    placement,
    predicted_bubble,
)
from course_lib.schedule.score import lower_bound, score
from course_lib.schedule.search import searched
from course_lib.schedule.simulate import Costs, Simulation, bubble, makespan, simulate
from course_lib.schedule.span import Span, from_zero
from course_lib.schedule.text import drawing, scored
from course_lib.schedule.validate import validate
from course_lib.schedule.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "bubble",
    "check_sizes",
    "drawing",
    "dualpipe_v",
    "from_rows",
    "from_zero",
    "gpipe",
    "interleaved",
    "looped",
    "lower_bound",
    "make",
    "makespan",
    "naive",
    "one_f_one_b",
    "placement",
    "predicted_bubble",
    "read_csv",
    "score",
    "scored",
    "searched",
    "simulate",
    "v_shape",
    "validate",
    "write_csv",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
