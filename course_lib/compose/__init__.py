"""One model under all axes at once: the techniques meet here.

::

    plan = compose.Plan(region=sp.REGION, zero=1, schedule="1f1b", micro_batches=4, max_norm=1.0)
    mesh = make_mesh(tp=2, cp=2, dp=2, pp=2)
    trainer = compose.parallelize(build_model(config), mesh, plan, adam)
    step = trainer.step(tokens, targets)  # the rows of this rank's dp replica

=============  ===============================================================================
plan           what one chooses: Plan, and the cores of attention; data
refusals       which combinations do not work or should not be used, in sentences
build          the techniques applied to the model, in order; the experts' auxiliary loss
gradients      which gradients are summed over which ranks, in what order, and their norm
trainer        parallelize and the step
formulas       bytes on each axis: course_lib.formulas.compose
=============  ===============================================================================
"""

from course_lib.compose.plan import GATHER, RING, ULYSSES, Core, Experts, LossScale, Plan, grid
from course_lib.compose.refusals import discouraged, refusals
from course_lib.compose.trainer import Step, Trainer, parallelize
from course_lib.formulas import compose as formulas
from course_lib.formulas.compose import PartSize, part_sizes, wire_bytes
