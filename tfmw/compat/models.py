"""Models, layers and variables: their parts, their building, methods that a user overrides."""

from __future__ import annotations

import bdb
import contextlib
import inspect
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.trainers.data_adapters import data_adapter_utils
from tensorflow.python.ops import resource_variable_ops

from tfmw.compat.kept import kept_with
from tfmw.compat.objects import Trainer, overridden, unique
from tfmw.compat.optimizers import optimizers_of, with_inner_optimizers
from tfmw.compat.replica_steps import replica_step


def is_model(candidate: Any) -> bool:
    """Whether an object can be trained: a `keras.Model`, or any layer that is a Keras trainer."""
    return isinstance(candidate, Trainer)


def compiled_parts(model: keras.Model) -> list[Any]:
    """The objects that a call to `compile` replaces; None if it was never called."""
    # the attribute exists from the first `compile` on
    optimizer = getattr(model, "optimizer", None)
    return [optimizer, model._compile_loss, model._compile_metrics]


def loss_arguments(model: keras.Model) -> dict[str, Any]:
    """Settings that a loss's configuration lacks: its weight, and such as a Huber loss's delta."""
    weights = getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)
    losses = keras.tree.flatten(getattr(model, "loss", None))
    arguments = [getattr(loss, "_fn_kwargs", {}) for loss in losses]
    return {"loss_weights": weights, "arguments of losses": arguments}


class_weight_to_sample_weights = data_adapter_utils.class_weight_to_sample_weights
"""(y, class_weight) -> the weight of each example, float32 [examples]."""

# Keras's name of the generator of draws without a seed. 3.8 has the same value, without a constant.
_UNSEEDED = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")


def layers_of(model: keras.Model) -> list[Any]:
    """The model and all layers in it, each once."""
    return list(model._flatten_layers())


@contextlib.contextmanager
def unseeded_generator() -> Iterator[None]:
    """Ensures in this context that Keras's generator of draws without a seed exists.

    Keras creates it at the first draw, which in a traced step would be on a replica. Without a draw
    nothing has changed at the end; creating it draws from Python's generator.
    """
    if unseeded_state() is not None:
        yield
        return
    before = random.getstate()
    state = seed_generator.global_seed_generator().state
    random.setstate(before)
    try:
        yield
    finally:
        # number of draws so far; the seed before it may be the chief's now
        if state.numpy()[1] == 0:
            global_state.set_global_attribute(_UNSEEDED, None)
        else:
            seed_generator.make_default_seed()


def unseeded_state() -> Any | None:
    """The Keras variable of `unseeded_generator`; None if it does not exist."""
    generator = global_state.get_global_attribute(_UNSEEDED)
    return None if generator is None else generator.state


def with_unseeded_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` for other threads, such as replicas': Keras has one generator per thread."""
    generator = global_state.get_global_attribute(_UNSEEDED)

    def call(*arguments: Any) -> Any:
        global_state.set_global_attribute(_UNSEEDED, generator)
        return function(*arguments)

    return call


def set_unseeded_state(value: list[int] | None) -> None:
    """Sets Keras's generator of draws without a seed; None removes it."""
    if value is not None:
        seed_generator.global_seed_generator().state.assign(value)


def state_variables_of(model: keras.Model) -> list[Any]:
    """Variables that layers update themselves, such as moving averages; not frozen weights."""
    layers = layers_of(model)
    return unique(v for layer in layers for v in getattr(layer, "_non_trainable_variables", []))


def native(variable: Any) -> Any:
    """The tf.Variable inside a Keras variable."""
    return variable._value


def set_native(variable: Any, value: Any) -> None:
    """Puts a `tf.Variable` into a Keras variable."""
    variable._value = value


def own_variable(*arguments: Any, **named: Any) -> tf.Variable:
    """A `tf.Variable` that is marked as tfmw's own, so that a step may assign it."""
    variable = tf.Variable(*arguments, **named)
    kept_with(variable)
    return variable


def lifted_variable(
    value: Any, dtype: tf.DType = tf.float32, shape: Sequence[int | None] | None = None
) -> tf.Variable:
    """A variable of this process alone, for which a traced function is not traced a second time.

    `tf.function` notices each `tf.Variable` that is created in a trace, in `tf.init_scope` too, and
    traces again. In a strategy's scope a `tf.Variable` has a copy for each replica.
    """
    with tf.init_scope():
        variable = resource_variable_ops.ResourceVariable(
            value, trainable=False, dtype=dtype, shape=shape
        )
    kept_with(variable)  # marks it as tfmw's own
    return variable


@contextlib.contextmanager
def substituted(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Substitutes other objects for the `tf.Variable`s of Keras variables in this context.

    Args:
        pairs: (Keras variable, the object that it holds).
    """
    with overridden([(variable, "_value", value) for variable, value in pairs]):
        yield


def keep_message(error: Exception) -> None:
    """Makes Keras raise an error unchanged, without a layer's arguments in its message."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]


def scope_of(model: keras.Model) -> Any:
    """The strategy in whose scope the model was created, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def build_all(model: keras.Model, spec: Any) -> None:
    """Creates every variable of the model, its losses, metrics and optimizer.

    Args:
        spec: structure of tf.TensorSpec for one batch (x, y, sample weights).
    """
    own_step = overrides_step(model, "train_step")
    _, *compiled = compiled_parts(model)
    if own_step:
        # Only the step knows the inputs of the model. A batch (anchor, positive, negative), for
        # example, has three inputs, which Keras takes for x, y and sample weights. Only the step
        # knows, too, which optimizers it uses for which variables.
        optimizer = model.optimizer
        alone = _unbuilt(model) == [optimizer] and optimizers_of(model) == [optimizer]
        if alone and _updates_its_weights_only(model):
            optimizer.build(model.trainable_variables)
        else:
            try:
                _trace_step(model, spec)
            except Exception as error:
                if not model.run_eagerly or isinstance(error, bdb.BdbQuit):  # pdb's command q
                    raise
                own_step = False  # it reads values, so Keras builds the model from its inputs
    if not own_step or not all(part is None or part.built for part in compiled):
        hidden = [(model, "optimizer", None)] if own_step else []
        try:
            with overridden(hidden), replica_step():
                model._symbolic_build(data_batch=spec)
        except (RuntimeError, TypeError, AttributeError, NotImplementedError, ValueError) as error:
            if not own_step:
                if isinstance(error, ValueError):
                    raise
                _trace_step(model, spec)  # the step may need TensorFlow's tensors
    if not own_step and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    kept_with(model).unbuilt = _unbuilt(model)


def _updates_its_weights_only(model: keras.Model) -> bool:
    """Whether the user's step takes only `optimizer` and its attributes' variables.

    Its methods then name modules, classes and numbers, but no variable, layer or function.
    """
    takes_optimizer = False
    for owner in type(model).__mro__:
        if owner.__module__.startswith(("keras.", "tensorflow.")):
            continue
        # methods of properties, too
        members = (getattr(m, "fget", m) for m in vars(owner).values())
        for method in filter(inspect.isfunction, members):
            names = inspect.getclosurevars(method)
            takes_optimizer |= "optimizer" in names.unbound  # names of attributes are among these
            for value in [*names.globals.values(), *names.nonlocals.values()]:
                if not isinstance(value, types.ModuleType | type | int | float | str):
                    return False
    return takes_optimizer


def _trace_step(model: keras.Model, spec: Any) -> None:
    """Traces a training step without running it.

    If the step applies gradients in parts, the compiled optimizer is built for all weights, as
    Keras does. No gradient is applied: this process may hold no weight that can be updated here.
    """
    optimizer = model.optimizer
    traced = False

    def build(variables: Any) -> None:
        weights = model.trainable_variables
        some = {id(v) for v in variables} <= {id(v) for v in weights}
        type(optimizer).build(optimizer, list(weights) if some else variables)

    def step(batch: Any) -> None:
        nonlocal traced
        if not traced:  # `tf.function` traces a function that has created variables again
            traced = True
            model.train_step(batch)

    every = with_inner_optimizers(*optimizers_of(model))
    overrides: list[Any] = [
        (each, "_backend_apply_gradients", lambda *arguments: None) for each in every
    ]
    overrides += [] if optimizer is None else [(optimizer, "build", build)]
    with overridden(overrides), replica_step():
        tf.function(step, autograph=False).get_concrete_function(spec)


def _unbuilt(model: keras.Model) -> list[Any]:
    """Layers, losses, metrics and optimizers of a model that have no variables yet."""
    _, *compiled = compiled_parts(model)
    parts = [*layers_of(model), *compiled, *optimizers_of(model)]
    return [part for part in parts if part is not None and not part.built]


def build_for_inputs(model: keras.Model, spec: Any) -> None:
    """Creates the variables of the model only, from the specs of its inputs."""
    kinds = {tf.SparseTensorSpec: {"sparse": True}, tf.RaggedTensorSpec: {"ragged": True}}

    def keras_tensor(spec: Any) -> Any:
        if spec is None:
            return None
        dtype = keras.backend.standardize_dtype(spec.dtype.name)
        return keras.KerasTensor(spec.shape, dtype, **kinds.get(type(spec), {}))

    model(tf.nest.map_structure(keras_tensor, spec))


def settable_learning_rate(optimizer: Any) -> float | None:
    """The learning rate variable if callbacks may set it; None for a schedule or several rates."""
    if getattr(optimizer, "_inner_optimizers", None):
        return None  # a MultiOptimizer's own rate has no effect
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    rate = getattr(inner, "_learning_rate", None)
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def limits_for_debugging() -> tuple[int | None, int | None]:
    """The limits of epochs and of steps per epoch that the user set in `keras.config`."""
    names = ("max_epochs", "max_steps_per_epoch")  # available since Keras 3.11
    epochs, steps = (getattr(keras.config, name, lambda: None)() for name in names)
    return epochs, steps


def needs_build(model: keras.Model) -> bool:
    """Whether the first batch would create variables of the model."""
    unused = set(map(id, kept_with(model).unbuilt))
    return any(id(part) not in unused for part in _unbuilt(model))


def overrides_step(model: keras.Model, name: str) -> bool:
    """Whether a user's model or class overrides `train_step`, `test_step` or `compute_metrics`."""
    return name in vars(model) or getattr(type(model), name) is not getattr(Trainer, name)


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
    """The epoch from which Keras's BackupAndRestore resumes; None if it was not used."""
    return model._initial_epoch


def has_synchronized_batch_norm(model: keras.Model) -> bool:
    """Whether a layer of the model is a BatchNormalization over all replicas."""
    norms = (x for x in layers_of(model) if isinstance(x, keras.layers.BatchNormalization))
    return any(layer.synchronized for layer in norms)
