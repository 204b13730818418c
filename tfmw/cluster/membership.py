"""The cluster that this process has joined, and how it leaves it: the only global state.

    joined = membership.joined()         # None in a process without a cluster
    report_failure(error)                # all tasks end with this task's error, at once

TensorFlow can join a cluster only once, and only before its first op. So the result of `init` is
stored here.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfmw.cluster import addresses
from tfmw.cluster.cluster import Cluster
from tfmw.cluster.handshake import token
from tfmw.cluster.servers import ControlServer, ServerSettings
from tfmw.errors import Preempted, TfmwError
from tfmw.observe.recorded_errors import ECHO, is_secondary

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger("tfmw")


@dataclasses.dataclass
class JoinedCluster:
    """A cluster that this process has joined."""

    cluster: Cluster
    # Makes the one strategy of the process, at its first use.
    make: Callable[[JoinedCluster], tf.distribute.Strategy]
    options: tf.distribute.experimental.CommunicationOptions  # settings of its reductions
    collectives: str = "auto"  # the argument of `init`
    control: ControlServer | None = None  # the connections to parameter servers, on the coordinator
    settings: ServerSettings = dataclasses.field(default_factory=ServerSettings)
    # Each returns JSON that is equal on tasks which have made the same calls, and None once no
    # further call is possible:
    positions: list[Callable[[], Any]] = dataclasses.field(default_factory=list)

    # Meets the other workers again, one of whom is new.
    rejoin: Callable[[], object] = lambda: None

    made: tf.distribute.Strategy | None = None  # the strategy, once it is made

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The one strategy of the process."""
        if self.made is None:
            self.made = self.make(self)
        return self.made

    @functools.cached_property
    def coordinator(self) -> Any:
        """TensorFlow's `ClusterCoordinator` of the parameter servers, one per process."""
        import tensorflow as tf

        return tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    @property
    def hosts(self) -> list[str]:
        """Names or IP addresses of the workers' hosts, in order of rank."""
        return [addresses.split(a)[0] for a in self.cluster.tasks("chief", "worker").values()]


def training_key(from_chief: Callable[[Callable[[], str]], str]) -> bytes:
    """The key of connections between workers: the token, or else one that the chief draws.

    Args:
        from_chief: a function that calls its argument on the chief, and broadcasts the result.
    """
    drawn = from_chief(lambda: secrets.token_hex(32))
    return token() or drawn.encode()


_joined: JoinedCluster | None = None
_evaluating = False


def joined() -> JoinedCluster | None:
    """The cluster that `init` joined; None if this process has no cluster."""
    return _joined


def set_joined(value: JoinedCluster) -> None:
    """Stores the cluster that this process has joined."""
    global _joined
    _joined = value


def set_evaluating() -> None:
    """Marks this process as an evaluator."""
    global _evaluating
    _evaluating = True


def current_cluster() -> Cluster:
    """The cluster that `init()` joined; a single-process cluster if it joined none."""
    return Cluster() if _joined is None else _joined.cluster


def chosen_collectives() -> str:
    """The `collectives` argument of the last `init`."""
    return "auto" if _joined is None else _joined.collectives


def reduction_options(
    strategy: tf.distribute.Strategy,
) -> tf.distribute.experimental.CommunicationOptions | None:
    """Options of the reductions of `strategy`, as chosen in `init`; None for its default."""
    return _joined.options if _joined is not None and strategy is _joined.made else None


def is_evaluator() -> bool:
    """Whether this process is an evaluator: it evaluates backups and does not train."""
    return _evaluating or (_joined is None and Cluster.resolve(os.environ).task == "evaluator")


def expects_evaluator() -> bool:
    """Whether this run has an evaluator, which may start later than the training ends."""
    return bool(current_cluster().evaluators) or os.environ.get("TFMW_EVALUATOR") == "1"


# ---- how it ends -------------------------------------------------------------------------------

_at_success: list[Callable[[], None]] = []
_failed = ""  # the error with which this process, or its cluster, has failed; "" before one
_preempted = False  # whether that error is `Preempted`


def mark_failed(error: BaseException) -> None:
    """Marks this process as failed, for any exit status."""
    global _failed, _preempted
    if _failed:
        return
    _, echo, message = str(error).partition(ECHO)
    line = (echo + message or str(error)).partition("\n")[0]
    _failed = f"{type(error).__name__}: {line}"
    _preempted = isinstance(error, Preempted)


def has_failed() -> bool:
    """Whether this process, or its cluster, has failed."""
    return bool(_failed)


def require_usable() -> None:
    """Raises TfmwError if the cluster of this process has ended with an earlier error.

    A preempted run has saved its state on all tasks, so a caller that catches the error may train
    again.
    """
    if _failed and _joined is not None and not _preempted:
        raise TfmwError(
            "the cluster has ended, as an earlier call failed on one task and not on all alike "
            f"({_failed}): start all tasks again, by hand or with tfmw run --max-restarts; with "
            "backup_dir they resume the training."
        )


def on_success(callback: Callable[[], None]) -> None:
    """Calls `callback` when this process ends without an error, and no other task fails."""
    if not _at_success and _joined is None:
        _leave_by(succeed)
    _at_success.append(callback)


def succeed() -> None:
    """Calls the callbacks of `on_success`, once, unless this process has failed."""
    while _at_success and not _failed:
        _at_success.pop(0)()


def forget_preemption() -> None:
    """Lets a process that has saved its state make further calls, and succeed."""
    global _failed, _preempted
    if _preempted:
        _failed, _preempted = "", False


def _leave_by(leave: Callable[[], None]) -> None:
    """Calls `leave` at exit, unless this process has failed.

    An unhandled error is reported to all tasks at once, so that all of them show the cause.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        report_failure(error)
        show(kind, error, traceback)

    def leave_unless_failed() -> None:
        if not _failed:
            leave()

    sys.excepthook = hook
    atexit.register(leave_unless_failed)


def end_together(cluster: Cluster) -> None:
    """Waits for the other tasks at exit: TensorFlow treats a peer's exit as a failure."""
    from tfmw.cluster.leaving import Departure

    departure = Departure(cluster, report_failure)

    def leave() -> None:
        import tensorflow as tf

        try:
            departure.wait()
        except tf.errors.OpError as e:
            logger.warning("exits before the other tasks have finished: %s", e.message)
            return
        succeed()

    _leave_by(leave)


def report_failure(error: BaseException) -> None:
    """Reports to every task of the cluster that this one fails with `error`; once per process."""
    already = _failed
    mark_failed(error)
    if _joined is None or already or is_secondary(error):
        return
    if _joined.control is not None:
        _joined.control.finish(f"{type(error).__name__}: {error}")
        return
    from tfmw.cluster import coordination

    name = f"{_joined.cluster.task} {_joined.cluster.index}"
    coordination.current().fail(f"{name}: {type(error).__name__}: {error}")


def leave_servers_at_exit(control: ControlServer) -> None:
    """Ends the servers when this process, their coordinator, ends without an error."""

    def leave() -> None:
        succeed()
        control.finish()

    _leave_by(leave)
