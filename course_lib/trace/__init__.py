"""Measured spans on one clock, the memory meters, and the bytes that the kernel counted."""

from course_lib.trace.memory import (
    PeakLiveBytes,
    SavedActivations,
    StateBytes,
    state_bytes,
)
from course_lib.trace.spans import TOO_BUSY, Sleep, Trace, overshoot
from course_lib.trace.traffic import (
    Matrix,
    SentBytes,
    SocketMeter,
    header_bytes,
    traffic_matrices,
)
