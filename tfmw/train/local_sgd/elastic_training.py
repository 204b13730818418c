"""Driver of the training loop for one member of elastic rounds, and its backups.

    with entered(client, context, arguments) as (context, backups):     # of elastic rounds
        ElasticTraining(context, arguments, backups, ElasticRounds(...))

A member of elastic rounds is one process, with its shard of each batch. It may be lost and come
back while the others continue. The server of the rounds keeps its position in the data after its
last round, and another member sends it the weights. So a record is a backup without tensors, which
the training loop saves after each round.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat import placement
from tfmw.data.random_state import random_state, restore_random_state
from tfmw.errors import TfmwError, UsageError
from tfmw.train.arguments import FitArguments
from tfmw.train.callbacks import BackupAndRestore
from tfmw.train.checkpoint import state
from tfmw.train.checkpoint.resume import Backups, PythonState
from tfmw.train.fit_context import FitContext
from tfmw.train.local_sgd.elastic_rounds import ElasticRounds
from tfmw.train.local_sgd.round_client import RoundClient
from tfmw.train.loop import DriverState, Rows
from tfmw.train.mirrored.sync_training import MirroredTraining

_ROUND = "round"  # name in backups of the number of the last round that they contain
_POSITIONS = "positions"  # name in backups of the positions after that round; see `RoundClient`


@contextlib.contextmanager
def entered(
    client: RoundClient, context: FitContext, arguments: FitArguments
) -> Iterator[tuple[FitContext, Backups]]:
    """The context and the backups of a member, which has connected to the server of the rounds."""
    _refuse(context, arguments)
    record, arrays, steps = client.enter()
    try:
        # Each member is a group of its own. Its rank selects its files.
        member = Group(client.member, 1, agree=client.fact)
        sharding = data.Sharding(client.members, client.member)
        context = dataclasses.replace(context, group=member, sharding=sharding)
        # Data that Python code orders has the same order on all members, from the first one's
        # state.
        restore_random_state(member.agreed_value("random state", random_state))
        asked = copy.copy(arguments.backup)
        if asked is not None:
            asked.backup_dir = os.path.join(asked.backup_dir, f"member_{client.member}")
        with MemberBackups(client, asked, record, arrays, steps) as backups:
            yield context, backups
    finally:
        client.leave()


def _refuse(context: FitContext, arguments: FitArguments) -> None:
    if arguments.sync is None:
        raise UsageError(
            "this process trains in elastic rounds (tfmw run --elastic), and fit was called "
            "without sync=: add sync=tfmw.LocalSGD(every=50)."
        )
    if placement.local_replicas(context.strategy) != 1 or context.group.size != 1:
        raise UsageError(
            "a member of elastic rounds has one device: start as many members as there are devices."
        )


class MemberBackups(Backups):
    """Backups on disk, and a record on the server after each round.

    Both are saved right after a round. Later steps are in this member's weights only, and it may
    come back with the weights of another member.

    Args:
        client: a client that has entered.
        asked: backup settings with the directory of this member; None saves nothing on disk.
        record, arrays: record and arrays from the server.
        steps: number of steps in rounds that have ended since the record.
    """

    def __init__(
        self,
        client: RoundClient,
        asked: BackupAndRestore | None,
        record: dict[str, Any] | None,
        arrays: list[np.ndarray],
        steps: int,
    ):
        super().__init__(Group(0, 1), asked)
        self.on = True
        self.client = client
        self.rounds: ElasticRounds | None = None  # rounds of the call, once they exist
        self._of_server = record, arrays, steps
        self._recorded = 0
        self._disk_is_due = False

    def __enter__(self) -> MemberBackups:
        super().__enter__()
        record, arrays, steps = self._of_server
        on_disk, _ = self.on_disk
        if on_disk is not None and len(on_disk.get(_POSITIONS, ())) != self.client.members:
            self.__exit__(None)
            raise UsageError(
                f"the backup in {self.path} is of {len(on_disk.get(_POSITIONS, ()))} members of "
                f"elastic rounds, and this run has {self.client.members}: resume with as many, or "
                "use another backup_dir."
            )
        # If the server has a record, other members have the weights of later rounds.
        self.from_server = record is not None
        self.unrecorded = steps if self.from_server else 0
        if record is not None:
            self.record = {**record, "step": record["step"] + steps}
            self.tensors = dict(zip(record["arrays"], arrays, strict=True))
        return self

    @property
    def known(self) -> tuple[int, list[int]]:
        """The last round that the restored weights contain, and the positions after it."""
        record, _ = self.on_disk
        return (0, []) if record is None else (record[_ROUND], record[_POSITIONS])

    def take_position(self) -> None:
        """Computes the steps that this member has made in rounds that its own state lacks."""
        step = 0 if self.record is None else self.record["step"]
        missing = self.client.positions[self.client.member] - step
        self.unrecorded += missing
        if missing < 0:
            raise TfmwError(
                f"member {self.client.member} resumes after step {step}, and the others have "
                f"resumed from before: remove its backup, {self.path}, and start it again."
            )

    def restore_callbacks(self, callbacks: list[Any], finished: bool = False) -> None:
        super().restore_callbacks(callbacks, finished and not self.from_server)

    # ------------------------------------------------------------ when

    def _ended(self) -> int:
        return 0 if self.rounds is None else self.rounds.ended

    def signals(self) -> tuple[float, ...]:
        found = super().signals()
        self._disk_is_due |= any(found)
        return found

    def due_after_step(self, step: int, signals: list[float]) -> bool:
        self._disk_is_due |= super().due_after_step(step, signals)
        return self._ended() != self._recorded

    def due_after_epoch(self, epoch: int, step: int, last: bool) -> tuple[bool, bool]:
        due, leave = super().due_after_epoch(epoch, step, last)
        self._disk_is_due |= due
        return not last, leave

    # ------------------------------------------------------------ save

    @property
    def saves_tensors(self) -> bool:
        """Whether the next `save` writes to the disk."""
        return self.has_directory and self._disk_is_due

    def save(
        self,
        driver: Any,
        kept: tuple[Any, ...],
        callbacks: list[Any],
        record: dict[str, Any],
        python_state: PythonState | None = None,
        parts: Any = None,
        write: bool = True,
    ) -> None:
        if self.unrecorded:  # its position is not yet that of its weights
            return
        python_state = python_state or self.python_state(callbacks)
        record = {**record, "step": self.client.positions[self.client.member]}
        if self.has_directory and (self._disk_is_due or record["done"]):
            rounds = {_ROUND: self.client.number, _POSITIONS: self.client.positions}
            super().save(driver, kept, callbacks, {**record, **rounds}, python_state, parts)
        self._disk_is_due = False
        entries, arrays = python_state
        tensors = state.with_replicas(arrays, *kept[:2])
        full = {**record, **entries, "arrays": list(tensors)}
        self.client.keep(full, [np.asarray(tensors[name]) for name in tensors])
        self._recorded = self._ended()


class ElasticTraining(MirroredTraining):
    """Training steps of one member, which exchanges its weights through the server of the rounds.

    Args:
        context, arguments, rounds: values of the call; see `entered`.
        backups: backups of the member.
    """

    def __init__(
        self,
        context: FitContext,
        arguments: FitArguments,
        backups: MemberBackups,
        rounds: ElasticRounds,
    ):
        self._backups = backups
        self._rounds = backups.rounds = rounds
        super().__init__(context, arguments, backups.record, rounds)

    # ------------------------------------------------------------ what the loop asks

    def resume(self, tensors: Mapping[str, Any] | None) -> None:
        super().resume(tensors)
        if tensors is None:
            self._join()

    def begin_epoch(self, kept: Rows | None, trains: bool = True) -> None:
        super().begin_epoch(kept, trains)
        if not trains:
            return
        self._skip()
        if not self._rounds.joined:
            self._trace()  # others wait for the steps of the members that have joined
        self._join()
        self._skip()
        self._rounds.begin_at(self.steps_done)

    def _skip(self) -> None:
        """Skips the steps of this epoch that ended rounds contain."""
        while self._backups.unrecorded:
            call = self._data.next_call(1)
            if call is None:
                return
            next(call.iterator)
            self._data.advance(1, 1)
            self._backups.unrecorded -= 1

    def _join(self) -> None:
        if not self._rounds.joined:
            self._rounds.join(*self._backups.known)
            self._backups.take_position()

    def _trace(self) -> None:
        call = self._data.next_call(1)
        if call is not None:
            none = dataclasses.replace(call, max_steps=0)
            self.driver.run_steps("train", none, self._data.shard.size_known)

    def train(
        self, max_steps: int, on_begin: Callable[[int], None], on_end: Callable[[], bool]
    ) -> None:
        before = self._rounds.ended

        def until_round() -> bool:  # the loop then saves a record
            return on_end() and self._rounds.ended == before

        super().train(max_steps, on_begin, until_round)

    def state(self, in_epoch: bool, slots: bool) -> DriverState:
        self._rounds.saves = self._backups.saves_tensors
        return super().state(in_epoch, slots and self._rounds.saves)

    def finish(self) -> None:
        self._join()
        self._rounds.finish()
        super().finish()
