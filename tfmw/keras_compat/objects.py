"""Keras objects that track their attributes: listing members, and overriding attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def overridden(overrides: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Overrides attributes of single objects, without attribute tracking, within this context."""
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
    """The value of an attribute, or the members of (nested) lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from items_in(member)
    else:
        yield value
