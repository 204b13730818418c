"""Imports of TensorFlow and Keras without garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Imports modules without garbage collection: their objects are permanent."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                # All objects are old now. Otherwise the next collection would traverse them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
