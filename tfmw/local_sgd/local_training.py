"""The training loop's driver for local SGD: the mirrored one, whose replicas train on their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmw.checkpoint.resume import Backups
from tfmw.errors import UsageError
from tfmw.local_sgd.rounds import Rounds
from tfmw.local_sgd.sync_settings import SyncSettings
from tfmw.mirrored.sync_driver import SyncDriver
from tfmw.mirrored.sync_training import MirroredTraining
from tfmw.training.arguments import FitArguments
from tfmw.training.fit_context import FitContext


class LocalTraining(MirroredTraining):
    """Training steps of replicas that exchange their weights every few steps.

    An epoch ends with a round: validation, callbacks and exports see the common weights.

    Args:
        context, arguments: of the call.
        backups: of the run; may contain the one from which it resumes.
    """

    _rounds: Rounds  # of this call, within the context

    def __init__(self, context: FitContext, arguments: FitArguments, backups: Backups):
        settings = SyncSettings.of(arguments)
        assert settings is not None
        self._settings = settings
        self._backups = backups
        self._refuse_other_settings()
        super().__init__(context, arguments, backups.record)

    def _refuse_other_settings(self) -> None:
        record = self._backups.record
        saved = None if record is None else record["feed"].get("rounds")
        if saved is not None and SyncSettings(**saved) != self._settings:
            raise UsageError(
                f"the backup was written with {saved}, this call has "
                f"{dataclasses.asdict(self._settings)}: resume with the same sync_ arguments and "
                "outer optimizer, or use another backup_dir."
            )

    def _count(self, local: int, examples: tf.Tensor) -> None:
        self._rounds.count(local, examples)

    @contextlib.contextmanager
    def _new_driver(self) -> Iterator[SyncDriver]:
        together = self._settings.between == "machines"
        driver = SyncDriver(self.model, self.strategy, on_own_step=self._count, together=together)
        with driver, Rounds(self.model, self.strategy, self._settings) as rounds:
            self._rounds = rounds
            yield driver

    # ------------------------------------------------------------ what the loop asks

    def restore_position(self) -> None:
        super().restore_position()
        with self.driver.lost_peer_named():
            self._rounds.restore(self._backups.tensors)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if not self.steps_done:
            self._rounds.begin()

    def update_model(self) -> None:
        with self.driver.lost_peer_named():
            self._rounds.meet()
        super().update_model()

    def replica_state(self, slots: bool) -> tuple[Any, ...]:
        kept = super().replica_state(slots)
        with self.driver.lost_peer_named():
            return *kept, self._rounds.state()

    def position(self, in_epoch: bool) -> dict[str, Any]:
        return {**super().position(in_epoch), "rounds": dataclasses.asdict(self._settings)}

    # ------------------------------------------------------------ steps

    def _most_steps(self) -> int:
        return self._settings.steps_to_next(self.steps_done)

    def _after_steps(self) -> None:
        with self.driver.lost_peer_named():
            self._rounds.after_step(self.steps_done)
