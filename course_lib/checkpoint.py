"""Sharded checkpoints: saved under one mesh, loaded under another, not one bit changed.

A checkpoint knows no ranks. Each weight is one tensor of its full shape under its name in the
model, and so is each tensor of its optimizer state (``name:exp_avg``); what a rank holds are boxes
in these tensors. Saving, every rank writes its boxes, what several hold once; loading, it reads
the parts of the saved boxes that lie in its own. So what matters is only where a rank's values
belong: the whole tensor (one process, data parallelism), a box cut along one dim (tensor
parallelism), or a run of a flattened tensor (ZeRO), which is a few boxes.

A weight is saved in the precision it is updated in: ZeRO's float32 master, not its bfloat16 copy.
The model must have the same names and shapes when it is loaded; hyperparameters are the caller's.
Underneath is torch.distributed.checkpoint: it dedups, checks that the boxes fill their tensor, and
plans who reads which file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from os import PathLike
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from course_lib.mesh import Axis, Mesh
from course_lib.zero import Sharded

Optimizer = torch.optim.Optimizer | Sharded
Run = tuple[nn.Parameter, int, Tensor]  # whose, number of its first element, values, one after one


def save(path: str | PathLike[str], model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> None:
    """Write weights and optimizer state into the folder ``path``. Call it on every rank.

    Raises ValueError on a mesh with a pipeline: the stages of a model name their blocks alike.
    """
    _check_no_pipeline(mesh)
    planner = _Saves(_boxes(model, optimizer, mesh.tp))
    with _plainly():
        dcp.save({}, checkpoint_id=path, planner=planner, **_among(mesh.world))


def load(path: str | PathLike[str], model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> None:
    """Read them back under this mesh; gradients are dropped. Call it on every rank.

    Raises ValueError when the checkpoint lacks a tensor or has it with another shape, and on a
    mesh with a pipeline.
    """
    _check_no_pipeline(mesh)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    _make_state(model, optimizer, {name.split(":")[0] for name in saved if ":" in name})
    planner = _Loads(_boxes(model, optimizer, mesh.tp))
    with _plainly():
        dcp.load({}, checkpoint_id=path, planner=planner, **_among(mesh.world))
    if isinstance(optimizer, Sharded):
        optimizer.refresh()


def _check_no_pipeline(mesh: Mesh) -> None:
    if mesh.pp.size > 1:
        raise ValueError(
            f"checkpoint on a mesh with pp={mesh.pp.size}: every stage counts its blocks from 0, "
            "and one would overwrite the other's; save on a mesh without a pipeline"
        )


# --- what a rank holds, as boxes -------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """``values`` are the part at ``offsets`` of the tensor ``name``, which has ``shape``."""

    name: str
    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> MetadataIndex:
        """What the checkpoint calls it."""
        return MetadataIndex(self.name, Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies."""
        return ChunkStorageMetadata(Size(self.offsets), self.values.shape)


@dataclass(frozen=True)
class _Holder:
    """What an optimizer updates, one parameter or a shard of several; ``runs`` cuts it up."""

    values: Tensor
    parameters: Sequence[nn.Parameter]
    runs: Callable[[Tensor], Iterable[Run]]


def _holders(model: nn.Module, optimizer: Optimizer) -> list[_Holder]:
    flats = optimizer.every_flat if isinstance(optimizer, Sharded) else []
    sharded = {parameter for flat in flats for parameter in flat.parameters}
    plain = [parameter for parameter in model.parameters() if parameter not in sharded]
    return [
        *(_Holder(flat.shard, flat.parameters, flat.own_parts) for flat in flats),
        *(_Holder(parameter, [parameter], partial(_one_run, parameter)) for parameter in plain),
    ]


def _one_run(parameter: nn.Parameter, values: Tensor) -> Iterable[Run]:
    return [(parameter, 0, values.view(-1))]


def _inner(optimizer: Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, Sharded) else optimizer


def _boxes(model: nn.Module, optimizer: Optimizer, tp: Axis) -> list[Box]:
    """All that this rank holds: weights, and the optimizer's state of each."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: list[Box] = []
    for holder in _holders(model, optimizer):
        state = _inner(optimizer).state.get(holder.values, {})
        for key, tensor in {"": holder.values.detach(), **state}.items():
            suffix = f":{key}" if key else ""
            if tensor.shape == holder.values.shape:
                for parameter, first, run in holder.runs(tensor):
                    found += _in_whole(names[parameter] + suffix, parameter, first, run, tp)
            elif tensor.numel() == 1:  # a counter of the shard is one of each parameter in it
                zeros = (0,) * tensor.dim()
                each = [names[parameter] + suffix for parameter in holder.parameters]
                found += [Box(name, tensor, zeros, tuple(tensor.shape)) for name in each]
            else:
                raise ValueError(
                    f"optimizer state {key!r} of shape {list(tensor.shape)} for a weight of shape "
                    f"{list(holder.values.shape)}: only state of the weight's shape, or of one "
                    "number, can be cut anew for another mesh"
                )
    return found


def _in_whole(
    name: str, parameter: nn.Parameter, first: int, run: Tensor, tp: Axis
) -> Iterator[Box]:
    """The boxes of a run, placed in the tensor that all tensor-parallel ranks hold together."""
    start, shape = [0] * parameter.dim(), list(parameter.shape)
    dim = getattr(parameter, "tp_dim", None)
    if dim is not None:
        sharers = getattr(parameter, "tp_sharers", None)
        holders = sharers.size if sharers else 1
        start[dim] = shape[dim] * (tp.rank // holders)
        shape[dim] *= tp.size // holders
    for offsets, values in run_boxes(parameter.shape, first, run):
        placed = tuple(a + b for a, b in zip(start, offsets, strict=True))
        yield Box(name, values, placed, tuple(shape))


def run_boxes(
    shape: Sequence[int], first: int, run: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cut a run of a flattened tensor of ``shape`` into boxes: (offsets, values), views of it.

    Of a matrix: the end of a row, whole rows, the beginning of a row; deeper ones likewise.
    """
    if not shape:
        yield (), run.view(())
        return
    row, at = prod(shape[1:]), 0
    while at < len(run):
        index, inside = divmod(first + at, row)
        count = (len(run) - at) // row if inside == 0 else 0
        length = count * row or min(row - inside, len(run) - at)
        part = run[at : at + length]
        if count:
            yield (index, *[0] * len(shape[1:])), part.view(count, *shape[1:])
        else:
            for offsets, values in run_boxes(shape[1:], inside, part):
                yield (index, *offsets), values[None]
        at += length


def _make_state(model: nn.Module, optimizer: Optimizer, with_state: set[str]) -> None:
    """Have the optimizer make the state that a checkpoint has: it does so in its first step.

    What that step changes is about to be read from the checkpoint.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    inner = _inner(optimizer)
    inner.zero_grad()
    for holder in _holders(model, optimizer):
        saved = any(names[parameter] in with_state for parameter in holder.parameters)
        if saved and holder.values.requires_grad and holder.values not in inner.state:
            holder.values.grad = torch.zeros_like(holder.values)
    inner.step()
    inner.zero_grad()


# --- torch.distributed.checkpoint ------------------------------------------------------------


class _Saves(dcp.DefaultSavePlanner):
    """Writes ``boxes``; torch's own planner drops what several ranks hold."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {box.index: box for box in boxes}

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        self.plan = SavePlan([_write(box) for box in self._boxes.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of a box."""
        return self._boxes[index].values


def _write(box: Box) -> WriteItem:
    properties = TensorProperties.create_from_tensor(box.values)
    data = TensorWriteData(box.chunk, properties, Size(box.shape))
    return WriteItem(box.index, WriteItemType.SHARD, tensor_data=data)


class _Loads(dcp.DefaultLoadPlanner):
    """Reads into ``boxes`` what of the saved ones lies in them."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {box.index: box for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of each box with those in the checkpoint."""
        return LoadPlan([item for box in self._boxes.values() for item in self._reads(box)])

    def _reads(self, box: Box) -> list[ReadItem]:
        assert self.metadata is not None, "set by torch before"
        saved: Any = self.metadata.state_dict_metadata.get(box.name)
        if saved is None:
            raise ValueError(
                f"the checkpoint has no {box.name}: it was saved from a model with other names, or "
                "with another optimizer"
            )
        if tuple(saved.size) != box.shape:
            raise ValueError(
                f"{box.name} has shape {list(saved.size)} in the checkpoint and {list(box.shape)} "
                "in this model; build it with the sizes that were saved"
            )
        return create_read_items_for_chunk_list(box.name, saved, [box.chunk])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the values of a box go."""
        return self._boxes[index].values


def _among(world: Axis) -> dict[str, Any]:
    return {"process_group": world.group, "no_dist": world.size == 1}


@contextmanager
def _plainly() -> Iterator[None]:
    """What went wrong on some rank is raised as it was there, on every rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on one rank
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
