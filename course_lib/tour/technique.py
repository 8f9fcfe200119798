"""What a row of the tour is, and the small model, batch and optimizer that all rows share.

To add a row, write in ``techniques/`` a function that trains on a rank and three formulas, each a
function of the :class:`Job`, and put the :class:`Technique` into ``TECHNIQUES``::

    Technique(
        name="tp-8",                     # at most 19 characters: the table has 80 columns
        lesson="05",
        sentence="Every rank holds an eighth of every matrix.",
        mesh={"tp": 8},
        train=...,                       # job -> Report, on every rank
        formula=...,                     # job -> bytes on each axis, all ranks together
        state_formula=...,               # job -> bytes between steps, of the fullest rank
        peak_activation_formula=...,     # job -> bytes saved for backward, of the fullest rank
    )

Formulas are closed forms from shapes. They may call those of the techniques' own files, and must
not look at what was run: else they could not be wrong. The row fails when any of the numbers is
off by one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import nn

from course_lib.data import batch
from course_lib.formulas.held import COUNT_BYTES, adam_state_bytes
from course_lib.mesh import Axis
from course_lib.model import Decoder, ModelConfig, build_model, parameter_sizes, tiny_config
from course_lib.recompute import ID_BYTES, saved_by_stage
from course_lib.trace.memory import StateBytes

CONFIG = tiny_config(max_seq_len=64)
LEARNING_RATE = 3e-3
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens (B, S) and targets (B, S)


@dataclass(frozen=True)
class Job:
    """What every row trains: a model, on ``sequences`` of ``seq_len`` positions in each step."""

    config: ModelConfig = CONFIG
    sequences: int = 8
    seq_len: int = 64
    steps: int = 8

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return self.config.dtype.itemsize

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the whole model."""
        return sum(parameter_sizes(self.config)) * self.width

    def model(self) -> Decoder:
        """The same weights for every technique."""
        return build_model(self.config, seed=0)

    def rows(self, step: int, axis: Axis) -> Batch:
        """This rank's share of the batch of ``step``; the ranks of ``axis`` read it together."""
        return self.rows_of(step, axis.rank, axis.size)

    def rows_of(self, step: int, rank: int, ranks: int) -> Batch:
        """The share of ``rank`` when ``ranks`` read the batch of ``step``."""
        return batch(
            step,
            seed=0,
            batch_size=self.sequences,
            seq_len=self.seq_len,
            dp_rank=rank,
            dp_size=ranks,
        )


JOB = Job()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every row."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True)
class Report:
    """Results of one rank after training. Ledger and kernel count hold the last step only."""

    losses: list[float]
    state: StateBytes
    peak_activation_bytes: int


@dataclass(frozen=True)
class Technique:
    """``train`` runs on every rank of ``mesh``. ``formula`` is what all ranks together send on
    each axis in one optimizer step; ``state_formula`` are parameters, gradients and optimizer of
    the fullest rank after it; ``peak_activation_formula`` is what autograd saves for backward on
    the fullest rank. All are bytes, computed from shapes alone (for expert parallelism also from
    the routes of the reference). ``reference`` names the one-process row with the same losses."""

    name: str
    lesson: str
    sentence: str
    mesh: Mapping[str, int]
    train: Callable[[Job], Report]
    formula: Callable[[Job], dict[str, Fraction]]
    state_formula: Callable[[Job], int]
    peak_activation_formula: Callable[[Job], int]
    reference: str = "serial"

    @property
    def ranks(self) -> int:
        """How many ranks it needs."""
        return prod(size for axis, size in self.mesh.items() if axis != "ep")  # ep is inside dp


# --- formulas that several rows share ------------------------------------------------------------


def whole_state_bytes(job: Job) -> int:
    """:func:`adam_state_bytes` of the whole model."""
    return adam_state_bytes(parameter_sizes(job.config), job.width)


def replica_peak_bytes(job: Job, replicas: int, micro_batches: int = 1) -> int:
    """Kept by one of ``replicas`` of the whole model that share the batch, micro-batch by
    micro-batch; tokens and targets of all of them stay as long as those of one."""
    sequences = job.sequences // replicas
    kept = saved_by_stage(job.config, sequences // micro_batches, job.seq_len)
    return kept + 2 * ID_BYTES * sequences * job.seq_len + COUNT_BYTES
