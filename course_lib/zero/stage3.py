"""ZeRO stage 3: parameters in shards as well, gathered unit by unit around their use.

For a unit u (a block; what is in no unit is the root's) with shard w_r:

    forward:   w_F = all_gather(w_r);  y = u(x; w_F);  free w_F
    backward:  w_F = all_gather(w_r);  dx, dw_F = u'(x, dy; w_F);  free w_F
               g_r += reduce_scatter(dw_F);  free dw_F

=====================  ======================  ==================================================
event                  noticed by              what happens
=====================  ======================  ==================================================
forward of u begins    forward pre-hook        u is there; the gather of the next unit starts
forward of u ends      forward hook            u is freed, unless it is kept
backward of u begins   hook on its outputs     u is there; the gather of the unit before starts
a gradient is made     hook on the parameter   the reduce-scatter under way lands; the gradient
                                               moves into the flat one of u
backward of u ends     _AfterBackward, which   u is freed; its reduce-scatter starts
                       its inputs went through
backward is over       accumulate(), finish()  the same for the root, and for units of whose
                                               inputs none has a gradient
=====================  ======================  ==================================================

*Kept* units stay gathered between forward and backward: what backward begins with would be
gathered again at once. *Prefetch* is the start of the next gather, which travels while this unit
computes; without it every unit waits for its own. A unit that no gradient goes through (frozen,
and nothing trained before it) has no backward, and is gathered for forward alone.

Ranks pair their gathers and reduce-scatters by order: all of them must run the same units in the
same order, in forward and in backward too. A unit that one rank skips, or runs twice, or branches
whose order depends on the data, pair one rank's block with another's.

Bytes are :func:`course_lib.zero.wire_bytes`, memory :func:`course_lib.zero.peak_bytes`.
Sources: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.3; Zhao et al. 2023 (FSDP),
arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib.mesh import Axis
from course_lib.zero.flat import Flat
from course_lib.zero.sharded import MakeOptimizer, Sharded
from course_lib.zero.units import Unit, cut


class Zero3(Sharded):
    """Every rank keeps its shards alone; all run the same units in the same order, backward too.

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
        self.units = cut(model, units, axis)
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

    def _prefetch(self, units: Sequence[Unit]) -> None:
        """Start to gather the first of ``units``, if there is one."""
        if self._prefetches and units:
            units[0].start_gather()

    def _before_forward(self, index: int, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        unit = self.units[index]
        unit.gather()
        if unit.in_backward:  # recomputation: backward itself has gathered, and frees
            return None
        self._prefetch(self.units[index + 1 :])
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
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        tracked = [tensor for tensor in tensors if tensor.requires_grad]
        unit.has_backward = bool(tracked)
        for output in tracked:
            output.register_hook(lambda _: self._before_backward(index))

    def _before_backward(self, index: int) -> None:
        """The gradient of an output is there: the unit's own backward comes next."""
        unit = self.units[index]
        if not unit.in_backward:
            unit.in_backward = True
            unit.gather()
            earlier = self.units[1 : index or None]  # of the root, which is first and last: all
            self._prefetch([one for one in reversed(earlier) if one.has_backward])

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

    def reset(self) -> None:
        """Forget a step that broke off: see :meth:`Sharded.reset`."""
        for unit in self.units:
            unit.in_backward = False
            unit.free()
        super().reset()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside, to be read; or to be written, :meth:`adopt` following.

        Raises RuntimeError when what was written was not adopted: it would be lost.
        """
        for unit in self.units:
            unit.gather()
        try:
            yield
            if any(flat.written for flat in self.every_flat):
                raise RuntimeError(
                    "parameters were written to inside gathered(), which would be lost with their "
                    "memory: call adopt() after writing, before the end of gathered()"
                )
        finally:
            for unit in self.units:
                unit.free()


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
