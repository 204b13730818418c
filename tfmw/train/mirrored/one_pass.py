"""One pass over data, in `tfmw.evaluate`, `tfmw.predict`, and the validation of `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat.metric_variables import flatten_metrics
from tfmw.train.arguments import FitArguments, limited_steps, presence
from tfmw.train.epoch_iterator import EpochIterator
from tfmw.train.fit_context import FitContext
from tfmw.train.loop import ValidationSignals
from tfmw.train.mirrored.prediction_parts import PredictionParts
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.mirrored.sync_training import run_evaluation, run_prediction
from tfmw.train.mirrored.synchronization import EachStep
from tfmw.train.own_methods import calling_evaluate


class OnePass(NamedTuple):
    """Evaluation or prediction with a model: one pass over some data.

    The arguments of the methods are those of Keras's.
    """

    model: keras.Model
    strategy: Any
    splits: bool  # whether replicas have shards of batches, rather than whole ones

    def evaluate(self, *, x: Any, return_dict: bool, **passed: Any) -> Any:
        """Loss and metrics over all examples, in the form of `keras.Model.evaluate`."""
        logs = self.logs(x=x, **passed)
        return logs if return_dict else flatten_metrics(self.model, logs)

    def logs(self, *, x: Any, signals: ValidationSignals | None = None, **passed: Any) -> Any:
        """The logs of `evaluate`, by name."""
        with self._prepared("evaluate", x, **passed) as prepared:
            return run_evaluation(*prepared, signals)

    def predict(self, *, x: Any, **passed: Any) -> Any:
        """The model's outputs for all examples."""
        with self._prepared("predict", x, **passed) as prepared:
            return run_prediction(*prepared)

    def write_predictions(self, parts: PredictionParts, *, x: Any, **passed: Any) -> str:
        """Writes the model's outputs to files; returns the path of their index."""
        with parts, self._prepared("predict", x, **passed, parts=parts) as prepared:
            return parts.write(*prepared)

    @contextlib.contextmanager
    def _prepared(
        self,
        method: str,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        steps: int | None = None,
        verbose: Any = "auto",
        callbacks: Any = None,
        parts: PredictionParts | None = None,
    ) -> Iterator[tuple[SyncDriver, Group, EpochIterator, Any]]:
        """(the driver in which the model is placed, the tasks, the data, the callbacks)."""
        context = FitContext.of(self.model, self.strategy, method)
        steps = limited_steps(steps)
        given = {"batch_size": batch_size, "steps": steps, "split_batch": self.splits}
        data_of = {"y": presence(y), "sample_weight": presence(sample_weight)}
        context.group.require_same({**given, **data_of})
        source = data.Source(x, y, sample_weight, batch_size, steps, split=self.splits)
        position = None if parts is None else parts.open(context, source)
        batches = EpochIterator(source, context.group, context.sharding, steps, "steps", position)
        context.build(batches.shard.element_spec, for_inputs=method == "predict")
        if parts is not None:
            parts.check(batches)
        with EachStep(context.strategy).driver(context.model) as driver:
            driver.splits = self.splits
            callback_list = context.callback_list(
                callbacks,
                driver,
                verbose=verbose,
                steps=batches.steps_per_epoch,
            )
            yield driver, context.group, batches, callback_list


def validate_here(
    model: keras.Model,
    arguments: FitArguments,
    callbacks: Any = None,
    signals: ValidationSignals | None = None,
) -> dict[str, Any]:
    """Evaluates on the validation data in this process only; returns the logs."""
    del callbacks  # none runs around batches of a validation on parameter servers
    here = OnePass(model, "default", splits=True)
    logs: dict[str, Any] = here.logs(**_of_validation(arguments), verbose=0, signals=signals)
    return logs


def _of_validation(arguments: FitArguments) -> dict[str, Any]:
    """The validation data as arguments of `keras.Model.evaluate`."""
    source = arguments.validation_source
    assert source is not None
    names = ("x", "y", "sample_weight", "batch_size", "steps")
    return {name: getattr(source, name) for name in names}


def validate_as_user(
    context: FitContext,
    arguments: FitArguments,
    unplaced_model: Callable[..., contextlib.AbstractContextManager[None]] | None,
    validate: Callable[..., dict[str, Any]],
    callback_list: Any = None,
    signals: ValidationSignals | None = None,
) -> dict[str, Any]:
    """Validates as Keras's fit does, by `model.evaluate`, which the model's class may override."""
    model = context.model
    one_pass = OnePass(model, context.strategy, arguments.split_batch)
    unplaced = contextlib.ExitStack()  # entered while the user's code runs

    def enter() -> None:
        if unplaced_model is not None:
            unplaced.enter_context(unplaced_model(True))

    def evaluate(_use_cached_eval_dataset: bool = False, **passed: Any) -> Any:
        if not _use_cached_eval_dataset:
            return one_pass.evaluate(**passed)
        unplaced.close()
        try:
            logs = validate(callback_list, signals)
        finally:
            enter()
        return logs if passed["return_dict"] else flatten_metrics(model, logs)

    with unplaced, calling_evaluate(model, context.strategy, evaluate):
        enter()
        logs: dict[str, Any] = model.evaluate(
            **_of_validation(arguments),
            callbacks=getattr(callback_list, "of_keras", callback_list),
            return_dict=True,
            # `fit` has set it already: Keras ignores x, y and weights
            _use_cached_eval_dataset=True,
        )
    return logs
