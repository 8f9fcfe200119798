"""ZeRO stage 3: parameters in shards as well, gathered unit by unit around their use.

A unit is a module (a block) with the parameters of its own; what is in no unit (embedding, final
norm, head, weights that several units share) is the root's. For a unit u with shard w_r:

    forward:   w_F = all_gather(w_r);  y = u(x; w_F);  free w_F
    backward:  w_F = all_gather(w_r);  dx, dw_F = u'(x, dy; w_F);  free w_F
               g_r += reduce_scatter(dw_F);  free dw_F

Units in ``kept`` stay gathered between forward and backward: what backward begins with would be
gathered again at once. With ``prefetch`` the next unit's gather travels while this one computes.
Bytes are :func:`course_lib.zero.wire_bytes`, memory :func:`course_lib.zero.peak_bytes`.
Sources: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.3; Zhao et al. 2023 (FSDP),
arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.zero.flat import Flat, MakeOptimizer, Sharded


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
        self._views, self._bytes = self.views(self.full_F), self.full_F.nbytes
        nan = self.full_F.new_full((), float("nan"))
        self._nothing = [nan.expand(parameter.shape) for parameter in parameters]
        self.free()

    def start_gather(self) -> comm.Handle:
        """Give the parameters memory and begin to fill it."""
        self.full_F.untyped_storage().resize_(self._bytes)
        self._show(self._views)
        return super().start_gather()

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


class Zero3(Sharded):
    """Every rank keeps its shards alone, and runs the same units in the same order as the others.

    ``kept`` are the units that stay gathered between forward and backward: by default the root
    (``model`` itself) and the last unit, as torch's FSDP2 is used; ``()`` is none of them.
    A unit whose inputs come by keyword, or need no gradient, is freed at the end of backward.
    Outside forward and backward the parameters have no memory, except within :meth:`gathered`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        axis: Axis,
        make_optimizer: MakeOptimizer,
        *,
        kept: Sequence[nn.Module] | None = None,
        prefetch: bool = True,
    ) -> None:
        self.units = _cut(model, units, axis)
        self._kept = [model, *units[-1:]] if kept is None else list(kept)
        self._prefetches = prefetch
        if strangers := set(self._kept) - {unit.module for unit in self.units}:
            raise ValueError(
                f"kept has {[type(one).__name__ for one in strangers]}, which are no units: give "
                "modules out of units, or the model itself for the root"
            )
        flats = [flat for unit in self.units for flat in unit.flats if not flat.frozen]
        super().__init__(flats, axis, make_optimizer)
        for index, unit in enumerate(self.units):
            self._watch(index, unit.module)

    def _watch(self, index: int, module: nn.Module) -> None:
        self._hooks += [
            module.register_forward_pre_hook(lambda _, inputs: self._before_forward(index, inputs)),
            module.register_forward_hook(
                lambda _, inputs, outputs: self._after_forward(index, outputs)
            ),
        ]

    @property
    def every_flat(self) -> list[Flat]:
        """The flats, those of frozen parameters too."""
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def buffers(self) -> list[Tensor]:
        """What parameters are gathered into: state, not activations, for the memory meters."""
        return [flat.full_F for flat in self.every_flat]

    def _ready(self, parameter: nn.Parameter) -> None:
        self._land()  # the unit before has had its time: one flat gradient at once is enough
        super()._ready(parameter)

    def _prefetch(self, index: int) -> None:
        if self._prefetches and index < len(self.units):
            self.units[index].start_gather()

    def _before_forward(self, index: int, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        unit = self.units[index]
        unit.gather()
        if unit.in_backward:  # recomputation: backward itself has gathered, and frees
            return None
        self._prefetch(index + 1)
        tracked = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        if not tracked or not torch.is_grad_enabled():
            return None
        passed = _AfterBackward.apply(
            lambda: self._after_backward(unit), *(inputs[i] for i in tracked)
        )
        replaced = dict(zip(tracked, passed, strict=True))
        return tuple(replaced.get(i, x) for i, x in enumerate(inputs))

    def _after_forward(self, index: int, outputs: Any) -> None:
        unit = self.units[index]
        if unit.in_backward:
            return
        if not torch.is_grad_enabled() or unit.module not in self._kept:
            unit.free()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._before_backward(index))

    def _before_backward(self, index: int) -> None:
        """The gradient of an output is there: the unit's own backward comes next."""
        unit = self.units[index]
        if not unit.in_backward:
            unit.in_backward = True
            unit.gather()
            self._prefetch(index - 1 if index else len(self.units) - 1)

    def _after_backward(self, unit: Unit) -> None:
        """Nothing reads the unit's parameters any more, and their gradients are complete."""
        unit.in_backward = False
        unit.free()
        for flat in unit.flats:
            if not flat.frozen:
                self._send(flat)

    def _flush(self) -> None:
        """The root, and units whose inputs need no gradient, are over when backward is."""
        for unit in reversed(self.units):
            if unit.in_backward:
                self._after_backward(unit)
            unit.free()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around one backward that is not the last: what it made is scattered and freed."""
        yield
        self._flush()

    def finish(self) -> None:
        """Scatter the root's gradients, free what is left, and wait for the last shard."""
        self._flush()
        self._land()

    def refresh(self) -> None:
        """Forget what a forward without backward left gathered: the shards were written."""
        for unit in self.units:
            unit.free()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside, to be read: what is written to them is lost."""
        for unit in self.units:
            unit.gather()
        try:
            yield
        finally:
            for unit in self.units:
                unit.free()


def _cut(model: nn.Module, modules: Sequence[nn.Module], axis: Axis) -> list[Unit]:
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


class _AfterBackward(torch.autograd.Function):
    """The identity. Backward through it comes when all that used the inputs is done: say so."""

    @staticmethod
    def forward(ctx, done, *inputs: Tensor):
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        ctx.done()
        return None, *gradients
