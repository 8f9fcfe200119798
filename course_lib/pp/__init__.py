"""Pipeline parallelism: one engine that runs any schedule on ranks.

A rank has some stages of the model (slices of its blocks) and runs its row of the schedule. A
forward sends its activations x_bSD (b sequences of the micro-batch) to the next stage's rank; a
backward sends the gradient of its input to the previous one. Between two actions the engine posts
one batch: send this result, receive the next input. It waits only for the input that it needs; it
frees what it sent when a later message from that rank shows that it was received. A backward may
be split: its weight gradient is deferred (:class:`DeferredWeightGradients`).

Bytes, all ranks of the axis together, per step: ``2 B S D`` elements per stage boundary (two
neighboring stages on different ranks), activations forward and gradients back. A tied embedding
adds one all-reduce of its gradient between first and last stage (:func:`wire_bytes`).
"""

from course_lib.formulas.pp import partition, saved_for_wgrad, stage_boundaries, wire_bytes
from course_lib.pp.engine import Batch, Loss, Outcome, StageDone, run, train_step
from course_lib.pp.exchange import Message, messages
from course_lib.pp.measured import measured_rows, pace_of, stage_traces
from course_lib.pp.split import DeferredWeightGradients, weights_of
from course_lib.pp.stages import make_stages, parameters

__all__ = [
    "Batch",
    "DeferredWeightGradients",
    "Loss",
    "Message",
    "Outcome",
    "StageDone",
    "make_stages",
    "measured_rows",
    "messages",
    "pace_of",
    "parameters",
    "partition",
    "run",
    "saved_for_wgrad",
    "stage_boundaries",
    "stage_traces",
    "train_step",
    "weights_of",
    "wire_bytes",
]
