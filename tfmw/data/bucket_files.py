"""Files in a bucket, of which each worker reads the ranges that it trains on.

for url in expanded("s3://bucket/train-*.tfrecord"):
    file = BucketFile(url)
    file.version                                  # changes with the content
    file.read([(12, 40), (56, 84)])               # the bytes of two records
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import functools
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfmw.errors import UsageError
from tfmw.storage.bucket import Bucket, is_bucket

_GAP = 1 << 14  # bytes between two ranges that cost less to read than another request
_PARALLEL = 16  # requests of one read at the same time


def expanded(url: str) -> list[str]:
    """The files that a name with `*`, `?` or `[...]` matches, in order; another name as it is."""
    folder, _, pattern = url.rpartition("/")
    if not is_bucket(url) or not set("*?[") & set(pattern):
        return [url]
    names = [name for name in _listed(folder) if "/" not in name]
    return [f"{folder}/{name}" for name in sorted(fnmatch.filter(names, pattern))]


class BucketFile:
    """An object that is read by ranges, and must not change meanwhile.

    Args:
        url: "s3://bucket/train-00.tfrecord".

    Raises:
        UsageError: there is none.
    """

    def __init__(self, url: str):
        folder, _, self._name = url.rpartition("/")
        self.url, self._bucket = url, _bucket(folder)
        found = _listed(folder).get(self._name)
        if found is None:
            raise UsageError(f"cannot read {url}; expected an object of that name.")
        self.size, self._etag = found

    @property
    def version(self) -> str:
        """The name of this content."""
        return f"{self.url} {self.size} {self._etag}"

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of these ranges. Ranges that are close together are one request.

        Args:
            ranges: (begin, end) of each.

        Raises:
            UsageError: the object has changed.
        """
        joined: list[list[int]] = []
        for begin, end in sorted(ranges):
            if joined and begin <= joined[-1][1] + _GAP:
                joined[-1][1] = max(end, joined[-1][1])
            else:
                joined.append([begin, end])
        parts = list(_pool().map(lambda r: (r[0], self._fetch(*r)), joined))
        firsts = [first for first, _ in parts]
        found = []
        for begin, end in ranges:
            first, part = parts[bisect.bisect_right(firsts, begin) - 1]
            found.append(part[begin - first : end - first])
        return found

    def _fetch(self, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        data = self._bucket.read_version(self._name, begin, end, self._etag)
        if data is None or len(data) != end - begin:
            raise UsageError(
                f"{self.url} has changed since this run began: start it again, with the files as "
                "they are now or as they were."
            )
        return data

    @contextlib.contextmanager
    def copy(self) -> Iterator[str]:
        """Yields the path of a temporary copy."""
        with tempfile.TemporaryDirectory(prefix="tfmw-records-") as folder:
            path = os.path.join(folder, "records")
            self._bucket.download([(self._name, self.size, path)])
            yield path

    def opened(self) -> io.RawIOBase:
        """The object as a file of Python, each of whose reads is a request."""
        return _Opened(self)


class _Opened(io.RawIOBase):
    def __init__(self, file: BucketFile):
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = (0, self._place, self._file.size)[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        end = min(self._place + len(buffer), self._file.size)
        (data,) = self._file.read([(self._place, max(end, self._place))])
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


@functools.lru_cache(64)
def _bucket(folder: str) -> Bucket:
    return Bucket(folder)


@functools.lru_cache(64)
def _listed(folder: str) -> dict[str, tuple[int, str]]:
    """(bytes, ETag) of the objects in a folder: one request for a thousand of them."""
    return _bucket(folder).names()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_PARALLEL, "tfmw-bucket")
