"""Small values that workers exchange outside of the training step: broadcast, all-gather.

    group = Group.of(strategy)
    seed = group.from_chief(lambda: draw_seed())     # the chief's result, on every task
    group.require_same({"epochs": 3})                # or every task raises the same error

Values are JSON. They travel over the workers' own connections (`coordination.py`), not through
collectives, so a call cannot interfere with the reductions of a step. All tasks must make the same
calls in the same order.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmw.cluster import Cluster, coordination, leaving
from tfmw.compat import placement
from tfmw.errors import UsageError

_ROOT_CAUSE_S = 2.0  # time in which a failed task reports its error before it exits

_ALIKE_S = 10.0  # time in which all tasks must raise the same error

_MOST_MADE = 128

Made = tuple[bool, Any]
"""A call: whether it was `from_chief`; then the chief's value, and otherwise that of this task."""

_made: list[Made] = []  # the first calls of this process
_calls = 0  # number of calls of this process; equal on all tasks, as they make the same calls
_errors = itertools.count()  # numbers the errors that tasks compare


def may_repeat() -> bool:
    """Whether `repeat` can make all calls so far once more."""
    return len(_made) == _calls


def repeat(made: Sequence[Made], group: Group) -> None:
    """Makes the first calls of this process once more, for a worker that makes them now."""
    global _calls
    _calls, _made[:] = 0, []
    for is_chiefs, value in made:
        if is_chiefs:
            group.from_chief(functools.partial(_same, value))
        else:
            group.from_all(value)


def calls_made() -> list[Made]:
    """The calls so far; the first `_MOST_MADE` of them."""
    return list(_made)


class Group:
    """The `size` processes that train together; this one is `rank`, and rank 0 is the chief."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Group:
        """The synchronous workers of a cluster, before it has a strategy."""
        return cls(cluster.rank, len(cluster.tasks("chief", "worker")))

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> Group:
        if not placement.spans_processes(strategy):
            return cls(0, 1)
        local = placement.local_replicas(strategy)
        first = placement.first_local_replica(strategy)
        return cls(first // local, strategy.num_replicas_in_sync // local)

    def _next_key(self) -> str:
        """The key of this call; equal on all tasks."""
        global _calls
        _calls += 1
        return f"call {_calls}"

    def raised_alike(self, error: BaseException, position: Any) -> bool:
        """Whether all tasks have raised this kind of error at one point, and can continue together.

        Later calls may differ between tasks only if the answer is False. All tasks get the same
        answer: a task that has waited too long decides for all.

        Args:
            position: JSON, equal on tasks that have made the same calls.
        """
        if self.size == 1:
            return True
        key = f"raised/{next(_errors)}"
        own = json.loads(json.dumps([type(error).__name__, _calls, leaving.calls(), position]))
        to_others = coordination.current()
        try:
            to_others.set(f"{key}/{self.rank}", own)
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                if not self.is_chief:
                    return bool(to_others.get(f"{key}/alike", _ALIKE_S))
                deadline = time.monotonic() + _ALIKE_S
                alike = all(
                    to_others.get(f"{key}/{rank}", deadline - time.monotonic()) == own
                    for rank in range(1, self.size)
                )
                return bool(to_others.set(f"{key}/alike", alike))
            return bool(to_others.set(f"{key}/alike", False))
        except tf.errors.OpError:  # another task was lost, or has failed
            return False

    def root_cause(self, found: Exception) -> tf.errors.OpError:
        """Error to raise after the loss of another task: the one that the task reported."""
        reported = coordination.current().error(_ROOT_CAUSE_S)
        if reported is not None:
            return reported
        if isinstance(found, tf.errors.OpError):
            return found
        return tf.errors.UnavailableError(None, None, str(found))

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def shared_call(self) -> contextlib.AbstractContextManager[None]:
        """Marks a call of all tasks that does not belong to this class; see `leaving`."""
        return leaving.shared_call() if self.size > 1 else contextlib.nullcontext()

    def from_chief(self, decide: Callable[[], Any]) -> Any:
        """Calls `decide` on the chief only and returns its result on every task.

        If it raises a UsageError, every task raises it.
        """
        if self.size == 1:
            return decide()
        with leaving.shared_call():
            key = self._next_key()
            if self.is_chief:
                return self._publish(key, decide)
            result = self._answered(lambda: coordination.current().get(key))
            if "error" in result:
                raise UsageError(result["error"])
            return _noted(True, result["value"])

    def _publish(self, key: str, decide: Callable[[], Any]) -> Any:
        """Calls `decide`, and sends its result to the other tasks; on the chief."""
        others = self.size - 1
        try:
            published = {"value": decide()}
        except UsageError as e:
            coordination.current().set(key, {"error": str(e)}, others)
            raise
        return _noted(True, coordination.current().set(key, published, others)["value"])

    def _answered(self, call: Callable[[], Any]) -> Any:
        """The result of a call that waits for other tasks, as long as they are alive.

        A task may spend hours in a callback.
        """
        try:
            return call()
        except tf.errors.OpError as e:
            raise self.root_cause(e) from None

    def from_all(self, value: Any) -> list[Any]:
        """All-gathers a value: every task's value, in order of rank."""
        if self.size == 1:
            return [value]
        with leaving.shared_call():
            key = self._next_key()
            values: list[Any] = self._answered(lambda: coordination.current().gather(key, value))
            _noted(False, value)
            return values

    def post(self, key: str, value: Any) -> None:
        """Sets a value for which another task waits in `posted`. May be called from any thread.

        Args:
            key: a key that is unique in this training.
        """
        coordination.current().set(key, value)

    def posted(self, key: str, wait_s: float) -> Any:
        """The value that another task posts; None if it does not within `wait_s` seconds.

        Raises:
            OSError: a task was lost.
        """
        try:
            return coordination.current().get(key, wait_s)
        except tf.errors.DeadlineExceededError:
            return None
        except tf.errors.OpError as e:
            raise OSError(str(e)) from None

    def forget(self, key: str) -> None:
        """Removes the values posted under keys that begin with `key`."""
        coordination.current().delete(key)

    def arrays_from_chief(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Broadcasts the chief's arrays; for small arrays: see the module's docstring.

        Args:
            arrays: arrays by name; only the chief's values are used.
        """
        if self.size == 1:
            return arrays
        found = {}
        described = self.from_chief(lambda: {n: a.dtype.name for n, a in sorted(arrays.items())})
        for name, dtype in described.items():
            text = self.from_chief(functools.partial(_text, arrays, name))
            found[name] = tf.io.parse_tensor(base64.b64decode(text), tf.as_dtype(dtype)).numpy()
        return found

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raises UsageError on every task if tasks differ in one of `facts`.

        Args:
            facts: name -> value, such as {"epochs": 3}. Floats may have rounding errors.
        """
        chief, *others = self.from_all({name: _as_json(value) for name, value in facts.items()})
        for rank, remote in enumerate(others, start=1):
            for name in chief:
                if not _is_equal(chief[name], remote.get(name)):
                    raise UsageError(
                        f"tasks disagree about {name}: worker 0 has {chief[name]!r}, worker "
                        f"{rank} has {remote.get(name)!r}. Run the same script with the same "
                        "arguments on every task, and draw random values with the same seed."
                    )


def _as_json(value: Any) -> Any:
    """The value as it arrives at other tasks; its text if it is not JSON, as NumPy's numbers."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether JSON values of two tasks are equal, and their floats close."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _same(value: Any) -> Any:
    return value


def _noted(is_chiefs: bool, value: Any) -> Any:
    """Keeps a call for `repeat`; returns the value."""
    if len(_made) < _MOST_MADE:
        _made.append((is_chiefs, value))
    return value


def _text(arrays: dict[str, np.ndarray], name: str) -> str:
    return base64.b64encode(tf.io.serialize_tensor(arrays[name]).numpy()).decode()
