"""Rounds whose members come and go: exchanges through a server, and the state of new members.

A member joins before the first step, exchanges as in `Rounds`, and stays until all members are
done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import models, placement
from tfmw.data import Sharding
from tfmw.train.local_sgd.quantized_sum import QuantizedSum
from tfmw.train.local_sgd.round_client import RoundClient
from tfmw.train.local_sgd.rounds import BEGUN, Rounds
from tfmw.train.local_sgd.sync_settings import LocalSGD
from tfmw.train.mirrored.sync_driver import SyncDriver


class ElasticRounds(Rounds):
    """The exchanges of one member. Moving averages of layers are averaged, too.

    Args:
        strategy, settings, sharding: see `Rounds`; the strategy has one replica.
        client: a client that has entered.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        settings: LocalSGD,
        sharding: Sharding,
        client: RoundClient,
    ):
        super().__init__(strategy, settings, sharding)
        self._client = client
        self._last = time.monotonic()
        self._steps = 0  # steps since the last round
        self._step = 0  # step within the epoch
        self.joined = False  # whether this member has joined
        self.ended = 0  # number of rounds of this member
        self._outcome: list[np.ndarray] | None = None  # result of a training that is over
        self._packs: QuantizedSum | None = None
        self.saves = True  # whether `state` is for a backup on disk

    @contextlib.contextmanager
    def driver(self, model: keras.Model) -> Iterator[SyncDriver]:
        member = self._client.member
        with super().driver(model) as driver:
            self._averages = driver.state.all_variables
            if self._settings.compression is not None:
                self._packs = QuantizedSum(self._outer.elements(0), self._settings.compression)
            placement.vary_seeds(model, member)  # each member draws its own random numbers
            try:
                yield driver
            finally:
                placement.vary_seeds(model, member)

    # ------------------------------------------------------------ join, and leave

    def join(self, known: int, positions: Sequence[int]) -> None:
        """Waits until this member has joined; then it has the common weights.

        Args:
            known: the number of the last round that its own state contains.
            positions: positions after that round; see `RoundClient`.
        """
        shapes = [list(w.shape) for w in self._weights]
        signature = f"weights of the shapes {shapes}, {self._settings}"
        found = self._client.join(signature, known, positions)
        if found.arrays:
            self._take_state(found.arrays)
        if found.wants_state:
            self._send_state()
        self._outcome = found.arrays if found.finished else None
        self.joined = True
        self._last = time.monotonic()

    def finish(self) -> None:
        """Stays in the rounds, without examples, until all members are done."""
        while self._outcome is None:
            if self._exchange_all(done=True):
                return
        self._take_state(self._outcome)

    def _take_state(self, state: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._state_variables(), state, strict=True):
            variable.assign(tf.constant(value))
        self._traced(self._take, 0, 0.0)()

    def _state_variables(self) -> list[Any]:
        """Variables that joining members get from others, in a fixed order."""
        weights = {id(w) for w in self._weights}
        others = [v for v in placement.updated_variables(self._model) if id(v) not in weights]
        copies = [placement.local_copies(self.strategy, v)[0] for v in others]
        return [*map(models.native, [*self._outer.common, *self._outer.state]), *copies]

    def _send_state(self) -> None:
        self._client.send_state([np.asarray(v.read_value()) for v in self._state_variables()])

    def state(self) -> dict[str, Any]:
        return super().state() if self.saves else {}

    def restore(self, tensors: Mapping[str, Any]) -> None:
        if BEGUN in tensors:  # otherwise the weights come from another member
            super().restore(tensors)

    # ------------------------------------------------------------ rounds

    def begin_epoch(self) -> None:
        self._step = 0
        if not self.joined:
            super().begin_epoch()

    def begin_at(self, step: int) -> None:
        """Starts within an epoch, after this number of its steps."""
        self._step = step

    def after_steps(self, step: int) -> None:
        self._steps += step - self._step
        self._step = step
        seconds = self._settings.seconds
        if seconds is None:
            super().after_steps(step)
        elif time.monotonic() - self._last >= seconds:
            self._exchange_all()

    def _begin(self, fragment: int) -> bool:
        # otherwise the others would wait for an empty round, at the end of an epoch
        if self._steps:
            self._exchange_all()
        return False  # the training is over

    def _exchange_all(self, done: bool = False) -> bool:
        """Runs one round; returns whether all members are done."""
        if self._outcome is not None:  # this member was lost at the very end
            return True
        gradient, own = self._traced(self._gradient, 0)()
        flat = self._replicas.first_result(gradient).numpy()
        elements, packed = flat.size, None
        examples = float(self._replicas.first_result(own))
        if self._packs is not None:
            packed = self._settings.compression
            # Without examples this member has no weight, and keeps its earlier rounding errors.
            zeros = np.zeros_like(self._packs.left)
            flat = self._packs.rounded(flat) if examples else self._packs.packed(zeros)
        averages = [placement.local_copies(self.strategy, v)[0] for v in self._averages()]
        mean = self._client.round(
            examples,
            [flat, *(np.asarray(copy.read_value()) for copy in averages)],
            self._steps,
            packed,
            elements,
            done,
        )
        self._steps = 0
        if mean.arrays:
            first = mean.arrays[0]
            if self._packs is not None:
                first = self._packs.values(first, elements)
            self._exchange = 0, lambda: tf.constant(first)
            self._apply(0.0)
            for variable, value in zip(averages, mean.arrays[1:], strict=True):
                variable.assign(tf.cast(value, variable.dtype))
        if mean.wants_state:
            self._send_state()
        self.ended += 1
        self._last = time.monotonic()
        return mean.finished
