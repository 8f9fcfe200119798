"""The rows of the tour: one entry per technique, with a training function and byte formulas.

To add a technique, write a file in this folder and add its entries below, as described in
:mod:`course_lib.tour.technique`.
"""

from course_lib.tour.technique import Technique
from course_lib.tour.techniques.compose import COMPOSED
from course_lib.tour.techniques.cp import CONTEXT_PARALLEL
from course_lib.tour.techniques.dp import DATA_PARALLEL
from course_lib.tour.techniques.ep import EXPERT_PARALLEL
from course_lib.tour.techniques.inference import INFERENCE
from course_lib.tour.techniques.pp import PIPELINES
from course_lib.tour.techniques.reference import SINGLE_PROCESS
from course_lib.tour.techniques.tp import TENSOR_PARALLEL
from course_lib.tour.techniques.zero import ZERO

TECHNIQUES: list[Technique] = [
    SINGLE_PROCESS,
    *DATA_PARALLEL,
    *ZERO,
    *TENSOR_PARALLEL,
    *PIPELINES,
    *CONTEXT_PARALLEL,
    *EXPERT_PARALLEL,
    *COMPOSED,
    *INFERENCE,
]
