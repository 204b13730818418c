"""The training steps of a worker of a parameter-server cluster: many in one scheduled function.

    steps = WorkerSteps(model, server_variables)
    remote = coordinator.schedule(steps.function, args=(iterator, max_steps, limit, seeds))

    claim up to `max_steps` tickets of the epoch          (one message)
    metrics = 0                                           (local to this function)
    for each ticket:
        batch = next(iterator)
        local copies = server variables, and rows that the batch looks up
        logs = model.train_step(batch)                    (of the user's class, if it has one)
        gradients, changes of state (batch-norm averages)
    return metrics                                        (the coordinator adds them up)

Between two steps, one message goes to each server and one comes back (`exchange`): the server
updates its variables with the gradients, counts the step, and answers with what the next one needs.
What a worker computes of a step is one op (`step_op`), where that can be.

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
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmw import data
from tfmw.errors import UsageError
from tfmw.keras_compat import models, objects, optimizers, parameter_servers
from tfmw.keras_compat.metric_variables import metric_variables, recorded_assignments
from tfmw.keras_compat.objects import contains, unique
from tfmw.parameter_server.exchange import Exchange, LookupReply, StepUpdates
from tfmw.parameter_server.hash_tables import HashTables
from tfmw.parameter_server.lookups import Fetched, LookupRequest, Plan, RowTransfer, plan_lookups
from tfmw.parameter_server.step_op import StepOp
from tfmw.parameter_server.updates import Grads, ReadOnlyScalar, Updates, taking_gradients
from tfmw.parameter_server.variables import PACK_BYTES, ServerPack, ServerVariables
from tfmw.tables import table_of
from tfmw.tables.shards import look_up, read_whole

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
        travel: how rows travel.
        remote_lookups: whether rows of large tables are fetched from servers, not whole tables.
        workers: number of workers that make steps at the same time.

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
        travel: RowTransfer | None = None,
        remote_lookups: bool = True,
        workers: int = 1,
    ):
        self.model = model
        self.server_variables = server_variables
        self.metrics = metric_variables(model)
        self.function = tf.function(self._many, autograph=False)
        self._name = f"{name}/{next(_models)}"
        self._assigned: list[Any] = []
        self._travel = travel or RowTransfer()
        self._ops: dict[Any, Callable[..., Any]] = {}
        of_layers = [v for layer in server_variables.hash_tables for v in layer.weights]
        on_servers = unique([*server_variables.divided, *of_layers], server_variables.steps)
        looked_up = parameter_servers.looked_up_variables(model) if remote_lookups else []
        large = [
            v
            for v in server_variables.trainable
            if contains(v, looked_up) and v.shape.num_elements() * 4 > PACK_BYTES
        ]
        self._remote = unique([*on_servers, *large])
        trained = server_variables.trainable + server_variables.state
        self._pulled = [v for v in trained if not contains(v, self._remote)]
        frozen, seeds = server_variables.frozen, server_variables.seeds
        self._own = [*trained, *frozen, *seeds, *self.metrics]
        self._scalars = [copies[server_variables.home] for _, copies in server_variables.scalars]
        self._updates = Updates(server_variables, self._remote, self._travel)
        self._hash_tables = HashTables(server_variables, self._one_op, self._travel, workers)
        self._fetched = Fetched([])

    # ------------------------------------------------------------ the scheduled function

    def _many(self, iterator: Any, max_steps: tf.Tensor, limit: tf.Tensor, seeds: list[Any]) -> Any:
        server_variables = self.server_variables
        end = server_variables.tickets.assign_add(max_steps, read_value=True)
        first = tf.identity(end) - max_steps
        count = tf.clip_by_value(limit - first, 0, max_steps)
        locals_, begun = self._initial_locals(seeds, first)
        plan, prefetch = self._plan(iterator.element_spec, locals_), self._travel.prefetch
        exchange = Exchange(self._updates, self._pulled, plan, self._one_op)
        step = StepOp(
            functools.partial(self._step, locals_=locals_),
            exchange,
            iterator.element_spec,
            self._scalars,
        )
        since = tf.timestamp()
        with tf.control_dependencies([since]):
            count = tf.identity(count)

        def turn(done: tf.Tensor, seen: tf.Tensor, steps: int) -> tuple[tf.Tensor, tf.Tensor]:
            read: list[tuple[Any, LookupRequest, LookupReply | None]] = []

            def read_to(number: int) -> None:
                while len(read) <= min(number, steps - 1):
                    batch = next(iterator)
                    asked = plan.asked(batch)
                    ahead = exchange(None, asked, pull=False) if prefetch else None
                    read.append((batch, asked, ahead))

            read_to(0)
            answers = exchange(None, None if prefetch else read[0][1])
            for number in range(steps):
                read_to(number + 1)
                batch, asked, ahead = read[number]
                received = [answers] if ahead is None else [answers, ahead]
                examples, work = step(batch, asked, received)
                is_last = number == steps - 1
                following = None if is_last or prefetch else read[number + 1][1]
                answers = exchange(work, following, pull=not is_last)
                seen += examples
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
        return {**self._results(done, seen, locals_, begun), "seconds": seconds}

    def _initial_locals(
        self, seeds: list[Any], ticket: tf.Tensor
    ) -> tuple[dict[int, Any], list[tf.Tensor]]:
        """(local copies with the values at the beginning of a function, those of seeds)."""
        locals_ = self._locals()
        for variable in self.metrics:
            locals_[id(variable)].assign(tf.zeros(variable.shape, _dtype(variable)))
        for variable in self.server_variables.frozen:
            if contains(variable, self._remote):
                continue
            value = self.server_variables.shard(variable).variable.read_value()
            locals_[id(variable)].assign(tf.identity(value))
        pairs = zip(self.server_variables.seeds, seeds, strict=True)
        begun = [_initial_seed(locals_[id(seed)], value, ticket) for seed, value in pairs]
        return locals_, begun

    def _results(
        self,
        done: tf.Tensor,
        seen: tf.Tensor,
        locals_: dict[int, Any],
        begun: list[tf.Tensor],
    ) -> dict[str, Any]:
        with tf.control_dependencies([done]):
            results = {
                "steps": tf.identity(done),
                "examples": tf.identity(seen),
                "metrics": [locals_[id(v)].read_value() for v in self.metrics],
                "draws": [
                    locals_[id(s)].read_value() - b
                    for s, b in zip(self.server_variables.seeds, begun, strict=True)
                ],
            }
        # The next function assigns all of them; after the last one no worker keeps a model.
        with tf.control_dependencies(tf.nest.flatten(results)):
            for variable in locals_.values():
                tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
        return results

    def _locals(self) -> dict[int, Any]:
        """This worker's local copies, by id of the Keras variable."""
        found: dict[int, Any] = {}
        for number, variable in enumerate(self._own):
            if contains(variable, self._remote) or id(variable) in found:
                continue
            found[id(variable)] = parameter_servers.local_variable(
                f"{self._name}/{number}", variable.shape, _dtype(variable), variable.trainable
            )
        for number, variable in enumerate(self._remote):
            shards = self.server_variables.shards(variable)
            table = table_of(variable)  # refuses to be read if it is too large
            read = functools.partial(read_whole, shards) if table is None else table.read_all
            found[id(variable)] = parameter_servers.RemoteRows(
                f"{self._name}/remote_{number}",
                variable.shape,
                _dtype(variable),
                functools.partial(self._look_up, variable),
                read,
            )
        return found

    def _look_up(self, variable: Any, ids: tf.Tensor) -> Any:
        fetched = self._fetched.rows(variable, ids)
        return look_up(self.server_variables.shards(variable), ids) if fetched is None else fetched

    def _plan(self, batch_spec: Any, locals_: dict[int, Any]) -> Plan:
        """The lookups of a step; it is traced for them, and never run."""

        def trace(batch: Any, recorded: Fetched) -> None:
            scalars = [ReadOnlyScalar(copy) for copy in self._scalars]
            self._train_step(batch, recorded, scalars, locals_, lambda *grads: None)

        if not self._remote:
            return Plan()
        return plan_lookups(trace, batch_spec, self.server_variables.shards, self._travel)

    # ------------------------------------------------------------ one step

    def _step(
        self,
        batch: Any,
        values: dict[int, tf.Tensor],
        fetched: Fetched,
        scalars: list[ReadOnlyScalar],
        locals_: dict[int, Any],
    ) -> tuple[tf.Tensor, StepUpdates]:
        """Runs one step, with what the servers sent; see `Exchange`.

        Returns:
            (int64 [], its number of examples; what it changes on the servers).
        """
        for variable in self._pulled:
            locals_[id(variable)].assign(values[id(variable)])
        work = StepUpdates()
        applied: list[Any] = []

        def update(optimizer: Any, grads: Grads) -> None:
            applied.append(optimizer)
            self._update(optimizer, grads, fetched, work)

        logs = self._train_step(batch, fetched, scalars, locals_, update)
        if not isinstance(logs, dict):
            raise UsageError(
                f"the model's train_step returned {type(logs).__name__}: expected a dict of logs, "
                'such as {"loss": loss}.'
            )
        if not applied:
            raise UsageError(
                "the model's train_step applied no gradients: expected it to call "
                "self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )
        self._store_state(locals_, values, work)
        return data.examples_of(batch), work

    def _train_step(
        self,
        batch: Any,
        fetched: Fetched,
        scalars: list[ReadOnlyScalar],
        locals_: dict[int, Any],
        update: Callable[[Any, Grads], None],
    ) -> Any:
        """The model's own step, on this worker's copies; returns its logs.

        Args:
            fetched: the rows that it looks up.
            scalars: of the optimizers.
            update: (optimizer, [(gradient, Keras variable), ...]): updates the variables.
        """
        server_variables, model = self.server_variables, self.model
        self._fetched = fetched
        pairs = [(v, locals_[id(v)]) for v in self._own]
        pairs += zip([v for v, _ in server_variables.scalars], scalars, strict=True)
        remote = [(v, locals_[id(v)]) for v in self._remote]
        held = server_variables.optimizers
        with contextlib.ExitStack() as stack:
            stack.enter_context(optimizers.stable_variable_keys(held, server_variables.trainable))
            for optimizer in held:
                stack.enter_context(taking_gradients(optimizer, update))
            stack.enter_context(recorded_assignments(self._assigned))
            # `tf.gather` on these looks up rows, where Keras would read all of them first.
            lookups = [(v, "sparse_read", rows.sparse_read) for v, rows in remote]
            stack.enter_context(objects.overridden(lookups))
            stack.enter_context(models.substituted(pairs))
            stack.enter_context(self._hash_tables.on_servers())
            return model.train_step(batch)

    def _store_state(
        self, locals_: dict[int, Any], before: dict[int, tf.Tensor], work: StepUpdates
    ) -> None:
        """Adds what the step has changed besides the optimizer's variables."""
        changed = [v for v in self.server_variables.state if contains(v, self._assigned)]
        averages = parameter_servers.moving_averages(self.model)

        def store(pack: ServerPack, flat: tf.Tensor) -> None:
            parts = pack.unpack(flat)
            for variable in pack.variables:
                server_variable = self.server_variables.shard(variable).variable
                if contains(variable, averages):
                    server_variable.assign(parts[id(variable)])
                else:
                    server_variable.assign_add(parts[id(variable)])

        for pack in self.server_variables.all_packs(changed):
            sent = []
            for variable in pack.variables:
                after = locals_[id(variable)].read_value()
                sent.append(after if contains(variable, averages) else after - before[id(variable)])
            work.store(pack.server, ([pack.pack(sent)], functools.partial(store, pack)))

    def _update(self, optimizer: Any, grads: Grads, fetched: Fetched, work: StepUpdates) -> None:
        """Adds what an optimizer changes with its gradients."""
        work.apply(optimizer, self._updates.of_gradients(optimizer, grads, fetched), grads[0][0])

    def _one_op(
        self, key: Any, function: Callable[..., Any], waits: bool = False
    ) -> Callable[..., Any]:
        """`function` as one op; traced for the first step in the loop's body, used by all."""
        return self._ops.setdefault(key, parameter_servers.one_op(function, waits))


def _initial_seed(local: Any, value: tf.Tensor, ticket: tf.Tensor) -> tf.Tensor:
    """Assigns a seed of this ticket's own to a local copy, and returns it."""
    fold = tf.cast(ticket * _SEED_STEP % (1 << 31), tf.uint32)
    begun = tf.bitwise.bitwise_xor(
        tf.cast(value, tf.uint32), tf.stack([fold, tf.constant(0, tf.uint32)])
    )
    begun = tf.cast(begun, local.dtype)
    local.assign(begun)
    return begun


def _dtype(variable: Any) -> tf.DType:
    return models.native(variable).dtype
