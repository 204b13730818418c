"""A strategy of tf.distribute between processes that starts no server of TensorFlow.

    strategy = ConnectedStrategy(resolver, options, transport)

TensorFlow's `MultiWorkerMirroredStrategy` does four things between workers: the all-reduce and the
all-gather of its `CrossDeviceOps`, the broadcast of initial values, and the start of a gRPC server.
Here a transport does the first three, so that there is no server and no port. The rest, such as
`merge_call`, variables and distributed datasets, is TensorFlow's.

Checked on TensorFlow 2.21: tensorflow/python/distribute/collective_all_reduce_strategy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util, distribute_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys
from tensorflow.python.distribute.values import Mirrored
from tensorflow.python.trackable.base import CheckpointInitialValue

from tfmw.errors import UsageError

Transport = Callable[[], Any]


class ConnectedStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """A `MultiWorkerMirroredStrategy` of workers with one CPU replica each, over a transport.

    Args:
        resolver: describes the cluster and this task.
        options: TensorFlow's options of a reduction; a transport uses their pack size.
        transport: returns an object with the methods of `OverRing` (`transports.py`).
    """

    def __init__(self, resolver: Any, options: Any, transport: Transport):
        tf.distribute.Strategy.__init__(self, _Extended(self, resolver, options, transport))


class _Extended(CollectiveAllReduceExtended):
    def __init__(self, strategy: Any, resolver: Any, options: Any, transport: Transport):
        self._transport = transport
        super().__init__(strategy, resolver, options)

    def _initialize_multi_worker(self, cluster_resolver: Any) -> None:
        devices, kind = self._initialize_local_devices(cluster_resolver, "")
        jobs = cluster_resolver.cluster_spec().as_dict()
        before = len(jobs.get("chief", [])) if cluster_resolver.task_type == "worker" else 0
        self._num_workers = sum(len(jobs.get(job, [])) for job in ("chief", "worker"))
        self._id_in_cluster = before + cluster_resolver.task_id
        self._is_chief = self._id_in_cluster == 0
        self._num_devices_per_worker, self._local_device_type = len(devices), kind
        self._cluster_spec, self._rpc_layer = None, None
        self._worker_device = device_util.canonicalize("/device:CPU:0")
        self._collective_keys = CollectiveKeys()
        self._cross_device_ops = self._host_cross_device_ops = _CrossDeviceOps(
            devices=devices,
            group_size=self._num_workers,
            options=self._communication_options,
            collective_keys=self._collective_keys,
        )
        self._cross_device_ops.transport = self._transport
        self._initialize_single_worker(devices)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        def initial_value() -> tf.Tensor:
            with tf.device(device):
                value = kwargs["initial_value"]
                value = value() if callable(value) else value
                if isinstance(value, CheckpointInitialValue):
                    value = value.wrapped_value
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
                return self._transport().broadcast(value)

        return initial_value


class _CrossDeviceOps(CollectiveAllReduce):
    transport: Transport

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        flat = [
            part if isinstance(part, tf.IndexedSlices) else tf.convert_to_tensor(part)
            for part in tf.nest.flatten(value)
        ]
        for part in flat:
            if not (part.dtype.is_floating or part.dtype.is_integer or part.dtype.is_complex):
                raise UsageError(
                    f"a reduction between workers received {part.dtype.name}: expected numbers."
                )
        totals = self.transport()(flat)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            totals = [_divided(total, self._group_size) for total in totals]
        return tf.nest.pack_sequence_as(value, totals)

    def _batch_all_gather(self, per_replica_values: Any, axis: Any, options: Any) -> list[Any]:
        gathered = [self._gathered(each.values[0], axis) for each in per_replica_values]
        return [distribute_utils.regroup((g,), wrap_class=Mirrored) for g in gathered]

    def _gathered(self, value: tf.Tensor, axis: Any) -> tf.Tensor:
        rank, axis = value.shape.rank, int(tf.get_static_value(axis))
        order = [axis, *range(axis), *range(axis + 1, rank)]
        back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
        (rows,) = self.transport().rows_of_all([tf.transpose(value, order)])
        return tf.transpose(rows, back)


def _divided(total: Any, replicas: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / replicas, total.indices, total.dense_shape)
    return total / replicas
