"""Expert parallelism: a mixture of experts replaces each MLP; each rank holds some experts.

=============  ===========================================================
moe            the layer of one process: router, capacity, balance loss
decoder        a model with such layers, and its loss
parallel       parallelize: experts divided among ranks, tokens sent to their experts; ExpertSync:
               which gradients are summed over which ranks
formulas       bytes sent, parameters per rank, saved activations
=============  ===========================================================
"""

from course_lib.ep.decoder import add_experts, auxiliary_loss, loss_sum, moe_layers
from course_lib.ep.formulas import (
    even_wire_bytes,
    parameters_per_rank,
    reference_saved_bytes,
    saved_beside_experts,
    saved_bytes,
    wire_bytes,
)
from course_lib.ep.moe import Load, MoE, balance_loss, imbalance, route
from course_lib.ep.parallel import (
    ExpertParallelMoE,
    ExpertSync,
    expert_parameters,
    parallelize,
    shared_parameters,
)

__all__ = [
    "ExpertParallelMoE",
    "ExpertSync",
    "Load",
    "MoE",
    "add_experts",
    "auxiliary_loss",
    "balance_loss",
    "even_wire_bytes",
    "expert_parameters",
    "imbalance",
    "loss_sum",
    "moe_layers",
    "parallelize",
    "parameters_per_rank",
    "reference_saved_bytes",
    "route",
    "saved_beside_experts",
    "saved_bytes",
    "shared_parameters",
    "wire_bytes",
]
