"""Python objects of Keras's that track their attributes: what they hold, how to shadow it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def overridden(overrides: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Shadows methods of single objects, past their attribute tracking, and takes it back."""
    before = [(obj, name, obj.__dict__.get(name)) for obj, name, _ in overrides]
    for obj, name, value in overrides:
        obj.__dict__[name] = value
    try:
        yield
    finally:
        for obj, name, value in reversed(before):
            if value is None:
                obj.__dict__.pop(name, None)
            else:
                obj.__dict__[name] = value


def items_in(value: Any) -> Iterator[Any]:
    """What an attribute holds: itself, or the members of (nested) lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from items_in(member)
    else:
        yield value
