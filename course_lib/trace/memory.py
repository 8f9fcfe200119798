"""Memory meters: exact bytes of a rank's state, saved activations and live tensors.

Memory belongs to *storages*, not to tensors. Tied weights, views of a flat buffer and two
operations that save the same input share one storage. It is counted once, with all its bytes
including padding. Sizes are in bytes.

========================  ==========================================================
:func:`state_bytes`       parameters, gradients and optimizer state, now
:class:`SavedActivations` tensors saved for backward, by saved-tensor hooks
:class:`PeakLiveBytes`    live storages allocated during a call, by a dispatch mode
========================  ==========================================================
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

State = nn.Module | Tensor | Iterable["State"]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that one rank stores between two steps."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(model: State, optimizer: Any = None) -> StateBytes:
    """Return the exact bytes of parameters, gradients and optimizer state.

    Each storage is counted once. ``model`` is a module, or an iterable of modules and tensors (the
    stages of a pipeline rank). ``optimizer`` has ``state`` and ``param_groups`` as in torch.optim.
    Every tensor in its state counts, including the step counter (4 bytes per parameter tensor in
    Adam), and so do parameters that only the optimizer has (float32 master weights). Buffers are
    not counted.

    A storage with two purposes counts for the first of: parameters, gradients, optimizer. A
    parameter that is a view counts with its whole storage, because the whole storage stays in
    memory. Raises ValueError if ``optimizer`` does not have these attributes.
    """
    seen: set[int] = set()
    own = list(_parameters(model))
    groups = [] if optimizer is None else _optimizer_field(optimizer, "param_groups")
    theirs = [parameter for group in groups for parameter in group["params"]]
    state = {} if optimizer is None else _optimizer_field(optimizer, "state")
    grads = [each.grad for each in own + theirs if each.grad is not None]
    return StateBytes(
        parameters=_count(own, seen),
        gradients=_count(grads, seen),
        optimizer=_count(theirs, seen) + _count(_tensors(state), seen),
    )


def _optimizer_field(optimizer: Any, name: str) -> Any:
    if not hasattr(optimizer, name):
        raise ValueError(
            "expected an optimizer with state and param_groups, as in torch.optim, but "
            f"{type(optimizer).__name__} has no .{name}; pass the optimizer inside it"
        )
    return getattr(optimizer, name)


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of the storages of ``tensors`` not in ``seen``; add them to ``seen``."""
    total = 0
    for tensor in tensors:
        storage = _storage(tensor)
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of ``tensor``; for a DTensor, the storage of this rank's shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _parameters(state: State, *, buffers: bool = False) -> Iterator[Tensor]:
    """Yield the parameters of modules, with ``buffers`` these too, and the tensors of ``state``."""
    if isinstance(state, nn.Module):
        yield from state.parameters()
        yield from state.buffers() if buffers else ()
    elif isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from _parameters(part, buffers=buffers)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _tensors(part)


class _Saved:
    """The object that autograd stores instead of a saved tensor, and deletes to free it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedActivations(saved_tensors_hooks):
    """Count the bytes that autograd has saved for backward.

    ::

        with SavedActivations(model) as saved:
            loss = model(x).sum()
        saved.peak, saved.now      # bytes
        loss.backward()
        saved.now                  # 0: backward has freed all of it

    ``state`` has modules and tensors that do not count: parameters and buffers are state, not
    activations. They are recognized by storage, so that a transposed view of a weight does not
    count either. Tokens and targets count if an operation saves them, unless they are in
    ``state``.

    Tensors saved in the context are counted until they are freed, also after its end. Hooks do not
    nest in torch: activations that non-reentrant ``torch.utils.checkpoint`` recomputes in backward
    pass through its own hooks and are not counted, only its saved inputs are.
    :class:`PeakLiveBytes` counts them, and also live tensors that are not saved.
    """

    def __init__(self, *state: State) -> None:
        super().__init__(self._pack, self._unpack)
        self.peak = 0
        self.now = 0
        # References to the storages, so that no new storage gets one of their ids.
        self._excluded = _state_storages(state)
        self._holders: dict[int, int] = {}  # storage -> number of saved tensors in it

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        storage = _storage(tensor)
        if storage._cdata not in self._excluded:
            key, size = storage._cdata, storage.nbytes()
            self._holders[key] = self._holders.get(key, 0) + 1
            if self._holders[key] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(saved, self._release, key, size).atexit = False
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.now -= size

    def __enter__(self) -> SavedActivations:  # type: ignore[override]
        super().__enter__()
        return self


def _state_storages(state: Iterable[State]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of ``state``, buffers included, by id."""
    storages = map(_storage, _parameters(state, buffers=True))
    return {storage._cdata: storage for storage in storages}


class PeakLiveBytes(TorchDispatchMode):
    """Count the live storages allocated in the context, in forward, backward and optimizer.

    ``peak`` and ``now`` are bytes; ``timeline`` is a list of (seconds on the clock of Trace, live
    bytes from then on). Tensors allocated before the context do not count, and neither do views
    and in-place operations. A tensor that outlives the context is counted in ``now`` until it is
    freed. Scratch memory inside a kernel or a collective is not counted. A resized storage (to 0,
    to free it early) counts with its current size. Storages of ``state`` (modules, tensors), which
    were allocated before, count with their growth.

    Each operation takes about 20 microseconds longer, and each new peak visits all live storages.
    Use it to measure a step, not in training.
    """

    def __init__(self, *state: State) -> None:
        super().__init__()
        self.peak = 0
        self.timeline: list[tuple[float, int]] = []
        self._now = 0
        # storage -> (itself, bytes that it had before, bytes counted)
        self._alive: dict[int, tuple[weakref.ref, int, int]] = {}
        for key, storage in _state_storages(state).items():
            self._track(key, storage, before=storage.nbytes())

    @property
    def now(self) -> int:
        """Live bytes allocated in the context."""
        self._refresh()
        return self._now

    def __enter__(self) -> PeakLiveBytes:
        if not self.timeline:
            self._note()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        given = self._storages_of(args, kwargs)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            given = {}  # torch.tensor(...) allocates its memory before this mode is called
        for key, storage in self._storages_of(result).items():
            if key not in self._alive and key not in given:
                self._track(key, storage)
        if any(self._resized(key, storage) for key, storage in given.items()):
            self._refresh()
        return result

    @staticmethod
    def _storages_of(*values: Any) -> dict[int, torch.UntypedStorage]:
        storages = (
            _storage(tensor) for tensor in _tensors(values) if tensor.layout == torch.strided
        )
        return {storage._cdata: storage for storage in storages}

    def _track(self, key: int, storage: torch.UntypedStorage, before: int = 0) -> None:
        # The Python object of a storage lives as long as its memory, so a weak reference to it
        # ends exactly when the last tensor on the storage is freed.
        def died(_: weakref.ref) -> None:
            self._change(-self._alive.pop(key)[2])

        size = storage.nbytes() - before
        if self._now + size > self.peak:
            self._refresh()  # freeing a storage by a resize calls no hook
        self._alive[key] = weakref.ref(storage, died), before, size
        self._change(size)

    def _resized(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Return whether the size of a counted storage has changed."""
        _, before, counted = self._alive.get(key, (None, storage.nbytes(), 0))
        return storage.nbytes() - before != counted

    def _refresh(self) -> None:
        """Update the sizes of all resized storages."""
        difference = 0
        for key, (reference, before, counted) in list(self._alive.items()):
            storage = reference()
            if storage is not None and self._resized(key, storage):
                size = storage.nbytes() - before
                self._alive[key] = reference, before, size
                difference += size - counted
        self._change(difference)

    def _change(self, difference: int) -> None:
        if difference:
            self._now += difference
            self.peak = max(self.peak, self._now)
            self._note()

    def _note(self) -> None:
        self.timeline.append((time.perf_counter(), self._now))
