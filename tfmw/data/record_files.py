"""Records of TFRecord and text files, by an index of their offsets.

records = tfmw.data.from_records(files, index_dir="index")     # bytes, one by one
train = records.map(parse).shuffle(100_000).batch(64)
"""

from __future__ import annotations

import array
import hashlib
import mmap
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfmw.data.rows import from_index
from tfmw.errors import UsageError

# tensorflow/core/lib/io/record_writer.h: uint64 length, uint32 checksum of it, the bytes, uint32
# checksum of those.
_LENGTH = struct.Struct("<Q")
_BEFORE, _AFTER = 12, 4


def from_records(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    kind: str = "tfrecord",
    index_dir: str | os.PathLike[str] | None = None,
) -> tf.data.Dataset:
    """The records of files, one by one, as strings.

    They have the order of `TFRecordDataset(files)` or `TextLineDataset(files)`. Workers read their
    own records only, also after a shuffle, and a resumed run reads no record again. Checksums of
    the bytes are not compared.

    Args:
        files: one path or several, on a disk that all workers see, without compression.
        kind: "tfrecord", or "text" for lines.
        index_dir: keeps the index, 16 bytes a record; a file that has changed gets a new one.
            Without it each start goes through the headers of all records, or through all lines.

    Raises:
        UsageError: a missing, compressed or incomplete file, no records, another kind.
    """
    if kind not in ("tfrecord", "text"):
        raise UsageError(f'received kind={kind!r}: expected "tfrecord" or "text".')
    paths = [files] if isinstance(files, str | os.PathLike) else files
    return from_index(_Records([os.fspath(p) for p in paths], kind, index_dir), in_threads=True)


class _Records:
    """The records of files, by index."""

    def __init__(self, paths: Sequence[str], kind: str, index_dir: str | os.PathLike[str] | None):
        self._paths = paths
        # int64 [records, 2] of each file: begin and end of the bytes
        self._index = [_kept(path, kind, index_dir) for path in paths]
        self._ends: np.ndarray = np.cumsum([len(index) for index in self._index])
        self._opened: dict[int, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._opened)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> bytes:
        file = int(np.searchsorted(self._ends, number, side="right"))
        index = self._index[file]
        begin, end = map(int, index[number - int(self._ends[file]) + len(index)])
        return os.pread(self._descriptor(file), end - begin, begin)

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._opened:
                self._opened[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._opened[file]


def _close(opened: dict[int, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def _kept(path: str, kind: str, index_dir: str | os.PathLike[str] | None) -> np.ndarray:
    """The index of a file, made once for each version of it."""
    try:
        facts = os.stat(path)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; expected a file on this machine."
        ) from error
    if index_dir is None:
        return _index(path, kind)
    version = f"{os.path.abspath(path)} {facts.st_size} {facts.st_mtime_ns} {kind}"
    name = hashlib.sha256(version.encode(errors="surrogateescape")).hexdigest()[:32]
    kept = os.path.join(os.fspath(index_dir), f"{name}.npy")
    if not os.path.exists(kept):
        os.makedirs(index_dir, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=index_dir, delete=False) as file:  # by each worker
            np.save(file, _index(path, kind))
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, kept)
    return np.load(kept, mmap_mode="r", allow_pickle=False)


def _index(path: str, kind: str) -> np.ndarray:
    if not os.path.getsize(path):
        return np.zeros([0, 2], np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return _lines(whole) if kind == "text" else _tfrecords(path, whole)


def _tfrecords(path: str, whole: mmap.mmap) -> np.ndarray:
    index = array.array("q")
    place, size = 0, len(whole)
    while place + _BEFORE <= size:
        begin = place + _BEFORE
        end = begin + _LENGTH.unpack_from(whole, place)[0]
        place = end + _AFTER
        if place <= size:
            index.extend((begin, end))
    if place != size:
        raise UsageError(
            f"{path} is no complete TFRecord file: a record would end at byte {place} of {size}. "
            "Compressed files have no offsets: decompress them, or pass tf.data.TFRecordDataset."
        )
    return np.array(index, np.int64).reshape(-1, 2)


def _lines(whole: mmap.mmap) -> np.ndarray:
    """Begin and end of each line, without its line break, as `TextLineDataset` has them."""
    content: np.ndarray = np.frombuffer(whole, np.uint8)
    breaks = np.flatnonzero(content == ord("\n"))
    last = len(content)
    ends = breaks if len(breaks) and breaks[-1] == last - 1 else np.append(breaks, last)
    begins: np.ndarray = np.append(0, ends[:-1] + 1)
    returns = (ends > begins) & (content[np.maximum(ends - 1, 0)] == ord("\r"))
    found: np.ndarray = np.stack([begins, ends - returns], axis=1).astype(np.int64)
    del content  # the file cannot be closed while an array refers to it
    return found
