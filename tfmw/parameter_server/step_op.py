"""A worker's step as one op, which one thread runs: it opens what servers sent, and computes.

    step = StepOp(compute, exchange, batch_spec, scalars)
    examples, work = step(batch, asked, answers)      # in the traced loop, for each of its steps

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
from tfmw.parameter_server import packed_tensors
from tfmw.parameter_server.exchange import Exchange, LookupReply, StepUpdates
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
        self,
        batch: Any,
        asked: LookupRequest,
        answers: LookupReply,
        ahead: LookupReply | None = None,
    ) -> tuple[tf.Tensor, StepUpdates]:
        """One step.

        Args:
            batch: of `batch_spec`.
            asked: the rows that it looks up.
            answers: with the values of variables.
            ahead: with the rows, if `answers` has none.
        """
        received = [answers] if ahead is None else [answers, ahead]
        if self._op is None:
            self._op = self._traced(asked, received)
        # Ops of a function that uses a GPU as well would wait for each other.
        if not self._op.is_on_one_device or tf.config.list_logical_devices("GPU"):
            scalars = [ReadOnlyScalar(variable) for variable in self._scalars]
            computed: tuple[tf.Tensor, StepUpdates] = self._compute(
                batch, *self._opened(asked, received), scalars
            )
            return computed
        read = [
            variable.read_value() if is_used else tf.zeros(variable.shape, variable.dtype)
            for variable, is_used in zip(self._scalars, self._op.uses, strict=False)
        ]
        examples, sent = self._op(read, _of_asked(asked), [_of_answers(a) for a in received])
        return examples, self._work.sending(dict(zip(self._work.updates, sent, strict=True)))

    def _traced(
        self, asked: LookupRequest, received: list[LookupReply]
    ) -> parameter_servers.TracedOp:
        def run(scalars: Any, of_asked: Any, of_received: Any) -> Any:
            own = _asked_of(of_asked)
            opened = self._opened(
                own, [_answers_of(*each) for each in zip(received, of_received, strict=True)]
            )
            batch = tf.nest.pack_sequence_as(self._batch_spec, own.leaves, expand_composites=True)
            values = zip(self._scalars, scalars, strict=True)
            examples, self._work = self._compute(
                batch, *opened, [ReadOnlyScalar(*each) for each in values]
            )
            return examples, [self._work.tensors(where) for where in self._work.updates]

        specs = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
            (self._scalars, _of_asked(asked)),
        )
        # Replies have any length, those of the first step too.
        more = tf.nest.map_structure(packed_tensors.spec_of, [_of_answers(a) for a in received])
        return parameter_servers.TracedOp(run, *specs, more)

    def _opened(
        self, asked: LookupRequest, received: list[LookupReply]
    ) -> tuple[dict[int, tf.Tensor], Fetched]:
        (values, fetched), *ahead = [self._exchange.opened(each, asked) for each in received]
        return values, ahead[0][1] if ahead else fetched


def _of_asked(asked: LookupRequest) -> Any:
    """The tensors that the step needs."""
    return asked.leaves, asked.ids, asked.routes


def _asked_of(tensors: Any) -> LookupRequest:
    leaves, ids, routes = tensors
    return LookupRequest(leaves, ids, routes, sent={})


def _of_answers(answers: LookupReply) -> Any:
    return list(answers.packed.values()), answers.alone


def _answers_of(answers: LookupReply, tensors: Any) -> LookupReply:
    packed, alone = tensors
    return dataclasses.replace(
        answers, packed=dict(zip(answers.packed, packed, strict=True)), alone=alone
    )
