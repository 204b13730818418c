"""Files in a bucket, of which each worker reads the ranges that it trains on.

for url in expanded("s3://bucket/train-*.tfrecord"):
    file = BucketFile(url, cache_of("/scratch/cache", 1 << 30))
    file.etag                                     # changes with the content
    file.read([(12, 40), (56, 84)])               # the bytes of two records
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfmw.errors import UsageError
from tfmw.storage.bucket import CHUNK, Bucket, is_bucket

logger = logging.getLogger("tfmw")

Range = tuple[int, int]
"""(begin, end) of bytes."""

_GAP = 1 << 10  # bytes between two ranges that are read, too: another request has as many
_PARALLEL = 32  # requests of one process at the same time
_WINDOW = 8 * CHUNK  # bytes of a copy that are in memory


def expanded(path: str) -> list[str]:
    """The files that a name with `*`, `?` or `[...]` matches, in order; another name as it is."""
    if not glob.has_magic(path) or os.path.exists(path):
        return [path]
    if not is_bucket(path):
        return sorted(glob.glob(path))
    folder, _, pattern = path.rpartition("/")
    return [f"{folder}/{name}" for name in sorted(fnmatch.filter(_listed(folder), pattern))]


class BucketFile:
    """An object that is read by ranges, and must not change meanwhile.

    Args:
        url: "s3://bucket/train-00.tfrecord".
        cache: cache of ranges, on this machine.

    Raises:
        UsageError: the object does not exist.
    """

    def __init__(self, url: str, cache: RangeCache | None = None):
        folder, _, self._name = url.rpartition("/")
        self.url, self._bucket, self._cache = url, _bucket(folder), cache
        found = _listed(folder).get(self._name)
        if found is None:
            raise UsageError(f"cannot read {url}; expected an object of that name.")
        self.size, self.etag = found

    def read(self, ranges: Sequence[Sequence[int]]) -> list[bytes]:
        """The bytes of these ranges, (begin, end) of each.

        Raises:
            UsageError: the object has changed.
        """
        pairs = [(begin, end) for begin, end in ranges]
        found = {} if self._cache is None else self._cache.get(self, pairs)
        fetched = self._fetched([pair for pair in pairs if pair not in found])
        if self._cache is not None:
            self._cache.put(self, fetched)
        found |= fetched
        return [found[pair] for pair in pairs]

    def _fetched(self, ranges: Sequence[Range]) -> dict[Range, bytes]:
        """Reads ranges from the bucket; those that are close together are one request."""
        joined: list[list[int]] = []
        request_of = {}
        for begin, end in sorted(ranges):
            if not joined or begin > joined[-1][1] + _GAP:
                joined.append([begin, end])
            joined[-1][1] = max(end, joined[-1][1])
            request_of[begin, end] = len(joined) - 1
        firsts = [first for first, _ in joined]
        parts = list(_pool().map(self._fetch, firsts, [end for _, end in joined]))
        return {
            (begin, end): parts[k][begin - firsts[k] : end - firsts[k]]
            for (begin, end), k in request_of.items()
        }

    def _fetch(self, begin: int, end: int) -> bytes:
        data = self._bucket.read_range(self._name, begin, end, self.etag)
        if data is None:
            raise UsageError(
                f"{self.url} has changed since this run began: start it again, with the files as "
                "they are now or as they were."
            )
        return data

    def copy_to(self, path: str) -> None:
        """Writes the whole object into a local file, several chunks at a time."""
        with open(path, "wb") as file:
            for first in range(0, self.size, _WINDOW):
                begins = range(first, min(first + _WINDOW, self.size), CHUNK)
                ends = [min(begin + CHUNK, self.size) for begin in begins]
                fetch = _pool().map if len(begins) > 1 else map  # no threads at a process's exit
                file.writelines(fetch(self._fetch, begins, ends))


class RangeCache:
    """Ranges of objects in a local file, for all processes of a machine.

    The file is a database of SQLite: a crash of any kind leaves whole ranges only, and the number
    of its pages has a limit. Ranges that do not fit, or that a damaged file does not give, are read
    from the bucket.

    Args:
        directory: a local directory.
        limit: bytes of the file.
    """

    def __init__(self, directory: str, limit: int):
        os.makedirs(directory, exist_ok=True)
        self._path = os.path.join(directory, "ranges.sqlite")
        self._mutex, self._is_full = threading.Lock(), False
        self._database = sqlite3.connect(self._path, timeout=60, check_same_thread=False)
        for setting in (
            "PRAGMA page_size=16384",
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=NORMAL",
            f"PRAGMA max_page_count={max(16, limit >> 14)}",
            "CREATE TABLE IF NOT EXISTS ranges (object INT, etag INT, begin INT, stop INT, "
            "data BLOB, PRIMARY KEY (object, etag, begin, stop))",
        ):
            self._database.execute(setting)

    def get(self, file: BucketFile, ranges: Sequence[Range]) -> dict[Range, bytes]:
        """The ranges of a file that are here."""
        key = _key(file)
        query = "SELECT data FROM ranges WHERE object=? AND etag=? AND begin=? AND stop=?"
        with self._guarded():
            rows = [self._database.execute(query, (*key, *each)).fetchone() for each in ranges]
            return {each: row[0] for each, row in zip(ranges, rows, strict=True) if row}
        return {}

    def put(self, file: BucketFile, found: Mapping[Range, bytes]) -> None:
        """Adds ranges of a file."""
        if not self._is_full and found:
            rows = [(*_key(file), *each, data) for each, data in found.items()]
            with self._guarded(), self._database:
                self._database.executemany("INSERT OR IGNORE INTO ranges VALUES (?,?,?,?,?)", rows)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with self._mutex:
                yield
        except sqlite3.Error as error:
            if not self._is_full:
                logger.warning("%s: %s; further records are not cached", self._path, error)
            self._is_full = True


def _key(file: BucketFile) -> tuple[int, ...]:
    digests = (hashlib.sha256(text.encode()).digest() for text in (file.url, file.etag))
    return tuple(int.from_bytes(digest[:7], "big") for digest in digests)


def cache_of(directory: str | os.PathLike[str] | None, limit: int) -> RangeCache | None:
    """The cache in a directory; None if there is no directory, or if it cannot be used."""
    try:
        return None if directory is None else _cache(os.path.abspath(directory), limit)
    except (OSError, sqlite3.Error) as error:
        logger.warning(
            "no cache in %s (%s): all records are read from the bucket", directory, error
        )
        return None


_cache = functools.cache(RangeCache)


class OpenedFile:
    """An object as pyarrow reads files; each read is a request."""

    closed = False

    def __init__(self, file: BucketFile):
        self._file, self._place = file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = (0, self._place, self._file.size)[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, count: int) -> bytes:
        begin, self._place = self._place, min(self._place + count, self._file.size)
        return self._file.read([(begin, self._place)])[0]

    def close(self) -> None:
        self.closed = True


@functools.lru_cache(64)
def _bucket(folder: str) -> Bucket:
    return Bucket(folder)


@functools.lru_cache(64)
def _listed(folder: str) -> dict[str, tuple[int, str]]:
    """(bytes, ETag) of the objects in a folder: one request for a thousand of them."""
    return _bucket(folder).files()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_PARALLEL, "tfmw-bucket")
