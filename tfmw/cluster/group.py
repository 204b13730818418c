"""Small values that workers exchange outside of the training step: broadcast, all-gather.

    group = Group.of(strategy)
    seed = group.from_chief(lambda: draw_seed())     # the chief's result, on every task
    group.require_same({"epochs": 3})                # or every task raises the same error

Values are JSON. They are sent through TensorFlow's coordination service, not through collectives. A
call takes about a millisecond, and cannot interfere with the reductions of a step. All tasks must
make the same calls in the same order. The chief collects and publishes the values of all tasks. So
the number of calls of the other tasks does not depend on the size of the group.
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

from tfmw.cluster import leaving
from tfmw.compat import placement, runtime
from tfmw.errors import UsageError
from tfmw.observe.recorded_errors import ECHO

_PIECE = 3 << 20  # characters of a chunk; a message of the coordination service may have 4 MB
_BYTES = 2 << 20  # bytes of arrays in one chunk; base64 adds a third

# Number of calls that share a directory of keys. The first call of the next directory is a barrier.
# After it all tasks have read the keys of the last directory, and the chief deletes it.
_CALLS_PER_DIRECTORY = 64

_ROOT_CAUSE_S = 2.0  # time in which a failed task reports its error before it exits
_RESPONSE_S = 5.0
_UNUSED_GROUP = 2**31 - 2  # strategies number their groups from 1

_ALIKE_S = 10.0  # time in which all tasks must raise the same error

_calls = 0  # number of calls of this process; equal on all tasks, as they make the same calls
_errors = itertools.count()  # numbers the errors that tasks compare


class Group:
    """The `size` processes that train together; this one is `rank`, and rank 0 is the chief."""

    def __init__(
        self,
        rank: int,
        size: int,
        tasks: Sequence[str] = (),
        agree: Callable[[str, Any], Any] | None = None,
    ):
        self.rank = rank
        self.size = size
        self._agree = agree  # see `agreed_value`
        self._tasks = tasks  # names as in TensorFlow: "/job:worker/replica:0/task:1"

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> Group:
        if not placement.spans_processes(strategy):
            return cls(0, 1)
        local = placement.local_replicas(strategy)
        jobs = strategy.cluster_resolver.cluster_spec().as_dict()
        return cls(
            placement.first_local_replica(strategy) // local,
            strategy.num_replicas_in_sync // local,
            [
                f"/job:{job}/replica:0/task:{index}"
                for job in ("chief", "worker")
                for index in range(len(jobs.get(job, ())))
            ],
        )

    def _set(self, key: str, text: str) -> None:
        """Sets a key to ASCII of any length."""
        first, *others = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
        for number, piece in enumerate(others):
            runtime.coordination_set(f"{key}/piece_{number}", piece)
        # set last, as the other tasks read it first
        runtime.coordination_set(key, f"{len(others)} {first}")

    def _get(self, key: str, rank: int) -> str:
        """Waits for a key that task `rank`, another one, sets, and returns its value.

        It waits as long as that task is alive, which may spend hours in a callback.
        """

        def get(key: str) -> str:
            return runtime.coordination_get(key, math.inf, self._tasks[rank], leaving.look)

        try:
            count, _, first = get(key).partition(" ")
            return first + "".join(get(f"{key}/piece_{number}") for number in range(int(count)))
        except tf.errors.OpError as e:
            raise self.root_cause(e) from None

    def _exchange(self, key: str, value: Any) -> list[Any]:
        """All values, in order of rank."""
        text = json.dumps(value)
        if self.is_chief:
            others = [self._get(f"{key}/{rank}", rank) for rank in range(1, self.size)]
            text = f"[{','.join([text, *others])}]"
            self._set(key, text)
        else:
            self._set(f"{key}/{self.rank}", text)
            text = self._get(key, rank=0)
        values: list[Any] = json.loads(text)
        return values

    def _next_key(self) -> str:
        """The key of this call; equal on all tasks."""
        global _calls
        directory, call = divmod(_calls, _CALLS_PER_DIRECTORY)
        _calls += 1
        if call == 0 and directory > 0:
            self._exchange(f"tfmw/{directory}/begin", None)
            if self.is_chief:
                runtime.coordination_delete(f"tfmw/{directory - 1}")
        return f"tfmw/{directory}/{call}"

    def raised_alike(self, error: BaseException, position: Any) -> bool:
        """Whether all tasks have raised this kind of error at one point, and can continue together.

        Later calls may differ between tasks only if the answer is False. All tasks get the same
        answer: a task that has waited too long decides for all.

        Args:
            position: JSON, equal on tasks that have made the same calls.
        """
        if self.size == 1:
            return True
        key = f"tfmw/raised/{next(_errors)}"
        own = [type(error).__name__, _calls, leaving.calls(), position]

        def answer(alike: bool) -> bool:
            with contextlib.suppress(tf.errors.AlreadyExistsError):
                runtime.coordination_set(f"{key}/alike", json.dumps(alike))
            return bool(json.loads(runtime.coordination_get(f"{key}/alike", _RESPONSE_S)))

        try:
            runtime.coordination_set(f"{key}/{self.rank}", json.dumps(own))
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                if not self.is_chief:
                    return bool(json.loads(runtime.coordination_get(f"{key}/alike", _ALIKE_S)))
                deadline = time.monotonic() + _ALIKE_S
                for rank in range(1, self.size):
                    left_s = deadline - time.monotonic()
                    found = json.loads(runtime.coordination_get(f"{key}/{rank}", left_s))
                    if found != json.loads(json.dumps(own)):
                        return answer(False)
                return answer(True)
            return answer(False)
        except tf.errors.OpError:  # another task was lost, or has failed
            return False

    def require_peer(self, rank: int) -> None:
        """Raises tf.errors.OpError if task `rank` does not respond, or was restarted."""
        runtime.require_task(self._tasks[rank], _RESPONSE_S)

    def root_cause(self, found: Exception) -> tf.errors.OpError:
        """Error to raise after the loss of another task: the one that the task reported.

        The coordination service does not publish the error that a failed task reports. But it ends
        collectives with that error, including one that only this task has joined.
        """
        try:
            tf.raw_ops.CollectiveReduceV2(
                input=0.0,
                group_size=self.size,
                group_key=_UNUSED_GROUP,
                instance_key=_UNUSED_GROUP,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                timeout_seconds=_ROOT_CAUSE_S,
            )
        except tf.errors.OpError as reported:
            if ECHO in str(reported):
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
            if not self.is_chief:
                result = json.loads(self._get(key, rank=0))
                if "error" in result:
                    raise UsageError(result["error"])
                return result["value"]
            try:
                text = json.dumps({"value": decide()})
            except UsageError as e:
                self._set(key, json.dumps({"error": str(e)}))
                raise
            self._set(key, text)
            return json.loads(text)["value"]

    def agreed_value(self, name: str, decide: Callable[[], Any]) -> Any:
        """The chief's `decide()`, for all tasks that read the same data.

        Args:
            name: unique name of the value in this training.
        """
        if self._agree is not None:
            return self._agree(name, decide())
        return self.from_chief(decide)

    def from_all(self, value: Any) -> list[Any]:
        """All-gathers a value: every task's value, in order of rank."""
        if self.size == 1:
            return [value]
        with leaving.shared_call():
            return self._exchange(self._next_key(), value)

    def post(self, key: str, value: Any) -> None:
        """Sets a value for which another task waits in `posted`. May be called from any thread.

        Args:
            key: a key that is unique in this training.
        """
        runtime.coordination_set(key, json.dumps(value))

    def posted(self, key: str, rank: int, wait_s: float) -> Any:
        """The value that task `rank` posts; None if it does not within `wait_s` seconds.

        Raises:
            OSError: that task was lost.
        """
        try:
            return json.loads(runtime.coordination_get(key, wait_s))
        except tf.errors.DeadlineExceededError:
            pass
        except tf.errors.OpError as e:
            raise OSError(f"the coordination service failed: {e}") from None
        try:
            self.require_peer(rank)
        except tf.errors.OpError as e:
            raise OSError(f"worker {rank} was lost: {e}") from None
        return None

    def forget(self, key: str) -> None:
        """Removes the values posted under keys that begin with `key`."""
        runtime.coordination_delete(key)

    def arrays_from_chief(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Broadcasts the chief's arrays; for small arrays: see the module's docstring.

        Args:
            arrays: arrays by name; only the chief's values are used.
        """
        if self.size == 1:
            return arrays
        names = sorted(arrays) if self.is_chief else []
        own = {name: tf.io.serialize_tensor(arrays[name]).numpy() for name in names}

        def piece(name: str, begin: int) -> str:
            return base64.b64encode(own[name][begin : begin + _BYTES]).decode()

        found = {}
        described = self.from_chief(lambda: {n: (arrays[n].dtype.name, len(own[n])) for n in own})
        for name, (dtype, size) in described.items():
            begins = range(0, size, _BYTES)
            pieces = [self.from_chief(functools.partial(piece, name, begin)) for begin in begins]
            data = b"".join(map(base64.b64decode, pieces))
            found[name] = tf.io.parse_tensor(data, tf.as_dtype(dtype)).numpy()
        return found

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raises UsageError on every task if tasks differ in one of `facts`.

        Args:
            facts: name -> JSON value, such as {"epochs": 3}.
        """
        chief, *others = self.from_all(facts)
        for rank, remote in enumerate(others, start=1):
            for name in chief:
                if remote.get(name) != chief[name]:
                    raise UsageError(
                        f"tasks disagree about {name}: worker 0 has {chief[name]!r}, worker "
                        f"{rank} has {remote.get(name)!r}. Run the same script with the same "
                        "arguments on every task."
                    )
