"""Boxes to files and back, by torch.distributed.checkpoint.

Its planners are asked on every rank what to write or read; what one of them raises is raised on
all ranks. The file ``.metadata`` is written last: a folder without it is no checkpoint.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
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

from course_lib.checkpoint.boxes import Box
from course_lib.mesh import Axis

Place = str | PathLike[str]
FINISHED = ".metadata"


def write(path: Place, own: Callable[[], list[Box]], world: Axis) -> None:
    """Write the boxes that ``own`` gives on each rank, what several hold once."""

    def new() -> list[Box]:
        if Path(path).is_file():
            raise ValueError(f"{path} is a file, and a checkpoint is a folder: choose another name")
        if (Path(path) / FINISHED).exists():
            raise ValueError(
                f"{path} holds a checkpoint: writing over it could end in a mixture of both; "
                "choose another folder, or remove this one"
            )
        return own()

    with _plainly():
        dcp.save({}, checkpoint_id=path, planner=_Saves(new, path), **_among(world))


def read(
    path: Place, own: Callable[[Collection[str]], list[Box]], world: Axis, *, with_state: bool
) -> None:
    """Fill the boxes that ``own`` gives on each rank, when it is told the names in the files.

    Without ``with_state`` the files may contain optimizer state that is not read.
    """
    with _plainly(path):
        dcp.load({}, checkpoint_id=path, planner=_Loads(own, with_state), **_among(world))


def _index(box: Box) -> MetadataIndex:
    return MetadataIndex(box.name, Size(box.offsets))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(box.offsets), box.values.shape)


class _Saves(dcp.DefaultSavePlanner):
    """Writes boxes; torch's own planner drops what several ranks hold."""

    def __init__(self, own: Callable[[], list[Box]], path: Place) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._own, self._path = own, str(Path(path).absolute())
        self._boxes: dict[MetadataIndex, Box] = {}

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        self._boxes = {_index(box): box for box in self._own()}
        items = [_write(box) for box in self._boxes.values()]
        self.plan = SavePlan(items, planner_data=self._path)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On one rank, which knows all plans: files in two folders would be no checkpoint."""
        first, *others = (plan.planner_data for plan in all_plans)
        for rank, place in enumerate(others, start=1):
            if place != first:
                raise ValueError(
                    f"rank {rank} saves to {place} and rank 0 to {first}: give all ranks the same "
                    "folder, on a disk that all of them see"
                )
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of a box."""
        return self._boxes[index].values


def _write(box: Box) -> WriteItem:
    properties = TensorProperties.create_from_tensor(box.values)
    data = TensorWriteData(_chunk(box), properties, Size(box.shape))
    return WriteItem(_index(box), WriteItemType.SHARD, tensor_data=data)


class _Loads(dcp.DefaultLoadPlanner):
    """Reads into boxes what of the saved ones lies in them."""

    def __init__(self, own: Callable[[Collection[str]], list[Box]], with_state: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._own, self._with_state = own, with_state
        self._boxes: dict[MetadataIndex, Box] = {}

    @property
    def _saved(self) -> dict[str, Any]:
        assert self.metadata is not None, "set by torch before"
        return self.metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of each box with those in the checkpoint."""
        boxes = self._own(self._saved)
        _check_names(boxes, self._saved)
        for box in boxes:
            _check_kind(box, self._saved[box.name])
        self._boxes = {_index(box): box for box in boxes}
        return LoadPlan([item for box in boxes for item in self._reads(box)])

    def _reads(self, box: Box) -> list[ReadItem]:
        return create_read_items_for_chunk_list(box.name, self._saved[box.name], [_chunk(box)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank, which knows what all of them read: is anything left over?"""
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        left = [name for name in self._saved if name not in wanted]
        if weights := [name for name in left if ":" not in name]:
            raise ValueError(
                f"the checkpoint has {_few(weights)}, of which this model knows nothing: build the "
                "model that was saved, with as many layers and experts"
            )
        if left and self._with_state:
            raise ValueError(
                f"the checkpoint has {_few(left)}, which no optimizer here keeps: make the kind of "
                "optimizer that was saved, over the weights that were trained, or give () to load "
                "weights alone"
            )
        return super().create_global_plan(global_plan)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the values of a box go."""
        return self._boxes[index].values


def _check_names(boxes: Sequence[Box], saved: Collection[str]) -> None:
    missing = list(dict.fromkeys(box.name for box in boxes if box.name not in saved))
    if weights := [name for name in missing if ":" not in name]:
        raise ValueError(
            f"the checkpoint has no {_few(weights)}: it was saved from another model; build the "
            "one that was saved"
        )
    if missing:
        keys = sorted({name.split(":")[1] for name in saved if ":" in name})
        raise ValueError(
            f"the checkpoint has no {_few(missing)}: it was saved with an optimizer of another "
            f"kind, which kept {', '.join(keys)}, or before some weights were trained; make that "
            "kind of optimizer, or give () to load weights alone"
        )


def _check_kind(box: Box, saved: Any) -> None:
    """Of the right shape, and of a dtype that loses nothing."""
    if tuple(saved.size) != box.shape:
        raise ValueError(
            f"{box.name} has shape {list(saved.size)} in the checkpoint and {list(box.shape)} "
            "in this model; build it with the sizes that were saved"
        )
    theirs, ours = saved.properties.dtype, box.values.dtype
    if torch.promote_types(theirs, ours) != ours:
        raise ValueError(
            f"{box.name} is {theirs} in the checkpoint and {ours} here, where bits would be lost; "
            "build the model in that dtype, or use ZeRO, whose master weights have it"
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _among(world: Axis) -> dict[str, Any]:
    return {"process_group": world.group, "no_dist": world.size == 1}


@contextmanager
def _plainly(reading: Place | None = None) -> Iterator[None]:
    """What went wrong on some rank is raised as it was there, on every rank, and not logged too."""
    root = logging.getLogger()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on one rank
        root.addFilter(_not_of_the_loader)
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, ValueError) or reading is None:
                raise cause from None
            raise ValueError(_unreadable(reading, rank, cause)) from cause
        finally:
            root.removeFilter(_not_of_the_loader)


def _not_of_the_loader(record: logging.LogRecord) -> bool:
    """torch's loader logs two tracebacks a rank for a file that is not there, then raises."""
    return record.module != "state_dict_loader"


def _unreadable(path: Place, rank: int, cause: BaseException) -> str:
    if not Path(path).is_dir():
        return f"there is no folder {path}: give the one that was saved to, seen by all ranks"
    if not (Path(path) / FINISHED).exists():
        return f"{path} is no finished checkpoint: it has no {FINISHED}, which is written last"
    return (
        f"the checkpoint {path} cannot be read, says rank {rank} ({type(cause).__name__}: {cause}):"
        " a file is missing or broken; take another checkpoint"
    )
