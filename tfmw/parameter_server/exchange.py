"""The exchange of a worker and the servers between two steps: one message there, one back.

    answers = exchange(None, asked)                   # before the first step
    values, fetched = exchange.opened(answers, asked) # in step k
    answers = exchange(work, asked)                   # its updates, and what step k + 1 needs

A server makes the updates of step k, and then answers with its variables and with the rows that
step k + 1 looks up. On the way a message takes more processor time than most updates do, a tenth
of a millisecond and more, whatever its size. So what goes to one server goes together:

    message = pack([sizes, ids, rows])                # where they are made
    sizes, ids, rows = unpack(message, specs)         # where they are used
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmw.parameter_server.lookups import Fetched, LookupRequest, Plan
from tfmw.parameter_server.updates import Update, Updates
from tfmw.parameter_server.variables import ServerPack
from tfmw.tables.shards import server


@dataclasses.dataclass
class StepUpdates:
    """The changes of one step on the servers, in this order.

    Attributes:
        updates: by server, (optimizer, its updates there); None for what no optimizer does.
        sent: by server, the tensors of these updates, if they come out of another function.
    """

    updates: dict[int, list[tuple[Any, list[Update]]]] = dataclasses.field(default_factory=dict)
    sent: dict[int, list[tf.Tensor]] | None = None
    _gradient: Any = None

    def apply(self, optimizer: Any, updates: dict[int, list[Update]], gradient: Any) -> None:
        """Adds the updates of an optimizer, which all servers count, also without any of their own.

        Args:
            gradient: one of its gradients, dense or sparse.
        """
        for where, own in updates.items():
            self.updates.setdefault(where, []).append((optimizer, own))
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        self._gradient = gradient.values if is_sparse else gradient

    def store(self, where: int, update: Update) -> None:
        """Adds an update that no optimizer makes."""
        self.updates.setdefault(where, []).append((None, [update]))

    def tensors(self, where: int) -> list[tf.Tensor]:
        """The tensors for a server: at least one, if it has to count the step."""
        if self.sent is not None:
            return self.sent.get(where, [])
        own = self.updates.get(where, [])
        sent = [t for _, updates in own for tensors, _ in updates for t in tensors]
        if own and not sent:
            sent = [tf.cast(tf.size(self._gradient), tf.int64)]
        return sent


@dataclasses.dataclass(frozen=True)
class LookupReply:
    """The answers of servers, as they come.

    Attributes:
        packed: by server.
        alone: the values of variables that are read by themselves.
        has_values: whether there are values of variables.
        has_rows: whether there are rows.
    """

    packed: dict[int, tf.Tensor]
    alone: list[tf.Tensor]
    has_values: bool
    has_rows: bool


class Exchange:
    """The messages of one worker's steps.

    Args:
        updates: of the model's variables.
        pulled: the Keras variables whose values each step needs.
        plan: the lookups of a step.
        one_op: (key, function) -> the function as one op, the same for each step.
    """

    def __init__(
        self,
        updates: Updates,
        pulled: list[Any],
        plan: Plan,
        one_op: Callable[[Any, Callable[..., Any]], Callable[..., Any]],
    ):
        self._updates = updates
        self._server_variables = updates.server_variables
        self._packs, self._alone = self._server_variables.packs(pulled)
        self._plan = plan
        self._one_op = one_op

    def __call__(
        self, work: StepUpdates | None, asked: LookupRequest | None, pull: bool = True
    ) -> LookupReply:
        """Sends the updates of a step, if any, and gets what the next one needs.

        Args:
            asked: the rows that it looks up, if they are wanted.
            pull: whether values of variables are.
        """
        work = work or StepUpdates()
        ids = {} if asked is None else asked.sent
        sent = {}
        for where in range(self._server_variables.servers):
            tensors = [*work.tensors(where), *([ids[where]] if where in ids else [])]
            if tensors or self._packs_of(where, pull):
                sent[where] = tensors
        of_server = self._one_op("sent", _packed)(list(sent.values()))
        packed = {}
        for (where, tensors), message in zip(sent.items(), of_server, strict=True):
            answer = self._with(where, work, tensors, message, where in ids, pull)
            if answer is not None:
                packed[where] = answer
        alone = [
            tf.identity(self._server_variables.shard(variable).variable.read_value())
            for variable in (self._alone if pull else ())
        ]
        return LookupReply(packed, alone, has_values=pull, has_rows=asked is not None)

    def opened(
        self, answers: LookupReply, asked: LookupRequest
    ) -> tuple[dict[int, tf.Tensor], Fetched]:
        """(values by id of the Keras variable, rows), in the function that is being traced."""
        values: dict[int, tf.Tensor] = {}
        rows: dict[int, list[tf.Tensor]] = {}
        for where, answer in answers.packed.items():
            packs = self._packs_of(where, answers.has_values)
            specs = [tf.TensorSpec([None], pack.dtype) for pack in packs]
            specs += self._plan.specs(where) if answers.has_rows else []
            key = ("arrived", where, answers.has_values, answers.has_rows)
            flats, rows[where] = self._one_op(key, functools.partial(_split, packs, specs))(answer)
            variables = [variable for pack in packs for variable in pack.variables]
            values.update({id(v): value for v, value in zip(variables, flats, strict=True)})
        if answers.has_values:
            own = zip(self._alone, answers.alone, strict=True)
            values.update({id(variable): value for variable, value in own})
        return values, self._plan.fetched(asked, rows) if answers.has_rows else Fetched([])

    def _packs_of(self, where: int, pull: bool) -> list[ServerPack]:
        return [b for b in self._packs if b.server == where] if pull else []

    def _with(
        self,
        where: int,
        work: StepUpdates,
        sent: list[tf.Tensor],
        message: tf.Tensor | None,
        asks: bool,
        pull: bool,
    ) -> tf.Tensor | None:
        """With one server: what it answers, if anything, to these tensors in this message."""
        own = work.updates.get(where, [])
        packs = self._packs_of(where, pull)
        specs = [spec_of(tensor) for tensor in sent]
        run = functools.partial(self._run, where, own, packs, asks, specs)
        with tf.device(server(where)):
            op = self._one_op(("exchange", where, bool(own), asks, pull), run)
            answer = op() if message is None else op(message)
        if not (packs or asks):
            return None
        return tf.identity(answer)  # on the worker: each use would fetch it again

    def _run(
        self,
        where: int,
        work: list[tuple[Any, list[Update]]],
        packs: list[ServerPack],
        asks: bool,
        specs: list[tf.TensorSpec],
        *message: tf.Tensor,
    ) -> tf.Tensor:
        """On a server, as one op.

        Separate ops would each send the worker a message. Also, if a worker died between an update
        and its count, the update would be made again.
        """
        arrived = iter(unpack(message[0], specs) if message else [])
        applied = False
        for optimizer, updates in work:
            made = [([next(arrived) for _ in tensors], update) for tensors, update in updates]
            if optimizer is None:
                for tensors, update in made:
                    update(*tensors)
            else:
                self._updates.run(where, optimizer, made)
                applied = True
        # Each step is counted once, with any number of optimizers.
        if applied and where == self._server_variables.home:
            self._server_variables.applied.assign_add(1)
        shard = self._server_variables.shard
        answer = [
            of.pack(shard(variable).variable.read_value() for variable in of.variables)
            for of in packs
        ]
        if asks:
            *_, ids = arrived
            answer += self._plan.answer(where, ids)
        return pack(answer) if answer else tf.constant(0)


def _packed(sent: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor | None]:
    """A message to each server; None if there is nothing to say."""
    return [pack(tensors) if tensors else None for tensors in sent]


def _split(
    packs: Sequence[ServerPack], specs: Sequence[tf.TensorSpec], answer: tf.Tensor
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """(values of the variables of all packs, rows of each kind)."""
    parts = unpack(answer, specs)
    flats, rows = parts[: len(packs)], parts[len(packs) :]
    values = [v for b, flat in zip(packs, flats, strict=True) for v in b.unpack(flat).values()]
    return values, rows


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """Shape, of which the first axis may vary, and dtype."""
    shape = tensor.shape.as_list()
    return tf.TensorSpec([None, *shape[1:]] if shape else [], tensor.dtype)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One tensor of some; uint8 [bytes], unless it is one only.

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
        specs: `spec_of` each of them.
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
