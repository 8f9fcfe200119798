"""Measured spans on one clock, and memory meters."""

from course_lib.trace.memory import (
    AllocatorPeak,
    PeakLiveBytes,
    SavedActivations,
    StateBytes,
    state_bytes,
)
from course_lib.trace.spans import TOO_BUSY, Sleep, Trace, overshoot

__all__ = [
    "TOO_BUSY",
    "AllocatorPeak",
    "PeakLiveBytes",
    "SavedActivations",
    "Sleep",
    "StateBytes",
    "Trace",
    "overshoot",
    "state_bytes",
]
