"""The model, the strategy and the tasks of one call of fit, evaluate or predict."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import data
from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.compat import models, placement, runtime
from tfmw.compat.model_methods import is_overridden
from tfmw.errors import UsageError
from tfmw.observe import tracing
from tfmw.observe.recorded_errors import forget_error, is_secondary, record_error
from tfmw.train import strategies
from tfmw.train.callbacks.log import Observer
from tfmw.train.callbacks.progress_bar import with_progress
from tfmw.train.callbacks.roles import OnUnplacedModel, for_task


@dataclasses.dataclass(frozen=True)
class FitContext:
    """The context of one call."""

    model: keras.Model  # compiled unless the call is `predict`
    strategy: tf.distribute.Strategy
    group: Group  # the tasks that make the same call
    sharding: data.Sharding  # division of global batches between their replicas

    @classmethod
    def of(cls, model: Any, strategy: Any, method: str) -> FitContext:
        """Context of `tfmw.<method>(model, strategy=strategy)`; may join the cluster.

        Raises:
            UsageError: `model` is neither a model nor a callable that returns one, or it is not
                compiled; or the strategy is unknown.
        """
        model = model_of(model)
        if not method.startswith("predict") and not model.compiled:
            raise UsageError(
                "the model is not compiled. You must call `compile(optimizer=..., loss=...)` "
                f"before tfmw.{method}()."
            )
        strategy = strategies.choose(strategy)
        if method != "fit" and isinstance(strategy, tf.distribute.ParameterServerStrategy):
            strategy = tf.distribute.get_strategy()  # the coordinator runs alone
        _refuse_states_of_examples(model, strategy)
        _refuse_own_function(model, method)
        if strategies.servers_of(strategy) is not None:
            # only the coordinator calls it
            return cls(model, strategy, Group(0, 1), data.Sharding())
        group = Group.of(strategy)
        local = placement.local_replicas(strategy)
        return cls(model, strategy, group, data.Sharding(group.size, group.rank, local))

    def build(self, element_spec: Any, for_inputs: bool = False) -> None:
        """Creates all variables that Keras would create on the first training batch.

        Args:
            element_spec: structure of tf.TensorSpec for one batch (x, y, sample weights).
            for_inputs: whether to create only the variables of the model, for `predict`.
        """
        if for_inputs:
            if not self.model.built:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
                models.build_for_inputs(self.model, x)
        elif models.needs_build(self.model):
            with models.scope_of(self.model):
                models.build_all(self.model, element_spec)

    def callback_list(
        self,
        callbacks: Any,
        driver: Any,
        *,
        verbose: Any,
        steps: int | None,
        epochs: int = 1,
        history: bool = False,
    ) -> Any:
        """Callbacks that this task runs, including its progress display.

        Args:
            callbacks: callbacks of the user, or the `CallbackList` of another call.
            driver: driver of the steps, with `examples` and `times` so far, and `unplaced_model`,
                which is None on parameter servers.
            verbose: see Keras.
            steps: number of steps of one epoch; None if unknown.
            history: whether to add a `History`.
        """
        is_ordinary = driver.unplaced_model is None
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks if is_ordinary else OnUnplacedModel(callbacks, driver.unplaced_model)
        shows = self.group.is_chief and verbose != 0
        local = for_task(callbacks, self.group.is_chief, self.group.size)
        for callback in local:
            if isinstance(callback, Observer):
                callback.observe(self.group, lambda: driver.times)
        callback_list = keras.callbacks.CallbackList(
            with_progress(local, shows, verbose, lambda: driver.examples, overlapping=is_ordinary),
            add_history=history,
            add_progbar=shows,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            model=self.model,
        )
        if is_ordinary:
            return callback_list
        return OnUnplacedModel(callback_list, driver.unplaced_model)


def model_of(model: Any) -> keras.Model:
    """The model of a call: its argument, or the result if the argument is a function."""
    if models.is_model(model):
        return model
    if not callable(model):
        raise UsageError(
            f"received {type(model).__name__} as the model: expected a Keras model, or a "
            "callable that returns one."
        )
    made = model()
    if not models.is_model(made):
        raise UsageError(
            f"the model function returned {type(made).__name__}: expected a Keras model."
        )
    return made


def _refuse_states_of_examples(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Raises UsageError if a layer keeps a state of each example, and batches are divided."""
    if strategy.num_replicas_in_sync == 1 and strategies.servers_of(strategy) is None:
        return
    for layer in models.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UsageError(
                f"the layer {layer.name} has stateful=True: it keeps a state of each example of "
                f"its batch, and {strategy.num_replicas_in_sync} replicas divide each batch. "
                "Expected stateful=False; or train on one replica, tfmw.fit(strategy='default')."
            )


def _refuse_own_function(model: keras.Model, method: str) -> None:
    """Raises UsageError if the model makes the function that Keras's method calls for a batch."""
    trains, predicts = method in ("fit", "train_on_batch"), method.startswith("predict")
    kind = "train" if trains else "predict" if predicts else "test"
    if is_overridden(model, f"make_{kind}_function"):
        raise UsageError(
            f"{type(model).__name__} overrides make_{kind}_function, and tfmw makes a function of "
            f"its own, for several replicas: override {kind}_step instead, which it calls for "
            "each batch."
        )


@contextlib.contextmanager
def errors_reported(strategy: Any) -> Iterator[None]:
    """Reports an error of this task to all tasks, which then fail with it at once.

    An error that all tasks raise alike is not reported: their next call may succeed. An error of a
    call that concerns this task alone is reported only if the process ends with it.

    Args:
        strategy: argument of the call.
    """
    try:
        if not _is_of_this_task(strategy):
            membership.require_usable()
        yield
    except BaseException as e:
        tracing.stop()
        if not isinstance(e, KeyboardInterrupt | SystemExit | GeneratorExit):
            record_error(e)
            if _is_of_this_task(strategy) or _goes_on(e):
                forget_error()
            else:
                membership.report_failure(e)
        raise


def _is_of_this_task(strategy: Any) -> bool:
    """Whether a call concerns this task only, according to its argument `strategy`."""
    joined = membership.joined()
    if joined is None or not isinstance(strategy, tf.distribute.Strategy):
        return joined is None or strategy in ("default", "mirrored")
    return strategy is not joined.made


def _goes_on(error: BaseException) -> bool:
    """Whether the cluster can make another call after an error in a call of all tasks."""
    joined = membership.joined()
    assert joined is not None
    if is_secondary(error) or membership.has_failed():
        return False
    if joined.control is not None:
        return True  # only the coordinator makes calls
    position = [of_one() for of_one in joined.positions]
    if None in position:
        return False
    traced = [] if joined.made is None else runtime.collectives_traced(joined.made)
    return Group.of_cluster(joined.cluster).raised_alike(error, [*position, traced])
