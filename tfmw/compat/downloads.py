"""Downloads by one task at a time, as every task runs the same script.

    share_downloads()                        # in a process that has joined a cluster
    with one_process_at_a_time("/data/mnist/3.0.1"): ...

Keras's `get_file` writes a download under its final name, so another task would read a part of it.
With `extract=True`, as in `keras.datasets.cifar10`, each call writes all files of the archive anew,
while another task may read them. Two tasks that prepare a dataset of TFDS use the same temporary
directory, as their random generators are equal. KaggleHub, which has KerasHub's presets, appends to
a file that another task is about to write. So one task does the work, and the others wait.

Checked with Keras 3.8 to 3.15, TFDS 4.9, KaggleHub 1.0.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import inspect
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from urllib.parse import urlsplit

import keras

from tfmw.observe.late_imports import when_imported
from tfmw.observe.progress import blocking_call
from tfmw.observe.trackers import RUN_ID
from tfmw.storage import disk, fence

_calls: collections.Counter[str] = collections.Counter()  # of `get_file`, for each lock
_SHARED = "_tfmw_shared"  # attribute of functions that this module has replaced


def share_downloads() -> None:
    """Makes `keras.utils.get_file`, TFDS and KaggleHub work in one task at a time."""
    get_file = keras.utils.get_file
    if not hasattr(get_file, _SHARED):
        names = get_file.__globals__
        names["urlretrieve"] = _whole(names["urlretrieve"])
        shared = _once_in_an_attempt(get_file)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "keras" and vars(module).get("get_file") is get_file:
                setattr(module, "get_file", shared)  # noqa: B010
    when_imported("tensorflow_datasets", share_preparation)
    when_imported("kagglehub", _share_kagglehub)


def share_preparation(tfds: ModuleType) -> None:
    """Makes `DatasetBuilder.download_and_prepare` of TFDS wait for other processes that do it."""
    builders = tfds.core.DatasetBuilder
    prepare = builders.download_and_prepare
    if hasattr(prepare, _SHARED):
        return

    @functools.wraps(prepare)
    def prepare_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.data_path.exists():  # TFDS renames complete data to this name
            prepare(self, *args, **kwargs)
            return
        with one_process_at_a_time(self.data_dir):
            prepared_meanwhile = self.data_path.exists()
            prepare(self, *args, **kwargs)
        if prepared_meanwhile:
            self.info.read_from_directory(self.data_dir)

    setattr(prepare_once, _SHARED, True)
    builders.download_and_prepare = prepare_once


@contextlib.contextmanager
def one_process_at_a_time(data_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lock on a TFDS version directory while it is prepared.

    The lock is a POSIX record lock (fcntl(2)) on a file beside the directory. The kernel drops it
    when its holder dies, it works over NFS, and the process that holds it may take it again. There
    is no lock on a remote `data_dir` (`gs://...`): prepare such data once, before the job. Python's
    random generator has the same state afterwards, so the initial weights do not depend on which
    process has prepared the data.
    """
    path = os.fspath(data_dir)
    with contextlib.ExitStack() as stack:
        # TFDS draws the names of its files from the generator that gives Keras its weights' seeds.
        stack.callback(random.setstate, random.getstate())
        if "://" not in path:
            lock = Path(path + ".lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(lock))
        yield


@contextlib.contextmanager
def _locked(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Opens a file, which it creates, and waits for its lock."""
    with blocking_call("download"), open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as e:
            if e.errno not in disk.NO_LOCKS:
                raise
            # Processes without the lock do the work twice.
        yield file


def _whole(retrieve: Callable[..., Any]) -> Callable[..., Any]:
    """A download that gets its name once it is complete: a killed task leaves no part of it."""

    @functools.wraps(retrieve)
    def whole(url: str, target: str, *args: Any, **kwargs: Any) -> Any:
        with disk.replacing(target) as temporary:
            return retrieve(url, temporary, *args, **kwargs)

    return whole


def _once_in_an_attempt(get_file: Callable[..., str]) -> Callable[..., str]:
    """Keras's `get_file`, of which one task of an attempt makes each call for all tasks.

    The file of the lock names the attempt, how often its tasks have got the file, and its path.
    """
    signature = inspect.signature(get_file)

    @functools.wraps(get_file)
    def shared(*args: Any, **kwargs: Any) -> str:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        lock = _lock_of(get_file, **given.arguments)
        _calls[lock] += 1
        with _locked(lock) as file:
            file.seek(0)
            *attempt, times, path = _read(file.read())
            own = [os.environ.get(RUN_ID), fence.attempt()]
            if own[0] and attempt == own and times >= _calls[lock] and os.path.exists(path):
                return str(path)
            path = get_file(*args, **kwargs)
            file.truncate(0)
            json.dump([*own, _calls[lock], path], file)
        return path

    setattr(shared, _SHARED, True)
    return shared


def _read(text: str) -> list[Any]:
    """The record of an attempt; one of no attempt from an empty or damaged file."""
    with contextlib.suppress(ValueError):
        match json.loads(text):
            case [_, int(), int(), str()] as record:
                return record
    return [None, 0, 0, ""]


def _lock_of(
    get_file: Any, fname: Any, origin: Any, cache_subdir: Any, cache_dir: Any, **_: Any
) -> str:
    """The path of the lock of a file of Keras's cache."""
    cache = os.path.expanduser(cache_dir or get_file.__globals__["config"].keras_home())
    return _lock_in(cache, f"{cache_subdir}/{fname or os.path.basename(urlsplit(origin).path)}")


def _lock_in(cache: str, name: str) -> str:
    """The path of a lock: in a cache, which several machines may share, if that is writable."""
    if not os.access(cache, os.W_OK):
        cache = tempfile.gettempdir()
    return os.path.join(cache, f".tfmw_{os.getuid()}_{re.sub('[^a-zA-Z0-9.]+', '_', name)}.lock")


def _share_kagglehub(kagglehub: ModuleType) -> None:
    """Makes downloads of KaggleHub wait for other tasks that download the same."""

    def one_at_a_time(download: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(download)
        def shared(handle: str, *args: Any, **kwargs: Any) -> str:
            cache = kagglehub.config.get_cache_folder()
            with contextlib.suppress(OSError):
                os.makedirs(cache, exist_ok=True)
            with _locked(_lock_in(cache, handle)):
                return download(handle, *args, **kwargs)

        return shared

    for name in ("model_download", "dataset_download", "competition_download"):
        setattr(kagglehub, name, one_at_a_time(getattr(kagglehub, name)))
