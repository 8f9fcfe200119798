"""ZeRO: optimizer state, gradients and parameters in shards over the data-parallel ranks."""

from course_lib.formulas import zero as formulas
from course_lib.formulas.zero import padded, peak_bytes, state_bytes, wire_bytes
from course_lib.zero.flat import FlatParameter
from course_lib.zero.sharded import MakeOptimizer, Sharded
from course_lib.zero.stage3 import Unit, Zero3
from course_lib.zero.stages import BUCKET_BYTES, Zero1, Zero2
