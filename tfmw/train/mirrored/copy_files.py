"""Copies of the state in files in memory, from which new workers continue if all have ended.

    files = CopyFiles(folder, rank=0)      # in /dev/shm, where the launcher makes and removes it
    files.write(copy)                      # in place of the older one of two files
    files.found()                          # the copies that earlier workers of this machine left

A file begins with the place of its header, which is zero while the file is written: a worker may
be killed at any time. Then come the arrays, and last the header, as JSON. Files of an attempt are
never changed by a later one, so that arrays may be views of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster.memory import usable_bytes
from tfmw.compat.memory import view_of
from tfmw.storage import fence
from tfmw.train.checkpoint.resume import CALL
from tfmw.train.mirrored.state_copies import Copy, Layout

_PLACE = struct.Struct("<QQ")  # offset of the header, and its bytes
_ALIGNED = 64  # bytes between whose multiples arrays begin
# the shares that all files may take: of the free memory of the file system, and of the machine's
_FREE, _MEMORY = 0.5, 0.125
_ALL_HAVE = 3  # number of copies of a worker, of which all others then have one


class CopyFiles:
    """The two files of this worker, and those of earlier workers on its machine.

    Args:
        folder: an existing directory in memory.
        rank: rank of this worker.
        is_first: whether it is the first worker of its machine, which removes earlier ones' files.
    """

    def __init__(self, folder: str, rank: int, is_first: bool = True):
        self._folder = Path(folder)
        # the file with the older copy first
        self._own = [self._folder / f"{fence.attempt()}-{rank}-{i}" for i in range(2)]
        self.is_first = is_first
        self._written = 0  # number of copies

    def found(self) -> list[Copy]:
        """The complete copies in this machine's files, of this call of `fit`."""
        return [copy for path in self._folder.iterdir() if (copy := _read(path)) is not None]

    def write(self, copy: Copy) -> None:
        """Writes a copy over the older one of this worker.

        Raises:
            OSError: there is not enough memory, or an array has no plain values.
        """
        if self.is_first and self._written == _ALL_HAVE - 1:
            for path in self._folder.iterdir():
                if not path.name.startswith(f"{fence.attempt()}-"):
                    path.unlink()
        if not self._written:
            self._require_memory(copy)
            # a worker that it replaces may have left copies
            steps = [-1 if (c := _read(path)) is None else c.held.step for path in self._own]
            self._own.sort(key=dict(zip(self._own, steps, strict=True)).__getitem__)
        file = os.open(self._own[0], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write(file, copy)
        finally:
            os.close(file)
        self._own.reverse()
        self._written += 1

    def remove(self) -> None:
        """Removes this worker's files, and perhaps those of earlier ones: the training is done."""
        for path in self._folder.iterdir():
            if self.is_first or path in self._own:
                path.unlink(missing_ok=True)

    def _require_memory(self, copy: Copy) -> None:
        writers = int(os.environ.get("TFMW_LOCAL_TASKS", "1")) if copy.shards else 1
        needed = 2 * writers * sum(array.nbytes for _, array in _arrays(copy))
        system = os.statvfs(self._folder)
        free = system.f_bavail * system.f_frsize
        if needed > min(_FREE * free, _MEMORY * usable_bytes()):
            raise OSError(f"files of {needed >> 20} MB in {self._folder} take too much memory")


def _arrays(copy: Copy) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays; those of shards are named by ranks."""
    for name, tensor in copy.tensors.items():
        yield name, view_of(tensor) if tf.is_tensor(tensor) else np.asarray(tensor)
    for rank, arrays in copy.shards.items():
        for array in arrays:
            yield str(rank), array


def _write(file: int, copy: Copy) -> None:
    entries: list[tuple[str, str, list[int], int]] = []
    offset = _PLACE.size
    os.pwrite(file, bytes(offset), 0)
    for name, array in _arrays(copy):
        if array.dtype.hasobject:
            raise OSError(f"{name} has values of {array.dtype}")
        offset = -(-offset // _ALIGNED) * _ALIGNED
        entries.append((name, array.dtype.name, list(array.shape), offset))
        offset = _put(file, np.ascontiguousarray(array).reshape(-1).view(np.uint8), offset)
    header = {
        "call": os.environ.get(CALL, ""),
        "record": copy.record,
        "attempt": copy.attempt,
        "tensors": entries[: len(copy.tensors)],
        "shards": entries[len(copy.tensors) :],
        "layout": copy.layout,
    }
    text = json.dumps(header).encode()
    _put(file, text, offset)
    os.pwrite(file, _PLACE.pack(offset, len(text)), 0)


def _put(file: int, data: Any, offset: int) -> int:
    """Writes bytes at an offset; returns that of their end."""
    rest = memoryview(data)
    while len(rest):
        written = os.pwrite(file, rest, offset)
        offset, rest = offset + written, rest[written:]
    return offset


def _read(path: Path) -> Copy | None:
    """The copy in a file, whose arrays are views of it; None if it is not complete."""
    with contextlib.suppress(OSError, ValueError, struct.error):
        memory = np.memmap(path, np.uint8, "r")
        begin, size = _PLACE.unpack(bytes(memory[: _PLACE.size]))
        header: dict[str, Any] = json.loads(bytes(memory[begin : begin + size])) if begin else {}
        if not header or header["call"] != os.environ.get(CALL, ""):
            return None

        def array(dtype: str, shape: list[int], offset: int) -> np.ndarray:
            type_ = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
            end = offset + int(np.prod(shape, dtype=np.int64)) * type_.itemsize
            found: np.ndarray = memory[offset:end].view(np.ndarray).view(type_).reshape(shape)
            return found

        shards: dict[int, list[np.ndarray]] = {}
        for rank, *place in header["shards"]:
            shards.setdefault(int(rank), []).append(array(*place))
        tensors = {name: array(*place) for name, *place in header["tensors"]}
        layout = Layout.of(*header["layout"])
        return Copy(header["record"], tensors, layout, shards, header["attempt"])
    return None
