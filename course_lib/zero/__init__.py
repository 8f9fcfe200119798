"""ZeRO: optimizer state, gradients and parameters in shards over the data-parallel ranks."""

from course_lib.zero.cost import peak_bytes, state_bytes, wire_bytes
from course_lib.zero.flat import FlatParameter, padded, reduce_dtype
from course_lib.zero.sharded import MakeOptimizer, Sharded
from course_lib.zero.stage3 import Unit, Zero3
from course_lib.zero.stages import BUCKET_BYTES, Zero1, Zero2

__all__ = [
    "BUCKET_BYTES",
    "FlatParameter",
    "MakeOptimizer",
    "Sharded",
    "Unit",
    "Zero1",
    "Zero2",
    "Zero3",
    "padded",
    "peak_bytes",
    "reduce_dtype",
    "state_bytes",
    "wire_bytes",
]
