"""Driver of the training loop for synchronous training, and evaluation and prediction with it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfmw.cluster.group import Group
from tfmw.compat import optimizers
from tfmw.observe import goodput, tracing
from tfmw.observe.step_times import StepTimes
from tfmw.tables.table import refuse_tables
from tfmw.train.arguments import FitArguments
from tfmw.train.checkpoint.tensor_files import SlotParts
from tfmw.train.epoch_iterator import DriverCall, EpochIterator
from tfmw.train.fit_context import FitContext
from tfmw.train.loop import DriverState, Reads, Rows, ValidationSignals, any_wants_every_batch
from tfmw.train.mirrored.prediction import Predictions
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.pace import CallPace, last_batch_number
from tfmw.train.reporter import InputBound


class MirroredTraining:
    """Training steps on all replicas of a strategy; a `tfmw.train.loop.Driver`.

    As a context manager it places the model's variables on the replicas, and restores them at the
    end.

    Args:
        context, arguments: context and arguments of the call.
        record: record of the backup from which the run resumes, or None.
        sync: synchronization of replicas: `EachStep`, or an object with the same methods.

    Attributes:
        element_spec: structure of tf.TensorSpec for one batch.
    """

    trains_in_place = True
    driver: SyncDriver  # driver of the steps, within the context
    _pace: CallPace  # set by `start`
    _reads: Reads

    def __init__(
        self,
        context: FitContext,
        arguments: FitArguments,
        record: dict[str, Any] | None,
        sync: Any,
    ):
        self.model = context.model
        self.strategy = context.strategy
        self.group = context.group
        self._arguments = arguments
        self._sync = sync
        self._feed: dict[str, Any] = {} if record is None else record["feed"]
        apart = ("validation", "rounds")
        train = {name: value for name, value in self._feed.items() if name not in apart}
        self._data = EpochIterator(
            arguments.source,
            context.group,
            context.sharding,
            arguments.steps_per_epoch,
            "steps_per_epoch",
            train or None,
            arguments.index_dir,
            self.model.steps_per_execution,
        )
        self.batch_size = self._data.shard.batch_size
        self.element_spec = self._data.shard.element_spec
        context.build(self.element_spec)
        refuse_tables(self.model.variables)
        self._validation: EpochIterator | None = None
        self._input_bound = InputBound()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MirroredTraining:
        with contextlib.ExitStack() as stack:  # after an error the model is in its earlier state
            self.driver = stack.enter_context(self._sync.driver(self.model))
            self.driver.splits = self._arguments.split_batch
            source = self._arguments.validation_source
            if source is not None:
                self._validation = EpochIterator(
                    source,
                    self.group,
                    self.driver.replicas.sharding,
                    self._arguments.validation_steps,
                    "validation_steps",
                    self._feed.get("validation"),
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._data.leave()
        else:
            self._data.abandon()
            if self._validation is not None:
                self._validation.abandon()
        self._stack.__exit__(*error)  # the driver is not cached after an error

    def unplaced_model(self, averaged: bool) -> contextlib.AbstractContextManager[None]:
        """See `SyncDriver.unplaced_model`."""
        return self.driver.unplaced_model(averaged)

    # ------------------------------------------------------------ what the loop asks

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps of an epoch; None if unknown."""
        return self._data.steps_per_epoch

    @property
    def examples(self) -> int:
        """Number of examples of all steps so far, over all replicas."""
        return self.driver.examples if "driver" in vars(self) else 0

    @property
    def times(self) -> StepTimes | None:
        """The time of this worker's steps by its parts; None if the context was not entered yet."""
        return self.driver.times if "driver" in vars(self) else None

    @property
    def signals(self) -> list[float]:
        return self.driver.results.signals

    @property
    def steps_done(self) -> int:
        return self._data.steps_done

    @property
    def at_epoch_end(self) -> bool:
        return self._data.at_epoch_end

    def start(self, reads: Reads) -> None:
        self._reads = reads
        for update in self.driver.updates:
            update.read_between_steps = reads.optimizer == "steps"
        self.driver.results.reset()
        self._data.reset()
        one_each = reads.every_batch or tracing.is_wanted()
        self._pace = CallPace(self.group, self.model.steps_per_execution, one_each)

    def resume(self, tensors: Mapping[str, Any] | None) -> None:
        if tensors is None:
            for data in (self._validation, self._data):
                if data is not None:
                    data.restore_orders("orders_left")
            return
        self._data.restore_position()
        if self._validation is not None:  # after the training data, as both may read one dataset
            self._validation.restore_orders("orders")
        self._sync.restore(tensors)

    def begin_epoch(self, kept: Rows | None, trains: bool = True) -> None:
        if kept is not None:
            self.driver.state.restore(*kept)
        self.driver.agree_on_weights(inside_epoch=kept is not None)
        if trains:
            self._data.begin_epoch()
            if not self.steps_done:
                self._sync.begin_epoch()

    def train(
        self, max_steps: int, on_begin: Callable[[int], None], on_end: Callable[[], bool]
    ) -> None:
        limit, pace = self.steps_done + max_steps, self._pace

        def most_steps() -> int:
            left, due = limit - self.steps_done, self._sync.steps_to_next(self.steps_done)
            return left and min(pace.next_steps(), due, left)

        for call in driver_calls(self.driver, "train", self._data, pace, most_steps, on_begin):
            self._sync.after_steps(self.steps_done)
            self._input_bound.check(self.driver.times, call.iterator)
            if self._reads.optimizer == "steps":
                self.driver.restore_optimizer()
            if self._reads.every_batch:
                self.driver.state.average()
            if not on_end():
                return

    def end_epoch(self, complete: bool = True) -> None:
        if complete:
            self._data.end_epoch()
        self._sync.end_epoch()
        self.driver.state.average()
        if self._reads.optimizer != "never":
            self.driver.restore_optimizer()

    def metrics(self, signals: tuple[float, ...] = ()) -> dict[str, Any]:
        if not self._sync.is_settled(self.steps_done, self.steps_per_epoch):
            signals = *signals[:2], *(0.0 for _ in signals[2:])  # a copy in memory waits
        return self.driver.results.result("train", signals)

    def from_chief(self, numbers: Sequence[float]) -> list[float]:
        return self.driver.replicas.from_chief(numbers)

    def share_changes(self) -> None:
        self.driver.agree_on_weights()

    def slot_parts(self) -> SlotParts | None:
        plans = [plan for update in self.driver.updates if (plan := update.parted) is not None]
        whole = [slot for plan in plans for slot in plan.whole_slots()]
        own = [values for p in plans for part in p.parts for values in part.slot_values()]
        rows = self._sync.own_rows()
        return SlotParts(whole, own, rows) if plans or rows else None

    def state(self, in_epoch: bool, slots: bool) -> DriverState:
        if slots:
            with self.driver.replicas.lost_peer_named():
                for update in self.driver.updates:
                    update.copy_to_chief()
        rows = self.driver.state.rows()
        tensors = self._sync.state(whole=slots)
        position = dataclasses.asdict(self._data.position(in_epoch))
        if self.group.is_chief:
            self._data.index_files()
        if self._validation is not None:
            position["validation"] = dataclasses.asdict(self._validation.position(False))
        return DriverState(rows, position | self._sync.as_json(), tensors)

    def finish(self) -> None:
        self.driver.restore_optimizer()
        if self._arguments.epochs > 0:
            for optimizer in optimizers.optimizers_of(self.model)[:1]:
                optimizer.finalize_variable_values(self.model.trainable_weights)

    def validate(self, callback_list: Any, signals: ValidationSignals | None) -> dict[str, Any]:
        """Evaluates the model on the validation data; returns the logs."""
        assert self._validation is not None
        return run_evaluation(self.driver, self.group, self._validation, callback_list, signals)


def driver_calls(
    driver: SyncDriver,
    kind: str,
    data: EpochIterator,
    pace: CallPace,
    most_steps: Callable[[], int],
    on_begin: Callable[[int], None],
) -> Iterator[DriverCall]:
    """Runs the steps of an epoch, as many as remain; yields each call that ran steps.

    Args:
        kind: "train" or "test".
        most_steps: returns the most steps of the next call; 0 ends the iteration.
        on_begin: called before each call, with the number of its first step.
    """
    while (steps := most_steps()) > 0 and (call := data.next_call(steps)) is not None:
        on_begin(call.first)
        with pace.timed(call.max_steps):
            done = driver.run_steps(kind, call, data.shard.size_known)
        data.advance(done, call.max_steps)
        if done:
            yield call


@goodput.phase("validation")
def run_evaluation(
    driver: SyncDriver,
    group: Group,
    data: EpochIterator,
    callback_list: Any,
    signals: ValidationSignals | None = None,
) -> dict[str, Any]:
    """Runs one pass over the data with the steps of `evaluate`; returns the logs.

    Args:
        signals: signals that are summed between two calls of the driver.
    """

    def metrics() -> dict[str, Any]:
        return driver.results.result("test", signals.local() if signals is not None else ())

    model = driver.model
    every_batch = any_wants_every_batch(group, callback_list, "test")
    pace = CallPace(group, model.steps_per_execution, every_batch)
    model.stop_evaluating = False
    data.reset()
    callback_list.on_test_begin()
    driver.results.reset()
    data.begin_epoch()
    begin = callback_list.on_test_batch_begin
    for _ in driver_calls(driver, "test", data, pace, pace.next_steps, begin):
        number = last_batch_number(data.steps_done, model.steps_per_execution, data.at_epoch_end)
        callback_list.on_test_batch_end(number, metrics())
        if signals is not None:
            signals.respond(driver.results.signals)
        if every_batch and group.from_chief(lambda: bool(model.stop_evaluating)):
            break
    else:
        data.end_epoch()
    data.leave()
    logs = dict(sorted(metrics().items()))  # in the order of Keras's evaluate
    callback_list.on_test_end(logs)
    return logs


def run_prediction(
    driver: SyncDriver, group: Group, data: EpochIterator, callback_list: Any
) -> Any:
    """Runs one pass over the data with the steps of `predict`; returns the model's outputs."""
    model, total = driver.model, data.steps_per_epoch
    every_batch = any_wants_every_batch(group, callback_list, "predict")
    model.stop_predicting = False
    callback_list.on_predict_begin()
    data.begin_epoch()
    predictions = Predictions(driver, data.iterator)
    # Each task has its own pace, as its pipeline may be longer than those of others.
    pace = CallPace(Group(0, 1), model.steps_per_execution, every_batch)
    done, more = 0, True
    while more and (total is None or done < total):
        max_steps = pace.next_steps()
        if total is not None:
            max_steps = min(max_steps, total - done)
        callback_list.on_predict_batch_begin(done)
        with pace.timed(max_steps):
            steps = predictions.extend(max_steps)
        if every_batch:  # if each worker has its own pipeline, one may end before the others
            steps = max(group.from_all(steps))
        done += steps
        data.advance(steps, steps)
        more = steps == max_steps
        if not steps:
            break
        logs = {"outputs": predictions.assembled(of_last_call=True)} if every_batch else {}
        number = last_batch_number(done, model.steps_per_execution, not more or done == total)
        callback_list.on_predict_batch_end(number, logs)
        if every_batch and group.from_chief(lambda: bool(model.stop_predicting)):
            break
    data.end_epoch()
    data.leave()
    callback_list.on_predict_end()
    return predictions.assembled()
