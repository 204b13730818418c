"""Training steps of a worker of a parameter-server cluster, many in one scheduled function.

    steps = WorkerSteps(server_variables, workers=2)
    remote = coordinator.schedule(steps.function, args=(iterator, max_steps, limit, seeds))

    claim up to `max_steps` tickets of the epoch          (one message)
    metrics = their initial values                        (local to this function)
    for each ticket:
        batch = next(iterator)
        local copies = server variables, and rows that the batch looks up
        logs = model.train_step(batch)                    (the user's own, if there is one)
        gradients, changes of state (batch-norm averages)
    return metrics                                        (the coordinator adds them up)

Between two steps, one message goes to each server and one comes back; see `exchange`.

No worker reads, changes and writes back a value that other workers write. Servers update their own
variables and add to the counts. A worker returns metrics only when a function is complete.

Layers update some variables themselves. For BatchNormalization's moving averages the server takes a
step's value; of two concurrent steps one may be lost, but each stored value is an average over
batches. To all other state the server adds the change of the step. Seed generators are local to the
worker: their seeds are combined with the number of the ticket, so no two steps draw the same mask.
The coordinator's seed generators advance by the draws of all workers.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw import data
from tfmw.compat import models, objects, optimizers, parameter_servers, placement
from tfmw.compat.assigned_weights import refusing_others
from tfmw.compat.metric_variables import metric_variables, note_combination, recorded_assignments
from tfmw.compat.objects import contains, unique
from tfmw.compat.replica_steps import replica_step
from tfmw.errors import UsageError
from tfmw.tables.shards import look_up, read_whole
from tfmw.tables.table import table_of
from tfmw.train.parameter_server.exchange import Exchange, LookupReply, spec_of
from tfmw.train.parameter_server.hash_tables import ServedHashTable
from tfmw.train.parameter_server.lookups import (
    Fetched,
    LookupRequest,
    Plan,
    RowTransfer,
    plan_lookups,
)
from tfmw.train.parameter_server.updates import (
    Grads,
    ReadOnlyScalar,
    StepUpdates,
    Updates,
    taking_gradients,
)
from tfmw.train.parameter_server.variables import PACK_BYTES, ServerPack, ServerVariables

UNROLLED = 10
"""Steps in one iteration of the traced loop: each iteration costs messages between processes."""


class WorkerSteps:
    """The traced function that workers run, and its worker-side variables.

    Args:
        server_variables: the model's variables on the servers.
        workers: number of workers that make steps concurrently.
        travel: settings of the transfer of large tables' rows; None to fetch whole tables.

    Attributes:
        function: (iterator, max_steps int64 [], limit int64 [], seeds [uint32 [2], ...]) -> a dict.
            Its "steps" int64 [], "examples" int64 [] and "seconds" float64 [] are those of the
            steps. "metrics" has the metric variables after them, "draws" the increase of each seed
            generator's counter.
    """

    _counts_steps = True  # on a server, after each step

    def __init__(
        self, server_variables: ServerVariables, workers: int, travel: RowTransfer | None = None
    ):
        model = server_variables.model
        self.server_variables = server_variables
        self.metrics = metric_variables(model)
        model.reset_metrics()
        self._initial = [models.native(variable).numpy() for variable in self.metrics]
        self._combined: dict[int, str] = {}  # see `note_combination`
        self.function = tf.function(self._many, autograph=False)
        self._name = f"tfmw/{uuid.uuid4().hex}"  # prefix of the names of worker-side variables
        self._assigned: list[Any] = []
        self._travel = travel or RowTransfer()
        self._ops: dict[Any, Callable[..., Any]] = {}
        of_layers = [v for layer in server_variables.hash_tables for v in layer.weights]
        on_servers = unique([*server_variables.divided, *of_layers], server_variables.steps)
        looked_up = parameter_servers.looked_up_variables(model) if travel is not None else []
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
        tables = [
            ServedHashTable(layer, server_variables, self._one_op, self._travel, workers)
            for layer in server_variables.hash_tables
        ]
        self._hash_lookups = [(table.layer, "look_up", table.look_up) for table in tables]
        # Values of the function that is being traced, and of its step:
        self._locals: dict[int, Any] = {}
        self._fetched = Fetched([])

    # ------------------------------------------------------------ the scheduled function

    def _many(self, iterator: Any, max_steps: tf.Tensor, limit: tf.Tensor, seeds: list[Any]) -> Any:
        server_variables = self.server_variables
        end = server_variables.tickets.assign_add(max_steps, read_value=True)
        first = tf.identity(end) - max_steps
        count = tf.clip_by_value(limit - first, 0, max_steps)
        begun = self._initial_locals(seeds, first)
        plan, prefetch = self._plan(iterator.element_spec), self._travel.prefetch
        exchange = Exchange(server_variables, self._pulled, plan, self._one_op)

        def compute(asked: LookupRequest, replies: list[LookupReply], scalars: Any) -> Any:
            spec = iterator.element_spec
            batch = tf.nest.pack_sequence_as(spec, asked.leaves, expand_composites=True)
            return self._step(batch, *exchange.opened(replies, asked), scalars)

        step = _StepOp(compute, self._scalars)
        since = tf.timestamp()
        with tf.control_dependencies([since]):
            count = tf.identity(count)

        def request() -> tuple[LookupRequest, list[LookupReply]]:
            """(the rows of the next batch, replies with them if they are fetched ahead)."""
            asked = plan.asked(next(iterator))
            return asked, [exchange({}, asked, pull=False)] if prefetch else []

        def turn(done: tf.Tensor, seen: tf.Tensor, steps: int) -> tuple[tf.Tensor, tf.Tensor]:
            requests = [request()]
            reply = exchange({}, None if prefetch else requests[0][0])
            for number in range(steps):
                is_last = number == steps - 1
                if not is_last:
                    requests.append(request())
                asked, ahead = requests[number]
                examples, work = step(asked, [reply, *ahead])
                following = None if is_last or prefetch else requests[-1][0]
                reply = exchange(work, following, pull=not is_last)
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
        return {**self._results(done, seen, begun), "seconds": seconds}

    def _initial_locals(self, seeds: list[Any], ticket: tf.Tensor) -> list[tf.Tensor]:
        """Assigns local copies their values at the start of a function; returns those of seeds."""
        self._locals = self._new_locals()
        for variable, initial in zip(self.metrics, self._initial, strict=True):
            self._locals[id(variable)].assign(tf.constant(initial))
        for variable in self.server_variables.frozen:
            if contains(variable, self._remote):
                continue
            value = self.server_variables.shard(variable).variable.read_value()
            self._locals[id(variable)].assign(tf.identity(value))
        pairs = zip(self.server_variables.seeds, seeds, strict=True)
        return [_initial_seed(self._locals[id(seed)], value, ticket) for seed, value in pairs]

    def _results(self, done: tf.Tensor, seen: tf.Tensor, begun: list[tf.Tensor]) -> dict[str, Any]:
        with tf.control_dependencies([done]):
            results = {
                "steps": tf.identity(done),
                "examples": tf.identity(seen),
                "metrics": [self._locals[id(v)].read_value() for v in self.metrics],
                "draws": [
                    self._locals[id(s)].read_value() - b
                    for s, b in zip(self.server_variables.seeds, begun, strict=True)
                ],
            }
        # The next function assigns all of them; after the last one no worker keeps a model.
        with tf.control_dependencies(tf.nest.flatten(results)):
            for variable in self._locals.values():
                tf.raw_ops.DestroyResourceOp(resource=variable.handle, ignore_lookup_error=True)
        return results

    def _new_locals(self) -> dict[int, Any]:
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
            table = table_of(variable)  # raises if the table is too large to be read
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

    def _plan(self, batch_spec: Any) -> Plan:
        """The lookups of a step, which is traced for them but never run."""

        def trace(batch: Any, recorded: Fetched) -> None:
            scalars = [ReadOnlyScalar(copy) for copy in self._scalars]
            self._train_step(batch, recorded, scalars, lambda *grads: None)

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
    ) -> tuple[tf.Tensor, StepUpdates]:
        """Runs one step, with the servers' values; see `Exchange`.

        Returns:
            (int64 [], its number of examples; its updates for the servers).
        """
        for variable in self._pulled:
            self._locals[id(variable)].assign(values[id(variable)])
        work: StepUpdates = {where: [] for where in range(self.server_variables.servers)}
        applied: list[Any] = []

        def update(optimizer: Any, grads: Grads) -> None:
            applied.append(optimizer)
            self._update(optimizer, grads, work)

        logs = self._train_step(batch, fetched, scalars, update)
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
        self._store_state(values, work)
        if self._counts_steps:  # once, with any number of optimizers
            count = functools.partial(self.server_variables.applied.assign_add, 1)
            work[self.server_variables.home].append(([], count))
        return data.examples_of(batch), work

    def _train_step(
        self,
        batch: Any,
        fetched: Fetched,
        scalars: list[ReadOnlyScalar],
        update: Callable[[Any, Grads], None],
    ) -> Any:
        """Runs the model's own step on this worker's copies; returns its logs.

        Args:
            fetched: the rows that it looks up.
            scalars: scalars of the optimizers.
            update: function (optimizer, [(gradient, Keras variable), ...]) that updates the
                variables.
        """
        server_variables, model = self.server_variables, self.server_variables.model
        self._fetched = fetched
        pairs = [(v, self._locals[id(v)]) for v in self._own]
        pairs += zip([v for v, _ in server_variables.scalars], scalars, strict=True)
        remote = [(v, self._locals[id(v)]) for v in self._remote]
        held = server_variables.optimizers
        with contextlib.ExitStack() as stack:
            stack.enter_context(optimizers.stable_variable_keys(held, server_variables.trainable))
            for optimizer in held:
                stack.enter_context(taking_gradients(optimizer, update))
            stack.enter_context(recorded_assignments(self._assigned, self._note_assignment))
            # `tf.gather` on these looks up rows, while Keras would read all of them first.
            lookups: list[Any] = [(v, "sparse_read", rows.sparse_read) for v, rows in remote]
            stack.enter_context(objects.overridden([*lookups, *self._hash_lookups]))
            stack.enter_context(models.substituted(pairs))
            stack.enter_context(refusing_others())
            stack.enter_context(replica_step())
            return model.train_step(batch)

    def _note_assignment(self, variable: Any, value: Any) -> Any:
        if contains(variable, self.metrics):
            note_combination(self._combined, variable, value)
        return value

    def add_to_metrics(self, values: list[tf.Tensor]) -> None:
        """Combines the model's own metrics with their values after the steps of a function."""
        for variable, value, initial in zip(self.metrics, values, self._initial, strict=True):
            own, how = models.native(variable), self._combined.get(id(variable), "sum")
            if how == "sum":
                own.assign_add(value - initial if initial.any() else value)
            else:
                own.assign((tf.maximum if how == "max" else tf.minimum)(own, value))

    def _store_state(self, before: dict[int, tf.Tensor], work: StepUpdates) -> None:
        """Adds the step's changes of variables other than the optimizer's."""
        changed = [v for v in self.server_variables.state if contains(v, self._assigned)]
        averages = parameter_servers.moving_averages(self.server_variables.model)

        def store(pack: ServerPack, flat: tf.Tensor) -> None:
            parts = pack.unpack(flat)
            for variable in pack.variables:
                server_variable = self.server_variables.shard(variable).variable
                if contains(variable, averages):
                    server_variable.assign(parts[id(variable)])
                else:
                    server_variable.assign_add(parts[id(variable)])

        for pack in self.server_variables.packs(changed):
            sent = []
            for variable in pack.variables:
                after = self._locals[id(variable)].read_value()
                sent.append(after if contains(variable, averages) else after - before[id(variable)])
            work[pack.server].append(([pack.pack(sent)], functools.partial(store, pack)))

    def _update(self, optimizer: Any, grads: Grads, work: StepUpdates) -> None:
        """Adds the updates of an optimizer with its gradients."""
        for where, update in self._updates.of_gradients(optimizer, grads, self._fetched).items():
            work[where].append(update)

    def _one_op(
        self, key: Any, function: Callable[..., Any], waits: bool = False
    ) -> Callable[..., Any]:
        """Wraps `function` as one op, traced for the first step in the loop's body, used by all."""
        return self._ops.setdefault(key, parameter_servers.one_op(function, waits))


class _StepOp:
    """A worker's step as one op, in one thread: it unpacks the servers' replies, and computes.

    A step has hundreds of small ops. Several threads would spend as much time on passing them on as
    on running them. Also, only the first step in the loop is traced.

    A step with ops on another device, such as a lookup whose rows could not be requested before, is
    traced into the loop each time. A function on several devices would wait within a thread.

    Args:
        compute: (the rows that it looks up, replies with them and with the values of variables,
            scalars of the optimizers) -> (int64 [], its number of examples; its updates).
        scalars: the variables on servers, one for each of the scalars.
    """

    def __init__(self, compute: Callable[..., Any], scalars: list[tf.Variable]):
        self._compute = compute
        self._scalars = scalars
        self._op: parameter_servers.TracedOp | None = None
        self._work: StepUpdates = {}

    def __call__(
        self, asked: LookupRequest, replies: list[LookupReply]
    ) -> tuple[tf.Tensor, StepUpdates]:
        if self._op is None:
            specs = tf.nest.map_structure(
                lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), (self._scalars, asked)
            )
            # Replies have any length, also those of the first step.
            of_replies = tf.nest.map_structure(spec_of, replies)
            self._op = parameter_servers.TracedOp(self._run, *specs, of_replies)
        # Ops of a function that also uses a GPU would wait for each other.
        if not self._op.is_on_one_device or tf.config.list_logical_devices("GPU"):
            scalars = [ReadOnlyScalar(variable) for variable in self._scalars]
            computed: tuple[tf.Tensor, StepUpdates] = self._compute(asked, replies, scalars)
            return computed
        read = [
            variable.read_value() if is_used else tf.zeros(variable.shape, variable.dtype)
            for variable, is_used in zip(self._scalars, self._op.uses, strict=False)
        ]
        examples, sent = self._op(read, asked, replies)
        work = {
            where: [(own, update) for own, (_, update) in zip(sent[where], updates, strict=True)]
            for where, updates in self._work.items()
        }
        return examples, work

    def _run(
        self, scalars: list[tf.Tensor], asked: LookupRequest, replies: list[LookupReply]
    ) -> Any:
        copies = [ReadOnlyScalar(*each) for each in zip(self._scalars, scalars, strict=True)]
        examples, self._work = self._compute(asked, replies, copies)
        sent = {where: [own for own, _ in updates] for where, updates in self._work.items()}
        return examples, sent


def _initial_seed(local: Any, value: tf.Tensor, ticket: tf.Tensor) -> tf.Tensor:
    """Assigns a seed for this ticket to a local copy, and returns it."""
    fold = tf.cast(ticket * placement.SEED_STEP % (1 << 31), tf.uint32)
    begun = tf.bitwise.bitwise_xor(
        tf.cast(value, tf.uint32), tf.stack([fold, tf.constant(0, tf.uint32)])
    )
    begun = tf.cast(begun, local.dtype)
    local.assign(begun)
    return begun


def _dtype(variable: Any) -> tf.DType:
    return models.native(variable).dtype
