"""The serial twin: a small decoder in plain torch that every parallel version is compared with.

Two families. ``llama``: RMSNorm, rotary positions (RoPE), grouped-query attention, SwiGLU, no
biases. ``gpt``: LayerNorm, learned positions, an MLP of two matrices with GELU, biases. Both
add what attention and MLP return to their input (pre-norm residuals).

Letters in names: ``x_BSD`` has the dimensions B, S, D in this order.
  B sequences (batch)   S positions of a sequence   D hidden size      V vocabulary
  H query heads         G key and value heads       K size of a head   F inner size of the MLP
  R = K/2 pairs of a head that RoPE rotates

The parts are made to be cut: projections are separate ``nn.Linear``; attention and MLP read the
number of heads off their input, so that a linear may return a share of them; a block runs alone
on ``(x_BSD, positions_S)``; :meth:`Decoder.stage` is a slice for a pipeline; ``Attention.core``
may be replaced. Positions are passed, never counted, because a rank may hold any part of a
sequence.
"""

from course_lib.model.config import ModelConfig, tiny_config
from course_lib.model.counting import block_parameter_count, parameter_count, parameter_sizes
from course_lib.model.decoder import IGNORE_INDEX, Decoder, build_model, loss_sum
from course_lib.model.layers import (
    Attention,
    AttentionCore,
    Block,
    causal_attention,
    rotary_angles,
    rotate,
)

__all__ = [
    "IGNORE_INDEX",
    "Attention",
    "AttentionCore",
    "Block",
    "Decoder",
    "ModelConfig",
    "block_parameter_count",
    "build_model",
    "causal_attention",
    "loss_sum",
    "parameter_count",
    "parameter_sizes",
    "rotary_angles",
    "rotate",
    "tiny_config",
]
