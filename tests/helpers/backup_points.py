"""The points of a backup's writing at which a test may let it fail or die."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from unittest import mock

import tensorflow as tf

# Everything by which a write changes the disk; tests count the calls.
_CHANGES = [
    (os, "makedirs"),
    (tf.raw_ops, "SaveV2"),
    (tf.raw_ops, "MergeV2Checkpoints"),
    (tf.io.gfile, "GFile"),
    (os, "fsync"),
    (os, "rename"),
    (os, "link"),
    (os, "unlink"),
    (shutil, "rmtree"),
]


@contextlib.contextmanager
def watched(before: Callable[[str], None]) -> Iterator[None]:
    """Calls `before` with a name such as "rename" before each change of the disk."""
    with contextlib.ExitStack() as stack:
        for module, name in _CHANGES:
            real = getattr(module, name)

            def changed(*args, _real=real, _name=name, **kwargs):
                before(_name)
                return _real(*args, **kwargs)

            stack.enter_context(mock.patch.object(module, name, changed))
        yield


def dying(number: int) -> Callable[[str], None]:
    """Ends the process, as SIGKILL would, before change `number` of the disk."""
    calls = iter(range(number))

    def before(name: str) -> None:
        if next(calls, None) is None:
            os._exit(77)

    return before


def failing(number: int, error: BaseException) -> Callable[[str], None]:
    """Raises `error` at change `number` of the disk; the ones after it succeed."""
    left = [number]

    def before(name: str) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error

    return before


def lacking(number: int) -> Callable[..., None]:
    """A call that a file system does not have: it raises OSError of that number."""

    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call
