"""A worker's step as one op, which one thread runs: it opens what servers sent, and computes.

    step = StepOp(compute, exchange, batch_spec, scalars)
    examples, work = step(batch, asked, [answers])    # in the traced loop, for each of its steps

A step has hundreds of small ops. Where threads share them, handing them over takes as long as they
do. Also, of all steps in the loop only the first is traced.

A step that has ops on another device, such as a lookup whose rows could not be asked for before, is
traced each time into the loop: a function on several devices would wait within a thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmw.keras_compat import parameter_servers
from tfmw.parameter_server.exchange import Exchange, LookupReply, StepUpdates, spec_of
from tfmw.parameter_server.lookups import Fetched, LookupRequest
from tfmw.parameter_server.updates import ReadOnlyScalar

Compute = Callable[[Any, dict[int, tf.Tensor], Fetched, list[ReadOnlyScalar]], Any]


class StepOp:
    """The steps in one traced function.

    Args:
        compute: (batch, values by id of the Keras variable, rows, scalars of the optimizers) ->
            (int64 [], its number of examples; what the step changes on the servers).
        exchange: that opens what servers send.
        batch_spec: structure of tf.TensorSpec.
        scalars: the variables on servers, one for each of the scalars.
    """

    def __init__(
        self, compute: Compute, exchange: Exchange, batch_spec: Any, scalars: list[tf.Variable]
    ):
        self._compute = compute
        self._exchange = exchange
        self._batch_spec = batch_spec
        self._scalars = scalars
        self._op: parameter_servers.TracedOp | None = None
        self._work = StepUpdates()

    def __call__(
        self, batch: Any, asked: LookupRequest, received: list[LookupReply]
    ) -> tuple[tf.Tensor, StepUpdates]:
        """One step.

        Args:
            batch: of `batch_spec`.
            asked: the rows that it looks up.
            received: the values of variables and the rows, in one reply or one each.
        """
        sent = [(answers.packed, answers.alone) for answers in received]
        if self._op is None:
            self._op = self._traced(asked, received, sent)
        # Ops of a function that uses a GPU as well would wait for each other.
        if not self._op.is_on_one_device or tf.config.list_logical_devices("GPU"):
            scalars = [ReadOnlyScalar(variable) for variable in self._scalars]
            computed: tuple[tf.Tensor, StepUpdates] = self._compute(
                batch, *self._opened(received, asked), scalars
            )
            return computed
        read = [
            variable.read_value() if is_used else tf.zeros(variable.shape, variable.dtype)
            for variable, is_used in zip(self._scalars, self._op.uses, strict=False)
        ]
        examples, tensors = self._op(read, asked, sent)
        return examples, StepUpdates(self._work.updates, tensors)

    def _traced(
        self, asked: LookupRequest, received: list[LookupReply], sent: Any
    ) -> parameter_servers.TracedOp:
        def run(scalars: list[tf.Tensor], asked: LookupRequest, sent: Any) -> Any:
            own = [
                dataclasses.replace(answers, packed=packed, alone=alone)
                for answers, (packed, alone) in zip(received, sent, strict=True)
            ]
            batch = tf.nest.pack_sequence_as(self._batch_spec, asked.leaves, expand_composites=True)
            copies = [ReadOnlyScalar(*each) for each in zip(self._scalars, scalars, strict=True)]
            examples, self._work = self._compute(batch, *self._opened(own, asked), copies)
            return examples, {where: self._work.tensors(where) for where in self._work.updates}

        specs = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), (self._scalars, asked)
        )
        # Replies have any length, those of the first step too.
        return parameter_servers.TracedOp(run, *specs, tf.nest.map_structure(spec_of, sent))

    def _opened(
        self, received: list[LookupReply], asked: LookupRequest
    ) -> tuple[dict[int, tf.Tensor], Fetched]:
        (values, fetched), *ahead = [self._exchange.opened(each, asked) for each in received]
        return values, ahead[0][1] if ahead else fetched
