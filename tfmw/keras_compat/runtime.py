"""TensorFlow's runtime and its coordination service.

Tasks exchange values through the coordination service (`coordination_*`), without a collective.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as _context


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


_PROBE_S = 5.0

_RESPONSE_S = 10.0


def coordination_set(key: str, value: str) -> None:
    """Sets a key that other tasks read."""
    _context.context().set_config_key_value(key, value)


def coordination_get(key: str, timeout_s: float, task: str | None = None) -> str:
    """Waits for a key.

    After a network failure neither a pending nor a later call ends. So this probes the task that
    sets the key every few seconds.

    Args:
        task: such as "/job:worker/replica:0/task:1".

    Raises:
        tf.errors.DeadlineExceededError: after `timeout_s` seconds.
        tf.errors.OpError: `task` cannot be reached, or was restarted.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            return _context.context().get_config_key_value(
                key, max(1, int(min(left, _PROBE_S) * 1000))
            )
        except tf.errors.DeadlineExceededError:
            if left <= _PROBE_S:
                raise
        if task is not None:
            require_task(task, _RESPONSE_S)


def require_task(task: str, timeout_s: float) -> None:
    """Raises tf.errors.OpError if `task` does not respond in time, or was restarted.

    Args:
        task: such as "/job:worker/replica:0/task:1".
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
    _context.context().report_error_to_cluster(tf.errors.INTERNAL, message)


PRIVATE_NAMES: list[tuple[Any, str]] = [
    (_context.Context, "configure_coordination_service"),
    (_context.Context, "set_config_key_value"),
    (_context.Context, "get_config_key_value"),
    (_context.Context, "delete_config_key_value"),
    (_context.Context, "wait_at_barrier"),
    (_context.Context, "report_error_to_cluster"),
]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
