"""Models, layers and variables: their parts, how they are built, what a user's class overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.trainers.data_adapters import (
    data_adapter_utils,
)

from tfmw.keras_compat.optimizers import inner_optimizer, optimizers_of

Variable = keras.Variable


def is_model(candidate: Any) -> bool:
    """Whether it can be trained: a `keras.Model`, or any layer that is one of Keras's trainers."""
    return isinstance(candidate, tf_trainer.TensorFlowTrainer)


def assert_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's own error if `model` is not compiled."""
    model._assert_compile_called(method)


def compiled_parts(model: keras.Model) -> list[Any]:
    """What a call to `compile` replaces."""
    return [model.optimizer, model._compile_loss, model._compile_metrics]


def class_weight_to_sample_weights(y: Any, class_weight: dict[int, float]) -> Any:
    """The weight of each example, float32 [examples], from the weights of its class."""
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


NOTES_OF_CALLS = ("_called",)

"""Attributes in which layers record their calls, and which no step reads."""


def layers_of(model: keras.Model) -> list[Any]:
    """The model and all layers in it, each once."""
    return list(model._flatten_layers())


def keeps_state_of_examples(layer: Any) -> bool:
    """Whether a layer carries a state of each example over to the next batch (`stateful=True`)."""
    return isinstance(layer, keras.layers.RNN) and bool(layer.stateful)


def seed_generators_of(model: keras.Model) -> list[Any]:
    """The seed generators of a model's layers, each once."""
    found: list[Any] = []
    for layer in layers_of(model):
        for generator in getattr(layer, "_seed_generators", []):
            if all(generator is not f for f in found):
                found.append(generator)
    return found


def state_variables_of(model: keras.Model) -> list[Any]:
    """Variables that layers update themselves, such as moving averages; not frozen weights."""
    found: dict[int, Any] = {}
    for layer in layers_of(model):
        for variable in getattr(layer, "_non_trainable_variables", []):
            found.setdefault(id(variable), variable)
    return list(found.values())


def native(variable: Any) -> Any:
    """The tf.Variable inside a Keras variable."""
    return variable._value


def set_native(variable: Any, value: Any) -> None:
    """Puts a `tf.Variable` into a Keras variable."""
    variable._value = value


@contextlib.contextmanager
def substituted(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Within this context each Keras variable holds another object than its own `tf.Variable`.

    Args:
        pairs: (Keras variable, the object that it holds).
    """
    before = [(v, native(v)) for v, _ in pairs]
    try:
        for variable, value in pairs:
            set_native(variable, value)
        yield
    finally:
        for variable, value in before:
            set_native(variable, value)


def keep_message(error: Exception) -> None:
    """Makes Keras raise an error as it is; otherwise it adds a layer's arguments to the message."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Builds model, losses, metrics and optimizer from the shapes of one batch.

    Args:
        batch: nested structure of objects with `.shape` and `.dtype`.
    """
    model._symbolic_build(data_batch=batch)


def scope_of(model: keras.Model) -> Any:
    """The strategy in whose scope the model was created, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def build_all(model: keras.Model, spec: Any) -> None:
    """Creates every variable of the model, its losses, metrics and optimizer.

    Args:
        spec: structure of tf.TensorSpec, of one batch (x, y, sample weights).
    """
    errors: tuple[type[Exception], ...] = (
        RuntimeError,
        TypeError,
        AttributeError,
        NotImplementedError,
    )
    if overrides_step(model, "train_step"):
        # Only the step knows the inputs of the model: a batch (anchor, positive, negative), for
        # example, has three inputs, which Keras takes for x, y and sample weights.
        errors = (*errors, ValueError)
    try:
        symbolic_build(model, spec)
    except errors:
        # Steps that only TensorFlow can trace: trace one without running it.
        tf.function(model.train_step, autograph=False).get_concrete_function(spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if any(not optimizer.built for optimizer in optimizers_of(model)):
        # The variables of optimizers in a custom step, such as a GAN's, appear only in the step.
        tf.function(model.train_step, autograph=False).get_concrete_function(spec)


def build_for_inputs(model: keras.Model, spec: Any) -> None:
    """Creates the variables of the model only, from the specs of its inputs."""
    model(tf.nest.map_structure(_keras_tensor, spec))


def _keras_tensor(spec: Any) -> Any:
    if spec is None:
        return None
    kind: dict[str, bool] = {}
    if isinstance(spec, tf.SparseTensorSpec):
        kind["sparse"] = True
    elif isinstance(spec, tf.RaggedTensorSpec):
        kind["ragged"] = True
    return keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype.name), **kind)


def settable_learning_rate(optimizer: Any) -> float | None:
    """The learning rate variable if callbacks may set it; None with a schedule or several rates."""
    if getattr(optimizer, "_inner_optimizers", None):
        return None  # a MultiOptimizer's own rate has no effect
    inner = inner_optimizer(optimizer) or optimizer
    rate = getattr(inner, "_learning_rate", None)
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def limits_for_debugging() -> tuple[int | None, int | None]:
    """The most epochs, and the most steps of an epoch, that the user set in `keras.config`."""
    names = ("max_epochs", "max_steps_per_epoch")  # since Keras 3.11
    epochs, steps = (getattr(keras.config, name, lambda: None)() for name in names)
    return epochs, steps


def needs_build(model: keras.Model) -> bool:
    """Whether the first batch would create variables of the model."""
    parts = [model._compile_loss, model._compile_metrics, *optimizers_of(model)]
    return not all(layer.built for layer in layers_of(model)) or not all(
        part is None or part.built for part in parts
    )


def overrides_step(model: keras.Model, name: str) -> bool:
    """Whether the user's class overrides `train_step` or `test_step`."""
    return getattr(type(model), name) is not getattr(tf_trainer.TensorFlowTrainer, name)


def should_validate(model: keras.Model, epoch: int, validation_freq: Any) -> bool:
    """Whether Keras validates after this epoch (from 0)."""
    return bool(model._should_eval(epoch, validation_freq))


def profiles_batches(tensorboard: keras.callbacks.TensorBoard) -> bool:
    """Whether the callback has a `profile_batch`, which it stores under other names."""
    return bool(tensorboard._should_trace)


def event_writers(tensorboard: keras.callbacks.TensorBoard) -> list[Any]:
    """The open `tf.summary.SummaryWriter`s of the callback."""
    return list(tensorboard._writers.values())


def requested_initial_epoch(model: keras.Model) -> int | None:
    """The epoch from which Keras's BackupAndRestore resumes; None without one."""
    return model._initial_epoch


def is_synchronized_batch_norm(layer: Any) -> bool:
    """Whether a layer is a BatchNormalization over all replicas."""
    return isinstance(layer, keras.layers.BatchNormalization) and bool(layer.synchronized)


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (tf_trainer.TensorFlowTrainer, "_symbolic_build"),
    (tf_trainer.TensorFlowTrainer, "_assert_compile_called"),
    (tf_trainer.TensorFlowTrainer, "_should_eval"),
    (keras.Model, "_flatten_layers"),
    (data_adapter_utils, "class_weight_to_sample_weights"),
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
