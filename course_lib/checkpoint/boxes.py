"""Describe the shards of a rank as boxes in the tensors of the whole model, with their names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from course_lib.comm import shard_spec
from course_lib.model import Decoder
from course_lib.zero import Sharded

Model = Decoder | Mapping[int, Decoder]
Optimizer = torch.optim.Optimizer | Sharded
Run = tuple[nn.Parameter, int, Tensor]  # whose, number of its first element, values, one after one


def names_in_whole(model: Model) -> dict[nn.Parameter, str]:
    """Return the name in the whole model of every parameter on this rank.

    Raises ValueError when two parameters have one name.
    """
    names: dict[nn.Parameter, str] = {}
    for stage in _stages(model):
        for prefix, module in _modules(stage).items():
            for name, parameter in () if module is None else module.named_parameters(prefix):
                names.setdefault(parameter, name)
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(
            f"two weights of this rank are {twice[0]} in the whole model, and would drift apart: "
            "cut the model into stages after all else, so that what is tied stays one weight"
        )
    return names


def _stages(model: Model) -> list[Decoder]:
    """Return the stages of this rank; a whole decoder is one."""
    return [model] if isinstance(model, Decoder) else list(model.values())


def _modules(stage: Decoder) -> dict[str, nn.Module | None]:
    """By their names in the whole model.

    A slice counts its own blocks from 0, and may have one end of a tied pair alone.
    """
    return {
        "embedding": stage.embedding,
        **{f"blocks.{block.layer}": block for block in stage.blocks},
        "norm": stage.norm,
        "embedding.token" if stage.config.tied else "head": stage.head,
    }


def tied_copies(model: Model) -> set[Tensor]:
    """Return heads that are tied to an embedding on another rank, where it is saved.

    Both have the same bits, but ZeRO shards the flat parameters of the two stages at different
    places: their boxes would overlap.
    """
    stages = _stages(model)
    heads = {s.head.weight for s in stages if s.config.tied and s.head is not None}
    return heads - {s.embedding.token.weight for s in stages if s.embedding is not None}


@dataclass(frozen=True)
class Box:
    """``values`` are the part at ``offsets`` of the tensor ``name``, which has ``shape``."""

    name: str
    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_padding(self) -> bool:
        """Whether it lies outside: rows that fill a vocabulary up."""
        return any(first >= end for first, end in zip(self.offsets, self.shape, strict=True))

    def cut(self) -> Iterator[Box]:
        """Its part inside the tensor, and its part beyond the last row: one or both."""
        inside = max(0, min(len(self.values), self.shape[0] - self.offsets[0]))
        for first, end in ((0, inside), (inside, len(self.values))):
            if first < end:
                offsets = (self.offsets[0] + first, *self.offsets[1:])
                yield Box(self.name, self.values[first:end], offsets, self.shape)


@dataclass(frozen=True)
class Holder:
    """What an optimizer updates as one: a parameter, or a shard of several.

    ``names`` are those of its ``parameters`` in the whole model; ``runs`` cuts a tensor of the
    shape of ``values`` up by parameter. ``optimizer`` and ``group`` are what updates it, None where
    nothing does.
    """

    values: Tensor
    names: Mapping[nn.Parameter, str]
    runs: Callable[[Tensor], Iterable[Run]]
    optimizer: torch.optim.Optimizer | None
    group: dict

    def boxes(self, state: State, without: Set[Tensor] = frozenset()) -> Iterator[Box]:
        """Of its weights, and of a ``state`` of them, those of the parameters ``without`` not."""
        for key, tensor in {"": self.values.detach(), **state.alike}.items():
            for parameter, first, run in self.runs(tensor):
                if parameter not in without:
                    yield from _in_whole(self.names[parameter] + key, parameter, first, run)
        for key, rows in state.numbers.items():
            for (parameter, name), number in zip(self.names.items(), rows, strict=True):
                if parameter not in without:
                    yield Box(name + key, number, (0,) * number.dim(), tuple(number.shape))


def holders(model: Model, optimizers: Sequence[Optimizer]) -> Iterator[Holder]:
    """Yield all that this rank holds of the parameters of ``model``.

    Raises ValueError for an optimizer with weights that are not among them, and for weights that
    are in shards of a Zero3 that is not among the optimizers.
    """
    names = names_in_whole(model)
    inner = [each.optimizer if isinstance(each, Sharded) else each for each in optimizers]
    flats = [flat for each in optimizers if isinstance(each, Sharded) for flat in each.every_flat]
    updaters = {
        values: (optimizer, group)
        for optimizer in inner
        for group in optimizer.param_groups
        for values in group["params"]
    }
    frozen: tuple[None, dict] = (None, {})
    sharded = {parameter for flat in flats for parameter in flat.parameters}
    shards = {flat.shard for flat in flats}
    _check_known([*sharded, *(values for values in updaters if values not in shards)], names)
    for flat in flats:
        mine = {parameter: names[parameter] for parameter in flat.parameters}
        yield Holder(flat.shard, mine, flat.parameter_slices, *updaters.get(flat.shard, frozen))
    for parameter in [one for one in names if one not in sharded]:
        if not parameter.is_contiguous():  # ZeRO-3 leaves a shape without memory
            raise ValueError(
                f"{names[parameter]} has no memory on this rank, as under ZeRO-3: give its Zero3 "
                "among the optimizers"
            )
        mine, whole = {parameter: names[parameter]}, partial(_one_run, parameter)
        yield Holder(parameter, mine, whole, *updaters.get(parameter, frozen))


def _check_known(parameters: Iterable[Tensor], names: Mapping[nn.Parameter, str]) -> None:
    strangers = [parameter for parameter in parameters if parameter not in names]
    if strangers:
        raise ValueError(
            f"{len(strangers)} weights of an optimizer (the first of shape "
            f"{list(strangers[0].shape)}) are none of this model's: make optimizers from the "
            "parameters of the model as it is after parallelize and cut"
        )


def _one_run(parameter: nn.Parameter, values: Tensor) -> Iterable[Run]:
    return [(parameter, 0, values.view(-1))]


def _in_whole(name: str, parameter: nn.Parameter, first: int, run: Tensor) -> Iterator[Box]:
    """The boxes of a run, placed in the tensor that all tensor-parallel ranks hold together."""
    start, shape = [0] * parameter.dim(), list(parameter.shape)
    spec = shard_spec(parameter)
    if spec is not None and spec.dim is not None:
        start[spec.dim] = shape[spec.dim] * spec.index
        shape[spec.dim] = spec.unpadded or shape[spec.dim] * spec.shards
    for offsets, values in run_boxes(parameter.shape, first, run):
        placed = tuple(a + b for a, b in zip(start, offsets, strict=True))
        box = Box(name, values, placed, tuple(shape))
        yield from box.cut() if shape else [box]


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


@dataclass(frozen=True)
class State:
    """Optimizer state of a holder, sorted by how it is cut; keys begin with a colon.

    ``alike`` are tensors of the shape of its values, cut as these are. ``numbers`` are single ones,
    such as a count of steps, with a row for each of its parameters: in a shard they share one.
    """

    holder: Holder
    alike: dict[str, Tensor]
    numbers: dict[str, Tensor]

    @staticmethod
    def of(holder: Holder) -> State:
        """What the optimizer has. Raises ValueError for what another mesh could not be given."""
        kept = {} if holder.optimizer is None else holder.optimizer.state.get(holder.values, {})
        return State._sorted(holder, kept, holder.values.shape)

    @staticmethod
    def empty(holder: Holder, with_state: Set[str]) -> State:
        """Room for what the optimizer will have after a step, if one of ``with_state`` has any.

        What that is shows in a step of a copy of the optimizer on a tiny weight.
        """
        if holder.optimizer is None or not with_state & set(holder.names.values()):
            return State(holder, {}, {})
        tiny = nn.Parameter(holder.values.new_zeros([2] * max(1, holder.values.dim())))
        tiny.grad = torch.zeros_like(tiny)
        probe = copy(holder.optimizer)
        probe.state = defaultdict(dict)
        probe.param_groups = [{**holder.group, "params": [tiny]}]
        probe.step()
        state = State._sorted(holder, probe.state[tiny], tiny.shape)
        alike = {
            key: torch.zeros_like(holder.values, dtype=tensor.dtype, requires_grad=False)
            for key, tensor in state.alike.items()
        }
        return State(holder, alike, state.numbers)

    @staticmethod
    def _sorted(holder: Holder, kept: Mapping[str, object], shape: torch.Size) -> State:
        state = State(holder, {}, {})
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.shape == shape:
                state.alike[f":{key}"] = value
            elif isinstance(value, Tensor) and value.numel() == 1:
                state.numbers[f":{key}"] = torch.stack([value] * len(holder.names))
            else:
                what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"optimizer state {key!r} of {next(iter(holder.names.values()))} is {what}, "
                    f"its weights have shape {list(holder.values.shape)}: only tensors of the "
                    "weights' shape, or of one number, can be cut anew for another mesh"
                )
        return state

    def give(self) -> None:
        """Let the optimizer have it, and nothing else."""
        if self.holder.optimizer is None:
            return
        found = dict(self.alike)
        for key, rows in self.numbers.items():
            if (rows != rows[0]).any():
                differ = ", ".join(f"{n}{key}" for n in list(self.holder.names.values())[:3])
                raise ValueError(
                    f"{differ}, ... are {rows.flatten().tolist()[:3]}, ... in the checkpoint, but "
                    "under ZeRO they lie in one shard, which has one number: load it without ZeRO"
                )
            found[key] = rows[0].clone()
        self.holder.optimizer.state.pop(self.holder.values, None)
        if found:
            state = {key.removeprefix(":"): value for key, value in found.items()}
            self.holder.optimizer.state[self.holder.values] = state
