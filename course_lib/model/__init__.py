"""The single-process reference: a small decoder in plain torch, which every technique must equal.

Two families. ``llama``: RMSNorm, rotary positions (RoPE), grouped-query attention, SwiGLU, no
biases. ``gpt``: LayerNorm, learned positions, an MLP of two matrices with GELU, biases. Both
add what attention and MLP return to their input (pre-norm residuals).

Letters in names: ``x_BSD`` has the dimensions B, S, D in this order.
  B sequences (batch)   S positions of a sequence   D hidden size      V vocabulary
  H query heads         G key and value heads       K size of a head   F inner size of the MLP
  R = K/2 pairs of a head that RoPE rotates

The model is made to be parallelized. Projections are separate ``nn.Linear``. Attention reads the
number of heads from the outputs of its linears, so that a linear may return a shard of them. A
block runs alone on ``(x_BSD, positions_S)``, and :meth:`Decoder.stage` is a slice for a pipeline.
Positions are arguments, because a rank may hold any positions of a sequence. What a technique
computes in another way is a field that it sets:

=======================  ===============================================  ======================
field                    computes                                         set by
=======================  ===============================================  ======================
Attention.core           softmax attention of q, k and v                  cp, inference, recompute
Attention.columns        q, k and v of x; of an MLP its input linears     tp
Block.run                the block                                        recompute
Decoder.cross_entropy    the loss of logits and targets                   tp
Decoder.own_rows         the positions that x has between blocks          tp (with sp)
=======================  ===============================================  ======================
"""

from course_lib.formulas.parameters import (
    block_parameter_count,
    parameter_count,
    parameter_sizes,
)
from course_lib.model.config import ModelConfig, accumulation_dtype, tiny_config
from course_lib.model.decoder import IGNORE_INDEX, Decoder, build_model, loss_sum
from course_lib.model.layers import (
    Attention,
    AttentionCore,
    Block,
    causal_attention,
    rotary_angles,
    rotate,
)
