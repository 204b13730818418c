"""TensorFlow's runtime and its coordination service.

Tasks exchange values through the coordination service (`coordination_*`), without a collective.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context as _context

from tfmw.errors import printable


def runtime_started() -> bool:
    """Whether TensorFlow has initialized its devices; then it cannot join a cluster."""
    return _context.context()._context_handle is not None


def configure_coordination(jobs: dict[str, int], leader: str, heartbeat_s: int) -> None:
    """Configures the coordination service before the strategy does, with shorter time-outs.

    Source: tensorflow/python/eager/context.py. The strategy's own call sets no time-outs (then
    heartbeat 10 s, waiting for all tasks 1 h).
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


def mirrored_strategy(devices: list[str]) -> tf.distribute.Strategy:
    """A `tf.distribute.MirroredStrategy` whose collectives have keys of their own.

    TensorFlow numbers the collectives of each strategy from the same number, and keeps the shapes
    of all that have run in this process. So a second strategy with another model fails with "Shape
    mismatch in the collective instance".
    """
    tf.distribute.MirroredStrategy._collective_key_base += _KEYS
    return tf.distribute.MirroredStrategy(devices=devices)


_KEYS = 1000  # keys for the device groups of one strategy

_LOOK_S = 1.0

_PROBE_EVERY = 5  # polls between two probes

_RESPONSE_S = 10.0


def collectives_traced(strategy: tf.distribute.Strategy) -> list[int]:
    """Numbers of the next collectives of a strategy that spans processes.

    TensorFlow numbers collectives while it traces them. Tasks with different numbers wait for ever.
    """
    tables = strategy.extended._collective_keys._instance_key_table.values()
    return [number for table in tables for number in table.values()]


def coordination_set(key: str, value: str) -> None:
    """Sets a key that other tasks read."""
    _context.context().set_config_key_value(key, value)


def coordination_get(
    key: str, timeout_s: float, task: str | None = None, look: Callable[[], None] = lambda: None
) -> str:
    """Waits for a key.

    After a network failure neither a pending nor a later call returns. So every few seconds this
    probes the task that sets the key.

    Args:
        task: name of a task, such as "/job:worker/replica:0/task:1".
        look: called about once a second; its exception ends the wait.

    Raises:
        tf.errors.DeadlineExceededError: after `timeout_s` seconds.
        tf.errors.OpError: `task` cannot be reached, or was restarted.
    """
    deadline = time.monotonic() + timeout_s
    for looks in itertools.count(1):
        left = deadline - time.monotonic()
        try:
            value: str = _context.context().get_config_key_value(
                key, max(1, int(min(left, _LOOK_S) * 1000))
            )
            return value
        except tf.errors.DeadlineExceededError:
            if left <= _LOOK_S:
                raise
        look()
        if task is not None and looks % _PROBE_EVERY == 0:
            require_task(task, _RESPONSE_S)
    raise AssertionError("unreachable")


def require_task(task: str, timeout_s: float) -> None:
    """Raises tf.errors.OpError if `task` does not respond in time, or was restarted.

    Args:
        task: name of a task, such as "/job:worker/replica:0/task:1".
    """
    _context.context().check_collective_ops_peer_health(task, int(1000 * timeout_s))


def coordination_delete(key: str) -> None:
    """Removes a key, and all keys below it."""
    _context.context().delete_config_key_value(key)


def coordination_barrier(name: str, timeout_s: float) -> None:
    """Waits until all tasks have called it. Raises tf.errors.OpError after the time-out."""
    _context.context().wait_at_barrier(name, int(timeout_s * 1000))


def coordination_report_error(message: str) -> None:
    """Fails every task of the cluster with `message`, in a fraction of a second."""
    _context.context().report_error_to_cluster(tf.errors.INTERNAL, printable(message))
