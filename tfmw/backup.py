"""State on disk: what a run needs to go on as if nothing had happened.

    store = BackupStore("/shared/backups/run7")
    with store.locked():
        store.write(step=1200, tensors={"v/0": array}, record={"epoch": 3})
        found = store.newest()                    # None, or a Backup that passed every check
        found.record["epoch"], found.tensors()["v/0"]

One backup is one directory `step_<n>` with three files:

* `tensors.index`, `tensors.data-00000-of-00001`: a TensorFlow checkpoint (its tensor bundle
  format: named tensors, a CRC-32C for each);
* `record.json`: everything else as JSON, with the SHA-256 of itself and the sizes of the other
  files. It is written last: a directory without a valid one is no backup.

It is written under a temporary name, flushed, and renamed; the parent directory is flushed; the two
newest are kept. Reading never executes what it reads: no pickle, no code, no links followed. Paths
may be local or whatever `tf.io.gfile` opens; where there is no atomic rename (object stores),
`record.json` coming last does its work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.errors import TfmwError, UsageError

logger = logging.getLogger("tfmw")

FORMAT = 1
KEPT = 2
_PREFIX = "tensors"
_RECORD = "record.json"
_NAME = re.compile(r"step_(\d{12})")
_TEMPORARY = re.compile(r"\.step_\d{12}\.tmp-.*")


class Damaged(TfmwError):
    """A backup that is incomplete or whose checksums do not match."""


class Backup:
    """One complete backup, checked.

    Attributes:
        path: its directory.
        step: training steps made when it was taken.
        record: what `BackupStore.write` was given.
    """

    def __init__(self, path: str, step: int, record: dict[str, Any]):
        self.path = path
        self.step = step
        self.record = record

    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors by name. Raises Damaged where a checksum does not match."""
        try:
            reader = tf.train.load_checkpoint(os.path.join(self.path, _PREFIX))
            names = reader.get_variable_to_shape_map()
            return {name: reader.get_tensor(name) for name in sorted(names)}
        except (tf.errors.OpError, ValueError, RuntimeError) as e:
            raise Damaged(f"backup {self.path} is damaged: {_first_line(e)}") from e


class BackupStore:
    """A directory of backups, written by one process at a time.

    Args:
        path: local, or a URL that `tf.io.gfile` opens.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._local = "://" not in self.path

    # ------------------------------------------------------------ one run at a time

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs off the directory, and removes what a killed one left half written.

        A local lock (flock): it ends with the process however that ends, holds on one machine and
        on network file systems that pass it on, and does nothing for object stores.

        Raises:
            UsageError: another process holds it.
        """
        tf.io.gfile.makedirs(self.path)
        if not self._local:
            self._remove_leftovers()
            yield
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(os.path.join(self.path, "LOCK"), flags, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
                raise UsageError(
                    f"backup directory {self.path!r} is in use by another run ({holder}): wait for "
                    "it, or give this run a directory of its own."
                ) from None
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            self._remove_leftovers()
            yield
        finally:
            os.close(lock)

    def _remove_leftovers(self) -> None:
        for name in self._names():
            if _TEMPORARY.fullmatch(name):
                tf.io.gfile.rmtree(os.path.join(self.path, name))

    def _names(self) -> list[str]:
        if not tf.io.gfile.exists(self.path):
            return []
        return [name.rstrip("/") for name in tf.io.gfile.listdir(self.path)]

    # ------------------------------------------------------------ writing

    def write(
        self, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]
    ) -> str:
        """Writes one backup and removes all but the newest ones.

        Args:
            step: training steps made; a newer backup has a higher one or replaces its like.
            tensors: name -> array, of any type that TensorFlow has.
            record: JSON values.

        Returns:
            The backup's directory.

        Raises:
            OSError or tf.errors.OpError: it could not be written; older backups are untouched.
        """
        final = os.path.join(self.path, f"step_{step:012d}")
        work = final
        if self._local:
            name = f".step_{step:012d}.tmp-{os.getpid()}-{threading.get_ident()}"
            work = os.path.join(self.path, name)
        try:
            self._write_files(work, step, tensors, record)
            if self._local:
                self._replace(work, final)
        except BaseException:
            with contextlib.suppress(OSError, tf.errors.OpError):
                if tf.io.gfile.exists(work):
                    tf.io.gfile.rmtree(work)
            raise
        self._prune(step)
        return final

    def _write_files(
        self, work: str, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]
    ) -> None:
        if tf.io.gfile.exists(work):
            tf.io.gfile.rmtree(work)
        tf.io.gfile.makedirs(work)
        prefix = os.path.join(work, _PREFIX)
        names = sorted(tensors)
        with tf.device("/CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.convert_to_tensor(tensors[n]) for n in names],
            )
        files = sorted(name for name in tf.io.gfile.listdir(work) if name.startswith(_PREFIX))
        sizes = {name: tf.io.gfile.stat(os.path.join(work, name)).length for name in files}
        if self._local:
            for name in files:
                _flush(os.path.join(work, name))
        body = {
            "format": FORMAT,
            "step": step,
            "sizes": sizes,
            "index_sha256": _sha256(os.path.join(work, f"{_PREFIX}.index")),
            "record": dict(record),
        }
        text = json.dumps(body, sort_keys=True)
        sealed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text})
        target = os.path.join(work, _RECORD)
        with tf.io.gfile.GFile(target, "w") as f:
            f.write(sealed)
        if self._local:
            _flush(target)
            _flush(work)

    def _replace(self, work: str, final: str) -> None:
        if os.path.isdir(final):
            # The same step again, after a resume: the old one goes once the new one is complete.
            aside = f"{work}-old"
            os.rename(final, aside)
            os.rename(work, final)
            tf.io.gfile.rmtree(aside)
        else:
            os.rename(work, final)
        _flush(self.path)

    def _prune(self, newest: int) -> None:
        steps = sorted(self.steps(), reverse=True)
        for step in [s for s in steps if s > newest] + [s for s in steps if s <= newest][KEPT:]:
            # Higher steps are of a run that was given up: what was written last is the truth.
            with contextlib.suppress(OSError, tf.errors.OpError):
                tf.io.gfile.rmtree(os.path.join(self.path, f"step_{step:012d}"))

    def clear(self) -> None:
        """Removes all backups."""
        for step in self.steps():
            tf.io.gfile.rmtree(os.path.join(self.path, f"step_{step:012d}"))

    # ------------------------------------------------------------ reading

    def steps(self) -> list[int]:
        """Steps of the backups that are there, complete or not, in order."""
        found = [_NAME.fullmatch(name) for name in self._names()]
        return sorted(int(m.group(1)) for m in found if m)

    def newest(self) -> Backup | None:
        """The newest backup whose record and sizes are right; a damaged one is said and passed."""
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except Damaged as e:
                logger.warning("%s; the one before is used", e)
        return None

    def candidates(self) -> Iterator[Backup]:
        """Backups that pass the cheap checks, newest first."""
        for step in reversed(self.steps()):
            try:
                yield self.read(step)
            except Damaged as e:
                logger.warning("%s; the one before is used", e)

    def read(self, step: int) -> Backup:
        """The backup of one step. Raises Damaged where it is incomplete or altered."""
        path = os.path.join(self.path, f"step_{step:012d}")
        target = os.path.join(path, _RECORD)
        if self._local:
            _refuse_links(path)
        if not tf.io.gfile.exists(target):
            raise Damaged(f"backup {path} is incomplete: it has no {_RECORD}")
        try:
            with tf.io.gfile.GFile(target, "r") as f:
                sealed = json.loads(f.read())
            text = sealed["body"]
            if hashlib.sha256(text.encode()).hexdigest() != sealed["sha256"]:
                raise Damaged(f"backup {path} is damaged: {_RECORD} does not match its checksum")
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise Damaged(
                    f"backup {path} has format {body['format']}, this version reads {FORMAT}"
                )
            for name, size in body["sizes"].items():
                if os.path.basename(name) != name:
                    raise Damaged(f"backup {path} names a file outside of itself: {name!r}")
                found = tf.io.gfile.stat(os.path.join(path, name)).length
                if found != size:
                    raise Damaged(f"backup {path} is damaged: {name} has {found} of {size} bytes")
            if _sha256(os.path.join(path, f"{_PREFIX}.index")) != body["index_sha256"]:
                raise Damaged(f"backup {path} is damaged: its index does not match its checksum")
        except (KeyError, TypeError, ValueError, OSError, tf.errors.OpError) as e:
            raise Damaged(f"backup {path} is damaged: {_first_line(e)}") from e
        return Backup(path, int(body["step"]), body["record"])


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: str) -> str:
    with tf.io.gfile.GFile(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def _refuse_links(path: str) -> None:
    for name in (path, *(os.path.join(path, n) for n in os.listdir(path))):
        if not (stat.S_ISREG(os.lstat(name).st_mode) or stat.S_ISDIR(os.lstat(name).st_mode)):
            raise Damaged(f"backup {path} holds something that is not a file: {name!r}")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class BackgroundWriter:
    """Writes backups beside training, one at a time; training waits only for the copy.

    Args:
        write: called in the background with what `submit` was given.
        on_error: called in the background where `write` fails on the disk's side.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        write: Callable[..., Any],
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write = write
        self._on_error = on_error
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.seconds = 0.0
        """How long the last write took."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, *arguments: Any) -> None:
        """Starts a write, after waiting for the one before."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="tfmw-backup", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything submitted is on disk or has failed.

        Raises:
            Exception: an error of the writer that is not the disk's.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self, *arguments: Any) -> None:
        start = self._clock()
        try:
            self._write(*arguments)
        except (OSError, tf.errors.OpError) as e:
            self._on_error(e)
        except BaseException as e:  # raised again by wait(), in the thread that trains
            self._failure = e
        self.seconds = self._clock() - start
