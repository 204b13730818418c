"""The training steps of a worker of a parameter-server cluster: many in one scheduled function.

    steps = WorkerSteps(model, server_variables)
    remote = coordinator.schedule(steps.function, args=(iterator, max_steps, limit, seeds))

    claim up to `max_steps` tickets of the epoch          (one message)
    metrics = 0                                           (local to this function)
    for each ticket:
        local copies = server variables                   (one message per server)
        logs = model.train_step(next(iterator))           (of the user's class, if it has one)
            optimizer.apply(gradients):                   (one message per server)
                on each server: update its variables, and count
        state = servers' state + the changes of this step (batch-norm averages)
    return metrics                                        (the coordinator adds them up)

No worker reads, changes and writes back a value that other workers write. Servers update their own
variables and add to the counts. A worker returns metrics only when a function is complete.

Variables that layers update themselves: the server takes a step's value of BatchNormalization's
moving averages (of two concurrent steps one may be lost; each stored value is an average over
batches). To all other state the server adds the change of the step. Seed generators are local to
the worker: their seeds are combined with the number of the ticket, so no two steps draw the same
mask. The coordinator's seed generators advance by the draws of all workers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import data, keras_compat
from tfmw.errors import UsageError
from tfmw.parameter_server.shards import split_by_shard
from tfmw.parameter_server.updates import ReadOnlyScalar, ServerUpdates, Update
from tfmw.parameter_server.variables import (
    BUCKET_BYTES,
    Bucket,
    ServerVariables,
    contains,
)
from tfmw.tables import VariableShard, look_up, read_whole, server, table_of

UNROLLED = 10
"""Steps in one iteration of the traced loop: each iteration costs messages between processes."""

_SEED_STEP = 0x9E3779B1  # 2**32 / golden ratio: neighbouring tickets give distant seeds

_models = itertools.count()


class WorkerSteps:
    """The traced function that workers run, and its worker-side variables.

    Args:
        model: compiled and built, with its optimizer built.
        server_variables: its variables on the servers.
        name: of the worker-side variables; different for trainings that share servers.
        remote_lookups: whether rows of large tables are fetched from servers, not whole tables.

    Attributes:
        function: (iterator, max_steps int64 [], limit int64 [], seeds [uint32 [2], ...]) -> a dict:
            "steps" int64 [], "examples" int64 [] in these steps, "seconds" float64 [] of these
            steps, "metrics" (the increase of each metric variable) and "draws" (the increase of
            each seed generator's counter).
    """

    def __init__(
        self,
        model: keras.Model,
        server_variables: ServerVariables,
        name: str,
        remote_lookups: bool = True,
    ):
        self.model = model
        self.server_variables = server_variables
        self.updates = ServerUpdates(server_variables)
        self.metrics = keras_compat.metric_variables(model)
        self.function = tf.function(self._many, autograph=False)
        self._name = f"{name}/{next(_models)}"
        self._assigned: list[Any] = []
        self._ops: dict[Any, Callable[..., Any]] = {}
        looked_up = keras_compat.looked_up_variables(model) if remote_lookups else []
        self._remote = [
            *server_variables.divided,
            *(
                v
                for v in server_variables.trainable
                if not contains(v, server_variables.divided)
                and any(v is e for e in looked_up)
                and v.shape.num_elements() * 4 > BUCKET_BYTES
            ),
        ]
        pulled = [
            v
            for v in server_variables.trainable + server_variables.state
            if not contains(v, self._remote)
        ]
        self._buckets, self._alone = server_variables.buckets(pulled)

    # ------------------------------------------------------------ the scheduled function

    def _many(self, iterator: Any, max_steps: tf.Tensor, limit: tf.Tensor, seeds: list[Any]) -> Any:
        server_variables = self.server_variables
        end = server_variables.tickets.assign_add(max_steps, read_value=True)
        first = tf.identity(end) - max_steps
        count = tf.clip_by_value(limit - first, 0, max_steps)
        locals_ = self._initial_locals()
        begun = [self._initial_seed(locals_[id(s)], v, first) for s, v in self._seeds(seeds)]
        step = functools.partial(self._step, iterator, locals_)
        since = tf.timestamp()
        with tf.control_dependencies([since]):
            count = tf.identity(count)

        def turn(done: tf.Tensor, seen: tf.Tensor, steps: int) -> tuple[tf.Tensor, tf.Tensor]:
            for _ in range(steps):
                seen += step()
            return done + steps, seen

        def loop(begin: tuple[tf.Tensor, tf.Tensor], end: tf.Tensor, steps: int) -> Any:
            return tf.while_loop(
                lambda done, seen: done < end,
                lambda done, seen: turn(done, seen, steps),
                begin,
                parallel_iterations=1,
            )

        none = tf.constant(0, tf.int64)
        begin = loop((none, none), count // UNROLLED * UNROLLED, UNROLLED)
        done, seen = loop(begin, count, 1)
        with tf.control_dependencies([done]):
            seconds = tf.timestamp() - since
        return {**self._results(done, seen, locals_, begun, seeds), "seconds": seconds}

    def _initial_locals(self) -> dict[int, Any]:
        """Local copies with the values at the beginning of a function."""
        locals_ = self._locals()
        for variable in self.metrics:
            locals_[id(variable)].assign(tf.zeros(variable.shape, _dtype(variable)))
        for variable in self.server_variables.frozen:
            if contains(variable, self._remote):
                continue
            locals_[id(variable)].assign(
                _on_worker(self.server_variables.shard(variable).variable.read_value())
            )
        return locals_

    def _results(
        self,
        done: tf.Tensor,
        seen: tf.Tensor,
        locals_: dict[int, Any],
        begun: list[tf.Tensor],
        seeds: list[Any],
    ) -> dict[str, Any]:
        with tf.control_dependencies([done]):
            return {
                "steps": tf.identity(done),
                "examples": tf.identity(seen),
                "metrics": [locals_[id(v)].read_value() for v in self.metrics],
                "draws": [
                    locals_[id(s)].read_value() - b
                    for (s, _), b in zip(self._seeds(seeds), begun, strict=True)
                ],
            }

    def _locals(self) -> dict[int, Any]:
        """This worker's local copies, by id of the Keras variable."""
        server_variables = self.server_variables
        ordinary = [
            *server_variables.trainable,
            *server_variables.state,
            *server_variables.frozen,
            *server_variables.seeds,
            *self.metrics,
        ]
        found: dict[int, Any] = {}
        for number, variable in enumerate(ordinary):
            if contains(variable, self._remote) or id(variable) in found:
                continue
            found[id(variable)] = keras_compat.local_variable(
                f"{self._name}/{number}", variable.shape, _dtype(variable), variable.trainable
            )
        for number, variable in enumerate(self._remote):
            shards = server_variables.shards(variable)
            table = table_of(variable)  # refuses to be read if it is too large
            read = functools.partial(read_whole, shards) if table is None else table.read_all
            found[id(variable)] = keras_compat.RemoteRows(
                f"{self._name}/remote_{number}",
                variable.shape,
                _dtype(variable),
                functools.partial(look_up, shards),
                read,
            )
        return found

    def _seeds(self, seeds: list[Any]) -> list[tuple[Any, Any]]:
        return list(zip(self.server_variables.seeds, seeds, strict=True))

    def _initial_seed(self, local: Any, value: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        fold = tf.cast(first * _SEED_STEP % (1 << 31), tf.uint32)
        begun = tf.bitwise.bitwise_xor(
            tf.cast(value, tf.uint32), tf.stack([fold, tf.constant(0, tf.uint32)])
        )
        begun = tf.cast(begun, local.dtype)
        local.assign(begun)
        return begun

    # ------------------------------------------------------------ one step

    def _step(self, iterator: Any, locals_: dict[int, Any]) -> tf.Tensor:
        """Runs one step; returns int64 [], its number of examples."""
        server_variables, model = self.server_variables, self.model
        before = self._pull(locals_)
        own = [
            *server_variables.trainable,
            *server_variables.state,
            *server_variables.frozen,
            *server_variables.seeds,
            *self.metrics,
        ]
        pairs = [(v, locals_[id(v)]) for v in own]
        pairs += [
            (v, ReadOnlyScalar(copies[server_variables.home]))
            for v, copies in server_variables.scalars
        ]
        remote = [(v, locals_[id(v)]) for v in self._remote]
        applied: list[tf.Tensor] = []
        with contextlib.ExitStack() as stack:
            for optimizer in server_variables.optimizers:
                enter = stack.enter_context
                enter(keras_compat.stable_variable_keys(optimizer, server_variables.trainable))
                enter(self._updating_servers(optimizer, applied))
            stack.enter_context(keras_compat.recorded_assignments(self._assigned))
            stack.enter_context(keras_compat.lookups_through(remote))
            stack.enter_context(keras_compat.substituted(pairs))
            batch = next(iterator)
            logs = model.train_step(batch)
        if not isinstance(logs, dict):
            raise UsageError(
                f"the model's train_step returned {type(logs).__name__}: expected a dict of logs, "
                'such as {"loss": loss}.'
            )
        self._push_state(locals_, before)
        if not applied:
            raise UsageError(
                "the model's train_step applied no gradients: expected it to call "
                "self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )
        return data.examples_of(batch)

    def _pull(self, locals_: dict[int, Any]) -> dict[int, tf.Tensor]:
        """Reads the servers' values into the local copies; returns the values of the state."""
        values: dict[int, tf.Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            with tf.device(server(bucket.server)):
                flat = self._one_op(("pull", number), functools.partial(self._flat, bucket))()
            values.update(bucket.unpack(_on_worker(flat)))
        for variable in self._alone:
            values[id(variable)] = _on_worker(
                self.server_variables.shard(variable).variable.read_value()
            )
        for variable in [v for p in self._buckets for v in p.variables] + self._alone:
            locals_[id(variable)].assign(values[id(variable)])
        return {id(v): values[id(v)] for v in self.server_variables.state}

    def _flat(self, bucket: Bucket) -> tf.Tensor:
        """[elements of all variables], on their server."""
        return bucket.pack(
            self.server_variables.shard(v).variable.read_value() for v in bucket.variables
        )

    def _push_state(self, locals_: dict[int, Any], before: dict[int, tf.Tensor]) -> None:
        changed = [v for v in self.server_variables.state if contains(v, self._assigned)]
        averages = keras_compat.moving_averages(self.model)
        for number, bucket in enumerate(self.server_variables.all_buckets(changed)):
            sent = []
            for variable in bucket.variables:
                after = locals_[id(variable)].read_value()
                sent.append(after if contains(variable, averages) else after - before[id(variable)])
            with tf.device(server(bucket.server)):
                take = functools.partial(self._store_state, bucket, averages)
                self._one_op(("state", number), take)(bucket.pack(sent))

    def _store_state(self, bucket: Bucket, averages: list[Any], flat: tf.Tensor) -> tf.Tensor:
        """On a server: stores the state after a step."""
        parts = bucket.unpack(flat)
        for variable in bucket.variables:
            server_variable = self.server_variables.shard(variable).variable
            if contains(variable, averages):
                server_variable.assign(parts[id(variable)])
            else:
                server_variable.assign_add(parts[id(variable)])
        return tf.constant(0)

    # ------------------------------------------------------------ updates

    @contextlib.contextmanager
    def _updating_servers(self, optimizer: Any, applied: list[tf.Tensor]) -> Iterator[None]:
        """Makes `optimizer.apply` update the server variables, on their servers."""
        keras_apply = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            grads = [
                _densified(g, v)
                for g, v in zip(
                    grads,
                    keras_compat.optimized_variables(optimizer)
                    if trainable_variables is None
                    else list(trainable_variables),
                    strict=True,
                )
            ]
            keras_apply(grads, trainable_variables)

        def update_step(grads: Any, variables: Any, learning_rate: Any) -> None:
            del learning_rate  # each server computes its own
            self._update(optimizer, list(zip(grads, variables, strict=True)), applied)

        overrides: list[tuple[Any, str, Any]] = [
            (optimizer, "apply", apply),
            (optimizer, "_backend_update_step", update_step),
            (optimizer, "_apply_weight_decay", lambda variables: None),
        ]
        with keras_compat.overridden(overrides):
            yield

    def _update(
        self, optimizer: Any, grads: list[tuple[Any, Any]], applied: list[tf.Tensor]
    ) -> None:
        server_variables = self.server_variables
        by_variable = {id(v): g for g, v in grads}
        todo: dict[int, list[Update]] = {where: [] for where in range(server_variables.servers)}
        here = [v for _, v in grads if not contains(v, self._remote)]
        for bucket in server_variables.all_buckets(here):
            flat = bucket.pack(by_variable[id(v)] for v in bucket.variables)

            def update_bucket(flat: tf.Tensor, bucket: Bucket = bucket) -> None:
                for variable, grad in zip(
                    bucket.variables, bucket.unpack(flat).values(), strict=True
                ):
                    shard = server_variables.shard(variable)
                    self.updates.update_whole(optimizer, shard, variable, grad)

            todo[bucket.server].append(([flat], update_bucket))
        for variable in [v for _, v in grads if contains(v, self._remote)]:
            for shard, *sent in split_by_shard(
                server_variables.shards(variable), by_variable[id(variable)]
            ):

                def update_rows(
                    *sent: Any, shard: VariableShard = shard, variable: Any = variable
                ) -> None:
                    self.updates.update_rows(optimizer, shard, variable, *sent)

                todo[shard.server].append((sent, update_rows))
        for where, updates in todo.items():
            is_home = where == server_variables.home
            # Servers without any of these variables count the step as well.
            updates = updates or [([_signal(grads)], _nothing)]
            # Each step is counted once, with any number of optimizers.
            updated = self._on_server(where, optimizer, updates, is_home and not applied)
            if is_home:
                applied.append(updated)

    def _on_server(
        self,
        where: int,
        optimizer: Any,
        updates: list[Update],
        counts: bool,
    ) -> tf.Tensor:
        """Runs updates on a server, as one op of the worker's graph.

        Separate ops would each send the worker a message. Also, if a worker died between an update
        and its count, the update would be made again.

        Args:
            counts: whether this op counts the step as applied.

        Returns:
            int64 [], on the server, available after the updates.
        """

        def run(sent: list[list[tf.Tensor]]) -> tf.Tensor:
            arrived = zip(sent, (update for _, update in updates), strict=True)
            self.updates.run(where, optimizer, list(arrived))
            if counts:
                self.server_variables.applied.assign_add(1)
            return tf.constant(0, tf.int64)

        with tf.device(server(where)):
            op = self._one_op(("update", where, id(optimizer), counts), run)
            return op([list(tensors) for tensors, _ in updates])

    def _one_op(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as one op; traced for the first step in the loop's body, used by all."""
        return self._ops.setdefault(key, keras_compat.one_op(function))


def _densified(grad: Any, variable: Any) -> Any:
    """Makes sparse gradients of small variables dense."""
    if isinstance(grad, tf.IndexedSlices) and not isinstance(
        keras_compat.native(variable), keras_compat.RemoteRows
    ):
        return tf.convert_to_tensor(grad)
    return grad


def _nothing(*_: Any) -> None:
    """Updates no variable."""


def _signal(grads: list[tuple[Any, Any]]) -> tf.Tensor:
    """int64 [], 0, available once the first gradient is."""
    grad = grads[0][0]
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return tf.cast(tf.size(values), tf.int64) * 0


def _on_worker(tensor: tf.Tensor) -> tf.Tensor:
    """Copies a tensor to the worker once; otherwise each use there would fetch it."""
    return tf.identity(tensor)


def _dtype(variable: Any) -> tf.DType:
    return keras_compat.native(variable).dtype
