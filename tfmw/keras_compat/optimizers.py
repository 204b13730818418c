"""Optimizers: which optimizers a model has, and how they update on each replica.

Keras's `TFOptimizer` clips gradients first, then reduces them and updates the variables in a
cross-replica context. tfmw reduces the gradients first. Each replica then updates its own copy of
the variables (`replica_local_updates`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from tfmw.keras_compat.losses import ReplicaWeight, current_weight
from tfmw.keras_compat.objects import held_by, overridden
from tfmw.keras_compat.row_origins import joined, row_parts

# In TFOptimizer these methods reduce gradients or update through the strategy. In the base class
# they update the variables of the current replica.
_CROSS_REPLICA_METHODS = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
)

_LOCAL_MARK = "_tfmw_updates_locally"  # an attribute of optimizers


@functools.cache
def _install_local_updates() -> None:
    """Makes TFOptimizer's methods those of the base class, for optimizers with the mark.

    The methods are replaced in TFOptimizer and not on the optimizer, because Nadam and Muon
    override some of them and call TFOptimizer's.
    """

    def choosing(keras_method: Any, local: Any) -> Any:
        @functools.wraps(keras_method)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            chosen = local if vars(self).get(_LOCAL_MARK) else keras_method
            return chosen(self, *arguments, **options)

        return method

    for name in _CROSS_REPLICA_METHODS:
        local = getattr(base_optimizer.BaseOptimizer, name, None)
        if local is not None:
            keras_method = getattr(tf_optimizer.TFOptimizer, name)
            setattr(tf_optimizer.TFOptimizer, name, choosing(keras_method, local))


def optimizers_of(model: keras.Model) -> list[Any]:
    """The outermost optimizers that the model and its layers hold, the compiled one first."""
    held = [getattr(model, "optimizer", None)]
    for layer in model._flatten_layers():  # the model first
        if type(layer).__module__.startswith("keras.") and layer is not model:
            held += vars(layer).values()  # lists and other objects of these are Keras's own
        else:
            held += [value for _, value in held_by(layer)]
    found = {id(o): o for o in held if isinstance(o, keras.optimizers.Optimizer)}
    return list(found.values())


def inner_optimizer(optimizer: Any) -> Any | None:
    """The optimizer that a LossScaleOptimizer wraps; None for others."""
    return getattr(optimizer, "inner_optimizer", None)


def with_inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those inside it: of a LossScaleOptimizer or a MultiOptimizer."""
    yield optimizer
    inner = inner_optimizer(optimizer)
    for each in [*([] if inner is None else [inner]), *getattr(optimizer, "_inner_optimizers", [])]:
        yield from with_inner_optimizers(each)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """All variables of an optimizer: iterations, learning rate, slots."""
    return list(optimizer.variables)


def slot_lists(optimizer: Any) -> list[tuple[str, list[Any]]]:
    """(name, the optimizer's own variables that go with those that it updates; None for none).

    Keras keeps slots in lists as long as the list of variables, under names of their own.
    """
    count = len(optimizer._trainable_variables)
    return [
        (name, list(value))
        for name, value in vars(optimizer).items()
        if name not in ("_trainable_variables", "_variables")
        and isinstance(value, list | tuple)
        and len(value) == count
        and any(v is not None for v in value)
        and all(v is None or isinstance(v, keras.Variable) for v in value)
    ]


Reduced = contextlib.AbstractContextManager[tuple[list[Any], list[Any]]]


@contextlib.contextmanager
def replica_local_updates(
    optimizer: Any, reduced: Callable[[list[Any], list[Any], ReplicaWeight], Reduced]
) -> Iterator[None]:
    """Makes `optimizer.apply` reduce the gradients first and then update this replica only.

    Clipping, loss scaling, accumulation and averages then see the gradients of the global batch,
    on every replica alike, and no update needs a cross-replica context.

    Args:
        optimizer: a Keras optimizer, built.
        reduced: (gradients, None allowed; their variables; this replica's weight) -> a context in
            which the update is traced, of the gradients of the global batch and the variables
            that this replica updates by them.
    """
    overrides: list[tuple[Any, str, Any]] = [
        (optimizer, "apply", _local_apply(optimizer, reduced)),
        (optimizer, "scale_loss", _weighting_scale_loss(optimizer)),
    ]
    with overridden(overrides), local_updates(optimizer):
        yield


@contextlib.contextmanager
def local_updates(optimizer: Any) -> Iterator[None]:
    """Makes an optimizer update the variables that it is given, and not through the strategy."""
    _install_local_updates()
    overrides: list[tuple[Any, str, Any]] = []
    for each in with_inner_optimizers(optimizer):
        overrides.append((each, _LOCAL_MARK, True))
        if hasattr(each, "_tf_apply"):
            overrides.append((each, "_tf_apply", each._common_apply))
    with overridden(overrides):
        yield


def _weighting_scale_loss(optimizer: Any) -> Callable[[Any], Any]:
    """`optimizer.scale_loss` that applies the replica's weight to the loss first."""
    keras_scale_loss = optimizer.scale_loss

    def scale_loss(loss: Any) -> Any:
        weight = current_weight()
        if weight is not None and weight.in_loss:
            loss = weight.weighted_loss(loss)
        return keras_scale_loss(loss)

    return scale_loss


def _local_apply(
    optimizer: Any, reduced: Callable[[list[Any], list[Any], ReplicaWeight], Reduced]
) -> Callable[..., None]:
    """`optimizer.apply` that reduces the gradients first."""
    keras_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        weight = current_weight()
        if weight is None:
            keras_apply(grads, trainable_variables)
            return
        grads = list(grads)
        # Backpropagation may lose shapes, and packs hold only tensors of known shape.
        _set_shapes(grads, trainable_variables or [])
        if weight.deferred is None:
            reduce_and_update(weight, grads, trainable_variables)
        else:
            # Which rows of sparse gradients are whose, only the graph that is compiled tells.
            sparse = {
                i: row_parts(grad)
                for i, grad in enumerate(grads)
                if isinstance(grad, tf.IndexedSlices)
            }

            def finish(computed: list[Any]) -> None:
                computed = list(computed)
                for i, parts in sparse.items():
                    origins = [origin for origin, _ in parts]
                    computed[i] = joined(list(zip(origins, computed[i], strict=True)))
                reduce_and_update(weight, computed, trainable_variables, xla=True)

            for i, parts in sparse.items():
                grads[i] = [part for _, part in parts]
            weight.deferred.append((grads, finish))

    def reduce_and_update(
        weight: ReplicaWeight, grads: list[Any], variables: Any, xla: bool = False
    ) -> None:
        if variables is None:
            variables = optimizer._trainable_variables
        with reduced(grads, list(variables), weight) as (totals, updated):

            def update() -> tf.Tensor:
                _set_shapes(totals, updated)  # TensorFlow's gather of rows may lose them
                keras_apply(totals, updated)
                return tf.constant(0)

            if xla:
                update = tf.function(update, jit_compile=True, autograph=False)
            if weight.size_known:
                update()
            else:
                # At the end of the data no replica has examples: that step updates nothing.
                tf.cond(weight.global_examples > 0, update, lambda: tf.constant(0))

    return apply


def _set_shapes(grads: Iterable[Any], variables: Iterable[Any]) -> None:
    for grad, variable in zip(grads, variables, strict=False):
        if isinstance(grad, tf.Tensor):
            grad.set_shape(variable.shape)
        elif isinstance(grad, tf.IndexedSlices):
            grad.values.set_shape([None, *variable.shape[1:]])


@contextlib.contextmanager
def stable_variable_keys(optimizer: Any, variables: list[Any]) -> Iterator[None]:
    """Keeps the optimizer's variable-to-slot map valid while other tf.Variables are substituted."""
    overrides: list[tuple[Any, str, Any]] = []
    for each in with_inner_optimizers(optimizer):
        keys = {id(v): each._var_key(v) for v in variables}
        keras_key = each._var_key

        def key(variable: Any, keys: dict[int, Any] = keys, default: Any = keras_key) -> Any:
            return keys[id(variable)] if id(variable) in keys else default(variable)

        overrides.append((each, "_var_key", key))
    with overridden(overrides):
        yield


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (keras.Model, "_flatten_layers"),
    (tf_optimizer.TFOptimizer, "_var_key"),
    (tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients"),
    (keras.optimizers.LossScaleOptimizer, "_tf_apply"),
    (keras.optimizers.LossScaleOptimizer, "_common_apply"),
    (keras.optimizers.Optimizer, "_backend_update_step"),
    (keras.optimizers.Optimizer, "_apply_weight_decay"),
    *[(base_optimizer.BaseOptimizer, name) for name in _CROSS_REPLICA_METHODS],
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
