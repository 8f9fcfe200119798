"""What stage 3 gathers at once: a unit is a module (a block) with the parameters of its own.

What is in no unit (embedding, final norm, head, weights that several units share) is the root's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.zero.flat import Flat


class Gathered(Flat):
    """A flat whose full tensor has memory only from :meth:`start_gather` to :meth:`free`.

    The storage is resized, never replaced: what autograd saved for backward are views into it,
    and they see the values again once they have been gathered again. In between a parameter keeps
    its shape and reads as NaN. Frozen parameters are sharded too; they have no gradient, and need
    no master weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, name: str) -> None:
        super().__init__(parameters, axis, name)
        self.frozen = not parameters[0].requires_grad
        mine = self.full_F.chunk(axis.size)[axis.rank] if self.frozen else self.shard.detach()
        self.shard = nn.Parameter(mine.clone(), requires_grad=not self.frozen)
        self.shares_memory = False
        self._views, self._bytes = self.views(self.full_F), self.full_F.nbytes
        nan = self.full_F.new_full((), float("nan"))
        self._nothing = [nan.expand(parameter.shape) for parameter in parameters]
        self.free()

    def start_gather(self) -> comm.Handle:
        """Give the parameters memory and begin to fill it."""
        self.full_F.untyped_storage().resize_(self._bytes)
        self._show(self._views)
        return super().start_gather()

    def adopt(self) -> None:
        """Let the shard take its values from the parameters, which must be gathered."""
        if not self.full_F.untyped_storage().nbytes():
            raise RuntimeError(
                f"the parameters of {self.name} have no memory now: write to them and call adopt() "
                "within `with z.gathered():`"
            )
        super().adopt()

    def free(self) -> None:
        """Take the parameters' memory away."""
        self.full_F.untyped_storage().resize_(0)
        self._show(self._nothing)


class Unit:
    """Parameters that are gathered and freed together: one flat for each dtype, frozen apart."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], axis: Axis, name: str):
        self.module, self.name = module, name
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.flats = [Gathered(alike, axis, name) for alike in kinds.values()]
        self.has_backward = False  # whether a gradient will come back from the last forward
        self.in_backward = False
        self._gathered = False
        self._coming: list[comm.Handle] = []

    def start_gather(self) -> None:
        """Begin to gather, unless that is under way or done."""
        if not self._coming and not self._gathered:
            self._coming = [flat.start_gather() for flat in self.flats]

    def gather(self) -> None:
        """Have the parameters there when it returns."""
        self.start_gather()
        for handle in self._coming:
            handle.wait()
        self._coming, self._gathered = [], True

    def free(self) -> None:
        """Have no memory for the parameters when it returns; what is coming is waited for."""
        for handle in self._coming:
            handle.wait()
        self._coming, self._gathered = [], False
        for flat in self.flats:
            flat.free()


def cut(model: nn.Module, modules: Sequence[nn.Module], axis: Axis) -> list[Unit]:
    """The root first, then a unit for each of ``modules``, in the order in which they run."""
    paths = model.named_modules(remove_duplicate=False)
    chosen = {path: module for path, module in paths if module in modules}
    for module in modules:
        if module is model or module not in chosen.values():
            raise ValueError(
                f"{type(module).__name__} is no part of the model: units are modules inside it, in "
                "the order in which forward runs them; what is in none of them is the root's"
            )
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = accumulate(name.split("."), "{}.{}".format)
        inside = [chosen[path] for path in around if path in chosen]
        users.setdefault(parameter, set()).add(inside[-1] if inside else model)
    owned: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in [model, *modules]}
    for parameter, owners in users.items():
        owned[owners.pop() if len(owners) == 1 else model].append(parameter)
    names = {module: path for path, module in chosen.items()}
    return [Unit(one, mine, axis, names.get(one, "root")) for one, mine in owned.items()]
