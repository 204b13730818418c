"""Records of TFRecord, text and tar files, by an index of their offsets.

records = tfmw.data.from_records(files, index_dir="index")     # bytes, one by one
train = records.map(parse).shuffle(100_000).batch(64)

samples = tfmw.data.from_tars(files, index_dir="index")        # {"jpg": bytes, "cls": bytes}
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfmw.data.record_index import index_of
from tfmw.data.rows import from_index
from tfmw.errors import UsageError


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
    return from_index(Records([os.fspath(p) for p in paths], kind, index_dir), in_threads=True)


def from_tars(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    extensions: Sequence[str],
    *,
    index_dir: str | os.PathLike[str] | None = None,
) -> tf.data.Dataset:
    """The samples of tar files, one by one, as WebDataset writes them.

        samples = tfmw.data.from_tars(files, ["jpg", "cls"], index_dir="index")
        train = samples.map(lambda s: (tf.io.decode_jpeg(s["jpg"]), s["cls"]))

    A sample is a dict: extension -> the bytes of that member. Members of a sample have one name up
    to the first dot, and follow each other. The order is that of the files. Workers read their own
    samples only, and of them these members only; a resumed run reads no sample again.

    Args:
        files: one path or several, on a disk that all workers see, without compression.
        extensions: of the members to read: the part of a name after its first dot.
        index_dir: keeps the index; see `from_records`.

    Raises:
        UsageError: a missing or compressed file, no samples, or a sample without such a member.
    """
    if isinstance(extensions, str) or not extensions:
        raise UsageError(
            f'received extensions={extensions!r}: expected several, as ["jpg", "cls"].'
        )
    names = [name.lower().lstrip(".") for name in extensions]
    paths = [files] if isinstance(files, str | os.PathLike) else files
    records = Records([os.fspath(p) for p in paths], "/".join(["tar", *names]), index_dir)
    return from_index(_Samples(records, names), in_threads=True)


class _Samples:
    """Each `len(extensions)` records, by index."""

    def __init__(self, records: Records, extensions: Sequence[str]):
        self._records, self._extensions = records, extensions

    def __len__(self) -> int:
        return len(self._records) // len(self._extensions)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        first = number * len(self._extensions)
        return {name: self._records[first + k] for k, name in enumerate(self._extensions)}


class Records:
    """The records of files, by index.

    Attributes:
        counts: the number of records of each file.
    """

    def __init__(self, paths: Sequence[str], kind: str, index_dir: str | os.PathLike[str] | None):
        self._paths = paths
        # int64 [records, 2] of each file: begin and end of the bytes
        self._index = [index_of(path, kind, index_dir) for path in paths]
        self.counts = [len(index) for index in self._index]
        self._ends: np.ndarray = np.cumsum(self.counts)
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

    def many(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n] -> object [n], the bytes of these records."""
        found: np.ndarray = np.empty(len(numbers), object)
        found[:] = [self[number] for number in numbers.tolist()]
        return found

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._opened:
                self._opened[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._opened[file]


def _close(opened: dict[int, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)
