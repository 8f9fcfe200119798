"""Context-parallel attention in the reference model, and what the model then saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from course_lib.cp.layout import PositionsCheck, SequenceLayout
from course_lib.cp.ring import ring_saved_bytes
from course_lib.mesh import Axis
from course_lib.model import Attention, Decoder, ModelConfig, causal_attention
from course_lib.recompute import saved_by_stage

ParallelAttention = Callable[..., Tensor]  # (q, k, v, axis=, layout=)


def parallelize(
    model: Decoder, attention: ParallelAttention, axis: Axis, layout: SequenceLayout
) -> Decoder:
    """Make ``attention`` the core of every attention of ``model``, in place; keep the weights.

    The model then raises ValueError for positions other than those that ``cp.shard`` returns on
    this rank, and for more positions than the model was built for. Raises ValueError if the core
    was replaced before.
    """
    check = PositionsCheck(axis, layout, model.config.max_seq_len)
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    if any(module.core is not causal_attention for module in modules):
        raise ValueError(
            "expected the reference model's attention, got another core: parallelize the model "
            "once, and call recompute.selective after that, which wraps the core that is there"
        )
    for module in modules:
        module.core = partial(attention, axis=axis, layout=layout)
        module.register_forward_pre_hook(check)
    return model


def saved_bytes(
    config: ModelConfig,
    sequences: int,
    seq_len: int,
    n: int,
    attention_bytes: int,
    *,
    output_copied: bool = False,
) -> int:
    """Return the bytes that a rank saves in one forward, ``attention_bytes`` of each attention.

    Tokens and targets are not counted. Outside attention a rank saves as much as one process saves
    for sequences of S/n. The next linear saves the output of attention, which ``attention_bytes``
    already counts. With ``output_copied`` it is another tensor and counts too: Ulysses sends the
    output back by all-to-all.
    """
    reference = ring_saved_bytes(config, sequences, seq_len, n)
    copy = sequences * seq_len * config.hidden * config.dtype.itemsize // n
    more = attention_bytes - reference + (copy if output_copied else 0)
    return saved_by_stage(config, sequences, seq_len // n) + config.layers * more
