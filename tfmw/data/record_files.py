"""Records of TFRecord, text and tar files, by an index of their offsets.

records = tfmw.data.from_records(files, index_dir="index")     # bytes, one by one
train = records.map(parse).shuffle(100_000).batch(64)

samples = tfmw.data.from_tars(files, index_dir="index")        # {"jpg": bytes, "cls": bytes}
"""

from __future__ import annotations

import array
import hashlib
import mmap
import os
import struct
import tarfile
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
    records = _Records([os.fspath(p) for p in paths], "/".join(["tar", *names]), index_dir)
    return from_index(_Samples(records, names), in_threads=True)


class _Samples:
    """Each `len(extensions)` records, by index."""

    def __init__(self, records: _Records, extensions: Sequence[str]):
        self._records, self._extensions = records, extensions

    def __len__(self) -> int:
        return len(self._records) // len(self._extensions)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        first = number * len(self._extensions)
        return {name: self._records[first + k] for k, name in enumerate(self._extensions)}


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
    if kind.startswith("tar"):
        return _members(path, kind.split("/")[1:])
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


def _members(path: str, extensions: Sequence[str]) -> np.ndarray:
    """Begin and end of the members of each sample, in the order of the extensions."""
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in filter(tarfile.TarInfo.isreg, tar):
                folder, name = os.path.split(member.name)
                key, _, extension = name.partition(".")
                if not key or not extension:
                    continue
                if not samples or samples[-1][0] != os.path.join(folder, key):
                    samples.append((os.path.join(folder, key), {}))
                begin = member.offset_data
                samples[-1][1][extension.lower()] = begin, begin + member.size
    except tarfile.TarError as error:
        raise UsageError(
            f"{path} is no tar file without compression ({error}): members of a compressed one "
            "have no offsets; decompress it."
        ) from error
    for key, members in samples:
        if missing := [name for name in extensions if name not in members]:
            raise UsageError(
                f"the sample {key} of {path} has the members {sorted(members)}: "
                f"expected {missing[0]}, as of the other samples; leave it out of `extensions`, or "
                "write the file again."
            )
    index = [members[name] for _, members in samples for name in extensions]
    return np.array(index, np.int64).reshape(-1, 2)
