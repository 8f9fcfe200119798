"""Sharded checkpoints: saved under one mesh, loaded under another, not one bit changed.

A checkpoint does not depend on ranks. Each weight is one tensor of its full shape under its name in
the whole model, and so is each tensor of its optimizer state (``name:exp_avg``). A rank holds boxes
in these tensors. On save, every rank writes its boxes, and a box that several ranks hold is written
once. On load, it reads where the saved boxes overlap with its own. The boxes of a rank are:

=====================  ==================================================================
held under             is, of the whole tensor
=====================  ==================================================================
dp, cp, one process    all of it
pp, ep                 all of it, of some blocks or experts; a tied pair is one tensor
tp                     the box of its ShardSpec; the padding of a vocabulary is in no box
ZeRO                   a run of the flattened tensor (or of tp's box), which is a few boxes
=====================  ==================================================================

A weight is saved in the precision it is updated in: ZeRO's float32 master, not its bfloat16 copy.
Numbers of the training, such as its count of steps, are saved beside them if the caller gives them;
hyperparameters, learning-rate schedules and random states are the caller's.

boxes finds a weight's name in the whole model and the place of its values; files has
torch.distributed.checkpoint write and read them: it drops duplicates, checks that the boxes fill
their tensor, and plans which rank reads which file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from os import PathLike

import torch

from course_lib.checkpoint import files
from course_lib.checkpoint.boxes import Box, Model, Optimizer, State, holders, tied_copies
from course_lib.mesh import Mesh
from course_lib.zero import Sharded

Optimizers = Optimizer | Sequence[Optimizer]
PROGRESS = "progress."  # in the name of a number that belongs to no weight


def save(
    path: str | PathLike[str],
    model: Model,
    optimizers: Optimizers,
    mesh: Mesh,
    progress: Mapping[str, float] | None = None,
) -> None:
    """Write weights and optimizer state into the folder ``path``. Call it on every rank.

    ``model`` is this rank's decoder, or its stages by number (``pp.make_stages``'s result).
    ``optimizers`` is what updates it, or several, each with weights of its own (with experts under
    ZeRO one over edp and one over dp_cp); ``()`` saves weights alone, of a model that no ZeRO
    holds. ``progress`` are numbers to be saved with them, the same on all ranks. The folder must
    be one that all ranks see. A save that broke off leaves a folder that :func:`load` refuses.

    Raises ValueError when the folder holds a checkpoint, when an optimizer has weights that are
    none of the model's, and for optimizer state that cannot be cut.
    """
    several = _several(optimizers)

    def own() -> list[Box]:
        copies = tied_copies(model)
        boxes = [
            box
            for holder in holders(model, several)
            for box in holder.boxes(State.of(holder), without=copies)
            if not box.is_padding
        ]
        return boxes + [_number(PROGRESS + key, value) for key, value in (progress or {}).items()]

    files.write(path, own, mesh.world)


def load(
    path: str | PathLike[str], model: Model, optimizers: Optimizers, mesh: Mesh
) -> dict[str, float]:
    """Read them back under this mesh; gradients are dropped. Call it on every rank.

    Returns the ``progress`` that was saved, {} if there was none.

    Arguments as of :func:`save`; ``optimizers`` = ``()`` reads weights alone. What an optimizer
    knew before is forgotten; a checkpoint from before the first step leaves it without state.
    Padding becomes zeros. A narrower dtype is read exactly into a wider one.

    Raises ValueError, the same on every rank and before anything is changed, when there is no
    finished checkpoint, when it has other names (too few or too many), shapes or state than this
    model and these optimizers, or a dtype of which bits would be lost. A broken file is a
    ValueError too, and so are weights that were trained for different numbers of steps and would
    share a shard; but by then some of the model is read.
    """
    several = _several(optimizers)
    fresh: list[State] = []
    padding: list[Box] = []
    numbers: list[Box] = []

    def own(saved: Collection[str]) -> list[Box]:
        with_state = {name.split(":")[0] for name in saved if ":" in name}
        fresh.extend(State.empty(each, with_state) for each in holders(model, several))
        found = [box for state in fresh for box in state.holder.boxes(state)]
        padding.extend(box for box in found if box.is_padding)
        numbers.extend(_number(name, 0.0) for name in saved if name.startswith(PROGRESS))
        return [*numbers, *(box for box in found if not box.is_padding)]

    files.read(path, own, mesh.world, with_state=bool(several))
    for box in padding:
        box.values.zero_()
    for state in fresh:
        state.give()
    for optimizer in several:
        optimizer.zero_grad()
        if isinstance(optimizer, Sharded):
            optimizer.refresh()
    return {box.name.removeprefix(PROGRESS): box.values.item() for box in numbers}


def _number(name: str, value: float) -> Box:
    return Box(name, torch.tensor(value, dtype=torch.float64), (), ())


def _several(optimizers: Optimizers) -> list[Optimizer]:
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
