"""Bytes that sequence parallelism sends and saves, from shapes alone. n is the size of the axis."""

from __future__ import annotations

from fractions import Fraction

from course_lib.formulas import recompute
from course_lib.formulas.moves import entering, leaving
from course_lib.formulas.parameters import Sizes, norm_parameters
from course_lib.formulas.recompute import saved_by_block
from course_lib.ledger import wire


def wire_bytes(
    config: Sizes,
    sequences: int,
    seq_len: int,
    n: int,
    *,
    again: bool = False,
    forwards: int = 1,
    shards: int = 1,
    regions: int = 2,
) -> Fraction:
    """Return the bytes per rank and optimizer step for activations and replicated parameters.

    A layer has 2 all-gathers and 2 reduce-scatters of x_BSD in every forward (``forwards=2`` with
    full recomputation) and in backward, 2 gathers more with ``again``; embedding and head have 2
    and 2, one gather more with ``again``. A layer has 2 ``regions``, attention and MLP; 1 where
    experts replace the MLP. Then one all-reduce of the gradients of replicated parameters.
    Under ZeRO over ``shards`` ranks each sums its shards: then it is the average over these ranks.
    ``formulas.tp`` counts the loss and the key and value heads that several ranks hold.
    All parameters are trained; with frozen ones fewer bytes are sent.
    """
    size = sequences * seq_len * config.hidden * config.dtype.itemsize
    enter, leave = entering(size, n, rows=True, again=again), leaving(size, n, rows=True)
    return (
        regions * config.layers * (enter.wire(forwards) + leave.wire(forwards))
        + leave.wire()
        + enter.wire()
        + wire("all_reduce", replicated_parameters(config) * config.dtype.itemsize, n) / shards
    )


def replicated_parameters(config: Sizes) -> int:
    """Return how many parameters are replicated: norms; gpt: biases after a sum, positions."""
    return config.layers * replicated_per_layer(config) + replicated_at_ends(config)


def replicated_per_layer(config: Sizes, *, regions: int = 2) -> int:
    """Return the replicated parameters of a layer with 2 ``regions``, or 1 beside experts."""
    biases = regions * config.hidden if config.family == "gpt" else 0
    return 2 * norm_parameters(config) + biases


def replicated_at_ends(config: Sizes, first: bool = True, last: bool = True) -> int:
    """Return the replicated parameters of the ``first`` stage and of the ``last``."""
    positions = config.max_seq_len * config.hidden if config.family == "gpt" else 0
    return first * positions + last * norm_parameters(config)


def saved_per_block(
    config: Sizes, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Return the bytes that a rank saves for one block: the gathered input, 1/n of all else.

    With ``again`` 1/n of the input too. A mask takes one byte here: see tp.RankDropout.
    """
    saved = saved_by_block(config, sequences, seq_len)
    keys_values = saved.keys_values // min(n, config.kv_heads)
    entered = saved.entered // n if again else saved.entered
    divided = saved.outside + saved.inside + saved.masks // config.dtype.itemsize
    return divided // n + entered + keys_values + saved.rope_cache


def saved_outside_blocks(
    config: Sizes, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Return the bytes that a rank saves for embedding and LM head, without the vocabulary's.

    1/n of the rows, and the gathered input of the head; with ``again`` 1/n of that too.
    ``formulas.tp.saved_by_vocabulary`` counts the rest.
    """
    saved = recompute.saved_outside_blocks(config, sequences, seq_len)
    divided = saved.positions + saved.norm + saved.mask // config.dtype.itemsize
    return divided // n + (saved.entered // n if again else saved.entered)


def saved_bytes(config: Sizes, sequences: int, seq_len: int, n: int, *, again: bool = False) -> int:
    """Return the bytes that a rank saves in one forward, without the vocabulary's."""
    shape = config, sequences, seq_len, n
    blocks = config.layers * saved_per_block(*shape, again=again)
    return blocks + saved_outside_blocks(*shape, again=again)
