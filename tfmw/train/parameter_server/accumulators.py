"""Synchronous updates on parameter servers, with spare workers.

    steps = SynchronousSteps(server_variables, workers=3, aggregate=2)
    coordinator.schedule(steps.function, args=(iterator, worker, limit, seeds))   # one per worker
    steps.advance(10)                          # applies 10 steps, on the coordinator

Each server has an accumulator for each bucket of its gradients. A worker reads the servers' values
of step s, sends its gradients to the accumulators, marked with s, and waits for step s + 1. Once
`aggregate` gradients of step s have arrived, the server applies their mean and the step ends. The
accumulator is then at s + 1 and drops later gradients of step s. TensorFlow 1's
SyncReplicasOptimizer used the same ops.

Counts are exact. A 1 is appended to each gradient and summed with it, so a server knows the number
of averaged gradients. Each worker counts the gradients that it sent. The metrics of an epoch
include batches whose gradients were dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.compat import models, parameter_servers
from tfmw.compat.optimizers import variables_of
from tfmw.errors import UsageError
from tfmw.tables.shards import server
from tfmw.train.parameter_server.exchange import Exchange
from tfmw.train.parameter_server.lookups import Plan
from tfmw.train.parameter_server.steps import WorkerSteps
from tfmw.train.parameter_server.updates import Grads, ReadOnlyScalar, StepUpdates, Update
from tfmw.train.parameter_server.variables import ServerPack, ServerVariables


class SynchronousSteps(WorkerSteps):
    """Steps to which several workers contribute.

    Args:
        server_variables, workers: see `WorkerSteps`.
        aggregate: number of gradients in a step.

    Attributes:
        function: (iterator, worker int64 [], limit int64 [], seeds) -> the result of
            `WorkerSteps.function`; runs until step `limit` has ended.
        spare_workers: number of workers that a step does not wait for.
    """

    _counts_steps = False  # the coordinator counts them

    def __init__(self, server_variables: ServerVariables, workers: int, aggregate: int):
        for layer in server_variables.hash_tables:  # hash tables need an order of steps
            raise UsageError(
                f"layer {layer.name!r} is a HashTableEmbedding, which gives rows to ids in the "
                "order of the workers' steps; sync_replicas=True has no such order: leave it out, "
                "or train without parameter servers."
            )
        if server_variables.divided:
            raise UsageError(
                "sync_replicas=True does not go with variables that are divided over servers: "
                "leave partitioner and min_shard_bytes out, or train asynchronously."
            )
        if len(server_variables.optimizers) != 1:
            raise UsageError(
                "sync_replicas=True needs one optimizer, the model has "
                f"{len(server_variables.optimizers)}."
            )
        (optimizer,) = server_variables.optimizers
        for variable in variables_of(optimizer):
            if variable.overwrite_with_gradient:
                raise UsageError(
                    f"{variable.path} gets new values as gradients, as float8's scales do, and "
                    "sync_replicas=True would take their mean: leave it out, or train without "
                    "parameter servers."
                )
        super().__init__(server_variables, workers)
        self.spare_workers = workers - aggregate
        self._aggregate = aggregate
        self._now: Any = None
        self._gradients = server_variables.packs(variables_of(optimizer))
        self._accumulators = []
        for number, pack in enumerate(self._gradients):
            with tf.device(server(pack.server)):
                self._accumulators.append(
                    tf.raw_ops.ResourceConditionalAccumulator(
                        dtype=pack.dtype,
                        shape=[sum(pack.sizes) + 1],
                        shared_name=f"{self._name}/gradients_{number}",
                        reduction_type="SUM",
                    )
                )
        count = functools.partial(models.own_variable, 0, dtype=tf.int64, trainable=False)
        with tf.device(server(self._gradients[0].server)):
            self._sent = count(name="gradients_sent")
        with tf.device(server(server_variables.home)):
            self._used = count(name="gradients_used")
            self._over = [
                tf.queue.FIFOQueue(-1, [tf.int64], [[]], shared_name=f"{self._name}/over_{w}")
                for w in range(workers)
            ]
        self._advance = tf.function(self._advance_by, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int64)
        )

    @property
    def dropped(self) -> int:
        """Number of gradients that arrived late, since the beginning."""
        return int(self._sent.numpy()) - int(self._used.numpy())

    def advance(self, steps: int) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Applies steps as the workers' gradients arrive.

        Returns:
            (function that waits for the end of all steps, function that cancels that call).
        """
        return parameter_servers.cancelable(self._advance, tf.constant(steps, tf.int64))

    def cancel(self) -> None:
        """Fails every call, pending or later, that waits for the end of a step."""
        for queue in self._over:
            queue.close(cancel_pending_enqueues=True)

    # ------------------------------------------------------------ on a worker

    def _many(self, iterator: Any, worker: tf.Tensor, limit: tf.Tensor, seeds: list[Any]) -> Any:
        server_variables = self.server_variables
        first = tf.identity(server_variables.applied.read_value())
        # Workers contribute to the same steps, but need different seeds.
        begun = self._initial_locals(seeds, first * len(self._over) + worker)
        plan = Plan()
        exchange = Exchange(server_variables, self._pulled, plan, self._one_op)

        def step(now: tf.Tensor, done: tf.Tensor, seen: tf.Tensor) -> Any:
            self._now = now
            self._sent_ops: list[tf.Tensor] = []
            batch = next(iterator)
            asked = plan.asked(batch)
            opened = exchange.opened([exchange({}, asked)], asked)
            scalars = [ReadOnlyScalar(copy) for copy in self._scalars]
            examples, work = self._step(batch, *opened, scalars)
            exchange(work, None, pull=False)
            with tf.control_dependencies(self._sent_ops), tf.device(server(server_variables.home)):
                over = self._one_op("wait", self._wait, waits=True)(worker, now)
            return tf.identity(over), done + 1, seen + examples

        _, done, seen = tf.while_loop(
            lambda now, done, seen: now < limit,
            step,
            [first, tf.constant(0, tf.int64), tf.constant(0, tf.int64)],
            parallel_iterations=1,
        )
        return self._results(done, seen, begun)

    def _wait(self, worker: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Waits until step `now` has ended; returns the number of the next step.

        A straggler finds several ended steps in its queue. It joins the newest, because its
        gradients of the steps between would arrive late too.
        """

        def own_queue(of: Callable[[Any], Any]) -> Any:
            choices = [functools.partial(of, queue) for queue in self._over]
            return tf.switch_case(tf.cast(worker, tf.int32), choices)

        (over,) = tf.while_loop(
            lambda step: tf.logical_or(step <= now, own_queue(lambda queue: queue.size()) > 0),
            lambda _: own_queue(lambda queue: queue.dequeue()),
            [now],
            parallel_iterations=1,
        )
        return over

    def _update(self, optimizer: Any, grads: Grads, work: StepUpdates) -> None:
        """Sends this worker's gradients to the accumulators, marked with their step."""
        del optimizer, work  # the coordinator runs the update
        by_variable = {id(v): g for g, v in grads}
        missing = [v.path for p in self._gradients for v in p.variables if id(v) not in by_variable]
        if missing:
            raise UsageError(
                f"no gradient for {missing[0]}: with sync_replicas=True every trainable variable "
                "needs one; freeze it (trainable=False)."
            )
        for number, pack in enumerate(self._gradients):
            flat = pack.pack(by_variable[id(v)] for v in pack.variables)
            with tf.device(server(pack.server)):
                op = self._one_op(
                    ("accumulate", number), functools.partial(self._accumulate, number)
                )
                done_here = op(tf.concat([flat, tf.ones([1], pack.dtype)], axis=0), self._now)
            self._sent_ops.append(done_here)

    def _accumulate(self, number: int, flat: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Adds one worker's gradients of step `now` on a server, or drops them as too late."""
        if number == 0:
            self._sent.assign_add(1)
        tf.raw_ops.ResourceAccumulatorApplyGradient(
            handle=self._accumulators[number], local_step=now, gradient=flat
        )
        return tf.constant(0, tf.int64)

    # ------------------------------------------------------------ on the coordinator

    def _advance_by(self, steps: tf.Tensor) -> tf.Tensor:
        def step(made: tf.Tensor) -> tf.Tensor:
            done_here = []
            for where in range(self.server_variables.servers):
                op = parameter_servers.one_op(functools.partial(self._apply, where))
                with tf.device(server(where)):
                    done_here.append(op())
            # Through the coordinator, as servers are not connected to each other.
            all_done = tf.add_n([tf.identity(t) for t in done_here])
            with tf.device(server(self.server_variables.home)):
                over = parameter_servers.one_op(self._end_step)(all_done)
            return made + 1 + tf.identity(over) * 0

        with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
            (made,) = tf.while_loop(
                lambda made: made < steps, step, [tf.constant(0, tf.int64)], parallel_iterations=1
            )
        return made

    def _apply(self, where: int) -> tf.Tensor:
        """Waits for enough gradients on one server, and updates its variables with their mean."""
        (optimizer,) = self.server_variables.optimizers
        updates: list[Update] = []
        used = tf.constant(0, tf.int64)
        for number, pack in enumerate(self._gradients):
            if pack.server != where:
                continue
            total = tf.raw_ops.ResourceAccumulatorTakeGradient(
                handle=self._accumulators[number], num_required=self._aggregate, dtype=pack.dtype
            )
            if number == 0:
                used = tf.cast(total[-1], tf.int64)

            def update(total: tf.Tensor, pack: ServerPack = pack) -> None:
                self._updates.update_pack(optimizer, pack, total[:-1] / total[-1])

            updates.append(([total], update))
        self._updates.run(where, optimizer, updates, *(total for (total,), _ in updates))
        return used

    def _end_step(self, used: tf.Tensor) -> tf.Tensor:
        """Counts the step and notifies every worker of its end."""
        self._used.assign_add(used)
        over = self.server_variables.applied.assign_add(1, read_value=True)
        for queue in self._over:
            queue.enqueue(over)
        return tf.identity(over)
