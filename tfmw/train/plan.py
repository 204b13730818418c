"""The plan of a training, which makes all choices of a call of `fit`.

    plan = Plan(arguments)
    history = plan.run()

`run` reads top to bottom: backups are opened, the driver shards the data, tasks compare their
arguments, the newest backup is restored, and the loop trains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmw import data
from tfmw.cluster import group, membership
from tfmw.cluster.cluster import MAX_RESTARTS
from tfmw.compat.model_methods import is_overridden
from tfmw.errors import UsageError
from tfmw.train import strategies
from tfmw.train.arguments import FitArguments, trained_in
from tfmw.train.callbacks.roles import without_backup
from tfmw.train.checkpoint import evaluator
from tfmw.train.checkpoint.resume import Backups
from tfmw.train.fit_context import FitContext
from tfmw.train.local_sgd.rounds import Rounds
from tfmw.train.local_sgd.sync_settings import settings_of
from tfmw.train.loop import TrainingLoop
from tfmw.train.mirrored.collectives import connection
from tfmw.train.mirrored.one_pass import validate_as_user, validate_here
from tfmw.train.mirrored.peer_state import PeerState, may_continue
from tfmw.train.mirrored.sync_training import MirroredTraining
from tfmw.train.mirrored.synchronization import EachStep
from tfmw.train.parameter_server.ps_training import ParameterServerTraining

logger = logging.getLogger("tfmw")

Training = MirroredTraining | ParameterServerTraining


class Plan:
    """One training.

    Args:
        arguments: arguments of the call, as they have reached Keras's method.

    Attributes:
        element_spec: structure of tf.TensorSpec for one batch, once the model is trained.

    Raises:
        UsageError: arguments contradict each other, the model or the cluster.
    """

    element_spec: Any = None

    def __init__(self, arguments: FitArguments):
        self._arguments = arguments.within_limits().split()
        self._context = FitContext.of(arguments.model, arguments.strategy, "fit")
        self._context.group.require_same(arguments.of_all)
        self._servers = strategies.servers_of(self._context.strategy)
        self._sync = settings_of(arguments)
        # The calls that a new worker makes until it is here.
        self._made = group.calls_made()
        self._peers: PeerState | None = None
        if self._may_continue():
            asked = arguments.backup
            self._peers = PeerState(self._context.group, self._context.strategy, asked)
        if self._servers is not None and self._sync is not None:
            raise UsageError(
                f"received sync={arguments.sync}: workers of parameter servers keep no "
                "weights of their own. Leave it out, or train with multi-worker mirroring."
            )

    def run(self) -> keras.callbacks.History:
        """Trains the model; after the loss of a worker, together with its replacement."""
        if membership.is_evaluator():
            return self._evaluate_beside()
        if self._peers is None:
            return self._run()
        lost = False
        with self._peers as peers:
            while True:
                try:
                    if lost:
                        connection.rejoin(self._made)
                    return self._run()
                except tf.errors.UnavailableError as e:
                    if not peers.may_go_on():
                        raise
                    lost = True
                    logger.warning("%s; waits for a new worker", e.message)

    def _run(self) -> keras.callbacks.History:
        arguments, context = self._arguments, self._context
        with self._backups() as backups:
            training = self._training(backups)
            self._require_same(training)
            backups.restore(context.model, training.batch_size or arguments.batch_size)
            backups.report_done(arguments.epochs)
            callback_list = context.callback_list(
                without_backup(arguments.callbacks)[0],
                training,
                verbose=0 if backups.is_done(arguments.epochs) else arguments.verbose,
                steps=training.steps_per_epoch,
                epochs=arguments.epochs,
                history=True,
            )
            validate = self._validation(training)
            loop = TrainingLoop(training, backups, callback_list, arguments, validate)
            with trained_in(context.model, arguments.precision), training:
                loop.run()
        self.element_spec = training.element_spec
        history: keras.callbacks.History = context.model.history
        return history

    def _backups(self) -> contextlib.AbstractContextManager[Backups]:
        """The backups of this training, or of its next view."""
        in_memory = self._peers is not None and self._peers.outlives_workers
        if self._arguments.backup is None and self._context.group.is_chief and not in_memory:
            _warn_of_restarts(os.environ.get(MAX_RESTARTS, "0"))
        if self._peers is None:
            return Backups(self._context.group, self._arguments.backup)
        self._peers.begin_view()
        return contextlib.nullcontext(self._peers)

    # ------------------------------------------------------------ what is chosen

    def _may_continue(self) -> bool:
        """Whether this training can continue from memory after the loss of workers."""
        arguments = self._arguments
        sources = (arguments.source, arguments.validation_source)
        again = all(s is None or not (s.is_read_once or s.is_function()) for s in sources)
        return again and may_continue(self._context.strategy) and group.may_repeat()

    def _training(self, backups: Backups) -> Training:
        """The driver, with sharded data and a built model."""
        context, arguments, sync = self._context, self._arguments, self._sync
        record = backups.record
        self._refuse_other_kind(record)
        if self._servers is not None:
            return ParameterServerTraining(context, arguments, self._servers, record)
        if sync is None:
            each_step = EachStep(
                context.strategy, arguments.gradient_compression, arguments.shard_optimizer
            )
            return MirroredTraining(context, arguments, record, each_step)
        sync.refuse_other(record)
        return MirroredTraining(context, arguments, record, Rounds(context.strategy, sync))

    def _validation(self, training: Training | None) -> Callable[..., dict[str, Any]] | None:
        """A function (callbacks, signals) -> logs that evaluates the validation data."""
        context, arguments = self._context, self._arguments
        if arguments.validation_source is None:
            return None
        validate: Callable[..., dict[str, Any]]
        if isinstance(training, MirroredTraining):
            validate = training.validate
        else:
            validate = functools.partial(validate_here, context.model, arguments)
        if not is_overridden(context.model, "evaluate"):
            return validate
        unplaced = None if training is None else training.unplaced_model
        return functools.partial(validate_as_user, context, arguments, unplaced, validate)

    def _evaluate_beside(self) -> keras.callbacks.History:
        """Evaluates the backups of the training, on an evaluator."""
        context, arguments = self._context, self._arguments
        backup, validate = arguments.backup, self._validation(None)
        if backup is None or validate is None:
            missing = "backup_dir" if backup is None else "validation_data"
            raise UsageError(
                f"this task is an evaluator and {missing} was not given: it evaluates each backup "
                "of the training on the validation data; pass both to fit on every task."
            )
        context.build(arguments.source.shard(context.sharding, data.SharedOrder()).element_spec)
        remove = backup.delete_checkpoint
        return evaluator.watch(context.model, validate, backup.backup_dir, remove=remove)

    # ------------------------------------------------------------ what is refused

    def _refuse_other_kind(self, record: dict[str, Any] | None) -> None:
        """Raises UsageError, on all tasks, if the backup belongs to another kind of training."""
        if record is None:
            return
        # Workers of parameter servers draw their own seeds.
        was = _kind("seed" not in record["feed"], "rounds" in record["feed"])
        now = _kind(self._servers is not None, self._sync is not None)
        if was != now:
            raise UsageError(
                f"the backup is of {was}, and this is {now}: their "
                "positions in the data differ in kind. Use another backup_dir; to continue with "
                "the weights, load them with model.load_weights before tfmw.fit."
            )

    def _require_same(self, training: Training) -> None:
        """Raises UsageError on every task if what follows from the arguments differs."""
        model = self._context.model
        self._context.group.require_same(
            {
                "steps per epoch": training.steps_per_epoch,
                "the batch size": training.batch_size,
                "the number of weights": sum(math.prod(w.shape) for w in model.weights),
                "steps_per_execution": model.steps_per_execution,
                "collectives": membership.chosen_collectives(),
            }
        )


def _kind(on_servers: bool, is_local: bool) -> str:
    if on_servers:
        return "a training on parameter servers"
    return "a training with sync=" if is_local else "a synchronous training"


@functools.cache  # a script may call fit often
def _warn_of_restarts(allowed: str) -> None:
    if allowed != "0":
        logger.warning(
            "this run may restart, up to %s times, and fit saves no backups: a restart of all "
            "tasks trains from the start. Add backup_dir= to the call, or --backup-dir to tfmw "
            "run.",
            allowed,
        )
