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
newest are kept. Reading never executes what it reads: no pickle, no code, no links followed, and no
more memory taken than the files have bytes. Paths may be local or whatever `tf.io.gfile` opens;
where there is no atomic rename (object stores), `record.json` coming last does its work.

    problems = verify("/shared/backups/run7")         # [] or what is damaged
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
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
_NICE = 10  # of the thread that writes; a tenth of the time of one that trains, where both want it
_PREFIX = "tensors"
_RECORD = "record.json"
_NAME = re.compile(r"step_(\d{12})")
_TEMPORARY = re.compile(r"\.(step_\d{12})\.tmp-.*?(-old)?")
_FILES = re.compile(re.escape(_PREFIX) + r"\.(index|data-\d{5}-of-\d{5})")
_LARGEST_RECORD = 256 << 20  # bytes; the histories of a million epochs are less


class Damaged(TfmwError):
    """A backup whose checksums do not match, or that holds what no backup holds."""


class Incomplete(Damaged):
    """A backup whose writing did not come to its end."""


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
            shapes = reader.get_variable_to_shape_map()
            types = reader.get_variable_to_dtype_map()
            # Memory is taken for what the index says: no more than there is in the files.
            said = sum(math.prod(shapes[name]) * types[name].size for name in shapes)
            if said > (there := self._bytes_of_tensors()):
                raise Damaged(
                    f"backup {self.path} is damaged: its index tells of {said} bytes, {there} "
                    "are there"
                )
            return {name: reader.get_tensor(name) for name in sorted(shapes)}
        except (tf.errors.OpError, ValueError, RuntimeError, MemoryError) as e:
            raise Damaged(f"backup {self.path} is damaged: {_first_line(e)}") from e

    def _bytes_of_tensors(self) -> int:
        names = [n for n in tf.io.gfile.listdir(self.path) if n.startswith(f"{_PREFIX}.data-")]
        return sum(tf.io.gfile.stat(os.path.join(self.path, n)).length for n in names)


class BackupStore:
    """A directory of backups, written by one process at a time.

    Args:
        path: local, or a URL that `tf.io.gfile` opens.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._local = "://" not in self.path
        self._damaged: set[int] = set()  # steps of backups that were found so

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
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            lock = os.open(os.path.join(self.path, "LOCK"), flags, 0o644)
        except OSError as e:
            raise UsageError(
                f"backup directory {self.path!r} cannot be locked ({e}): expected a directory that "
                "this process may write to, and in it no LOCK or a plain file of that name."
            ) from e
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
                raise UsageError(
                    f"backup directory {self.path!r} is in use by another run ({holder}): wait for "
                    "it, or give this run a directory of its own."
                ) from None
            with contextlib.suppress(OSError):  # who it is helps others; a full disk is no reason
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            self._remove_leftovers()
            yield
        finally:
            os.close(lock)

    def _remove_leftovers(self) -> None:
        names = self._names()
        for name in names:
            match = _TEMPORARY.fullmatch(name)
            if match and match[2] and match[1] not in names:
                # Killed between the two renames of `_replace`: the old one is still whole.
                os.rename(os.path.join(self.path, name), os.path.join(self.path, match[1]))
                names.append(match[1])
            elif match:
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Removes an entry of the directory; of a link, the link."""
        path = os.path.join(self.path, name)
        if not self._local:
            tf.io.gfile.rmtree(path)
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)  # unlike tf.io.gfile.rmtree, it follows no links
        else:
            os.unlink(path)

    def _names(self) -> list[str]:
        if not tf.io.gfile.exists(self.path):
            return []
        return [name.rstrip("/") for name in tf.io.gfile.listdir(self.path)]

    # ------------------------------------------------------------ writing

    def write(self, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> str:
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
                self._remove(os.path.basename(work))
            raise
        self._damaged.discard(step)
        self._prune(step)
        return final

    def _write_files(
        self, work: str, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]
    ) -> None:
        if tf.io.gfile.exists(work):
            self._remove(os.path.basename(work))
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
        text = json.dumps(body)
        sealed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text})
        target = os.path.join(work, _RECORD)
        with tf.io.gfile.GFile(target, "w") as f:
            f.write(sealed)
        if self._local:
            _flush(target)
            _flush(work)

    def _replace(self, work: str, final: str) -> None:
        if os.path.lexists(final):
            # The same step again, after a resume: the old one goes once the new one is complete.
            aside = f"{work}-old"
            os.rename(final, aside)
            os.rename(work, final)
            self._remove(os.path.basename(aside))
        else:
            os.rename(work, final)
        _flush(self.path)

    def _prune(self, newest: int) -> None:
        steps = self.steps()
        intact = [s for s in steps if s <= newest and s not in self._damaged]
        for step in steps:
            # Higher steps are of a run that was given up: what was written last is the truth.
            if step not in intact[-KEPT:]:
                with contextlib.suppress(OSError, tf.errors.OpError):
                    self._remove(f"step_{step:012d}")

    def clear(self) -> None:
        """Removes all backups."""
        for step in self.steps():
            self._remove(f"step_{step:012d}")

    # ------------------------------------------------------------ reading

    def steps(self) -> list[int]:
        """Steps of the backups that are there, complete or not, in order."""
        found = [_NAME.fullmatch(name) for name in self._names()]
        return sorted(int(m.group(1)) for m in found if m)

    def newest(self) -> Backup | None:
        """The newest backup whose record and sizes are right; a damaged one is said and passed.

        Raises:
            UsageError: there are backups, all damaged, or one of another version of this format.
        """
        return next(self.candidates(), None)

    def candidates(self) -> Iterator[Backup]:
        """Backups that pass the cheap checks, newest first.

        The one before comes only after `pass_over`: whoever finds a backup damaged says so.

        Raises:
            UsageError: there are backups, all damaged, or one of another version of this format.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                yield self.read(step)
                if step not in self._damaged:
                    return
                damaged.append(f"step {step} is damaged")
            except Incomplete as e:
                self.pass_over(step, e)
            except Damaged as e:
                self.pass_over(step, e)
                damaged.append(str(e))
        if damaged:
            raise UsageError(
                f"no backup in {self.path!r} is intact ({'; '.join(damaged)}): restore one from "
                "elsewhere, or delete them to start anew."
            )

    def pass_over(self, step: int, why: Damaged) -> None:
        """Notes that the backup of `step` is damaged, and says so."""
        self._damaged.add(step)
        logger.warning("%s; the one before is used", why)

    def read(self, step: int) -> Backup:
        """The backup of one step.

        Raises:
            Incomplete, Damaged: it has no record, or is altered.
            UsageError: it has a format that this version does not read.
        """
        path = os.path.join(self.path, f"step_{step:012d}")
        target = os.path.join(path, _RECORD)
        try:
            if self._local:
                _refuse_all_but_files(path)
            if not tf.io.gfile.exists(target):
                raise Incomplete(f"backup {path} is incomplete: it has no {_RECORD}")
            if tf.io.gfile.stat(target).length > _LARGEST_RECORD:
                raise Damaged(f"backup {path} is damaged: {_RECORD} is too large to be one")
            with tf.io.gfile.GFile(target, "r") as f:
                sealed = json.loads(f.read())
            text = sealed["body"]
            if hashlib.sha256(text.encode()).hexdigest() != sealed["sha256"]:
                raise Damaged(f"backup {path} is damaged: {_RECORD} does not match its checksum")
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise UsageError(
                    f"backup {path} has format {body['format']}, this version reads {FORMAT}: "
                    "go on with the version that wrote it, or use another backup_dir."
                )
            for name, size in body["sizes"].items():
                if not _FILES.fullmatch(name):
                    raise Damaged(f"backup {path} is damaged: it lists a file {name!r}")
                found = tf.io.gfile.stat(os.path.join(path, name)).length
                if found != size:
                    raise Damaged(f"backup {path} is damaged: {name} has {found} of {size} bytes")
            if _sha256(os.path.join(path, f"{_PREFIX}.index")) != body["index_sha256"]:
                raise Damaged(f"backup {path} is damaged: its index does not match its checksum")
            if body["step"] != step or not isinstance(body["record"], dict):
                raise Damaged(f"backup {path} is damaged: its record is of step {body['step']!r}")
        except UsageError:
            raise
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
            OSError,
            tf.errors.OpError,
        ) as e:
            raise Damaged(f"backup {path} is damaged: {_first_line(e)}") from e
        return Backup(path, step, body["record"])


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Compares backups with the checksums that were taken when they were written.

    Args:
        path: a directory of backups, or one backup in it (`step_...`).

    Returns:
        One sentence for each problem, none where every backup is as it was written.
    """
    directory = os.fspath(path).rstrip("/")
    if not tf.io.gfile.isdir(directory):
        return [f"{directory} is not a directory."]
    parent, name = os.path.split(directory)
    one = _NAME.fullmatch(name)
    store = BackupStore(parent if one else directory)
    steps = [int(one[1])] if one else store.steps()
    if not steps:
        return [f"{directory} holds no backup."]
    problems = []
    for step in steps:
        try:
            store.read(step).tensors()
        except TfmwError as e:
            problems.append(f"{e}.")
    return problems


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: str) -> str:
    with tf.io.gfile.GFile(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def _refuse_all_but_files(path: str) -> None:
    """Raises Damaged unless `path` is a directory with nothing but plain files in it."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise Damaged(f"backup {path} is damaged: it is not a directory")
    for name in os.listdir(path):
        if not stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode):
            raise Damaged(f"backup {path} is damaged: {name!r} in it is not a plain file")


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
        with contextlib.suppress(OSError):
            # On Linux each thread has a priority of its own: training goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._write(*arguments)
        except (OSError, tf.errors.OpError) as e:
            self._on_error(e)
        except BaseException as e:  # raised again by wait(), in the thread that trains
            self._failure = e
        self.seconds = self._clock() - start
