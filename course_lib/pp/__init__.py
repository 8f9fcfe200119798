"""Pipeline parallelism: one engine that runs any schedule on ranks.

A rank holds some stages of the model (slices of its blocks) and does its row of the schedule. A
forward sends its activations x_bSD (b sequences of the micro-batch) to the next stage's rank, a
backward sends the gradient of its input to the previous one. Between two actions the engine posts
one batch: send this result, receive what is needed next. It waits for what it needs and for
nothing else; what was sent is let go when the other rank's answer shows that it has arrived.
A backward may be in two halves, of which only the first is waited for (:class:`WeightsLater`).

Bytes, all ranks of the axis together, per step: ``2 B S D`` elements for each hop (pair of
neighbouring stages on different ranks), activations forward and gradients back; with a tied
embedding also one all-reduce of its gradient between first and last stage (:func:`wire_bytes`).
"""

from course_lib.pp.cut import cut, hops, parameters, partition, wire_bytes
from course_lib.pp.engine import Batch, Loss, Outcome, StageDone, run, train_step
from course_lib.pp.mail import Message, messages
from course_lib.pp.measured import measured_rows, pace_of, stage_traces
from course_lib.pp.split import WeightsLater, kept_for_weights

__all__ = [
    "Batch",
    "Loss",
    "Message",
    "Outcome",
    "StageDone",
    "WeightsLater",
    "cut",
    "hops",
    "kept_for_weights",
    "measured_rows",
    "messages",
    "pace_of",
    "parameters",
    "partition",
    "run",
    "stage_traces",
    "train_step",
    "wire_bytes",
]
