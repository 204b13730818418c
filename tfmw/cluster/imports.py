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
    collects, names = gc.isenabled(), vars(typing)
    before = names.get("compile")
    gc.disable()  # modules' objects are permanent
    # `typing` compiles the texts of annotations: TensorFlow has 18,000, of a few texts.
    names["compile"] = functools.lru_cache(None)(compile)
    try:
        yield
    finally:
        if before is None:
            del names["compile"]
        else:
            names["compile"] = before
        if collects:
            if not gc.get_freeze_count():
                # All objects are old now. Else the next collection goes through them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
