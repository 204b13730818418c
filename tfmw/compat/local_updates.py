"""Updates on each replica, and as one compiled function.

Keras's `TFOptimizer` clips gradients first, then reduces them and updates the variables in a
cross-replica context. tfmw reduces the gradients first. Each replica then updates its own copy of
the variables (`replica_local_updates`).

Keras's optimizers compute an update op by op, and each op reads and writes memory as large as the
weights. For a 25M-parameter model with Adam this takes more time than forward and backward pass
together. XLA fuses the ops into one pass per variable (`fused_update`). The arithmetic is Keras's
own, so the results differ by rounding only. (TensorFlow's `ResourceApplyAdam` is as fast, but
rounds 1 - beta_2 to float32 first, which changes an update by 2e-5 of its size.) Compiling takes
about half a second and 80 MB, so updates of small models are not compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from tfmw.compat.losses import ReplicaWeight, current_weight
from tfmw.compat.models import native
from tfmw.compat.objects import overridden
from tfmw.compat.optimizers import variables_of, with_inner_optimizers
from tfmw.compat.row_origins import joined, row_parts
from tfmw.errors import require_choice

FUSED_UPDATE = "TFMW_FUSED_UPDATE"
"""Environment variable: "auto" (default), "on" for models of any size, or "off"."""

MIN_BYTES = 4 << 20
"""Bytes of trainable weights below which compiling costs more than it saves."""


# In TFOptimizer these methods reduce gradients or update through the strategy. In the base class
# they update the variables of the current replica.
CROSS_REPLICA_METHODS = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
)

_LOCAL_MARK = "_tfmw_updates_locally"  # attribute of optimizers that update locally


@functools.cache
def _install_local_updates() -> None:
    """Replaces TFOptimizer's methods by those of the base class, for optimizers with the mark.

    The methods are replaced in TFOptimizer and not on the optimizer, because Nadam and Muon
    override some of them and call TFOptimizer's.
    """

    def choosing(keras_method: Any, local: Any) -> Any:
        @functools.wraps(keras_method)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            chosen = local if vars(self).get(_LOCAL_MARK) else keras_method
            return chosen(self, *arguments, **options)

        return method

    for name in CROSS_REPLICA_METHODS:
        keras_method = getattr(tf_optimizer.TFOptimizer, name)
        local = getattr(base_optimizer.BaseOptimizer, name)
        setattr(tf_optimizer.TFOptimizer, name, choosing(keras_method, local))


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
            which the update is traced. Its value is (the gradients of the global batch, the
            variables that this replica updates).
    """
    overrides: list[tuple[Any, str, Any]] = [
        (optimizer, "apply", _local_apply(optimizer, reduced)),
        (optimizer, "scale_loss", _weighting_scale_loss(optimizer)),
    ]
    with overridden(overrides), local_updates(optimizer):
        yield


@contextlib.contextmanager
def local_updates(optimizer: Any) -> Iterator[None]:
    """Makes an optimizer update the given variables directly, without the strategy."""
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
        # Backpropagation may lose shapes, and buckets hold only tensors of known shape.
        _set_shapes(grads, trainable_variables or [])
        if weight.deferred is None:
            reduce_and_update(weight, grads, trainable_variables)
        else:
            # Only the graph that is compiled shows the origins of sparse gradients' rows.
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
            variables = variables_of(optimizer)
        with reduced(grads, list(variables), weight) as (totals, updated):

            def update() -> tf.Tensor:
                _set_shapes(totals, updated)  # TensorFlow's gather of rows may lose shapes
                with overridden([(weight, "watches", False)]):
                    keras_apply(totals, updated)
                return tf.constant(0)

            if xla:
                update = tf.function(update, jit_compile=True, autograph=False)
            if weight.size_known:
                update()
            else:
                # At the end of the data no replica has examples, so that step updates nothing.
                tf.cond(weight.global_examples > 0, update, lambda: tf.constant(0))

    return apply


def _set_shapes(grads: Iterable[Any], variables: Iterable[Any]) -> None:
    for grad, variable in zip(grads, variables, strict=False):
        if isinstance(grad, tf.Tensor):
            grad.set_shape(variable.shape)
        elif isinstance(grad, tf.IndexedSlices):
            grad.values.set_shape([None, *variable.shape[1:]])


# ---------------------------------------------------------------- compiled


@contextlib.contextmanager
def fused_update(optimizer: Any, variables: list[Any]) -> Iterator[None]:
    """Compiles `optimizer.apply` if `fuses` returns True.

    Args:
        optimizer: a Keras optimizer, built.
        variables: the Keras variables that it updates.
    """
    if not fuses(optimizer, variables):
        yield
        return
    keras_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        # The number of rows of sparse gradients varies, and XLA would compile for each.
        if tf.executing_eagerly() or any(isinstance(g, tf.IndexedSlices) for g in grads):
            keras_apply(grads, trainable_variables)
            return

        @tf.function(jit_compile=True, autograph=False)
        def update() -> tf.Tensor:
            keras_apply(grads, trainable_variables)
            return tf.constant(0)

        update()

    with overridden([(optimizer, "apply", apply)]):
        yield


def fuses(optimizer: Any, variables: list[Any]) -> bool:
    """Whether updates by `optimizer` are compiled.

    Updates are compiled only for Keras's own optimizers, as a user's class may not compile. They
    are compiled only on the CPU and with one replica in the process, as XLA treats all virtual
    devices of a process as one.

    Args:
        optimizer: a Keras optimizer.
        variables: the Keras variables that it updates.

    Raises:
        UsageError: the environment variable is neither "auto", "on" nor "off".
    """
    choice = os.environ.get(FUSED_UPDATE, "auto")
    require_choice(FUSED_UPDATE, choice, ("auto", "on", "off"))
    every = with_inner_optimizers(optimizer)
    is_of_keras = all(type(each).__module__.startswith("keras.") for each in every)
    values = [native(v) for v in variables]
    if choice == "off" or not values or not is_of_keras:
        return False
    if any(isinstance(v, tf.distribute.DistributedValues) for v in values):
        return False
    if not all("CPU" in (v.device or "CPU").upper() for v in values):
        return False
    size = sum(v.shape.num_elements() * v.dtype.size for v in values)
    return choice == "on" or size >= MIN_BYTES
