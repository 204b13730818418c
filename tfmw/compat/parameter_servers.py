"""Parameter servers: rows of remote variables, ops on one device, iterators on workers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops as _iterator_ops
from tensorflow.python.distribute.coordinator import cluster_coordinator as _cluster_coordinator
from tensorflow.python.distribute.coordinator import values as _coordinator_values
from tensorflow.python.eager import cancellation as _cancellation
from tensorflow.python.eager import record as _record
from tensorflow.python.ops import resource_variable_ops as _resource_variables

from tfmw.compat.graph import ancestors, calls_function
from tfmw.compat.kept import kept_with
from tfmw.compat.models import layers_of
from tfmw.compat.objects import overridden


def looked_up_variables(model: keras.Model) -> list[Any]:
    """Embedding tables: variables that layers use by looking up rows only."""
    return [
        layer._embeddings
        for layer in layers_of(model)
        if type(layer) is keras.layers.Embedding and layer.built
    ]


def moving_averages(model: keras.Model) -> list[Any]:
    """The moving averages of BatchNormalization layers."""
    found = []
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            found += [layer.moving_mean, layer.moving_variance]
    return found


def one_op(function: Callable[..., Any], waits: bool = True) -> Callable[..., Any]:
    """Wraps `function` as one op of the calling graph; the whole op runs on one device.

    Args:
        waits: whether ops of the function may wait for something else, such as a queue. If not,
            one thread runs them one after the other. For many small ops this takes a fraction of
            the time; a large op is still divided among threads.
    """
    op = tf.function(function, autograph=False, experimental_attributes={"_noinline": True})
    if waits:
        return op

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        # A nested op would need a second thread: see `_executor_of`.
        if getattr(_tracing, "op", False):
            return function(*arguments)
        with _executor_of(op.get_concrete_function(*arguments).graph):
            return op(*arguments)

    return call


class TracedOp:
    """A function that is traced once, to be one op that runs on one device; see `one_op`.

    Functions of `one_op` that it calls are traced into it, not as ops of their own.

    Args:
        function: the function, traced with tensors of these specs.
        specs: its arguments, structures of tf.TensorSpec.

    Attributes:
        is_on_one_device: whether all of its ops run on the CPU of the task that calls it.
        uses: for each tensor of the arguments, in order, whether the result depends on it.
    """

    def __init__(self, function: Callable[..., Any], *specs: Any):
        op = tf.function(function, autograph=False, experimental_attributes={"_noinline": True})
        with overridden([(_tracing, "op", True)]):
            self._function = op.get_concrete_function(*specs)
        graph = self._function.graph
        live = _live_ops(graph)
        resources = [t for t in self._function.captured_inputs if t.dtype == tf.resource]
        self.is_on_one_device = all(_is_own_cpu(part.device) for part in [*live, *resources])
        used = {tensor.name for op in live for tensor in op.inputs}
        used |= {tensor.name for tensor in graph.outputs}
        number = len(tf.nest.flatten(specs))
        self.uses = [tensor.name in used for tensor in graph.inputs[:number]]

    def __call__(self, *arguments: Any) -> Any:
        with _executor_of(self._function.graph):
            return self._function(*arguments)


_tracing = threading.local()  # `op`: whether this thread traces a `TracedOp`


def _executor_of(graph: Any) -> contextlib.AbstractContextManager[None]:
    """Restricts the ops of a function to one thread, if possible.

    An op that calls a function (such as `tf.cond` in a schedule) keeps its thread until another
    thread has run that function. With a single thread it would wait for ever.
    """
    calls = any(map(calls_function, _live_ops(graph)))
    context: contextlib.AbstractContextManager[None] = tf.experimental.function_executor_type(
        "" if calls else "SINGLE_THREADED_EXECUTOR"
    )
    return context


def _live_ops(graph: Any) -> list[tf.Operation]:
    """The ops of a traced function that run: stateful ones, and those on which others depend."""
    stateful = [op for op in graph.get_operations() if op.op_def.is_stateful]
    return ancestors([*graph.outputs, *graph.control_outputs, *stateful], controls=True)


def _is_own_cpu(device: str) -> bool:
    """Whether a device is the CPU of the task that runs a function, for any task."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job is None and spec.device_type in (None, "CPU") and not spec.device_index


def cancelable(function: Any, *arguments: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(call of a concrete function, which may block; its cancellation by another thread)."""
    manager = _cancellation.CancellationManager()
    call = manager.get_cancelable_function(function)
    return (lambda: call(*arguments)), manager.start_cancel


def local_variable(name: str, shape: Any, dtype: tf.DType, trainable: bool) -> Any:
    """A variable of the process that runs the traced function.

    That process finds it by its name. It has no value until one is assigned, and keeps it until the
    resource is destroyed. A `tf.Variable` created in a traced function would belong to the
    coordinator.
    """
    described = _named_resource(name, shape, dtype)
    variable = _resource_variables.BaseResourceVariable(trainable=trainable, **described)
    kept_with(variable)  # marks it as tfmw's own
    return variable


def _named_resource(name: str, shape: Any, dtype: tf.DType) -> dict[str, Any]:
    """Arguments of BaseResourceVariable for the resource `name` of the process that runs the op."""
    return {
        "shape": shape,
        "dtype": dtype,
        "handle": tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container=""),
        "name": name.replace("/", "_"),
        "unique_id": name,
        "handle_name": name,
    }


class RemoteRows(_resource_variables.BaseResourceVariable):
    """A substitute for a variable whose rows are on servers: lookups fetch rows, reads fetch all.

    Gradients are recorded for its handle, as for any variable. It stores no value.

    Args:
        look_up: int64 [n] -> the rows [n, ...] with these indices, or (these rows, a tensor equal
            to the indices, which replaces them in gradients).
        read: () -> the whole value.
        trainable: whether gradients are recorded.
    """

    def __init__(
        self,
        name: str,
        shape: Any,
        dtype: tf.DType,
        look_up: Callable[[tf.Tensor], tf.Tensor | tuple[tf.Tensor, tf.Tensor]],
        read: Callable[[], tf.Tensor],
        trainable: bool = True,
    ):
        super().__init__(trainable=trainable, **_named_resource(name, shape, dtype))
        self._look_up = look_up
        self._read = read

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The rows at `indices`, an integer tensor of any shape."""
        del name
        indices = tf.convert_to_tensor(indices)
        is_flat = indices.shape.rank == 1  # this saves several ops for each table
        flat = tf.cast(indices if is_flat else tf.reshape(indices, [-1]), tf.int64)
        row = self.shape[1:]

        def shaped(values: tf.Tensor) -> tf.Tensor:
            if not is_flat:
                values = tf.reshape(values, tf.concat([tf.shape(indices), row], axis=0))
            values = tf.identity(values)
            values.set_shape(indices.shape.concatenate(row))
            return values

        def look_up() -> tuple[tf.Tensor, tf.Tensor]:
            found = self._look_up(flat)
            return found if isinstance(found, tuple) else (found, flat)

        return self.rows_found(look_up, shaped)

    def rows_found(
        self,
        look_up: Callable[[], tuple[tf.Tensor, tf.Tensor]],
        shaped: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    ) -> tf.Tensor:
        """Rows that `look_up` returns, for which gradients are recorded.

        Args:
            look_up: () -> (rows [n, ...], their indices int64 [n]).
            shaped: reshapes the rows.
        """
        with _record.stop_recording():
            values, ids = look_up()
            out = shaped(values)
        is_flat, row = out.shape.rank == self.shape.rank, self.shape[1:]

        def backward(gradient: tf.Tensor) -> list[Any]:
            rows = gradient if is_flat else tf.reshape(gradient, tf.concat([[-1], row], axis=0))
            return [tf.IndexedSlices(rows, ids, tf.constant(self.shape.as_list(), tf.int64))]

        self._record([out], backward)
        return out

    def value(self) -> tf.Tensor:
        with _record.stop_recording():
            out = tf.identity(self._read())
            out.set_shape(self.shape)
        self._record([out], lambda gradient: [gradient])
        return out

    def read_value(self) -> tf.Tensor:
        return self.value()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        del no_copy
        return self.value()

    def _record(self, outputs: list[tf.Tensor], backward: Callable[..., list[Any]]) -> None:
        _resource_variables.variable_accessed(self)
        _record.record_operation("RemoteRows", outputs, [self.handle], backward)


def is_worker_failure(error: BaseException) -> bool:
    """Whether TensorFlow's coordinator treats `error` as a lost worker and continues."""
    return bool(_cluster_coordinator._is_worker_failure(error))


def worker_iterators(
    coordinator: Any, makers: list[Callable[[], tf.data.Dataset]], element_spec: Any
) -> Any:
    """One iterator on each worker, created again when a worker restarts.

    In contrast, `ClusterCoordinator.create_per_worker_dataset` calls the same function for all
    workers.

    Args:
        makers: for each worker, creates its dataset; called with that worker as the device.
        element_spec: structure of tf.TensorSpec, of the datasets' elements.

    Returns:
        Per-worker values: an argument of `ClusterCoordinator.schedule`.
    """
    iterators = [lambda make=make: iter(make()) for make in makers]
    return _per_worker(coordinator, iterators, _iterator_ops.IteratorSpec(element_spec))


def worker_constants(coordinator: Any, constants: list[int]) -> Any:
    """One int64 [] on each worker; see `worker_iterators`."""
    tensors = [lambda n=n: tf.identity(tf.constant(n, tf.int64)) for n in constants]
    return _per_worker(coordinator, tensors, tf.TensorSpec([], tf.int64))


def _per_worker(coordinator: Any, makers: Sequence[Callable[[], Any]], spec: Any) -> Any:
    values = []
    for worker, make in zip(coordinator._cluster.workers, makers, strict=True):
        values.append(worker.create_resource(make))
        values[-1]._type_spec = spec
    return _coordinator_values.PerWorkerValues(tuple(values))
