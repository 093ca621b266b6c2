"""Checks the fields of a dataclass against their annotations: from JSON or a command line anything can come."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, get_args, get_origin, get_type_hints

_WORDS = {bool: "True or False", int: "an int", float: "a finite float or int", str: "a str", type(None): "None"}


def check_types(instance: Any) -> None:
    """Check every field of a dataclass instance; a field whose default is None may always be None.

    bool is no number here, and 4.0 no integer: both would pass for one until they are saved, or index something.

    Raises:
        ValueError: naming the field, its value and what it must be.
    """
    for name, kind, optional in _kinds(type(instance)):  # type: ignore[arg-type]
        value = getattr(instance, name)
        if not (optional and value is None) and not _fits(value, kind):
            raise ValueError(f"{name}={value!r} must be {_words(kind)}")


def check_seed(name: str, seed: int | None) -> None:
    """Raise ValueError, with the field's name, for a seed that PyTorch's generators do not take."""
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"{name}={seed} must be a number of 64 bits")


@functools.cache
def _kinds(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(cls)
    return tuple((field.name, hints[field.name], field.default is None) for field in dataclasses.fields(cls))


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is list:
        return isinstance(value, list) and all(_fits(one, arguments[0]) for one in value)
    if origin is tuple:  # of any length
        return isinstance(value, tuple) and all(_fits(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(one, arguments[1]) for key, one in value.items()
        )
    if arguments:  # a union
        return any(_fits(value, one) for one in arguments)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _words(kind: Any) -> str:
    if get_origin(kind) in (list, tuple, dict):
        return f"a {kind}".replace("typing.", "")
    if get_args(kind):
        return " or ".join(_words(one) for one in get_args(kind))
    return _WORDS.get(kind) or f"a {kind.__name__}"
