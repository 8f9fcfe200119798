"""Pickle functions, arguments and results by value, because a rank cannot import a notebook.

Code of the library and of installed packages, such as torch, is sent by reference: a rank imports
it. This includes the globals of a decorator's wrapper, which itself is sent by value.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import reprlib
import sys
import sysconfig
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle
import torch

INSTALLED = tuple(
    str(Path(sysconfig.get_paths()[kind]).resolve()) for kind in ("stdlib", "purelib", "platlib")
)
PACKAGE = str(Path(__file__).resolve().parents[1])
GRADERS = str(Path(PACKAGE).parent / "exercises" / "graders")
_registry = threading.Lock()  # cloudpickle's list of modules by value is global to the process
LONGEST = 20_000  # characters shown of an exception's message
Cached = type(functools.lru_cache(len))


def pack_call(fn: Callable, args: Sequence[Any]) -> bytes:
    """Return ``fn`` and ``args`` as bytes; raises TypeError that names an unpicklable value."""
    try:
        with _registry, _by_value(_own_modules(fn, args)):
            return pack((fn, tuple(args)))
    except Exception as error:
        raise TypeError(_what_cannot_travel(fn, args, error)) from None


def pack(value: Any) -> bytes:
    """Return a value as bytes: cached functions by value, views without the storage around them."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduce_cached(fn: Any) -> Any:
    """Reduce a cached function of the learner to the same function with an empty cache."""
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if fn.__module__ not in by_value and _is_found_by_name(fn):
        return fn.__reduce__()
    return _cached_again, (fn.__wrapped__, fn.cache_parameters())


def _is_found_by_name(fn: Any) -> bool:
    found: Any = sys.modules.get(fn.__module__)
    for name in getattr(fn, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is fn


def _cached_again(fn: Callable, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    plain = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    if plain and not vars(tensor) and _shows_a_part(tensor):
        needs = tensor.requires_grad
        tensor = tensor.detach().clone().requires_grad_(needs)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _shows_a_part(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap(
        {Cached: _reduce_cached, torch.Tensor: _reduce_tensor}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions and classes; a function of a library keeps that library's globals."""
        reduced = super().reducer_override(obj)
        if not isinstance(obj, FunctionType) or not isinstance(reduced, tuple):
            return reduced  # NotImplemented: found by name, so sent by reference
        if (module := _library_of(obj)) is None:
            return reduced
        _, (code, *_, closure), (state, slots), *rest = reduced
        return _in_module, (module, code, closure), (state, slots | {"__globals__": {}}), *rest


def _library_of(fn: FunctionType) -> str | None:
    """Return the name of the library module whose globals ``fn`` has; None for other functions.

    ``fn.__module__`` is no help: a wrapper has the module of the function that it wraps.
    """
    name = fn.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or vars(module) is not fn.__globals__:
        return None
    return name if is_library(module) else None


def _in_module(module: str, code: CodeType, closure: tuple[CellType, ...] | None) -> FunctionType:
    """Return a function with this code and the globals of ``module``."""
    return FunctionType(code, vars(importlib.import_module(module)), closure=closure)


def text_of(error: BaseException) -> str:
    """Return an exception's message with its notes, cut to :data:`LONGEST` characters."""
    try:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    except Exception as other:
        return f"(no message, because its __str__ raised {type(other).__name__})"
    if len(text) > LONGEST:
        return f"{text[:LONGEST]} ... ({len(text) - LONGEST:,} more characters left out)"
    return text


@contextmanager
def _by_value(modules: set[ModuleType]) -> Iterator[None]:
    """Send functions and classes of these modules by value inside this context."""
    already = cloudpickle.list_registry_pickle_by_value()
    new = [module for module in modules if module.__name__ not in already]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules(fn: Callable, args: Sequence[Any]) -> set[ModuleType]:
    """Return the learner's modules of these values, which a rank may not be able to import."""
    things = [fn, getattr(fn, "func", None), *args, *map(type, args)]
    names = {getattr(thing, "__module__", None) for thing in things}
    modules = [sys.modules.get(name) for name in names if isinstance(name, str)]
    return {
        module
        for module in modules
        if module is not None and module.__name__ != "__main__" and not is_library(module)
    }


def is_library(module: ModuleType) -> bool:
    """Return whether every rank can import ``module``: it is installed or part of course_lib."""
    name = getattr(module, "__file__", None)
    if name is None:
        return True
    path = str(Path(name).resolve())
    return path.startswith((*INSTALLED, PACKAGE, GRADERS))


def _what_cannot_travel(fn: Callable, args: Sequence[Any], error: Exception) -> str:
    name = getattr(fn, "__name__", repr(fn))
    for number, arg in enumerate(args, 1):
        if reason := refusal(arg):
            return (
                f"argument {number} of {name} ({_kind(arg)}) cannot be sent to the ranks: {reason}"
            )
    for variable, value in _variables(fn).items():
        if reason := refusal(value):
            return (
                f"function {name} cannot be sent to the ranks, because it uses the variable "
                f"{variable} ({_kind(value)}): {reason}. Make {variable} inside the function."
            )
    return f"function {name} cannot be sent to the ranks: {text_of(error)}"


def _variables(fn: Callable) -> dict[str, Any]:
    """Return the global and nonlocal variables that ``fn`` uses, by name."""
    try:
        used = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):
        return {}
    return {**used.globals, **used.nonlocals}


def refusal(value: Any) -> str:
    """Return why ``value`` cannot be pickled; an empty string if it can."""
    try:
        pack(value)
    except Exception as error:
        return text_of(error) or type(error).__name__
    return ""


def what_cannot_return(value: Any, name: str = "the result") -> str:
    """Return a sentence that names the element of a result that cannot be pickled."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{name}[{reprlib.repr(key)}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    for part_name, part in parts:
        if refusal(part):
            return what_cannot_return(part, part_name)
    return f"{name} ({_kind(value)}) cannot be pickled: {refusal(value)}"


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")


def unpack(data: bytes) -> Any:
    """Return the value that was packed."""
    return pickle.loads(data)
