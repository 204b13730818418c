"""How often replicas exchange weights, and how: the `sync_` arguments of `fit`, checked."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import sys
from typing import Any

import keras

from tfmw.cluster.cluster import ROUNDS
from tfmw.errors import UsageError, is_whole
from tfmw.train.arguments import FitArguments
from tfmw.train.checkpoint.schedule import Schedule
from tfmw.train.local_sgd.quantized_sum import LEVELS


@dataclasses.dataclass(frozen=True)
class SyncSettings:
    """The exchange of weights of one call of fit."""

    every: int  # steps between two exchanges of the same weights
    fragments: int  # parts of the weights, which are exchanged in turns
    overlap: int  # steps that run during an exchange
    compression: str | None  # "int8" or "int4"; None for float32
    outer: dict[str, Any]  # the configuration of the outer optimizer
    between: str = "replicas"  # or "machines": what trains on its own between two exchanges
    elastic: bool = False  # whether members come and go; see `elastic_rounds`
    seconds: float | None = None  # between two exchanges, in place of `every`; elastic ones only

    @classmethod
    def of(cls, arguments: FitArguments) -> SyncSettings | None:
        """The settings of a call; None if it has no `sync_every`.

        Raises:
            UsageError: a wrong value, or arguments that cannot be combined.
        """
        every = arguments.sync_every
        if every is None:
            for name, default in _DEFAULTS.items():
                if getattr(arguments, name) != default:
                    raise UsageError(f"received {name}= without sync_every=: add sync_every=50.")
            return None
        elastic = arguments.sync_elastic or bool(os.environ.get(ROUNDS))
        seconds = _seconds(every) if elastic else None
        settings = cls(
            sys.maxsize if seconds is not None else _number("sync_every", every, 1),
            _number("sync_fragments", arguments.sync_fragments, 1),
            _number("sync_overlap", arguments.sync_overlap, 0),
            arguments.sync_compression,
            _config_of(arguments.outer_optimizer),
            arguments.sync_between,
            elastic,
            seconds,
        )
        settings._check()
        if arguments.gradient_compression is not None:
            raise UsageError(
                "received sync_every and gradient_compression: no gradients are sent then. Use "
                'sync_compression="int8".'
            )
        if arguments.shard_optimizer is True:
            raise UsageError(
                "received sync_every and shard_optimizer=True: each replica makes its own updates "
                "then. Leave one of them out."
            )
        return settings

    def _check(self) -> None:
        if self.fragments > self.every:
            raise UsageError(
                f"received sync_fragments={self.fragments} and sync_every={self.every}: expected "
                "at most one fragment for each step."
            )
        if self.overlap >= self.every // self.fragments:
            raise UsageError(
                f"received sync_overlap={self.overlap}: expected fewer than sync_every // "
                f"sync_fragments = {self.every // self.fragments} steps, as an exchange must end "
                "before the next one begins."
            )
        if self.compression is not None and self.compression not in LEVELS:
            raise UsageError(
                f"received sync_compression={self.compression!r}: expected "
                f"{' or '.join(map(repr, LEVELS))}, or None."
            )
        if self.elastic and (self.fragments > 1 or self.overlap or self.between != "replicas"):
            raise UsageError(
                "received sync_fragments, sync_overlap or sync_between for workers that come and "
                "go: they exchange all weights at once. Leave these out, or train without "
                "sync_elastic and tfmw run --elastic."
            )
        if self.between not in ("replicas", "machines"):
            raise UsageError(
                f"received sync_between={self.between!r}: expected 'replicas' or 'machines'."
            )

    # ------------------------------------------------------------ the schedule

    def begun_after(self, step: int) -> int | None:
        """The fragment of which an exchange begins after a step of an epoch, from 1; or None."""
        return self.applied_after(step + self.overlap)

    def applied_after(self, step: int) -> int | None:
        """The fragment of which the exchanged values are applied after a step, or None."""
        for fragment in range(self.fragments):
            end = (fragment + 1) * self.every // self.fragments
            if step > 0 and (step - end) % self.every == 0:
                return fragment
        return None

    def steps_to_next(self, step: int) -> int:
        """Number of steps after `step` until an exchange begins or ends."""
        if self.seconds is not None:
            return sys.maxsize
        acts = (self.begun_after, self.applied_after)
        due = (s for s in itertools.count(step + 1) if any(act(s) is not None for act in acts))
        return next(due) - step


_DEFAULTS = {
    "outer_optimizer": None,
    "sync_fragments": 1,
    "sync_overlap": 0,
    "sync_compression": None,
    "sync_between": "replicas",
    "sync_elastic": False,
}


def _number(name: str, value: Any, least: int) -> int:
    if not is_whole(value, least):
        raise UsageError(f"received {name}={value!r}: expected a whole number from {least} up.")
    return value


def _seconds(every: Any) -> float | None:
    """Seconds between two rounds; None if `every` is a number of steps."""
    if not isinstance(every, str | datetime.timedelta):
        return None
    seconds = Schedule(every).seconds
    if not seconds:
        raise UsageError(
            f'received sync_every={every!r}: expected a number of steps, or a time such as "10 s".'
        )
    return seconds


def _config_of(optimizer: Any) -> dict[str, Any]:
    """The configuration of an optimizer; by default the one that sets weights to their mean."""
    if optimizer is None:
        optimizer = keras.optimizers.SGD(learning_rate=1.0)
    given = dict(optimizer) if isinstance(optimizer, dict) else optimizer  # Keras changes it
    try:
        config: dict[str, Any] = keras.optimizers.serialize(keras.optimizers.get(given))
    except (ValueError, TypeError) as e:
        raise UsageError(
            f"received outer_optimizer={optimizer!r}: expected one of keras.optimizers, such as "
            f"keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True) ({e})."
        ) from None
    return config


def checked(arguments: FitArguments) -> FitArguments:
    """The arguments, with the outer optimizer as its configuration, which can be sent.

    Raises:
        UsageError: see `SyncSettings.of`.
    """
    settings = SyncSettings.of(arguments)
    if settings is None or arguments.outer_optimizer is None:
        return arguments
    return dataclasses.replace(arguments, outer_optimizer=settings.outer)
