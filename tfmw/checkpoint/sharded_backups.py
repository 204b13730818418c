"""Backups that several tasks write: each its own part of the optimizer's slots.

    shared = directory.begin(target)                # all tasks; the chief creates the directory
    shared.write_part(pieces)                       # each of the others
    shared.write(prefix, tensors, pieces)           # the chief, which waits for the others

Each task saves a TensorFlow checkpoint of slices under a name of its own, and reports to the chief.
The chief joins them: the data files are renamed, and one index lists the slices of all. Whoever
reads the backup finds whole tensors, in a checkpoint like any other. Before the record, which the
chief writes last, and the renaming of the directory there is no backup.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmw import storage
from tfmw.cluster.group import Group
from tfmw.runtime.file_lock import flush

_LOOK_S = 1.0  # how often the chief looks whether a task that it waits for is there


@dataclasses.dataclass(frozen=True)
class SlotPart:
    """Some elements of an optimizer's slot.

    Attributes:
        variable: of Keras, with the shape of the whole slot.
        elements: which of them, in its flat form.
        value: [m], of them.
    """

    variable: Any
    elements: slice
    value: tf.Tensor


@dataclasses.dataclass(frozen=True)
class SlotParts:
    """The slots that no task has whole.

    Attributes:
        variables: all of them, of Keras.
        own: the parts that this task has.
    """

    variables: list[Any]
    own: list[SlotPart]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some elements of a tensor of a backup.

    Attributes:
        name: of the tensor, which is saved flat.
        elements: which of its elements.
        size: number of elements of the whole tensor.
        value: [m], of them.
    """

    name: str
    elements: slice
    size: int
    value: tf.Tensor


def save(prefix: str, tensors: Mapping[str, Any], pieces: Sequence[Piece] = ()) -> None:
    """Saves tensors, and pieces of other ones, in a TensorFlow checkpoint."""
    names = sorted(tensors)
    with tf.device("/CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[*names, *(piece.name for piece in pieces)],
            # As tf.raw_ops.SaveV2: the shape, and begin,length of each dimension.
            shape_and_slices=[
                *[""] * len(names),
                *(
                    f"{p.size} {p.elements.start},{p.elements.stop - p.elements.start}"
                    for p in pieces
                ),
            ],
            tensors=[
                *(tf.convert_to_tensor(tensors[name]) for name in names),
                *(piece.value for piece in pieces),
            ],
        )


class SharedWrite:
    """The writing of one backup by all tasks, into a directory that all of them have.

    Args:
        group: the tasks.
        directory: where to write; the chief has created it.
    """

    def __init__(self, group: Group, directory: str):
        self.directory = directory
        self._group = group
        self._key = f"tfmw-backup/{os.path.basename(directory)}"
        self._given_up = threading.Event()

    def prefix_of(self, rank: int) -> str:
        """The prefix of the files of one task."""
        return os.path.join(self.directory, f"part-{rank:05d}")

    def write_part(self, pieces: Sequence[Piece]) -> None:
        """Writes this task's pieces and reports to the chief; an error of the disk, too."""
        error = None
        prefix = self.prefix_of(self._group.rank)
        try:
            if pieces:
                save(prefix, {}, pieces)
                for path in storage.files_of(prefix):
                    flush(path)
        except (OSError, tf.errors.OpError) as e:
            error = (str(e) or type(e).__name__).splitlines()[0]
        report = {"error": error, "wrote": bool(pieces)}
        self._group.post(f"{self._key}/{self._group.rank}", report)

    def write(self, prefix: str, tensors: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """On the chief: writes its tensors and pieces, and makes one checkpoint of all parts.

        Raises:
            OSError or tf.errors.OpError: a part could not be written, or its task was lost.
        """
        try:
            save(self.prefix_of(0), tensors, pieces)
        finally:
            ranks = [0, *self._wait_for_others()]
        with tf.device("/CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[self.prefix_of(rank) for rank in ranks],
                destination_prefix=prefix,
                delete_old_dirs=False,
            )

    def give_up(self) -> None:
        """After an error of this task, which ends: it waits for no other. From any thread."""
        self._given_up.set()

    def abandon(self) -> None:
        """On the chief: removes what all have written, for no backup."""
        with contextlib.suppress(OSError):
            self._wait_for_others()
        with contextlib.suppress(OSError):
            storage.remove(self.directory)

    def _wait_for_others(self) -> list[int]:
        """Waits until all others have written; the ranks of those that had something to write."""
        reports = {rank: self._report_of(rank) for rank in range(1, self._group.size)}
        if reports:
            self._group.forget(self._key)
        for rank, report in reports.items():
            if report["error"] is not None:
                raise OSError(f"worker {rank} could not write its part: {report['error']}")
        return [rank for rank, report in reports.items() if report["wrote"]]

    def _report_of(self, rank: int) -> dict[str, Any]:
        while (report := self._group.posted(f"{self._key}/{rank}", rank, _LOOK_S)) is None:
            if self._given_up.is_set():
                raise OSError(f"worker {rank} has not written its part")
        return dict(report)


class BackupDirectory:
    """The directory of a run's backups, as its tasks see it.

    Args:
        group: the tasks.
        path: of the directory.
    """

    def __init__(self, group: Group, path: str):
        self._group = group
        self._path = path
        self._is_shared: bool | None = None

    def is_shared(self) -> bool:
        """Whether all tasks can write to it, and see what others write. All must call it."""
        if self._is_shared is None:
            self._is_shared = storage.is_local(self._path) and self._probe()
        return self._is_shared

    def begin(self, target: Callable[[], str]) -> SharedWrite:
        """Creates the directory of a backup under a temporary name. All tasks must call it.

        Args:
            target: the name that it will have; called on the chief.

        Raises:
            OSError: on all tasks, where the chief cannot create it.
        """

        def create() -> dict[str, str]:
            temporary = storage.name_beside(target())
            try:
                os.makedirs(temporary)
            except OSError as e:
                return {"error": str(e)}
            return {"directory": temporary}

        created = self._group.from_chief(create)
        if "error" in created:
            raise OSError(created["error"])
        return SharedWrite(self._group, created["directory"])

    def _probe(self) -> bool:
        """Whether each task finds the chief's file, and the chief those of all."""
        name = self._group.from_chief(lambda: f".shared-{secrets.token_hex(6)}")
        own = os.path.join(self._path, f"{name}-{self._group.rank}")
        found = [self._group.is_chief and _touch(own)]
        self._group.from_all(None)  # the chief's exists
        if not self._group.is_chief:
            found = [os.path.exists(os.path.join(self._path, f"{name}-0")) and _touch(own)]
        touched = self._group.from_all(found[0])

        def seen() -> bool:
            paths = (os.path.join(self._path, f"{name}-{rank}") for rank in range(len(touched)))
            return all(touched) and all(map(os.path.exists, paths))

        shared = bool(self._group.from_chief(seen))
        if found[0]:
            with contextlib.suppress(OSError):
                os.unlink(own)
        return shared


def _touch(path: str) -> bool:
    try:
        with open(path, "x"):
            return True
    except OSError:
        return False
