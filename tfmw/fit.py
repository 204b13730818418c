"""fit, evaluate and predict: Keras's methods of those names, on every replica of a cluster.

Read `fit` top to bottom: it is Keras's own loop, with three things in it that Keras lacks. The
dataset is this worker's share; the steps are the driver's; and what the chief decides (steps per
call, whether to stop, the learning rate) everybody hears before anybody goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import callbacks as callbacks_lib
from tfmw import data, keras_compat, strategies
from tfmw.callbacks.progress import with_progress
from tfmw.checkpoint import evaluator, state
from tfmw.checkpoint.resume import Backups
from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.engines import local
from tfmw.errors import UsageError
from tfmw.export import check_path, export
from tfmw.keras_compat import placement
from tfmw.mirrored.cached_driver import cached_driver
from tfmw.mirrored.collectives.reduction import COMPRESSIONS
from tfmw.mirrored.driver import SyncDriver
from tfmw.parameter_server import driver as parameter_server
from tfmw.precision import check as check_precision
from tfmw.precision import trained_in
from tfmw.runtime.progress import report_progress
from tfmw.runtime.recorded_errors import record_error

# One Python call runs about this long: seldom enough to cost nothing, often enough for a live bar.
_SECONDS_PER_CALL = 0.2
_MOST_STEPS_PER_CALL = 1000


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    strategy: Any = "auto",
    workers: int | None = None,
    backup_dir: str | os.PathLike[str] | None = None,
    backup_every: Any = "epoch",
    export_dir: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    gradient_compression: str | None = None,
    precision: str | None = None,
) -> keras.callbacks.History:
    """Trains `model` on all replicas of the cluster, with the numbers of one process.

    Args:
        model: a compiled Keras 3 model, whenever and wherever it was built, or a callable that
            returns one. It is trained in place.
        x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle,
            class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps,
            validation_batch_size, validation_freq: as in `keras.Model.fit`. A `tf.data.Dataset`
            is batched by the global batch size. A callable gets a `tf.distribute.InputContext`
            and returns the pipeline of that worker, batched by the batch size of one replica.
        strategy: "auto" (the cluster that `tfmw.init` joined; else the GPUs of this machine; else
            one process), a name from `tfmw.strategies`, or a `tf.distribute.Strategy`.
        workers: trains on that many new processes of this machine and brings the result back: the
            way for notebooks, where TensorFlow has run already. What cannot travel there (a
            dataset that holds Python functions, say) is refused before anything starts.
        backup_dir: where the state of the run is saved, and where an interrupted run goes on from:
            the short form of `tfmw.callbacks.BackupAndRestore(backup_dir)`.
        backup_every: a number of steps, "epoch", "3 epochs", or a time such as "10 s".
        export_dir: after training the chief exports a SavedModel there.
        seed: makes runs with the same number of workers equal bit for bit. It sets the seeds of
            Python, NumPy, Keras and TensorFlow (`keras.utils.set_random_seed`) and turns
            TensorFlow's deterministic ops on, for the whole process.
        gradient_compression: "fp16" or "bf16": dense gradients travel between replicas, and are
            summed, in 16 bits. Half the traffic, and no longer the numbers of one process.
        precision: "mixed_bfloat16" or "mixed_float16": float32 layers compute in 16 bits while they
            are trained; weights, optimizer and losses stay float32, and the model is a float32
            model again afterwards. "mixed_float16" needs a `keras.optimizers.LossScaleOptimizer`.
            None or "float32": as the layers say.

    Returns:
        A `keras.callbacks.History`, the same on every worker.

    Raises:
        UsageError: an uncompiled model, an empty dataset, an infinite one without
            `steps_per_epoch`, arguments that differ between workers, a backup of another model,
            a backup directory in use, and other wrong uses.
        Preempted: SIGTERM or SIGUSR1 came to a task while there is a `backup_dir`: the state is
            saved and the process should end with the status of this exception (75).
    """
    if gradient_compression not in (None, *COMPRESSIONS):
        raise UsageError(
            f"unknown gradient_compression {gradient_compression!r}: expected None, "
            f"{' or '.join(map(repr, COMPRESSIONS))}."
        )
    check_precision(precision)
    if workers is not None:
        settings = {k: v for k, v in locals().items() if k not in _NOT_SENT}
        return _fit_on_new_workers(model, workers, x, validation_data, settings)
    if export_dir is not None:
        check_path(export_dir)
    if seed is not None:
        keras.utils.set_random_seed(seed)
        tf.config.experimental.enable_op_determinism()
    with _errors_told(), _session(model, strategy, "fit") as session:
        model, group = session.model, session.group
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = keras_compat.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        source = data.Source(
            x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight
        )
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            validation = data.Source(
                val_x,
                val_y,
                val_weight,
                _batch_size(val_x, validation_batch_size, batch_size),
                validation_steps,
            )
        callbacks, asked = callbacks_lib.without_backup(callbacks)
        if backup_dir is not None:
            asked = callbacks_lib.BackupAndRestore(backup_dir, save_freq=backup_every)
        validate = (
            None
            if validation is None
            else lambda: evaluate(
                model,
                validation.x,
                validation.y,
                batch_size=validation.batch_size,
                sample_weight=validation.sample_weight,
                steps=validation_steps,
                verbose=0,
                return_dict=True,
                strategy="default",
            )
        )
        if membership.is_evaluator():
            return _evaluate_beside(session, source, asked, validate)
        servers = strategies.servers_of(session.strategy)
        if servers is not None:
            with trained_in(model, precision):
                return parameter_server.fit(
                    model,
                    servers,
                    source,
                    epochs=epochs,
                    verbose=verbose,
                    callbacks=callbacks,
                    validate=validate,
                    validation_freq=validation_freq,
                    initial_epoch=initial_epoch,
                    steps_per_epoch=steps_per_epoch,
                    backup=asked,
                    export_dir=export_dir,
                )
        with Backups.of(group, asked) as backups:
            found = backups.record
            feed = _Feed(session, source, steps_per_epoch, "steps_per_epoch", found)
            session.build(feed.share)
            group.same(
                {
                    "epochs": epochs,
                    "initial_epoch": initial_epoch,
                    "steps per epoch": feed.steps,
                    "the batch size": feed.share.batch_size,
                    "the number of weights": model.count_params(),
                    "validation_freq": str(validation_freq),
                    "steps_per_execution": model.steps_per_execution,
                    "backup_every": str(backup_every),
                    "collectives": membership.chosen_collectives(),
                }
            )
            backups.restore(model, feed.share.batch_size or batch_size)
            mine = callbacks_lib.for_task(callbacks, group.is_chief, group.size)
            shows = group.is_chief and verbose != 0 and not backups.is_done(epochs)
            callback_list = keras.callbacks.CallbackList(
                with_progress(mine, shows, verbose, session.examples),
                add_history=True,
                add_progbar=shows,
                verbose=verbose,
                epochs=epochs,
                steps=feed.steps,
                model=model,
            )
            with (
                trained_in(model, precision),
                cached_driver(model, session.strategy, gradient_compression) as driver,
            ):
                session.driver = driver
                run = _Run(session, feed, backups, callback_list)
                if validation is not None:
                    run.validation = _Feed(
                        session, validation, validation_steps, "validation_steps"
                    )
                    run.validation_freq = validation_freq
                run.train(keras_compat.requested_initial_epoch(model) or initial_epoch, epochs)
        history: keras.callbacks.History = model.history
        if export_dir is not None:
            export(model, export_dir, input_signature=_export_signature(model, feed.share))
        return history


# Arguments of fit that do not go to new workers as they are.
_NOT_SENT = ("model", "workers", "x", "validation_data")


def _fit_on_new_workers(
    model: Any, workers: int, x: Any, validation_data: Any, settings: dict[str, Any]
) -> keras.callbacks.History:
    if not membership.current_cluster().is_single:
        raise UsageError(
            f"workers={workers} starts new processes, and this process is already part of "
            f"{membership.current_cluster()!r}: leave workers= out."
        )
    if settings["strategy"] not in ("auto", "multi_worker_mirrored"):
        raise UsageError(
            f"workers={workers} trains with multi-worker mirroring, received "
            f"strategy={settings['strategy']!r}: leave one of the two out."
        )
    return local.fit_on_workers(fit, model, workers, x, validation_data, settings)


def _evaluate_beside(
    session: _Session, source: data.Source, asked: Any, validate: Any
) -> keras.callbacks.History:
    """What fit does on an evaluator: scores the backups of the training."""
    if asked is None or validate is None:
        missing = "backup_dir" if asked is None else "validation_data"
        raise UsageError(
            f"this task is an evaluator and {missing} was not given: it evaluates each backup of "
            "the training on the validation data; pass both to fit on every task."
        )
    session.build(source.shard(session.sharding, data.Order()))
    return evaluator.watch(
        session.model, validate, asked.backup_dir, remove=asked.delete_checkpoint
    )


class _Run:
    """The loop of fit: epochs, steps, validation, callbacks, backups."""

    def __init__(self, session: _Session, feed: _Feed, backups: Backups, callback_list: Any):
        self.validation: _Feed | None = None
        self.validation_freq: Any = 1
        self._session = session
        self._feed = feed
        self._backups = backups
        self._callbacks = callback_list
        self._step = 0  # since the run began, over all epochs and resumes

    def train(self, initial_epoch: int, epochs: int) -> None:
        """Trains from `initial_epoch`, or from where the backup was taken, to `epochs`."""
        session, model, backups = self._session, self._session.model, self._backups
        group, driver = session.group, session.driver
        assert driver is not None
        if backups.is_done(epochs):
            backups.restore_callbacks(self._callbacks.callbacks, finished=True)
            backups.finished()
            return
        wants = map(callbacks_lib.wants_every_batch, self._callbacks.callbacks)
        every_batch = any(group.from_all(any(wants)))
        pace = _Pace(group, model.steps_per_execution, every_batch)
        found, callbacks = backups.record, self._callbacks.callbacks
        unchanged: Callable[[], Any] = contextlib.nullcontext
        if found is not None:
            initial_epoch, self._step = found["epoch"], found["step"]
            state.prepare_for_resume(callbacks, initial_epoch)
            self._feed.go_back()
            # What callbacks set when something begins, they have set before.
            unchanged = functools.partial(state.unchanged, model, session.strategy)
        model.stop_training = False
        backups.note_callbacks(callbacks)
        with unchanged():
            self._callbacks.on_train_begin()
        backups.note_callbacks(callbacks)
        training_logs: dict[str, Any] | None = None
        for epoch in range(initial_epoch, epochs):
            resumed = found is not None and epoch == initial_epoch
            inside = resumed and self._feed.resumes_inside_epoch
            if resumed and not inside:
                backups.restore_callbacks(callbacks)
            driver.reset_metrics()
            with unchanged() if inside else contextlib.nullcontext():
                self._callbacks.on_epoch_begin(epoch)
            if inside:
                backups.restore_callbacks(callbacks)
                driver.restore_replica_state(*backups.kept_by_replicas())
            session.follow_chief()
            driver.agree_on_weights(inside)
            epoch_logs = self._train_epoch(epoch, pace, every_batch)
            driver.average_state()
            if self.validation is not None and keras_compat.should_validate(
                model, epoch, self.validation_freq
            ):
                val_logs = _evaluate(session, self.validation, self._callbacks)
                epoch_logs.update({f"val_{name}": v for name, v in val_logs.items()})
            self._callbacks.on_epoch_end(epoch, epoch_logs)
            session.follow_chief()
            training_logs = epoch_logs
            last = model.stop_training or epoch + 1 == epochs
            due, leave = backups.due_after_epoch(epoch, self._step, last)
            if due:
                self._save(epoch + 1, begun=False)
            if leave:
                backups.leave(self._step)
            if last:
                break
        if epochs > 0:
            for optimizer in keras_compat.optimizers_of(model)[:1]:
                optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs=training_logs)
        driver.agree_on_weights()
        if backups.on:
            self._save(epochs, begun=False, done=True)
            backups.finished()
            state.forget_callbacks(callbacks)

    def _train_epoch(self, epoch: int, pace: _Pace, every_batch: bool) -> dict[str, Any]:
        session, feed, backups = self._session, self._feed, self._backups
        model, driver = session.model, session.driver
        assert driver is not None
        logs: dict[str, Any] = {}
        for begin, most, evenness, iterator in feed.epoch(pace, backups, self._step):
            self._callbacks.on_train_batch_begin(begin)
            with pace.timed(most):
                made = driver.train(iterator, most, evenness, feed.share.size_known)
            feed.made(made, most)
            self._step += made
            if made:
                logs = driver.metrics("train", backups.signals())
                report_progress(self._step)
                backups.refuse_nan(logs, epoch, begin + made)
                if every_batch:
                    driver.average_state()
                self._callbacks.on_train_batch_end(begin + made - 1, logs)
                if every_batch:
                    session.follow_chief()
                if model.stop_training:
                    break
                if not feed.at_end and backups.due_after_step(self._step, driver.signals):
                    self._save(epoch, begun=True)
                    if driver.signals[0]:
                        backups.leave(self._step)
        return dict(logs) or driver.metrics("train")

    def _save(self, epoch: int, begun: bool, done: bool = False) -> None:
        driver = self._session.driver
        assert driver is not None
        self._backups.save(
            self._step,
            self._session.model,
            self._session.strategy,
            driver.replica_state(),
            self._callbacks.callbacks,
            {
                "epoch": epoch,
                "step": self._step,
                "done": done,
                "stopped": bool(self._session.model.stop_training),
                "feed": self._feed.position(begun),
                "batch_size": self._feed.share.batch_size,
            },
        )


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    strategy: Any = "auto",
) -> Any:
    """Loss and metrics over all examples, computed on all replicas.

    Args:
        model, x, y, strategy: as in `fit`.
        batch_size, verbose, sample_weight, steps, callbacks, return_dict: as in
            `keras.Model.evaluate`.

    Returns:
        As `keras.Model.evaluate`; the same on every worker.

    Raises:
        UsageError: an uncompiled model, an empty dataset, or an infinite one without `steps`.
    """
    strategy = strategies.beside_training(strategy)
    with _errors_told(), _session(model, strategy, "evaluate") as session:
        model, group = session.model, session.group
        source = data.Source(x, y, sample_weight, batch_size, steps)
        feed = _Feed(session, source, steps, "steps")
        session.build(feed.share)
        with cached_driver(model, session.strategy) as driver:
            session.driver = driver
            mine = callbacks_lib.for_task(callbacks, group.is_chief, group.size)
            shows = group.is_chief and verbose != 0
            callback_list = keras.callbacks.CallbackList(
                with_progress(mine, shows, verbose, session.examples),
                add_progbar=shows,
                verbose=verbose,
                epochs=1,
                steps=feed.steps,
                model=model,
            )
            logs = _evaluate(session, feed, callback_list)
    return logs if return_dict else keras_compat.flatten_metrics(model, logs)


def _evaluate(session: _Session, feed: _Feed, callback_list: Any) -> dict[str, Any]:
    driver, model = session.driver, session.model
    assert driver is not None
    pace = _Pace(session.group, model.steps_per_execution, every_batch=False)
    callback_list.on_test_begin()
    driver.reset_metrics()
    for begin, most, evenness, iterator in feed.epoch(pace):
        callback_list.on_test_batch_begin(begin)
        with pace.timed(most):
            made = driver.test(iterator, most, evenness, feed.share.size_known)
        if made:
            callback_list.on_test_batch_end(begin + made - 1, driver.metrics("test"))
        feed.made(made, most)
    logs = driver.metrics("test")
    callback_list.on_test_end(logs)
    return logs


def predict(
    model: Any,
    x: Any,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    strategy: Any = "auto",
) -> Any:
    """Predictions for all examples in the dataset's order, computed on all replicas.

    Args:
        model, x, strategy: as in `fit`.
        batch_size, verbose, steps, callbacks: as in `keras.Model.predict`.

    Returns:
        NumPy array(s) [examples, ...] in the structure of the model's outputs, all of them on
        every worker.

    Raises:
        UsageError: an empty dataset, an infinite one without `steps`, or outputs that cannot be
            sent between workers (strings, ragged, sparse).
    """
    strategy = strategies.beside_training(strategy)
    with _errors_told(), _session(model, strategy, "predict") as session:
        model, group = session.model, session.group
        source = data.Source(x, None, None, batch_size, steps)
        feed = _Feed(session, source, steps, "steps")
        session.build(feed.share, inputs_only=True)
        with cached_driver(model, session.strategy) as driver:
            session.driver = driver
            mine = callbacks_lib.for_task(callbacks, group.is_chief, group.size)
            shows = group.is_chief and verbose != 0
            callback_list = keras.callbacks.CallbackList(
                with_progress(mine, shows, verbose),
                add_progbar=shows,
                verbose=verbose,
                epochs=1,
                steps=feed.steps,
                model=model,
            )
            callback_list.on_predict_begin()

            def after_step(made: int) -> None:
                callback_list.on_predict_batch_begin(made - 1)
                callback_list.on_predict_batch_end(made - 1, {})

            feed.share.on_epoch_begin()
            outputs = driver.predict(iter(feed.share.dataset), feed.steps, after_step)
            feed.share.on_epoch_end()
            callback_list.on_predict_end()
    return outputs


# ---------------------------------------------------------------- one call


class _Session:
    """What one call of fit, evaluate or predict works with."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self.model = model
        self.strategy = strategy
        self.group = Group.of(strategy)
        self.sharding = data.Sharding(
            self.group.size, self.group.rank, placement.local_replicas(strategy)
        )
        self.driver: SyncDriver | None = None

    def examples(self) -> int:
        """Examples of all steps so far, over all replicas."""
        return self.driver.examples if self.driver is not None else 0

    def build(self, share: data.Shard, inputs_only: bool = False) -> None:
        """Creates all variables that Keras would create on the first batch."""
        model = self.model
        if inputs_only:
            if not model.built:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(share.element_spec)
                keras_compat.build_for_inputs(model, x)
            return
        if keras_compat.needs_build(model):
            with keras_compat.scope_of(model):
                keras_compat.build_all(model, share.element_spec)

    def follow_chief(self) -> None:
        """Takes over the chief's decisions: whether to stop, and the learning rate."""
        model = self.model

        def decide() -> dict[str, Any]:
            rate = keras_compat.settable_learning_rate(model.optimizer)
            return {"stop": bool(model.stop_training), "learning rate": rate}

        decided = self.group.from_chief(decide)
        model.stop_training = decided["stop"]
        if decided["learning rate"] is not None and not self.group.is_chief:
            model.optimizer.learning_rate = decided["learning rate"]


@contextlib.contextmanager
def _session(model: Any, strategy: Any, method: str) -> Iterator[_Session]:
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise UsageError(
                f"received {type(model).__name__} as the model: expected a Keras model, or a "
                "callable that returns one."
            )
        model = model()
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"the model function returned {type(model).__name__}: expected a Keras model."
            )
    if method != "predict" and not model.compiled:
        raise UsageError(
            f"the model is not compiled: call model.compile(optimizer=..., loss=...) before "
            f"tfmw.{method}()."
        )
    yield _Session(model, strategies.choose(strategy))


@contextlib.contextmanager
def _errors_told() -> Iterator[None]:
    """An error on this task becomes everybody's error, at once."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, KeyboardInterrupt | SystemExit | GeneratorExit):
            record_error(e)
            membership.report_failure(e)
        raise


class _Feed:
    """A source as this worker reads it, epoch after epoch."""

    def __init__(
        self,
        session: _Session,
        source: data.Source,
        steps: int | None,
        argument: str,
        found: dict[str, Any] | None = None,
    ):
        self._session = session
        self._source = source
        self._asked = steps
        self._was: dict[str, Any] | None = None if found is None else found["feed"]
        if self._was is not None:
            self._seed = self._was["seed"]
        else:
            self._seed = session.group.from_chief(_draw_seed)
        self._agree = lambda mine: session.group.from_chief(lambda: mine)
        self.resumes_inside_epoch = self._was is not None and bool(self._was["begun"])
        """Whether the backup that this feed goes on from was taken between two steps."""
        self._passes = 0
        self._iterator: Any = None
        self._in_pass = 0  # steps made since the dataset began
        self._done = 0  # steps made in this epoch
        self._done_before = 0  # those of them that an interrupted run made
        self._ended = False
        self.share = source.shard(session.sharding, data.Order(self._seed, self._agree))
        self._seen: int | None = self.share.steps if self.share.steps != data.INFINITE else None
        self.steps = data.steps_of(self.share, steps, argument)

    @property
    def at_end(self) -> bool:
        """Whether the epoch has no further step, as far as is known."""
        return self._ended or (self.steps is not None and self._done >= self.steps)

    def position(self, begun: bool) -> dict[str, Any]:
        """Where in the data the run is, as JSON.

        Args:
            begun: whether an epoch has begun and is not over.
        """
        return {
            "seed": self._seed,
            "passes": self._passes,
            "in_pass": self._in_pass if self._iterator is not None else None,
            "done": self._done if begun else 0,
            "begun": begun,
            "steps": self.steps,
        }

    def go_back(self) -> None:
        """Puts the data where it was, on any number of workers: same batches, same order."""
        was = self._was
        assert was is not None
        self._done_before = was["done"]
        if self.steps is None and was["steps"] is not None:
            self.steps = self._seen = was["steps"]
        self._passes = was["passes"] - (was["in_pass"] is not None)
        if not self._source.reshuffled_by_keras:
            self._replay(self.share, self._passes)
        if was["in_pass"] is not None:
            self._begin_pass(skip=was["in_pass"])

    def _replay(self, share: data.Shard, passes: int) -> None:
        """Each pass over a dataset draws its reshuffles when it begins: begins that many."""
        # What Python code makes draws nothing here, and would begin to be read by its threads.
        draws = not self._source.is_read_once
        late = draws and data.draws_late(share.dataset)
        for _ in range(passes):
            if draws:
                iterator = iter(share.dataset)
                if late:
                    next(iterator, None)
            share.skip_epoch()

    def epoch(
        self, pace: _Pace, backups: Backups | None = None, step: int = 0
    ) -> Iterator[tuple[int, int, data.ShardSizes, Any]]:
        """Yields (first step, steps to make, evenness, iterator) for each call of the driver.

        After each, `made` must be told how many steps were made.

        Args:
            backups: steps are made so that none of its due ones is passed.
            step: steps since the run began.
        """
        self._done, self._done_before = self._done_before, 0
        if self._iterator is None or (self._asked is None and not self._done):
            self._begin_pass()
        self.share.on_epoch_begin()
        begun_at = step - self._done
        self._ended = False
        while not self._ended:
            limit = self.steps if self.steps is not None else self._seen
            most = pace.next()
            if backups is not None:
                most = backups.limit(begun_at + self._done, most)
            evenness = self.share.full
            if limit is not None:
                most = min(most, limit - self._done)
            if most <= 0:
                break
            if self.share.steps not in (None, data.INFINITE):
                left = self.share.steps - self._in_pass
                if left <= 0:
                    self._out_of_data()
                    break
                if left == 1:
                    evenness = self.share.last
                elif self.share.last != self.share.full:
                    most = min(most, left - 1)
                most = min(most, left)
            yield self._done, most, evenness, self._iterator
        self.share.on_epoch_end()
        if self._asked is None:
            self._iterator = None
            if self.steps is None:
                self.steps = self._done
                self._seen = self._done
            if self.share.steps is not None and keras_compat.is_dataset(self._source.x):
                # Keras begins a pass here and another one in the next epoch; a seeded dataset that
                # reshuffles itself must come to the same order.
                self._passes += 1
                iter(self.share.dataset)
        elif self.share.steps == self._in_pass:
            # The pass ended with the epoch: the next one begins a new pass.
            self._iterator = None

    def made(self, made: int, asked: int) -> None:
        self._done += made
        self._in_pass += made
        if made < asked:
            self._ended = True
            if self._asked is not None:
                self._out_of_data()
            elif self._done == 0 and self.share.steps is None:
                raise data.empty_dataset()

    def _begin_pass(self, skip: int = 0) -> None:
        share = self.share
        if self._source.reshuffled_by_keras:
            order = data.Order(self._seed + self._passes, self._agree)
            if skip:
                share = self._source.shard(self._session.sharding, order, skip)
            elif self._passes:
                share = self.share = self._source.shard(self._session.sharding, order)
        elif skip and self._source.is_read_once:
            share = dataclasses.replace(share, dataset=share.dataset.skip(skip))
        elif skip:
            # Skipped below the maps: what is left out need not be decoded.
            order = data.Order(self._seed, self._agree)
            share = self._source.shard(self._session.sharding, order, skip)
            self._replay(share, self._passes)
            self._replay(self.share, 1)
        self._passes += 1
        self._iterator = iter(share.dataset)
        self._in_pass = skip

    def _out_of_data(self) -> None:
        self._iterator = None
        if self._session.group.is_chief:
            warnings.warn(
                "Your input ran out of data; interrupting training. Make sure that your dataset "
                "or generator can generate at least `steps_per_epoch * epochs` batches. You may "
                "need to use the `.repeat()` function when building your dataset.",
                stacklevel=2,
            )


class _Pace:
    """How many steps one Python call makes: the chief measures and decides, everybody follows."""

    def __init__(
        self,
        group: Group,
        steps_per_execution: int,
        every_batch: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._group = group
        self._clock = clock
        self._fixed = steps_per_execution if steps_per_execution > 1 or every_batch else None
        self._calls = 0
        self._steps = 1
        self._seconds_per_step = 0.0

    def next(self) -> int:
        if self._fixed is not None:
            return self._fixed
        # The first call traces; the second and third measure; later ones seldom ask again.
        if self._calls in (1, 2, 3, 8, 64):
            self._steps = self._group.from_chief(self._decide)
        return self._steps

    def _decide(self) -> int:
        if self._calls == 1:
            return 2
        enough = int(_SECONDS_PER_CALL / max(self._seconds_per_step, 1e-6))
        return max(1, min(enough, self._steps * 32, _MOST_STEPS_PER_CALL))

    @contextlib.contextmanager
    def timed(self, steps: int) -> Iterator[None]:
        start = self._clock()
        yield
        self._calls += 1
        if self._calls > 1:
            self._seconds_per_step = (self._clock() - start) / steps


def _export_signature(model: keras.Model, share: data.Shard) -> Any:
    """What a model that does not know its inputs is exported for: what it was trained on."""
    if getattr(model, "inputs", None):
        return None
    x, _, _ = keras.utils.unpack_x_y_sample_weight(share.element_spec)
    return tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), x)


def _draw_seed() -> int:
    """The global seed where there is one, so that runs with it are equal; else a random one."""
    seed = keras_compat.global_seed()
    return (int.from_bytes(os.urandom(4)) if seed is None else seed) & 0x7FFFFFFF


def _batch_size(x: Any, validation: int | None, training: int | None) -> int | None:
    """Datasets and the like bring their own batches; arrays are cut as the training data is."""
    if keras_compat.is_dataset(x) or callable(x) or isinstance(x, keras.utils.PyDataset):
        return None
    return validation or training
