"""Library functions that *are* the answer: while an answer is judged, they raise an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from types import FunctionType
from typing import Any


@contextmanager
def refusing(names: Sequence[str]) -> Iterator[None]:
    """Let each "module:function" (or "module:Class.method") raise PermissionError in the body.

    The code of the function is replaced, not its name, so that all its names raise.
    """
    functions = [find(name) for name in names]
    before = [(function.__code__, function.__kwdefaults__) for function in functions]
    try:
        for function in functions:
            function.__code__, function.__kwdefaults__ = _refused.__code__, None
        yield
    finally:
        for function, (code, defaults) in zip(functions, before, strict=True):
            function.__code__, function.__kwdefaults__ = code, defaults


def find(name: str) -> FunctionType:
    """The function that "module:function" or "module:Class.method" names."""
    module, path = name.split(":")
    found: Any = reduce(getattr, path.split("."), import_module(module))
    assert isinstance(found, FunctionType), name
    return found


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError("this is what you are asked to write")  # it has no globals of its own
