"""What a row of the tour is, and the small model, batch and optimizer that all rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch

from course_lib.data import batch
from course_lib.mesh import Mesh
from course_lib.model import Decoder, build_model, tiny_config
from course_lib.trace.memory import StateBytes

STEPS = 8
BATCH, SEQ = 8, 64  # sequences of all ranks together, and positions of each
LEARNING_RATE = 3e-3
CONFIG = tiny_config(max_seq_len=SEQ)
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens (B, S) and targets (B, S)


@dataclass(frozen=True)
class Report:
    """What one rank has to say after training. Its ledger holds the last step alone."""

    losses: list[float]
    state: StateBytes
    peak_activation_bytes: int


@dataclass(frozen=True)
class Technique:
    """``train`` runs on every rank of ``mesh``; ``formula`` is what all ranks together send on
    each axis in one optimizer step, in bytes, from shapes alone (tokens that travel to their
    experts: from what the twin's routers want). ``twin`` is the row of one process whose losses
    this one must have."""

    name: str
    lesson: str
    sentence: str
    mesh: Mapping[str, int]
    train: Callable[[], Report]
    formula: Callable[[], dict[str, Fraction]]
    twin: str = "serial"

    @property
    def ranks(self) -> int:
        """How many ranks it needs."""
        return prod(size for axis, size in self.mesh.items() if axis != "ep")  # ep is inside dp


def parts() -> tuple[Decoder, torch.optim.Optimizer]:
    """The same model and optimizer for every technique."""
    model = build_model(CONFIG, seed=0)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def rows(step: int, mesh: Mesh) -> Batch:
    """This rank's share of the batch of ``step``."""
    return rows_of(step, mesh.dp.rank, mesh.dp.size)


def rows_of(step: int, rank: int, ranks: int) -> Batch:
    """The share of ``rank`` when ``ranks`` read the batch of ``step``."""
    return batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, dp_rank=rank, dp_size=ranks)
