"""train_on_batch, test_on_batch, predict_on_batch for user-written loops, on every replica.

    for x, y in batches:                                  # the same on every task
        loss = tfmw.train_on_batch(model, x, y)

They correspond to Keras's methods of the same names. Every task makes the same calls with the same
whole batch, and processes its shard of it. Between two calls the model is an ordinary Keras model,
equal on all tasks.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmw import data
from tfmw.compat import datasets, models
from tfmw.compat.kept import kept_with
from tfmw.compat.metric_variables import flatten_metrics, python_logs
from tfmw.compat.model_methods import given, given_arguments
from tfmw.errors import UsageError
from tfmw.train import strategies
from tfmw.train.fit_context import FitContext, errors_reported
from tfmw.train.mirrored.batch_driver import BatchDriver
from tfmw.train.mirrored.cached_driver import same_objects
from tfmw.train.mirrored.sharded_update import is_driven
from tfmw.train.own_methods import call_own


@given_arguments
def train_on_batch(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: dict[int, float] | None = None,
    return_dict: bool = False,
    *,
    strategy: Any = "auto",
) -> Any:
    """Trains `model` on one batch, on all replicas.

    Args:
        model: a compiled Keras 3 model. It is trained in place.
        x, y, sample_weight: arrays or tensors [examples, ...], or structures of them: the whole
            batch, the same on every task.
        class_weight, return_dict: see `keras.Model.train_on_batch`.
        strategy: see `tfmw.fit`.

    Returns:
        Loss and metrics of this batch, in the form of `keras.Model.train_on_batch`; the same on
        every task.

    Raises:
        UsageError: an uncompiled model; a batch, or a weight, that differs between tasks; parameter
            servers; a call from within `tfmw.fit`.
    """
    return _logs(model, "train", locals(), given())


@given_arguments
def test_on_batch(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    return_dict: bool = False,
    *,
    strategy: Any = "auto",
) -> Any:
    """Computes loss and metrics of one batch, on all replicas.

    Args:
        model, x, y, sample_weight, strategy: see `train_on_batch`.
        return_dict: see `keras.Model.test_on_batch`.

    Returns:
        The result of `keras.Model.test_on_batch`, the same on every task.

    Raises:
        UsageError: see `train_on_batch`.
    """
    return _logs(model, "test", locals(), given())


def predict_on_batch(model: Any, x: Any) -> Any:
    """Computes the predictions of one batch.

    Every task computes all of them, because a loop needs them on every task. So no communication is
    needed. `tfmw.predict` divides a dataset.

    Args:
        model: a Keras 3 model.
        x: array or tensor [examples, ...], or a structure of them.

    Returns:
        The result of `keras.Model.predict_on_batch`.
    """
    with errors_reported("default"):
        return model.predict_on_batch(x)


def _parts(model: Any, strategy: Any) -> list[Any]:
    """Objects that a driver depends on; `compile`, a new variable or a new seed replaces some."""
    parts = models.compiled_parts(model)
    return [strategy, *parts, *model.variables, datasets.source_of_seeds()]


def _logs(model: Any, kind: str, arguments: dict[str, Any], given: frozenset[str]) -> Any:
    strategy = arguments["strategy"]

    def run(
        x: Any,
        y: Any,
        sample_weight: Any,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        if class_weight is not None:
            if sample_weight is not None:
                raise UsageError("received both sample_weight and class_weight: pass one of them.")
            sample_weight = models.class_weight_to_sample_weights(y, class_weight)
        batch = x, y, sample_weight
        logs = python_logs(_driver_of(model, kind, batch, strategy).step(kind, batch))
        return logs if return_dict else flatten_metrics(model, logs)

    with errors_reported(strategy):
        if not models.is_model(model):
            raise UsageError(
                f"received {type(model).__name__} as the model: expected a Keras model."
            )
        return call_own(f"{kind}_on_batch", model, strategy, arguments, given, run)


def _driver_of(model: Any, kind: str, batch: Any, strategy: Any) -> BatchDriver:
    method = f"{kind}_on_batch"
    if is_driven(model):
        raise UsageError(
            f"tfmw.{method} was called from within tfmw.fit or tfmw.evaluate of the same model: "
            "call it between two calls of them."
        )
    kept: tuple[BatchDriver, list[Any]] | None = kept_with(model).batch_driver
    if kept is not None and same_objects(kept[1], _parts(model, strategy)):
        return kept[0]
    chosen = strategies.choose(strategy)
    if strategies.servers_of(chosen) is not None:
        raise UsageError(
            f"tfmw.{method} needs synchronous replicas, and this cluster has parameter servers, "
            "whose workers do not share a batch: use tfmw.fit, or strategy='default'."
        )
    context = FitContext.of(model, chosen, method)
    context.build(data.map_tensors(_spec, batch))
    driver = BatchDriver(model, chosen)
    kept_with(model).batch_driver = driver, _parts(model, strategy)
    return driver


def _spec(tensor: Any) -> Any:
    spec = tf.type_spec_from_value(tensor if tf.is_tensor(tensor) else tf.constant(tensor[:1]))
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
