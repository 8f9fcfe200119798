"""Memory meters: exact bytes of what a rank keeps, saves for backward, and has alive at once.

Memory belongs to *storages*, not to tensors: tied weights, views of a flat buffer and the two
operations that save the same input share one storage, and it is counted once, whole, padding
included. Sizes are bytes.

========================  ==========================================================
:func:`state_bytes`       parameters, gradients and optimizer state, now
:class:`SavedActivations` what autograd keeps for backward, by saved-tensor hooks
:class:`PeakLiveBytes`    every storage made during a call and alive, by a dispatch mode
:class:`AllocatorPeak`    the same as the CUDA allocator sees it
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
    """Bytes that one rank keeps between two steps."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(model: State, optimizer: Any = None) -> StateBytes:
    """Exact bytes of parameters, gradients and optimizer state, each storage counted once.

    ``model`` is a module, or an iterable of modules and tensors (the stages of a pipeline rank).
    ``optimizer`` is anything with ``state`` and ``param_groups`` as torch.optim has them. Every
    tensor in its state counts, the step counter (4 bytes a parameter in Adam) included, and so
    do parameters that only the optimizer has (float32 master weights). Buffers are not counted.

    A storage that serves two purposes counts for the first of: parameters, gradients,
    optimizer. A parameter that is a view of something larger counts as all of it, since all of
    it stays in memory. Raises ValueError when ``optimizer`` has no such fields.
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
            f"{type(optimizer).__name__} has no .{name}: state_bytes wants an optimizer with "
            "state and param_groups, as those of torch.optim have; pass the optimizer inside"
        )
    return getattr(optimizer, name)


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages of ``tensors`` that are not in ``seen``; they are added to it."""
    total = 0
    for tensor in tensors:
        storage = _storage(tensor)
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """The memory behind ``tensor``; of a DTensor, that of this rank's shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _parameters(state: State) -> Iterator[Tensor]:
    if isinstance(state, nn.Module):
        yield from state.parameters()
    elif isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from _parameters(part)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _tensors(part)


class _Saved:
    """What autograd holds instead of a saved tensor; its end is the end of the saving."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedActivations(saved_tensors_hooks):
    """Count the bytes that autograd saves for backward and still holds.

    ::

        with SavedActivations(model) as saved:
            loss = model(x).sum()
        saved.peak, saved.now      # bytes
        loss.backward()
        saved.now                  # 0: backward has let go of all of it

    ``state`` are modules and tensors that do not count: parameters and buffers are state, not
    activations, and they are recognised by storage, so that a transposed view of a weight does
    not count either. Tokens and targets do count when an operation saves them, unless given.

    A forward run within the context is counted also after it has ended. Hooks do not nest in
    torch: what non-reentrant ``torch.utils.checkpoint`` recomputes in backward goes through its
    own hooks and is not seen here, only the inputs that it keeps are. :class:`PeakLiveBytes`
    sees it, and so it does tensors that are alive without being saved.
    """

    def __init__(self, *state: State) -> None:
        super().__init__(self._pack, self._unpack)
        self.peak = 0
        self.now = 0
        # The storages are held, so that none of their ids is given to a new storage.
        self._excluded = {each._cdata: each for part in state for each in _state_storages(part)}
        self._holders: dict[int, int] = {}  # storage -> how many saved tensors lie in it

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


def _state_storages(state: State) -> Iterator[torch.UntypedStorage]:
    for tensor in _parameters(state):
        yield _storage(tensor)
    modules = [state] if isinstance(state, (nn.Module, Tensor)) else state
    for module in modules:
        if isinstance(module, nn.Module):
            for buffer in module.buffers():
                yield _storage(buffer)


class PeakLiveBytes(TorchDispatchMode):
    """Count the storages made during the context and alive: forward, backward, optimizer, all.

    ``peak`` and ``now`` are bytes, ``timeline`` is a list of (seconds on the clock of Trace,
    bytes alive from then on). Tensors made before the context count nothing, nor does writing
    into them; views and in-place operations add nothing. A tensor that outlives the context is
    still counted in ``now`` until it dies. Scratch memory inside a kernel or inside a collective
    is not seen. A storage that was resized (to 0, to free it early) counts with the size it has;
    those of ``state`` (modules, tensors), made before, count by what they have grown since.

    Each operation costs some 20 microseconds more, and each new peak a look at all live
    storages: meant for measuring a step, not for training.
    """

    def __init__(self, *state: State) -> None:
        super().__init__()
        self.peak = 0
        self.timeline: list[tuple[float, int]] = []
        self._now = 0
        # storage -> (itself, bytes that it had before, bytes counted)
        self._alive: dict[int, tuple[weakref.ref, int, int]] = {}
        for storage in (each for part in state for each in _state_storages(part)):
            if storage._cdata not in self._alive:
                self._track(storage._cdata, storage, before=storage.nbytes())

    @property
    def now(self) -> int:
        """Bytes made during the context and alive at this moment."""
        self._refresh()
        return self._now

    def __enter__(self) -> PeakLiveBytes:
        if not self.timeline:
            self._note()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        given = self._storages_of(args, kwargs)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            given = {}  # torch.tensor(...) makes its memory before this mode is asked
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
        # PyTorch keeps the Python object of a storage as long as its memory, so that a weak
        # reference to it dies exactly when the last tensor on it does.
        def died(_: weakref.ref) -> None:
            self._change(-self._alive.pop(key)[2])

        size = storage.nbytes() - before
        if self._now + size > self.peak:
            self._refresh()  # a storage freed by resizing tells nobody
        self._alive[key] = weakref.ref(storage, died), before, size
        self._change(size)

    def _resized(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Whether a storage that is counted has another size than it had then."""
        _, before, counted = self._alive.get(key, (None, storage.nbytes(), 0))
        return storage.nbytes() - before != counted

    def _refresh(self) -> None:
        """Find the storages that were resized since they were counted."""
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


class AllocatorPeak:
    """Peak bytes that the CUDA allocator handed out during the context, beyond those before it.

    The allocator rounds every tensor up to 512 bytes and sees scratch memory of kernels, so that
    this is a little more than :class:`PeakLiveBytes`. Raises ValueError on a CPU, which has no
    such meter.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(
                f"AllocatorPeak(device={str(device)!r}): only CUDA has an allocator with a meter; "
                "use PeakLiveBytes"
            )
        self.before = 0
        self.peak = 0

    def __enter__(self) -> AllocatorPeak:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self.before
