"""Index of a file of records: begin and end of each record, created once per version of a file.

    index = index_of("train-00.tfrecord", "tfrecord", "index")   # int64 [records, 2]

`make_in_background` makes the indices that a resumed run will need while the first run trains.
"""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import itertools
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np

from tfmw.errors import UsageError
from tfmw.storage.bucket import Bucket, is_bucket
from tfmw.storage.disk import flush, replacing

DIRECTORY = "record_index"
"""The indices of the files of a run, beside its backups."""

_LARGE = 1 << 26  # bytes of files whose indexing takes a second or more
_PIECE = 1 << 26  # bytes of a text that are processed together
# A file of rows without a header: `np.load` in several threads at once fails by chance. It parses
# the header with syntax trees of Python, whose depth CPython 3.11 counts for all threads together.
_SUFFIX, _TYPE, _ROW = ".index", np.dtype("<i8"), 16  # and the bytes of a row
_DIGITS = 32  # of each digest in the name of an index; the first is that of the file's path

# Format of tensorflow/core/lib/io/record_writer.h: uint64 length, uint32 checksum of it, the bytes,
# uint32 checksum of those.
_LENGTH = struct.Struct("<Q")
_BEFORE, _AFTER = 12, 4


def make_in_background(
    paths: Sequence[str], kind: str, index_dir: str
) -> subprocess.Popen[bytes] | None:
    """Starts a process of low priority that creates the indices of large files.

    Returns:
        The process; None if the files are small, or missing.
    """
    try:
        # reads the sizes of only a few files
        sizes = itertools.accumulate(map(os.path.getsize, paths))
        if not any(size >= _LARGE for size in sizes):
            return None
    except OSError:
        return None
    packages = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with tempfile.TemporaryFile() as arguments:
        arguments.write(json.dumps([list(paths), kind, index_dir, os.getpid()]).encode())
        arguments.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)],
            stdin=arguments,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": packages},
        )


def _make() -> None:
    paths, kind, index_dir, parent = json.load(sys.stdin)
    if sys.platform.startswith("linux"):  # prctl(2), PR_SET_PDEATHSIG: ends with the training
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
    os.nice(19)
    for path in paths:
        index_of(path, kind, index_dir)


def index_of(path: str, kind: str, index_dir: str | os.PathLike[str] | None) -> np.ndarray:
    """The index of a file.

    Args:
        path: path of a file without compression.
        kind: "tfrecord", "text", or "tar/" and the extensions of the members.
        index_dir: directory that keeps it, also in a bucket, 16 bytes a record; None creates it in
            each call.

    Returns:
        int64 [records, 2]: begin and end of the bytes of each record.

    Raises:
        UsageError: the file is missing, compressed or incomplete.
    """
    name = _name_of(path, kind, index_dir)
    if index_dir is None:
        return _made(path, kind)
    directory = os.fspath(index_dir)
    if is_bucket(directory):
        bucket = Bucket(directory)
        if (found := bucket.read(name)) is not None:
            return np.frombuffer(found[0], _TYPE).reshape(-1, 2)
        index = _made(path, kind)
        bucket.replace(name, index.astype(_TYPE, copy=False).tobytes(), None)
        return index
    whole = os.path.join(directory, name)
    if not os.path.exists(whole):
        os.makedirs(directory, exist_ok=True)
        with replacing(whole) as temporary:  # every worker writes it
            _made(path, kind).astype(_TYPE, copy=False).tofile(temporary)
            flush(temporary)
    if not os.path.getsize(whole):  # which nothing can map
        return np.empty((0, 2), _TYPE)
    return np.memmap(whole, _TYPE, "r").reshape(-1, 2)


def count_of(path: str, kind: str, index_dir: str | os.PathLike[str]) -> int:
    """The number of records of a file; an index that was made before is not read for it."""
    name = _name_of(path, kind, index_dir)
    known, size = _known(os.fspath(index_dir)).get(name[:_DIGITS], ("", 0))
    return size // _ROW if known == name else len(index_of(path, kind, index_dir))


def _name_of(path: str, kind: str, index_dir: str | os.PathLike[str] | None) -> str:
    """The name of an index, with a digest of the version of its file."""
    if is_bucket(path):
        # Not above: the process that makes indices would import TensorFlow with it.
        from tfmw.data.bucket_files import BucketFile

        file = BucketFile(path)
        version = f"{file.size} {file.etag}"
    else:
        try:
            facts = os.stat(path)
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror}; expected a file on this machine."
            ) from error
        path, version = os.path.abspath(path), f"{facts.st_size} {facts.st_mtime_ns}"
    encoded = (t.encode(errors="surrogateescape") for t in (f"{path} {kind}", version))
    name = "-".join(hashlib.sha256(text).hexdigest()[:_DIGITS] for text in encoded) + _SUFFIX
    known = _known(os.fspath(index_dir)) if index_dir is not None and is_bucket(path) else {}
    if known.get(name[:_DIGITS], (name, 0))[0] != name:
        raise UsageError(
            f"{path} has changed since its index in {index_dir} was made: a run that resumes "
            "would read other records. To train on the object as it is, name another index_dir."
        )
    return name


@functools.cache
def _known(index_dir: str) -> dict[str, tuple[str, int]]:
    """(name, bytes) of the indices in a directory or a bucket, by the digest of the file's path."""
    if is_bucket(index_dir):
        sizes = {name: size for name, (size, _) in Bucket(index_dir).files().items()}
    else:
        found = os.scandir(index_dir) if os.path.isdir(index_dir) else ()
        sizes = {entry.name: entry.stat().st_size for entry in found}
    return {name[:_DIGITS]: (name, size) for name, size in sizes.items() if name.endswith(_SUFFIX)}


def _made(path: str, kind: str) -> np.ndarray:
    """The index of a file, which goes through its content."""
    if is_bucket(path):
        from tfmw.data.bucket_files import BucketFile

        with tempfile.NamedTemporaryFile(prefix="tfmw-records-") as copy:
            BucketFile(path).copy_to(copy.name)
            return _index(copy, path, kind)
    with open(path, "rb") as file:
        return _index(file, path, kind)


def _index(file: IO[bytes], path: str, kind: str) -> np.ndarray:
    if not os.fstat(file.fileno()).st_size:
        return np.zeros([0, 2], np.int64)
    if kind.startswith("tar"):
        return _members(file, path, kind.split("/")[1:])
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
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
    # per chunk of the text: a copy of a large file may not fit into memory
    found: list[np.ndarray] = []
    next_begin, last = 0, len(content)
    for first in range(0, last, _PIECE):
        ends: np.ndarray = first + np.flatnonzero(content[first : first + _PIECE] == ord("\n"))
        if first + _PIECE >= last and content[-1] != ord("\n"):
            ends = np.append(ends, last)
        begins: np.ndarray = np.append(next_begin, ends + 1)
        next_begin, begins = int(begins[-1]), begins[:-1]
        returns = (ends > begins) & (content[np.maximum(ends - 1, 0)] == ord("\r"))
        found.append(np.stack([begins, ends - returns], axis=1).astype(np.int64))
    del content  # the file cannot be closed while an array refers to it
    return np.concatenate(found)


def _members(file: IO[bytes], path: str, extensions: Sequence[str]) -> np.ndarray:
    """Begin and end of the members of each sample, in the order of the extensions."""
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
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


if __name__ == "__main__":
    _make()
