"""Every private name of Keras and TensorFlow that tfmw touches, in one place.

Checked on TensorFlow 2.18 to 2.21 with Keras 3.8 to 3.15. `check()` looks every name up and says
which one has moved; a test calls it, so that a new Keras release fails loudly and here.

What is private, and why tfmw needs it:

* Keras scales losses by 1 / number of replicas in two module functions. tfmw needs another factor,
  the replica's share of the global batch (`LossShare`), to be exact where shares differ.
* `TFOptimizer` reduces gradients after clipping them, through cross-replica updates. tfmw reduces
  first and then runs the optimizer on each replica as if it were alone (`alone_on_replica`).
* Datasets keep their inputs and functions in private attributes (`dataset_*`).
* The coordination service (`coordination_*`) is how tasks hear of each other without a collective.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.optimizers import base_optimizer
from keras.src.saving import keras_saveable
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import (
    array_slicing,
    data_adapter_utils,
    get_data_adapter,
)
from keras.src.trainers.data_adapters import tf_dataset_adapter as _tf_dataset_adapter
from keras.src.utils import backend_utils, tracking
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    map_op,
    prefetch_op,
    repeat_op,
    shuffle_op,
    skip_op,
    take_op,
)
from tensorflow.python.data.ops import iterator_ops as _iterator_ops
from tensorflow.python.data.util import random_seed as data_random_seed
from tensorflow.python.distribute.coordinator import cluster_coordinator as _cluster_coordinator
from tensorflow.python.distribute.coordinator import values as _coordinator_values
from tensorflow.python.eager import cancellation as _cancellation
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record
from tensorflow.python.ops import gen_experimental_dataset_ops
from tensorflow.python.ops import resource_variable_ops as _resource_variables
from tensorflow.python.util import _pywrap_util_port

Variable = keras.Variable

# ---------------------------------------------------------------- losses and their shares


class CannotCompile(Exception):
    """A loss needs sums over all replicas in the middle of the step."""


class LossShare:
    """The part of the global batch that one replica holds, while its step is traced.

    Attributes:
        rows: int32 [], examples of this replica.
        total: int32 [], examples of the global batch, over all replicas.
        weight: float32 [], `rows / total`; 0 for a replica without examples.
        used: whether some loss of the step was computed by Keras.
        scalar_losses: whether a loss function returned a scalar, taken for a mean.
        careful: whether this replica may be without examples.
        counted: whether every step is one; else one whose total is 0 updates nothing.
        later: whether losses stay means over this replica's examples, and gradients are weighted
            instead. So for steps that may add terms of their own to Keras's losses: a mean that
            is written by hand is then right too, alone or in a sum with others.
        waiting: while XLA compiles the step, which leaves no place for collectives: a list that
            takes (gradients, what reduces and applies them) instead. Else None.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        total: tf.Tensor,
        careful: bool,
        counted: bool,
        later: bool = False,
    ):
        self.rows = rows
        self.total = total
        self.careful = careful
        self.counted = counted
        self.later = later
        self.weight = tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
        self.used = False
        self.scalar_losses = False
        self.waiting: list[tuple[list[Any], Callable[[list[Any]], None]]] | None = None

    @contextlib.contextmanager
    def gradients_waiting(self) -> Iterator[list[Any]]:
        """Gradients of this context are put into the list that it gives; see `waiting`."""
        self.waiting = []
        try:
            yield self.waiting
        finally:
            self.waiting = None

    def all_sum(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over replicas; no gradient flows through (normalizers are constants)."""
        if self.waiting is not None:
            raise CannotCompile
        replica = tf.distribute.get_replica_context()
        stopped = [tf.stop_gradient(tf.identity(v)) for v in values]
        reduced: list[tf.Tensor] = replica.all_reduce(tf.distribute.ReduceOp.SUM, stopped)
        return [tf.stop_gradient(v) for v in reduced]


# Per thread: MirroredStrategy traces each replica in a thread of its own.
_traced = threading.local()


def current_share() -> LossShare | None:
    return getattr(_traced, "share", None)


@contextlib.contextmanager
def loss_share(share: LossShare | None) -> Iterator[None]:
    """Within this context losses of this thread's replica are weighted by its share."""
    _install_loss_hooks()
    before = current_share()
    _traced.share = share
    try:
        yield
    finally:
        _traced.share = before


_hooked = False


def _install_loss_hooks() -> None:
    """Replaces six Keras functions by ones that obey `current_share()`, and else do as before."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    keras_scale = loss_module.scale_loss_for_distribution
    keras_unscale = loss_module.unscale_loss_for_distribution
    keras_apply_mask = loss_module.apply_mask
    keras_reduce_values = loss_module.reduce_values
    keras_aggregate = tf_trainer.TensorFlowTrainer._aggregate_additional_loss
    keras_update_mean = keras.metrics.Mean.update_state

    def scale(value: Any) -> Any:
        share = current_share()
        if share is None:
            return keras_scale(value)
        share.used = True
        return value if share.later else value * tf.cast(share.weight, value.dtype)

    def unscale(value: Any) -> Any:
        share = current_share()
        if share is None:
            return keras_unscale(value)
        return value if share.later else value / tf.cast(share.weight, value.dtype)

    def whole(value: Any, share: LossShare) -> Any:
        # A sum over examples: the replicas' sums add up, whatever the weights.
        share.used = True
        if not share.later:
            return value
        return tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        # Keras divides by the valid entries of this replica; one process divides by those of
        # the global batch. Both counts are summed over replicas, and the ratio is corrected.
        weights = keras_apply_mask(sample_weight, mask, dtype, reduction)
        share = current_share()
        if share is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        total = tf.cast(tf.size(mask), tf.float32)
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        all_total, all_valid = share.all_sum([total, valid])
        ratio = tf.math.divide_no_nan(all_total * valid, all_valid * total)
        return weights * tf.cast(ratio, weights.dtype)

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        loss = keras_reduce_values(values, sample_weight, reduction)
        share = current_share()
        if share is None or reduction in (None, "none"):
            return loss
        if reduction == "sum" and values.shape.rank != 0:
            return whole(loss, share)
        if values.shape.rank == 0:
            # A loss function that returned one number: taken for a mean over its examples.
            share.scalar_losses = True
            return scale(loss)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            mine = tf.reduce_sum(tf.cast(sample_weight, tf.float32))
            (everyone,) = share.all_sum([mine])
            ratio = tf.math.divide_no_nan(mine, everyone * share.weight)
            return loss * tf.cast(ratio, loss.dtype)
        return loss

    def aggregate_additional_loss(self: Any, loss: Any) -> Any:
        # add_loss of one number is a mean (scaled); one value per example is a sum over examples
        # (one process would add them all up), so it is not scaled.
        share = current_share()
        if share is not None and loss.shape.rank:
            return whole(base_trainer.Trainer._aggregate_additional_loss(self, loss), share)
        return keras_aggregate(self, loss)

    def update_mean(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # One number is the mean of a batch, and the batch counts once: each replica counts by
        # its part of the batch.
        share = current_share()
        if share is not None and sample_weight is None and tf.convert_to_tensor(values).shape == ():
            sample_weight = share.weight
        return keras_update_mean(self, values, sample_weight)

    loss_module.scale_loss_for_distribution = scale
    loss_module.unscale_loss_for_distribution = unscale
    loss_module.apply_mask = apply_mask
    loss_module.reduce_values = reduce_values
    tf_trainer.TensorFlowTrainer._aggregate_additional_loss = aggregate_additional_loss
    keras.metrics.Mean.update_state = update_mean


def only_keras_losses(model: keras.Model) -> bool:
    """Whether every loss of a compiled model is computed by Keras's own code."""
    if type(model).compute_loss is not base_trainer.Trainer.compute_loss:
        return False
    call = keras.losses.Loss.__call__
    losses = tf.nest.flatten(getattr(model, "loss", None))
    return all(not isinstance(x, keras.losses.Loss) or type(x).__call__ is call for x in losses)


@contextlib.contextmanager
def overridden(overrides: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Shadows methods of single objects, past their attribute tracking, and takes it back."""
    before = [(obj, name, obj.__dict__.get(name)) for obj, name, _ in overrides]
    for obj, name, value in overrides:
        obj.__dict__[name] = value
    try:
        yield
    finally:
        for obj, name, value in reversed(before):
            if value is None:
                obj.__dict__.pop(name, None)
            else:
                obj.__dict__[name] = value


# ---------------------------------------------------------------- optimizers

# TFOptimizer's versions of these reduce gradients or update through the strategy; the base
# class's update the variables at hand, which is what a replica that is alone does.
_ALONE = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
)


def optimizers_of(model: keras.Model) -> list[Any]:
    """The outermost optimizers that the model holds, the compiled one first."""
    found: list[Any] = []
    for value in [getattr(model, "optimizer", None), *vars(model).values()]:
        for item in items_in(value):
            if isinstance(item, keras.optimizers.Optimizer) and all(item is not f for f in found):
                found.append(item)
    return found


def items_in(value: Any) -> Iterator[Any]:
    """What an attribute holds: itself, or the members of (nested) lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from items_in(member)
    else:
        yield value


def inner_optimizer(optimizer: Any) -> Any | None:
    return getattr(optimizer, "inner_optimizer", None)


def optimizer_variables(optimizer: Any) -> list[Any]:
    return list(optimizer.variables)


@contextlib.contextmanager
def alone_on_replica(
    optimizer: Any, reduce_gradients: Callable[[list[Any], LossShare], list[Any]]
) -> Iterator[None]:
    """Makes `optimizer.apply` reduce the gradients first and then update this replica only.

    Clipping, loss scaling, accumulation and averages then see the gradients of the global batch,
    on every replica alike, and no update needs a cross-replica context.

    Args:
        optimizer: a Keras optimizer, built.
        reduce_gradients: (gradients, None allowed; this replica's share) -> the gradients of the
            global batch.
    """
    overrides: list[tuple[Any, str, Any]] = []
    keras_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        share = current_share()
        if share is None:
            keras_apply(grads, trainable_variables)
            return
        grads = list(grads)
        for grad, variable in zip(grads, trainable_variables or [], strict=False):
            # Backpropagation may lose shapes, and only tensors of known shape travel in packs.
            if isinstance(grad, tf.Tensor):
                grad.set_shape(variable.shape)
        if share.waiting is None:
            finish(share, grads, trainable_variables)
        else:
            compiled = functools.partial(finish, share, variables=trainable_variables, xla=True)
            share.waiting.append((grads, compiled))

    def finish(share: LossShare, grads: list[Any], variables: Any, xla: bool = False) -> None:
        reduced = reduce_gradients(grads, share)

        def update() -> tf.Tensor:
            keras_apply(reduced, variables)
            return tf.constant(0)

        if xla:
            update = tf.function(update, jit_compile=True, autograph=False)
        if share.counted:
            update()
        else:
            # The step after the last one, for which no replica has examples, changes nothing.
            tf.cond(share.total > 0, update, lambda: tf.constant(0))

    overrides.append((optimizer, "apply", apply))
    each: Any | None = optimizer
    while each is not None:
        for name in _ALONE:
            method = getattr(base_optimizer.BaseOptimizer, name, None)
            if method is not None:
                overrides.append((each, name, method.__get__(each)))
        if hasattr(each, "_tf_apply"):
            overrides.append((each, "_tf_apply", each._common_apply))
        each = inner_optimizer(each)
    with overridden(overrides):
        yield


@contextlib.contextmanager
def stable_variable_keys(optimizer: Any, variables: list[Any]) -> Iterator[None]:
    """Keeps the optimizer's variable-to-slot map valid while other tf.Variables stand in."""
    overrides: list[tuple[Any, str, Any]] = []
    each: Any | None = optimizer
    while each is not None:
        keys = {id(v): each._var_key(v) for v in variables}
        keras_key = each._var_key

        def key(variable: Any, keys: dict[int, Any] = keys, default: Any = keras_key) -> Any:
            return keys[id(variable)] if id(variable) in keys else default(variable)

        overrides.append((each, "_var_key", key))
        each = inner_optimizer(each)
    with overridden(overrides):
        yield


# ---------------------------------------------------------------- models, layers, variables


def assert_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's own error where `model` is not compiled."""
    model._assert_compile_called(method)


NOTES_OF_CALLS = ("_called",)
"""Attributes in which layers note that they were called, and that no step reads."""


def layers_of(model: keras.Model) -> list[Any]:
    return list(model._flatten_layers())


def seed_generators_of(model: keras.Model) -> list[Any]:
    found: list[Any] = []
    for layer in layers_of(model):
        for generator in getattr(layer, "_seed_generators", []):
            if all(generator is not f for f in found):
                found.append(generator)
    return found


def state_variables_of(model: keras.Model) -> list[Any]:
    """Variables that layers update by themselves, such as moving averages; not frozen weights."""
    found: dict[int, Any] = {}
    for layer in layers_of(model):
        for variable in getattr(layer, "_non_trainable_variables", []):
            found.setdefault(id(variable), variable)
    return list(found.values())


def native(variable: Any) -> Any:
    """The tf.Variable inside a Keras variable."""
    return variable._value


def set_native(variable: Any, value: Any) -> None:
    variable._value = value


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Builds model, losses, metrics and optimizer from the shapes of one batch.

    Args:
        batch: nested structure of objects with `.shape` and `.dtype`.
    """
    model._symbolic_build(data_batch=batch)


def scope_of(model: keras.Model) -> Any:
    """The strategy scope that the model was made in, if it was: its variables belong there."""
    strategy = getattr(model, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def build_all(model: keras.Model, spec: Any) -> None:
    """Creates every variable of the model, its losses, metrics and optimizer.

    Args:
        spec: structure of tf.TensorSpec, of one batch (x, y, sample weights).
    """
    try:
        symbolic_build(model, spec)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        # Steps that only TensorFlow's own tracing understands: trace one, run nothing.
        tf.function(model.train_step, autograph=False).get_concrete_function(spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if any(not optimizer.built for optimizer in optimizers_of(model)):
        # Optimizers of a custom step, such as a GAN's: only the step knows their variables.
        tf.function(model.train_step, autograph=False).get_concrete_function(spec)


def build_for_inputs(model: keras.Model, spec: Any) -> None:
    """Creates the variables of the model alone, from the specs of its inputs."""
    keras_inputs = tf.nest.map_structure(
        lambda s: keras.KerasTensor(s.shape, keras.backend.standardize_dtype(s.dtype.name)), spec
    )
    model(keras_inputs)


def settable_learning_rate(optimizer: Any) -> float | None:
    """The learning rate where it is a number that callbacks may set; None under a schedule."""
    inner = inner_optimizer(optimizer) or optimizer
    rate = getattr(inner, "_learning_rate", None)
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def needs_build(model: keras.Model) -> bool:
    parts = [model._compile_loss, model._compile_metrics, *optimizers_of(model)]
    return not all(layer.built for layer in layers_of(model)) or not all(
        part is None or part.built for part in parts
    )


def overrides_step(model: keras.Model, name: str) -> bool:
    """Whether the user's class has a `train_step` or `test_step` of its own."""
    return getattr(type(model), name) is not getattr(tf_trainer.TensorFlowTrainer, name)


def metrics_or_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    return dict(model._get_metrics_result_or_logs(logs))


def leaf_metrics(model: keras.Model) -> list[Any]:
    """All metrics, those inside the compiled container too."""
    found: list[Any] = []
    todo = list(model.metrics)
    while todo:
        metric = todo.pop(0)
        if all(metric is not f for f in found):
            found.append(metric)
            todo.extend(getattr(metric, "metrics", None) or getattr(metric, "_metrics", []) or [])
    return [m for m in found if m is not None]


def metric_variables(model: keras.Model) -> list[Any]:
    found: list[Any] = []
    for metric in model.metrics:
        for variable in metric.variables:
            if all(variable is not f for f in found):
                found.append(variable)
    return found


def combination(variable: Any, value: Any) -> str | None:
    """How values of several replicas combine into one, from how a step updates the variable.

    Args:
        variable: a Keras variable.
        value: the tensor that it is assigned.

    Returns:
        "sum" for an update variable + x, "max" for max(variable, x), "min"; None for any other,
        such as a moving average or the last value.
    """
    if not isinstance(value, tf.Tensor) or not hasattr(value, "graph"):
        return "sum"  # eager: there is no expression to look at
    replica = tf.distribute.get_replica_context()
    here = replica.strategy.experimental_local_results(native(variable))
    handles = {id(value.graph.capture(copy.handle)) for copy in here}

    def reads(tensor: Any, seen: set[Any]) -> bool:
        if id(tensor) in seen:
            return False
        seen.add(id(tensor))
        if id(tensor) in handles:
            return True
        return any(reads(t, seen) for t in tensor.op.inputs)

    def kind(tensor: Any) -> str | None:
        operation = tensor.op
        inputs = list(operation.inputs)
        if operation.type in ("Identity", "Cast", "Reshape", "EnsureShape", "StopGradient"):
            return kind(inputs[0])
        if operation.type == "ReadVariableOp":
            return "unchanged" if id(inputs[0]) in handles else None
        if operation.type in ("AddV2", "Add", "AddN", "Sub", "Maximum", "Minimum"):
            mine = [t for t in inputs if reads(t, set())]
            if len(mine) != 1 or (operation.type == "Sub" and mine[0] is not inputs[0]):
                return None
            done = {"Maximum": "max", "Minimum": "min"}.get(operation.type, "sum")
            before = kind(mine[0])
            return done if before in ("unchanged", done) else None
        if operation.type in ("SelectV2", "Select"):
            kinds = {kind(t) for t in inputs[1:]}
            kinds = kinds - {"unchanged"} or kinds
            return kinds.pop() if len(kinds) == 1 and not reads(inputs[0], set()) else None
        if operation.type.startswith("Scatter") or operation.type.startswith("TensorScatterAdd"):
            return "sum" if operation.type == "TensorScatterAdd" and kind(inputs[0]) else None
        return None

    return kind(value)


def should_validate(model: keras.Model, epoch: int, validation_freq: Any) -> bool:
    return bool(model._should_eval(epoch, validation_freq))


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    return model._flatten_metrics_in_order(logs)


def profiles_batches(tensorboard: keras.callbacks.TensorBoard) -> bool:
    """Whether the callback was given a `profile_batch`, which it keeps under other names."""
    return bool(tensorboard._should_trace)


def requested_initial_epoch(model: keras.Model) -> int | None:
    return model._initial_epoch


def is_synchronized_batch_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and bool(layer.synchronized)


@contextlib.contextmanager
def recorded_assignments(
    seen: list[Any], note: Callable[[Any, Any], None] | None = None
) -> Iterator[None]:
    """Collects the Keras variables that are assigned to while a step is traced.

    Args:
        seen: gets each variable once.
        note: called with each variable and the value that it gets.
    """
    cls = keras.Variable
    keras_direct_assign = cls._direct_assign

    def direct_assign(self: Any, value: Any) -> Any:
        if all(self is not s for s in seen):
            seen.append(self)
        if note is not None:
            note(self, value)
        return keras_direct_assign(self, value)

    cls._direct_assign = direct_assign
    try:
        yield
    finally:
        cls._direct_assign = keras_direct_assign


# ---------------------------------------------------------------- models on their way


def is_saveable(part: Any) -> bool:
    """Layers, models, losses, metrics, optimizers, seed generators and the like."""
    return isinstance(part, keras_saveable.KerasSaveable)


def backend_switch(part: Any) -> str | None:
    """The backend that a preprocessing layer's switch is set to; None for anything else.

    Its `__getattr__` reads an attribute that a blank one lacks, without end.
    """
    return vars(part)["_backend"] if isinstance(part, backend_utils.DynamicBackend) else None


def saveable_state(part: Any) -> dict[str, Any]:
    """Attributes of a saveable, less compiled functions and TensorFlow's own notes (`_self_`)."""
    state = {k: v for k, v in vars(part).items() if not k.startswith("_self_")}
    for name in ("train_function", "test_function", "predict_function", "history"):
        if name in state:
            state[name] = None
    return state


def variable_state(variable: Any) -> tuple[dict[str, Any], Any]:
    """(attributes, value) of a Keras variable, which holds a tf.Variable that cannot travel."""
    dropped = ("_value", "_initializer")
    state = {
        k: v for k, v in vars(variable).items() if k not in dropped and not k.startswith("_self_")
    }
    return {**state, "_initializer": None}, variable.numpy()


def new_native(state: dict[str, Any], value: Any) -> tf.Variable:
    """A tf.Variable for a Keras variable with these attributes."""
    return tf.Variable(
        value, dtype=state["_dtype"], trainable=state.get("_trainable", True), name=state["_name"]
    )


def is_tracked_collection(part: Any) -> bool:
    return isinstance(part, (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet))


def index_variables_anew(optimizer: Any) -> None:
    """After variables became other objects: rebuilds the maps that go by their identities."""
    each: Any | None = optimizer
    while each is not None:
        old = dict(getattr(each, "_trainable_variables_indices", {}))
        keys = [each._var_key(v) for v in getattr(each, "_trainable_variables", [])]
        each._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
        excluded = getattr(each, "_exclude_from_weight_decay", None)
        if excluded:
            each._exclude_from_weight_decay = {keys[old[k]] for k in excluded if k in old}
        if hasattr(each, "_exclude_from_weight_decay_cache"):
            each._exclude_from_weight_decay_cache = {}
        each = inner_optimizer(each)


# ---------------------------------------------------------------- data

train_validation_split = array_slicing.train_validation_split
make_class_weight_map = _tf_dataset_adapter.make_class_weight_map_fn


def data_adapter(x: Any, y: Any, sample_weight: Any, **options: Any) -> Any:
    """Keras's own reading of arrays, PyDataset and generators: `.get_tf_dataset()` and hooks."""
    return get_data_adapter(x, y, sample_weight, **options)


def is_dataset(x: Any) -> bool:
    return isinstance(x, tf.data.Dataset)


Batch = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
Map = (map_op._MapDataset, map_op._ParallelMapDataset)
Shuffle = (shuffle_op._ShuffleDataset,)
Repeat = (repeat_op._RepeatDataset,)
Take = (take_op._TakeDataset,)
Skip = (skip_op._SkipDataset,)
Prefetch = (prefetch_op._PrefetchDataset,)
OptionsNode = (dataset_ops._OptionsDataset,)


def dataset_input(node: tf.data.Dataset) -> tf.data.Dataset | None:
    """The one dataset that `node` transforms; None for sources and for several inputs."""
    inputs = node._inputs()
    return inputs[0] if len(inputs) == 1 else None


def batch_arguments(node: tf.data.Dataset) -> tuple[int, bool] | None:
    """(batch size, drop_remainder) of a batch node; None where they are not constants."""
    size = tf.get_static_value(node._batch_size)
    drop = tf.get_static_value(node._drop_remainder)
    return None if size is None or drop is None else (int(size), bool(drop))


def map_function(node: tf.data.Dataset) -> Callable[..., Any]:
    return node._map_func._func


def map_graph_nodes(node: tf.data.Dataset) -> list[Any]:
    """NodeDefs of the function of a map node and of every function that it calls."""
    graph_def = node._map_func.function.graph.as_graph_def()
    nodes = list(graph_def.node)
    for function in graph_def.library.function:
        nodes.extend(function.node_def)
    return nodes


def shuffle_seeds(node: tf.data.Dataset) -> list[int] | None:
    """The two seeds of a shuffle, 0 and 0 where it has none; None where they are not constants."""
    seeds = [tf.get_static_value(node._seed), tf.get_static_value(node._seed2)]
    return None if any(s is None for s in seeds) else [int(s) for s in seeds]


def is_unordered(node: tf.data.Dataset) -> bool:
    """Whether a parallel map or batch was allowed to change the order."""
    return getattr(node, "_deterministic", None) == "false"


def rebuilt(
    node: tf.data.Dataset, source: tf.data.Dataset, seeds: list[int] | None = None
) -> tf.data.Dataset:
    """The transformation of `node` again, over another `source`, in a deterministic order.

    Args:
        node: a Batch, Map, Shuffle, Repeat, Take, Skip, Prefetch or options node.
        seeds: for a shuffle, the pair to use; its own unless given.
    """
    calls = getattr(node, "_num_parallel_calls", None)
    parallel: dict[str, Any] = {}
    if calls is not None:
        calls = int(tf.get_static_value(calls))
        parallel = {"num_parallel_calls": calls, "deterministic": True}
    if isinstance(node, Map):
        return source.map(map_function(node), **parallel)
    if isinstance(node, Batch):
        return source.batch(node._batch_size, node._drop_remainder, **parallel)
    if isinstance(node, Shuffle):
        # The exact pair of seeds, for which Dataset.shuffle() has no argument.
        pair = (node._seed, node._seed2)
        if seeds is not None:
            pair = tuple(tf.constant(s, tf.int64) for s in seeds)
        get_seed = data_random_seed.get_seed
        data_random_seed.get_seed = lambda seed: pair
        try:
            return source.shuffle(
                node._buffer_size, reshuffle_each_iteration=node._reshuffle_each_iteration
            )
        finally:
            data_random_seed.get_seed = get_seed
    if isinstance(node, Repeat):
        return source.repeat(node._count)
    if isinstance(node, Take):
        return source.take(node._count)
    if isinstance(node, Skip):
        return source.skip(node._count)
    if isinstance(node, Prefetch):
        return source.prefetch(int(tf.get_static_value(node._buffer_size)))
    if isinstance(node, OptionsNode):
        return source.with_options(node.options())
    raise TypeError(f"cannot rebuild {type(node).__name__}")


REBUILDABLE = (*Batch, *Map, *Shuffle, *Repeat, *Take, *Skip, *Prefetch, *OptionsNode)

# Sources and transformations that hold no dataset inside of a function and draw no random numbers.
_PLAIN = {
    "_TensorSliceDataset",
    "_TensorDataset",
    "_RangeDataset",
    "_FilterDataset",
    "_ZipDataset",
    "_ConcatenateDataset",
    "CacheDataset",
    "_CacheDataset",
    "_ShardDataset",
    "_PaddedBatchDataset",
    "_TakeWhileDataset",
    "_UnbatchDataset",
    "_WindowDataset",
    "_RaggedTensorDataset",
}


def may_shuffle_inside(dataset: tf.data.Dataset) -> bool:
    """Whether some part of a pipeline might shuffle or reorder, so that its graph must be read."""
    todo = [dataset]
    while todo:
        node = todo.pop()
        if isinstance(node, Shuffle) or is_unordered(node):
            return True
        if not isinstance(node, REBUILDABLE) and type(node).__name__ not in _PLAIN:
            return True
        todo.extend(node._inputs())
    return False


def shuffles_in(dataset: tf.data.Dataset) -> int:
    """How many shuffles a pipeline has; what only its graph tells about counts as two."""
    shuffles, todo = 0, [dataset]
    while todo:
        node = todo.pop()
        if isinstance(node, Shuffle):
            shuffles += 1
        elif not isinstance(node, REBUILDABLE) and type(node).__name__ not in _PLAIN:
            shuffles += 2
        todo.extend(node._inputs())
    return shuffles


def dataset_graph(dataset: tf.data.Dataset, for_other_process: bool = False) -> Any:
    """The GraphDef of a dataset, with the functions it uses in its library.

    Raises:
        tf.errors.OpError: `for_other_process`, and it uses state of this one, such as a variable.
    """
    policy = tf.data.experimental.ExternalStatePolicy
    serialized = dataset._as_serialized_graph(
        external_state_policy=policy.FAIL if for_other_process else policy.IGNORE
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def dataset_from_graph(graph_def: Any, element_spec: Any) -> tf.data.Dataset:
    """The dataset of an edited GraphDef.

    In the process that made it, Python functions, variables and tables that it uses stay valid.
    """
    variant = gen_experimental_dataset_ops.dataset_from_graph(graph_def.SerializeToString())
    return tf.data.experimental.from_variant(variant, element_spec)


def global_seed() -> int | None:
    """What `tf.random.set_seed` was last given."""
    return _context.global_seed()


def source_of_seeds() -> Any:
    """Another object after every `tf.random.set_seed`; of it ops that are traced draw a seed."""
    return getattr(_context.context(), "_rng", None)


# ---------------------------------------------------------------- the runtime and its cluster


def computes_with_onednn() -> bool:
    """Whether TensorFlow took oneDNN's kernels when it was imported."""
    on: bool = _pywrap_util_port.IsMklEnabled()
    return on


def runtime_started() -> bool:
    """Whether TensorFlow has initialized its devices, after which no cluster can be joined."""
    return _context.context()._context_handle is not None


def configure_coordination(jobs: dict[str, int], leader: str, heartbeat_s: int) -> None:
    """Sets the coordination service up before the strategy does, with our time-outs.

    Source: tensorflow/python/eager/context.py; the strategy's own call has no time-outs
    (heartbeat 10 s, waiting for the cluster to assemble 1 h).
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import (
        coordination_config_pb2,
    )

    _context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=heartbeat_s * 1000,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=name, num_tasks=count)
            for name, count in jobs.items()
        ],
    )


_ASK_AGAIN_S = 5.0
_ANSWER_S = 10.0


def coordination_set(key: str, value: str) -> None:
    _context.context().set_config_key_value(key, value)


def coordination_get(key: str, timeout_s: float, task: str | None = None) -> str:
    """Waits for a key.

    Where the network is cut, the call under way does not end, nor do later ones find out: so the
    task that is to set the key is asked every few seconds whether it is there.

    Args:
        task: such as "/job:worker/replica:0/task:1".

    Raises:
        tf.errors.DeadlineExceededError: after `timeout_s` seconds.
        tf.errors.OpError: `task` cannot be reached, or was started again.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            return _context.context().get_config_key_value(
                key, max(1, int(min(left, _ASK_AGAIN_S) * 1000))
            )
        except tf.errors.DeadlineExceededError:
            if left <= _ASK_AGAIN_S:
                raise
        if task is not None:
            require_task(task, _ANSWER_S)


def require_task(task: str, timeout_s: float) -> None:
    """Raises tf.errors.OpError where `task` gives no answer in time, or was started again.

    Args:
        task: such as "/job:worker/replica:0/task:1".
    """
    _context.context().check_collective_ops_peer_health(task, int(1000 * timeout_s))


def coordination_delete(key: str) -> None:
    _context.context().delete_config_key_value(key)


def coordination_barrier(name: str, timeout_s: float) -> None:
    _context.context().wait_at_barrier(name, int(timeout_s * 1000))


def coordination_report_error(message: str) -> None:
    """Makes `message` the error of every task of the cluster, in a fraction of a second."""
    _context.context().report_error_to_cluster(tf.errors.INTERNAL, message)


# ---------------------------------------------------------------- parameter servers


def optimized_variables(optimizer: Any) -> list[Any]:
    """The Keras variables that a built optimizer updates, in its own order."""
    return list(optimizer._trainable_variables)


def optimizer_slots(optimizer: Any) -> list[list[Any]]:
    """For each variable that the optimizer updates, the optimizer's own variables that go with it.

    Keras keeps slots in lists as long as the list of variables, under names of their own.
    """
    count = len(optimizer._trainable_variables)
    slots: list[list[Any]] = [[] for _ in range(count)]
    for name, value in vars(optimizer).items():
        if name in ("_trainable_variables", "_variables") or not isinstance(value, (list, tuple)):
            continue
        kinds = (keras.Variable, type(None))
        if len(value) != count or not all(isinstance(v, kinds) for v in value):
            continue
        for index, slot in enumerate(value):
            if slot is not None and all(slot is not s for s in slots[index]):
                slots[index].append(slot)
    return slots


def is_iterations(variable: Any, optimizers: list[Any]) -> bool:
    return any(variable is optimizer.iterations for optimizer in optimizers)


def looked_up_variables(model: keras.Model) -> list[Any]:
    """Tables that layers only look rows up in."""
    return [
        layer._embeddings
        for layer in layers_of(model)
        if type(layer) is keras.layers.Embedding and layer.built
    ]


def moving_averages(model: keras.Model) -> list[Any]:
    """Variables of which each new value is an average of the one before and of a batch."""
    found = []
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            found += [layer.moving_mean, layer.moving_variance]
    return found


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    return bool(optimizer.weight_decay) and bool(optimizer._use_weight_decay(variable))


def current_learning_rate(optimizer: Any) -> Any:
    """The learning rate of this step, a schedule's too, computed where this is called."""
    return optimizer._get_current_learning_rate()


def more_is_better(name: str) -> bool:
    """As Keras's ModelCheckpoint guesses from the name of a log."""
    name = name.removeprefix("val_").lower()
    return "acc" in name or "auc" in name or name.startswith("fmeasure")


def one_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which stays one op in the graph that calls it, run where that op is placed."""
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def cancelable(function: Any, *arguments: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(calls a concrete function, which may block; makes that call end, from another thread)."""
    manager = _cancellation.CancellationManager()
    call = manager.get_cancelable_function(function)
    return (lambda: call(*arguments)), manager.start_cancel


def local_variable(name: str, shape: Any, dtype: tf.DType, trainable: bool) -> Any:
    """A `tf.Variable` of whichever process runs the function that is being traced.

    It is found by its name in that process, is empty until something is assigned, and stays until
    `forget_local_variable`. A `tf.Variable` made in a traced function would be the coordinator's.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container="")
    return _resource_variables.BaseResourceVariable(
        trainable=trainable,
        shape=shape,
        dtype=dtype,
        handle=handle,
        name=name.replace("/", "_"),
        unique_id=name,
        handle_name=name,
    )


def forget_local_variable(name: str, shape: Any, dtype: tf.DType) -> None:
    handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container="")
    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class RemoteRows(_resource_variables.BaseResourceVariable):
    """Stands in for a variable whose rows are elsewhere: lookups fetch rows, reads fetch all.

    Gradients arrive at its handle, as at that of any variable; nothing is ever stored in it.

    Args:
        look_up: int64 [n] -> [n, ...], the rows asked for.
        read: () -> the whole value.
    """

    def __init__(
        self,
        name: str,
        shape: Any,
        dtype: tf.DType,
        look_up: Callable[[tf.Tensor], tf.Tensor],
        read: Callable[[], tf.Tensor],
    ):
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container="")
        super().__init__(
            trainable=True,
            shape=shape,
            dtype=dtype,
            handle=handle,
            name=name.replace("/", "_"),
            unique_id=name,
            handle_name=name,
        )
        self._look_up = look_up
        self._read = read

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The rows at `indices`, an integer tensor of any shape."""
        del name
        indices = tf.convert_to_tensor(indices)
        flat = tf.cast(tf.reshape(indices, [-1]), tf.int64)
        row = self.shape[1:]
        with _record.stop_recording():
            values = self._look_up(flat)
            out = tf.reshape(values, tf.concat([tf.shape(indices), row], axis=0))
            out.set_shape(indices.shape.concatenate(row))

        def backward(gradient: tf.Tensor) -> list[Any]:
            rows = tf.reshape(gradient, tf.concat([[-1], row], axis=0))
            return [tf.IndexedSlices(rows, flat, tf.constant(self.shape.as_list(), tf.int64))]

        self._watched([out], backward)
        return out

    def value(self) -> tf.Tensor:
        with _record.stop_recording():
            out = tf.identity(self._read())
            out.set_shape(self.shape)
        self._watched([out], lambda gradient: [gradient])
        return out

    def read_value(self) -> tf.Tensor:
        return self.value()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        del no_copy
        return self.value()

    def _watched(self, outputs: list[tf.Tensor], backward: Callable[..., list[Any]]) -> None:
        _resource_variables.variable_accessed(self)
        _record.record_operation("RemoteRows", outputs, [self.handle], backward)


@contextlib.contextmanager
def lookups_through(variables: list[tuple[Any, Any]]) -> Iterator[None]:
    """Lets `tf.gather` on a Keras variable look rows up, where Keras would read all of them first.

    Args:
        variables: (Keras variable, `RemoteRows`).
    """
    overrides = [(v, "sparse_read", remote.sparse_read) for v, remote in variables]
    with overridden(overrides):
        yield


def is_worker_failure(error: BaseException) -> bool:
    """Whether TensorFlow's coordinator takes `error` for the loss of a worker, and goes on."""
    return bool(_cluster_coordinator._is_worker_failure(error))


def worker_iterators(
    coordinator: Any, makers: list[Callable[[], tf.data.Dataset]], element_spec: Any
) -> Any:
    """One iterator on each worker, made again where a worker comes back.

    `ClusterCoordinator.create_per_worker_dataset` would give all workers the same function.

    Args:
        makers: for each worker, makes its dataset; called while that worker is the device.
        element_spec: of their elements.

    Returns:
        What `schedule` takes as the argument of each worker.
    """
    spec = _iterator_ops.IteratorSpec(element_spec)
    workers = coordinator._cluster.workers
    values = []
    for worker, make in zip(workers, makers, strict=True):
        remote = worker.create_resource(lambda make=make: iter(make()))
        remote._type_spec = spec
        values.append(remote)
    return _coordinator_values.PerWorkerValues(tuple(values))


def worker_constants(coordinator: Any, constants: list[int]) -> Any:
    """int64 [] on each worker, as `worker_iterators`."""
    values = []
    for worker, constant in zip(coordinator._cluster.workers, constants, strict=True):
        remote = worker.create_resource(
            lambda constant=constant: tf.identity(tf.constant(constant, tf.int64))
        )
        remote._type_spec = tf.TensorSpec([], tf.int64)
        values.append(remote)
    return _coordinator_values.PerWorkerValues(tuple(values))


# ---------------------------------------------------------------- does everything still stand


def check() -> list[str]:
    """Names that this module relies on and that the installed versions lack; [] when all stand."""
    expected = [
        (loss_module, "scale_loss_for_distribution"),
        (loss_module, "unscale_loss_for_distribution"),
        (loss_module, "apply_mask"),
        (loss_module, "reduce_values"),
        (tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss"),
        (tf_trainer.TensorFlowTrainer, "_symbolic_build"),
        (tf_trainer.TensorFlowTrainer, "_assert_compile_called"),
        (tf_trainer.TensorFlowTrainer, "_get_metrics_result_or_logs"),
        (tf_trainer.TensorFlowTrainer, "_should_eval"),
        (tf_trainer.TensorFlowTrainer, "_flatten_metrics_in_order"),
        (tf_optimizer.TFOptimizer, "_var_key"),
        (tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients"),
        (keras.optimizers.LossScaleOptimizer, "_tf_apply"),
        (keras.optimizers.LossScaleOptimizer, "_common_apply"),
        (keras.Model, "_flatten_layers"),
        (keras.Variable, "_direct_assign"),
        (keras.metrics.Mean, "update_state"),
        (base_trainer.Trainer, "compute_loss"),
        (data_adapter_utils, "class_weight_to_sample_weights"),
        (dataset_ops.DatasetV2, "_inputs"),
        (_pywrap_util_port, "IsMklEnabled"),
        (_context.Context, "configure_coordination_service"),
        (_context.Context, "set_config_key_value"),
        (_context.Context, "get_config_key_value"),
        (_context.Context, "delete_config_key_value"),
        (_context.Context, "wait_at_barrier"),
        (_context.Context, "report_error_to_cluster"),
        (keras.optimizers.Optimizer, "_get_current_learning_rate"),
        (keras.optimizers.Optimizer, "_use_weight_decay"),
        (keras.optimizers.Optimizer, "_backend_update_step"),
        (keras.optimizers.Optimizer, "_apply_weight_decay"),
        (_resource_variables, "BaseResourceVariable"),
        (_record, "record_operation"),
        (_resource_variables, "variable_accessed"),
        (_record, "stop_recording"),
        (_iterator_ops, "IteratorSpec"),
        (_coordinator_values, "PerWorkerValues"),
        (_cancellation.CancellationManager, "get_cancelable_function"),
        (_cluster_coordinator, "_is_worker_failure"),
        *[(base_optimizer.BaseOptimizer, name) for name in _ALONE],
    ]
    return [f"{getattr(o, '__name__', o)}.{name}" for o, name in expected if not hasattr(o, name)]
