"""The tensors of one backup on disk: TensorFlow checkpoints, which several processes may write.

    shared = SharedWrite.begin(group, files, step)  # all tasks; the chief creates the directory
    shared.pieces = [...]                           # the slices of this task
    shared.write_part()                             # on each other task
    shared.write(prefix, tensors)                   # on the chief, which waits for the others

Workers with shards of the optimizer's slots save a checkpoint of slices each, under a separate
name, and report to the chief. The chief merges them: it renames the data files, and one index lists
the slices of all. A reader of the backup finds whole tensors, in an ordinary checkpoint.

Parameter servers write the rows of tables. The checkpoint `TABLES` has all of them. The next few
backups have hard links to it, and their checkpoint `PREFIX` has the rows that have changed since.
`TableBackups` chooses between the two kinds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmw.cluster.group import Group
from tfmw.errors import first_line
from tfmw.storage import directories
from tfmw.tables.files import (
    Layout,
    TableFiles,
    TensorSlice,
    changed_name,
    ids_of,
    save_tensors,
    write_checkpoint,
)
from tfmw.train.checkpoint.backup_files import BucketFiles, LocalFiles

logger = logging.getLogger("tfmw")

PREFIX = "tensors"
TABLES = "tables"
FULL_EVERY = 10  # number of backups; those in between have only the changed rows of tables
# fraction of all tables' bytes from which a backup of the changed rows would save nothing
_FEW = 0.5
_LOOK_S = 1.0  # interval at which the chief checks whether a task for which it waits is alive


class ReplicaRows(NamedTuple):
    """Rows of a tensor with one row for each replica: those of this task's replicas."""

    name: str  # name of the tensor in a backup
    replicas: int  # number of all rows
    first: int  # index of this task's first row
    values: tf.Tensor  # [replicas of this task, elements]


def own_name(name: str) -> str:
    """The name of this task's rows of a tensor, where a task has only its own."""
    return f"{name}/own"


@dataclasses.dataclass(frozen=True)
class SlotParts:
    """State that no task has whole: shards of slots, or what each replica has of its own."""

    variables: list[Any]  # the Keras variables that no task has whole
    # shards of this task: (variable, its elements, their values [m])
    own: list[tuple[Any, slice, tf.Tensor]]
    rows: Sequence[ReplicaRows] = ()


class SharedWrite:
    """Write of one backup by all tasks.

    Args:
        group: the tasks.
        begun: the result of `files.begin` on the chief.
        files: where the backup is written.
    """

    def __init__(self, group: Group, begun: str, files: LocalFiles | BucketFiles):
        self.begun = begun
        self.pieces: Sequence[TensorSlice] = ()  # the slices of this task
        self._group = group
        self._files = files
        self._key = f"tfmw-backup/{os.path.basename(begun)}"
        self._given_up = threading.Event()

    @classmethod
    def begin(cls, group: Group, files: LocalFiles | BucketFiles, step: int) -> SharedWrite:
        """Creates the directory that the tasks write to. All tasks must call it.

        Raises:
            OSError: the chief cannot create it; raised on all tasks.
        """

        def create() -> dict[str, str]:
            try:
                return {"begun": files.begin(step)}
            except OSError as e:
                return {"error": str(e)}

        created = group.from_chief(create)
        if "error" in created:
            raise OSError(created["error"])
        return cls(group, created["begun"], files)

    def _prefix_of(self, rank: int) -> str:
        return os.path.join(self._files.directory_of(self.begun), f"part-{rank:05d}")

    def write_part(self) -> None:
        """Writes this task's slices and reports to the chief, also about an error of the disk."""
        error, handed = None, {}
        try:
            if self.pieces:
                prefix = self._prefix_of(self._group.rank)
                save_tensors(prefix, {}, self.pieces)
                handed = self._files.hand_over(self.begun, directories.files_of(prefix))
        except (OSError, tf.errors.OpError) as e:
            error = first_line(e)
            self._files.drop(self.begun)
        report = {"error": error, "wrote": bool(self.pieces), "files": handed}
        self._group.post(f"{self._key}/{self._group.rank}", report)

    def write(self, prefix: str, tensors: Mapping[str, Any]) -> None:
        """Writes the chief's tensors and pieces, and makes one checkpoint of all parts.

        Raises:
            OSError or tf.errors.OpError: a part could not be written, or its task was lost.
        """
        try:
            save_tensors(self._prefix_of(0), tensors, self.pieces)
        finally:
            ranks = [0, *self._wait_for_others()]
        with tf.device("/CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[self._prefix_of(rank) for rank in ranks],
                destination_prefix=prefix,
                delete_old_dirs=False,
            )

    def give_up(self) -> None:
        """Stops waiting for other tasks, after an error of this task; from any thread."""
        self._given_up.set()

    def abandon(self) -> None:
        """Removes the files of all tasks, on the chief: there is no backup."""
        with contextlib.suppress(OSError):
            self._wait_for_others()
        self._files.abandon(self.begun)

    def _wait_for_others(self) -> list[int]:
        """Waits until all others have written; returns the ranks of those that had slices."""
        reports: dict[int, dict[str, Any]] = {}
        for rank in range(1, self._group.size):
            key = f"{self._key}/{rank}"
            while (report := self._group.posted(key, _LOOK_S)) is None:
                if self._given_up.is_set():
                    raise OSError(f"worker {rank} has not written its part")
            reports[rank] = report
        if reports:
            self._group.forget(self._key)
        for rank, report in reports.items():
            if report["error"] is not None:
                raise OSError(f"worker {rank} could not write its part: {report['error']}")
            self._files.take_over(self.begun, report["files"])
        return [rank for rank, report in reports.items() if report["wrote"]]


# ---------------------------------------------------------------- tables


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SavedTensors(Mapping[str, np.ndarray]):
    """The tensors of a backup by name; tables are read on demand."""

    tables_prefix: str  # prefix of the checkpoint with the tables
    arrays: dict[str, np.ndarray]  # the tensors that are no tables
    layout: Layout  # the slices of the tables
    changed_prefix: str | None  # prefix of the checkpoint with rows that have changed since, if any

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.layout:
            return self.arrays[name]
        with directories.checkpoint_reader(self.tables_prefix) as reader:
            array: np.ndarray = reader.get_tensor(name)
        if self.changed_prefix is not None:
            with directories.checkpoint_reader(self.changed_prefix) as reader:
                for start, _ in self.layout[name]:
                    rows = changed_name(name, start)
                    array[reader.get_tensor(ids_of(rows))] = reader.get_tensor(rows)
        return array

    def __iter__(self) -> Iterator[str]:
        yield from self.arrays
        yield from self.layout

    def __len__(self) -> int:
        return len(self.arrays) + len(self.layout)

    def restore(self, table_files: TableFiles) -> None:
        """Restores tables; their servers read them."""
        table_files.read(self.tables_prefix, self.layout)
        if self.changed_prefix is not None:
            table_files.read(self.changed_prefix, self.layout, only_changed=True)


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rows of tables in one backup, which the servers of the tables write."""

    files: TableFiles
    must_be_finite: Collection[str] = ()  # names of tables whose rows are checked
    # The directory of a backup since which few rows have changed: its files of tables are linked,
    # and the changed rows are written. None to write all rows.
    base: str | None = None

    def write(self, directory: str, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes the rows, and other tensors, as checkpoints in an existing directory.

        Raises: see `BackupStore.write`.
        """
        prefix = os.path.join(directory, PREFIX)
        write = functools.partial(self.files.write, must_be_finite=self.must_be_finite)
        if self.base is None:
            write_checkpoint(os.path.join(directory, TABLES), write)
            save_tensors(prefix, tensors)
            return
        for path in directories.files_of(os.path.join(self.base, f"{TABLES}.")):
            os.link(path, os.path.join(directory, os.path.basename(path)))
        write_checkpoint(prefix, functools.partial(write, only_changed=True), tensors)


class TableBackups:
    """The tables of a run in its backups.

    The first two backups have all rows, as backups that share files of tables are damaged together.

    Args:
        files: the tables.
    """

    def __init__(self, files: TableFiles):
        self.files = files
        self._last: str | None = None  # the directory of the last backup
        self._full = 0  # number of backups with all rows so far
        self._since_full = 0  # number of backups of changed rows only

    def write(
        self, write: Callable[[TableRows], str], must_be_finite: Collection[str] = ()
    ) -> None:
        """Writes one backup, with all rows or with those that have changed.

        Args:
            write: function that writes it and returns its directory.
            must_be_finite: names of tables whose rows are checked.

        Raises:
            OSError or tf.errors.OpError, NotFinite: an error of `write`; the next backup has these
                changes, too.
        """
        rows = TableRows(self.files, must_be_finite, self._base())
        if rows.base is not None:
            try:
                self._last = write(rows)
                self._since_full += 1
                return
            except OSError as e:  # for example a file system without hard links
                logger.info("no backup of changed rows (%s): all rows are written", e)
        self._last = write(dataclasses.replace(rows, base=None))
        self._full, self._since_full = self._full + 1, 0
        self.files.clear_marks()

    def _base(self) -> str | None:
        if self._full < 2 or self._since_full >= FULL_EVERY - 1:
            return None
        if self._last is None or not os.path.isdir(self._last):
            return None
        return self._last if self.files.share_changed() < _FEW else None
