"""What this process has joined, and how it leaves: the one place with state of the process.

    joined = membership.joined()         # None in a process without a cluster
    report_failure(error)                # all tasks end with this task's error, at once

TensorFlow can join a cluster only before its first op, and only once; so what `init` joined is kept
here.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfmw.cluster.cluster import Cluster

if TYPE_CHECKING:
    import tensorflow as tf

    from tfmw.cluster.servers import Joined as JoinedServers

logger = logging.getLogger("tfmw")

LEAVE_TIMEOUT_S = 60.0


@dataclasses.dataclass
class Joined:
    """What this process has joined.

    Attributes:
        cluster: with this process's task in it.
        strategy: the one strategy of the process.
        options: how it reduces gradients.
        servers: parameter servers, on their coordinator.
        collectives: "auto", "ring" or "nccl": what was asked for.
        at_failure: called once this task fails, after its error was reported to the others.
    """

    cluster: Cluster
    strategy: tf.distribute.Strategy
    options: tf.distribute.experimental.CommunicationOptions
    servers: JoinedServers | None = None
    collectives: str = "auto"
    at_failure: list[Callable[[], None]] = dataclasses.field(default_factory=list)


_joined: Joined | None = None
_evaluating = False


def joined() -> Joined | None:
    """What `init` joined; None in a process without a cluster."""
    return _joined


def set_joined(value: Joined) -> None:
    """Keeps what this process has joined."""
    global _joined
    _joined = value


def set_evaluating() -> None:
    """Keeps that this process is an evaluator."""
    global _evaluating
    _evaluating = True


def current_cluster() -> Cluster:
    """The cluster that `init()` joined; a single process where it joined none."""
    return Cluster() if _joined is None else _joined.cluster


def chosen_collectives() -> str:
    """The `collectives` argument of the last `init`."""
    return "auto" if _joined is None else _joined.collectives


def reduction_options(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.experimental.CommunicationOptions | None:
    """How `strategy` reduces gradients by the arguments of `init`; None for its default."""
    return _joined.options if _joined is not None and strategy is _joined.strategy else None


def is_evaluator() -> bool:
    """Whether this process evaluates what others train."""
    return _evaluating or (_joined is None and Cluster.resolve(os.environ).task == "evaluator")


# ---- how it ends -------------------------------------------------------------------------------

_at_success: list[Callable[[], None]] = []
_failed = False


def mark_failed() -> None:
    """This process has failed, however it ends."""
    global _failed
    _failed = True


def on_success(callback: Callable[[], None]) -> None:
    """Calls `callback` when this process ends without an error, and no other task fails."""
    if not _at_success and _joined is None:
        watch_errors()
        atexit.register(_succeed)
    _at_success.append(callback)


def _succeed() -> None:
    if not _failed:
        for callback in _at_success:
            callback()


def watch_errors() -> None:
    """Reports an unhandled error to all tasks at once, so that all of them show the cause."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        report_failure(error)
        show(kind, error, traceback)

    sys.excepthook = hook


def end_together() -> None:
    """No task leaves while another computes: TensorFlow takes a peer's exit for its death."""
    from tfmw import keras_compat

    watch_errors()

    def leave() -> None:
        if _failed:
            return
        import tensorflow as tf

        try:
            keras_compat.coordination_barrier("tfmw/leave", LEAVE_TIMEOUT_S)
        except tf.errors.OpError as e:
            logger.warning("left before the other tasks had finished: %s", e.message)
            return
        _succeed()

    atexit.register(leave)


def report_failure(error: BaseException) -> None:
    """Reports to every task of the cluster that this one fails with `error`, once per process."""
    already = _failed
    mark_failed()
    if _joined is None or already:
        return
    try:
        _report(_joined, error)
    finally:
        for close in _joined.at_failure:
            close()  # tasks that wait for this one get its error now


def _report(joined: Joined, error: BaseException) -> None:
    import tensorflow as tf

    from tfmw import keras_compat

    if is_secondary(error):
        return
    if joined.servers is not None:
        joined.servers.control.fail(f"{type(error).__name__}: {error}")
        return
    name = f"{joined.cluster.task} {joined.cluster.index}"
    try:
        keras_compat.coordination_report_error(f"{name}: {type(error).__name__}: {error}")
    except (tf.errors.OpError, ValueError) as e:
        logger.warning("could not report the error to the other tasks: %s", e)


def is_secondary(error: BaseException) -> bool:
    """Whether `error` only shows that another task has gone."""
    import tensorflow as tf

    return isinstance(
        error,
        tf.errors.UnavailableError
        | tf.errors.AbortedError
        | tf.errors.CancelledError
        | tf.errors.DeadlineExceededError,
    )


def leave_servers_at_exit(servers: JoinedServers) -> None:
    """On a coordinator: servers end when this process ends well."""
    watch_errors()

    def leave() -> None:
        if not _failed:
            _succeed()
            servers.control.finish()

    atexit.register(leave)
