"""TensorFlow's runtime and its coordination service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context as _context


def runtime_started() -> bool:
    """Whether TensorFlow has initialized its devices; then it cannot join a cluster."""
    return _context.context()._context_handle is not None


def configure_coordination(jobs: dict[str, int], leader: str) -> None:
    """Configures the coordination service that a strategy starts, without its heartbeats.

    The workers' own connections (`tfmw.cluster.coordination`) notice a lost worker. The service
    would also end a cluster whose processes have all been paused.

    Source: tensorflow/python/eager/context.py.
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import (
        coordination_config_pb2,
    )

    _context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=_NO_HEARTBEATS_MS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=name, num_tasks=count)
            for name, count in jobs.items()
        ],
    )


_NO_HEARTBEATS_MS = 2**31 - 1


def abort_collectives(error: tf.errors.OpError) -> None:
    """Makes TensorFlow's pending and later collectives of this process fail with an error."""
    _context.context().abort_collective_ops(error.error_code, error.message)


def mirrored_strategy(devices: list[str]) -> tf.distribute.Strategy:
    """A `tf.distribute.MirroredStrategy` whose collectives have keys of their own.

    TensorFlow numbers the collectives of each strategy from the same number, and keeps the shapes
    of all that have run in this process. So a second strategy with another model fails with "Shape
    mismatch in the collective instance".
    """
    tf.distribute.MirroredStrategy._collective_key_base += _KEYS
    return tf.distribute.MirroredStrategy(devices=devices)


_KEYS = 1000  # keys for the device groups of one strategy


@contextlib.contextmanager
def without_eager_advice() -> Iterator[None]:
    """Drops the advice of an eager `strategy.run`, which users of `run_eagerly=True` cannot follow.

    It is to wrap calls of `strategy.run` in a `tf.function`.

    Source: tensorflow/python/distribute/mirrored_run.py.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "eagerly has significant overhead" not in str(record.msg)

    if tf.inside_function():
        yield
        return
    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def collectives_traced(strategy: tf.distribute.Strategy) -> list[int]:
    """Numbers of the next collectives of a strategy that spans processes.

    TensorFlow numbers collectives while it traces them. Tasks with different numbers wait for ever.
    """
    tables = strategy.extended._collective_keys._instance_key_table.values()
    return [number for table in tables for number in table.values()]
