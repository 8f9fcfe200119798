"""ZeRO stage 3: parameters in shards too, gathered unit by unit just before they are used.

For a unit u (a block; the root owns what is in no other unit) with shard w_r:

    forward:   w_F = all_gather(w_r);  y = u(x; w_F);  free w_F
    backward:  w_F = all_gather(w_r);  dx, dw_F = u'(x, dy; w_F);  free w_F
               g_r += reduce_scatter(dw_F);  free dw_F

=====================  ======================  ==================================================
event                  noticed by              what happens
=====================  ======================  ==================================================
forward of u begins    forward pre-hook        wait for u's gather; start that of the next unit
forward of u ends      forward hook            free u, if it is resharded after forward
backward of u begins   hook on its outputs     wait for u's gather; start that of the unit before
a gradient is ready    hook on the parameter   wait for the reduce-scatter in flight; move the
                                               gradient into the flat gradient of u
backward of u ends     _AfterBackward, which   free u; start its reduce-scatter
                       wraps its inputs
backward has ended     accumulate(), finish()  the same for the root, and for units of which no
                                               input has a gradient
=====================  ======================  ==================================================

*reshard_after_forward*, as in FSDP2, says which units are freed between forward and backward. The
units that backward starts with would be gathered again at once. *Prefetch* starts the next gather
while this unit computes; without it every unit waits for its own. A unit through which no gradient
passes (frozen, and nothing trained before it) has no backward, and is gathered for forward only.

Ranks match their gathers and reduce-scatters by order, so all of them must run the same units in
the same order, in forward and in backward. If one rank skips a unit, runs one twice, or takes
branches in an order that depends on the data, one rank's block is combined with another's.

Bytes are :func:`course_lib.zero.wire_bytes`, memory :func:`course_lib.zero.peak_bytes`.
Sources: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.3; Zhao et al. 2023 (FSDP),
arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.zero.flat import ShardedFlatParameter
from course_lib.zero.sharded import MakeOptimizer, Sharded


class Unit:
    """A module and its parameters, which are gathered and freed together.

    There is one flat parameter per dtype; frozen parameters have their own.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], axis: Axis, name: str):
        self.module = module
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.flats = [ShardedFlatParameter(alike, axis, name) for alike in kinds.values()]
        self.has_backward = False  # whether the outputs of the last forward require a gradient
        self.in_backward = False
        self._gathered = False
        self._gathering: list[comm.Handle] = []

    def start_gather(self) -> None:
        """Start the all-gather, unless it is in flight or finished."""
        if not self._gathering and not self._gathered:
            self._gathering = [flat.start_gather() for flat in self.flats]

    def gather(self) -> None:
        """Start the all-gather if necessary, and wait until the parameters are gathered."""
        self.start_gather()
        for handle in self._gathering:
            handle.wait()
        self._gathering, self._gathered = [], True

    def free(self) -> None:
        """Free the memory of the parameters, after the gather in flight."""
        for handle in self._gathering:
            handle.wait()
        self._gathering, self._gathered = [], False
        for flat in self.flats:
            flat.free()


def make_units(model: nn.Module, modules: Sequence[nn.Module], axis: Axis) -> list[Unit]:
    """Return the root first, then one unit per module, in the order in which they run.

    The root owns what is in none of ``modules`` (embedding, final norm, head) and weights that
    several of them share.
    """
    paths = model.named_modules(remove_duplicate=False)
    chosen = {path: module for path, module in paths if module in modules}
    for module in modules:
        if module is model or module not in chosen.values():
            raise ValueError(
                f"expected units to be modules inside the model, got {type(module).__name__}, "
                "which is not: give the blocks in the order in which forward runs them; the root "
                "owns the rest"
            )
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = [module for path, module in chosen.items() if name.startswith(f"{path}.")]
        innermost = around[-1] if around else model
        users.setdefault(parameter, set()).add(innermost)
    owned: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in [model, *modules]}
    for parameter, using in users.items():
        owned[using.pop() if len(using) == 1 else model].append(parameter)
    names = {module: path for path, module in chosen.items()}
    return [Unit(one, own, axis, names.get(one, "root")) for one, own in owned.items()]


class Zero3(Sharded):
    """Every rank stores only its shards; all ranks run the same units in the same order.

    ``reshard_after_forward`` says which units are freed between forward and backward, as in FSDP2:
    all (True), none (False), or those in a collection of modules, in which ``model`` is the root.
    By default these are all but the root and the last unit, which backward uses first.
    A unit whose inputs are keywords, or need no gradient, is freed at the end of backward.
    Outside forward and backward the parameters have no memory, except inside :meth:`gathered`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        axis: Axis,
        make_optimizer: MakeOptimizer,
        *,
        reshard_after_forward: bool | Collection[nn.Module] | None = None,
        prefetch: bool = True,
    ) -> None:
        self.units = make_units(model, units, axis)
        modules = [unit.module for unit in self.units]
        if reshard_after_forward is None:
            reshard_after_forward = modules[1:-1]
        elif isinstance(reshard_after_forward, bool):
            reshard_after_forward = modules if reshard_after_forward else []
        self._resharded, self._prefetches = set(reshard_after_forward), prefetch
        if unknown := self._resharded - set(modules):
            raise ValueError(
                "expected reshard_after_forward to name units, or the model for the root; got "
                f"{[type(one).__name__ for one in unknown]}: choose from the modules that were "
                "given as units"
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
    def every_flat(self) -> list[ShardedFlatParameter]:
        """All flat parameters, including the frozen ones."""
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that parameters are gathered into; memory meters count them as state."""
        return [flat.full_F for flat in self.every_flat]

    def _ready(self, parameter: nn.Parameter) -> None:
        """Move the gradient into the flat gradient of its unit: only one of them has memory."""
        self._reduction.wait()
        if parameter.grad is not None:
            self._flat_of[parameter].collect(parameter)

    def _prefetch(self, units: Sequence[Unit]) -> None:
        """Start to gather the first of ``units``, if there is one."""
        if self._prefetches and units:
            units[0].start_gather()

    def _before_forward(self, index: int, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        unit = self.units[index]
        unit.gather()
        if unit.in_backward:  # recomputation: the hooks of backward gather and free the unit
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
        if not torch.is_grad_enabled() or unit.module in self._resharded:
            unit.free()
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        tracked = [tensor for tensor in tensors if tensor.requires_grad]
        unit.has_backward = bool(tracked)
        for output in tracked:
            output.register_hook(lambda _: self._before_backward(index))

    def _before_backward(self, index: int) -> None:
        """Gather the unit: the gradient of an output is ready, so its own backward is next."""
        unit = self.units[index]
        if not unit.in_backward:
            unit.in_backward = True
            unit.gather()
            earlier = self.units[1 : index or None]  # of the root, which is first and last: all
            self._prefetch([one for one in reversed(earlier) if one.has_backward])

    def _after_backward(self, unit: Unit) -> None:
        """Free the unit and send its gradients, which are complete."""
        unit.in_backward = False
        unit.free()
        for flat in unit.flats:
            if not flat.frozen:
                self._reduction.start(flat)

    def _flush(self) -> None:
        """End the backward of the root, and of units whose inputs need no gradient."""
        for unit in reversed(self.units):
            if unit.in_backward:
                self._after_backward(unit)
            unit.free()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run one backward that is not the last inside; its gradients are reduce-scattered."""
        yield
        self._flush()

    def finish(self) -> None:
        """Reduce-scatter the remaining gradients, free all units, and wait for the last shard."""
        self._flush()
        self._reduction.wait()

    def refresh(self) -> None:
        """Free units that a forward without backward has gathered: their shards have changed."""
        for unit in self.units:
            unit.free()

    def reset(self) -> None:
        """Drop the state of an interrupted step: see :meth:`Sharded.reset`."""
        for unit in self.units:
            unit.in_backward = False
            unit.free()
        super().reset()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters inside, to read them; after a write call :meth:`sync_shards`.

        Raises RuntimeError when a write was not followed by it: the values would be lost.
        """
        for unit in self.units:
            unit.gather()
        try:
            yield
            if any(flat.written for flat in self.every_flat):
                raise RuntimeError(
                    "parameters were written to inside gathered(), and the values would be lost "
                    "with their memory: call sync_shards() after writing, before gathered() ends"
                )
        finally:
            for unit in self.units:
                unit.free()


class _AfterBackward(torch.autograd.Function):
    """The identity. Its backward calls ``done``: the inputs' gradients are complete then."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.done()
        return None, *gradients
