"""Expert parallelism: a mixture of experts replaces each MLP; each rank holds some experts.

=============  ===========================================================
moe            the layer of one process: router, capacity, balance loss
decoder        a model with such layers, and its loss
parallel       parallelize: experts divided among ranks, tokens sent to their experts; ExpertSync:
               which gradients are summed over which ranks
formulas       bytes sent, parameters per rank, saved activations: course_lib.formulas.ep
=============  ===========================================================
"""

from course_lib.ep.decoder import add_experts, auxiliary_loss, loss_sum, moe_layers
from course_lib.ep.moe import Load, MoE, balance_loss, imbalance, route
from course_lib.ep.parallel import (
    ExpertParallelMoE,
    ExpertSync,
    expert_parameters,
    parallelize,
    shared_parameters,
)
from course_lib.formulas import ep as formulas
from course_lib.formulas.ep import (
    even_wire_bytes,
    parameters_per_rank,
    reference_saved_bytes,
    saved_bytes,
    saved_per_layer,
    wire_bytes,
)
