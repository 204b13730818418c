"""Exchange of a worker and the servers between two steps: one message each way.

    reply = exchange({}, asked)                       # before the first step
    values, fetched = exchange.opened([reply], asked) # in step k
    reply = exchange(work, asked)                     # its updates, and the rows for step k + 1

A server makes the updates of step k, and then answers with its variables and with the rows that
step k + 1 looks up. A message of any size takes 0.1 ms of processor time or more, which exceeds
that of most updates. So all tensors for one server are sent together:

    message = pack([sizes, ids, rows])                # in the sending task
    sizes, ids, rows = unpack(message, specs)         # in the receiving task
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmw.tables.shards import server
from tfmw.train.parameter_server.lookups import Fetched, LookupRequest, Plan
from tfmw.train.parameter_server.updates import StepUpdates, Update
from tfmw.train.parameter_server.variables import ServerPack, ServerVariables


class LookupReply(NamedTuple):
    """Answers of the servers, as they arrive; a structure of tensors for TensorFlow, too."""

    packed: dict[int, tf.Tensor]  # server -> its answer
    unpacked: list[tf.Tensor]  # the values of variables that are read separately


class Exchange:
    """The messages of one worker's steps.

    Args:
        pulled: the Keras variables whose values each step needs.
        plan: the lookups of a step.
        one_op: (key, function) -> the function as one op, the same op for each step.
    """

    def __init__(
        self,
        server_variables: ServerVariables,
        pulled: list[Any],
        plan: Plan,
        one_op: Callable[[Any, Callable[..., Any]], Callable[..., Any]],
    ):
        self._server_variables = server_variables
        packs = server_variables.packs(pulled)
        self._packs = [pack for pack in packs if not pack.is_single]
        self._unpacked = [v for pack in packs if pack.is_single for v in pack.variables]
        self._plan = plan
        self._one_op = one_op

    def __call__(
        self, work: StepUpdates, asked: LookupRequest | None, pull: bool = True
    ) -> LookupReply:
        """Sends the updates of a step, if any, and gets the values of the next one.

        Args:
            asked: the rows that it looks up, if they are wanted.
            pull: whether values of variables are.
        """
        ids = {} if asked is None else asked.sent
        sent = {}
        for where in range(self._server_variables.servers):
            tensors = [tensor for own, _ in work.get(where, ()) for tensor in own]
            tensors += [ids[where]] if where in ids else []
            if tensors or self._packs_of(where, pull):
                sent[where] = tensors
        packed_op = self._one_op("sent", lambda sent: [pack(of) if of else None for of in sent])
        messages = packed_op(list(sent.values()))
        packed = {}
        for (where, tensors), message in zip(sent.items(), messages, strict=True):
            own, packs, asks = work.get(where, []), self._packs_of(where, pull), where in ids
            specs = [spec_of(tensor) for tensor in tensors]
            run = functools.partial(self._run, where, own, packs, asks, specs)
            with tf.device(server(where)):
                op = self._one_op(("exchange", where, bool(own), asks, pull), run)
                answer = op() if message is None else op(message)
            if packs or asks:
                # on the worker: otherwise each use would fetch it again
                packed[where] = tf.identity(answer)
        unpacked = [
            tf.identity(self._server_variables.shard(variable).variable.read_value())
            for variable in (self._unpacked if pull else ())
        ]
        return LookupReply(packed, unpacked)

    def opened(
        self, replies: Sequence[LookupReply], asked: LookupRequest
    ) -> tuple[dict[int, tf.Tensor], Fetched]:
        """(values by id of the Keras variable, rows), in the function that is being traced.

        Args:
            replies: one reply with values and rows, or one with values and one with rows.
            asked: the request for the rows.
        """
        values: dict[int, tf.Tensor] = {}
        rows: dict[int, list[tf.Tensor]] = {}
        for reply in replies:
            has_values, has_rows = reply is replies[0], reply is replies[-1]
            for where, answer in reply.packed.items():
                packs = self._packs_of(where, has_values)
                specs = [tf.TensorSpec([None], pack.dtype) for pack in packs]
                specs += self._plan.specs(where) if has_rows else []
                key = ("arrived", where, has_values, has_rows)
                split = self._one_op(key, functools.partial(_split, packs, specs))
                flats, rows[where] = split(answer)
                variables = [variable for pack in packs for variable in pack.variables]
                values.update({id(v): value for v, value in zip(variables, flats, strict=True)})
        values.update({id(v): x for v, x in zip(self._unpacked, replies[0].unpacked, strict=True)})
        return values, self._plan.fetched(asked, rows)

    def _packs_of(self, where: int, pull: bool) -> list[ServerPack]:
        return [b for b in self._packs if b.server == where] if pull else []

    def _run(
        self,
        where: int,
        work: list[Update],
        packs: list[ServerPack],
        asks: bool,
        specs: list[tf.TensorSpec],
        *message: tf.Tensor,
    ) -> tf.Tensor:
        """Makes updates and answers, on a server, as one op.

        Separate ops would each send the worker a message. Also, if a worker died between an update
        and its count, the update would be made again.
        """
        arrived = iter(unpack(message[0], specs) if message else [])
        for tensors, update in work:
            update(*itertools.islice(arrived, len(tensors)))
        shard = self._server_variables.shard
        answer = [
            of.pack(shard(variable).variable.read_value() for variable in of.variables)
            for of in packs
        ]
        if asks:
            *_, ids = arrived
            answer += self._plan.answer(where, ids)
        return pack(answer) if answer else tf.constant(0)


def _split(
    packs: Sequence[ServerPack], specs: Sequence[tf.TensorSpec], answer: tf.Tensor
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """(values of the variables of all buckets, rows of each kind)."""
    parts = unpack(answer, specs)
    flats, rows = parts[: len(packs)], parts[len(packs) :]
    values = [v for b, flat in zip(packs, flats, strict=True) for v in b.unpack(flat).values()]
    return values, rows


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """The dtype and shape of a tensor, with any length of the first axis."""
    shape = tensor.shape.as_list()
    return tf.TensorSpec([None, *shape[1:]] if shape else [], tensor.dtype)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors as bytes, uint8 [n]; a single tensor is returned unchanged.

    Args:
        tensors: [n, ...] or [], of any types of fixed size, not bool.
    """
    if len(tensors) == 1:
        return tensors[0]
    parts = [tf.reshape(tf.bitcast(tensor, tf.uint8), [-1]) for tensor in tensors]
    lengths = tf.concat(tf.raw_ops.ShapeN(input=parts, out_type=tf.int64), axis=0)
    return tf.concat([tf.reshape(tf.bitcast(lengths, tf.uint8), [-1]), *parts], axis=0)


def unpack(message: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors of `pack`.

    Args:
        specs: `spec_of` of each tensor.
    """
    if len(specs) == 1:
        return [message]
    header = tf.int64.size * len(specs)
    lengths = tf.bitcast(tf.reshape(message[:header], [-1, tf.int64.size]), tf.int64)
    parts = tf.split(message[header:], lengths, num=len(specs))
    return [_restored(part, spec) for part, spec in zip(parts, specs, strict=True)]


def _restored(part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    size = spec.dtype.size
    flat = tf.bitcast(tf.reshape(part, [-1, size] if size > 1 else [-1]), spec.dtype)
    shape = spec.shape.as_list()
    assert all(axis is not None for axis in shape[1:]), spec
    if not shape:
        return tf.reshape(flat, [])
    if math.prod(shape[1:]) == 0:
        raise ValueError(f"{spec} has no elements: its first axis cannot be told from its bytes")
    return tf.reshape(flat, [-1, *shape[1:]])
