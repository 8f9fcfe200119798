"""Functions, arguments and results as bytes: by value, so that no rank imports the notebook."""

from __future__ import annotations

import inspect
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

INSTALLED = tuple(
    str(Path(sysconfig.get_paths()[kind]).resolve()) for kind in ("stdlib", "purelib", "platlib")
)
PACKAGE = str(Path(__file__).resolve().parents[1])
_registry = threading.Lock()  # cloudpickle's list of what travels by value is the process's


def pack_call(fn: Callable, args: Sequence[Any]) -> bytes:
    """``fn`` and ``args`` as bytes; a TypeError names what cannot be pickled."""
    try:
        with _registry, _by_value(_own_modules(fn, args)):
            return cloudpickle.dumps((fn, tuple(args)))
    except Exception as error:
        raise TypeError(_what_cannot_travel(fn, args, error)) from error


@contextmanager
def _by_value(modules: set[ModuleType]) -> Iterator[None]:
    """Inside, functions and classes of these modules travel by value."""
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
    """The learner's files that these come from: a rank need not be able to import them."""
    things = [fn, getattr(fn, "func", None), *args, *map(type, args)]
    names = {getattr(thing, "__module__", None) for thing in things}
    modules = [sys.modules.get(name) for name in names if isinstance(name, str)]
    return {
        module
        for module in modules
        if module is not None and module.__name__ != "__main__" and not is_library(module)
    }


def is_library(module: ModuleType) -> bool:
    """Whether every rank can import ``module`` and has it already, or soon."""
    name = getattr(module, "__file__", None)
    if name is None:
        return True
    path = str(Path(name).resolve())
    return path.startswith((*INSTALLED, PACKAGE))


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
    return f"function {name} cannot be sent to the ranks: {error}"


def _variables(fn: Callable) -> dict[str, Any]:
    """The variables from outside that ``fn`` uses, by name."""
    try:
        used = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):
        return {}
    return {**used.globals, **used.nonlocals}


def refusal(value: Any) -> str:
    """Why ``value`` cannot be pickled; an empty string if it can."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def what_cannot_return(value: Any, name: str = "the result") -> str:
    """One sentence that names the part of a result that cannot be pickled."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    for part_name, part in parts:
        if refusal(part):
            return what_cannot_return(part, part_name)
    return f"{name} ({_kind(value)}) cannot be pickled: {refusal(value)}"


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")


def unpack(data: bytes) -> Any:
    """The value that was packed."""
    return pickle.loads(data)
