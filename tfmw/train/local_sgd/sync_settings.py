"""`tfmw.LocalSGD` and `tfmw.DiLoCo`: settings of the replicas' exchanges of weights."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import sys
from typing import Any

import keras

from tfmw.cluster.cluster import ROUNDS
from tfmw.errors import UsageError, require_choice, require_whole
from tfmw.train.arguments import FitArguments
from tfmw.train.checkpoint.schedule import Schedule
from tfmw.train.local_sgd.quantized_sum import LEVELS


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Local SGD, experimental: replicas train independently, then set their weights to the mean.

        history = tfmw.fit(model, dataset, sync=tfmw.LocalSGD(every=50))

    It is made for slow networks: replicas communicate once in `every` steps, and after each epoch.
    The results differ from those of one process.

    Args:
        every: number of steps that each replica trains between two exchanges of the same weights.
            With `elastic`, it may be a time such as "10 s" or a `datetime.timedelta`.
        fragments: number of fragments in which the weights are exchanged, in turns, each after
            `every` steps (Streaming DiLoCo, arXiv 2501.18512).
        overlap: number of steps that run during an exchange. A replica then takes half of the
            common weights, and half of its own.
        compression: "int8" or "int4" sends differences of weights in 8 or 4 bits. A worker adds its
            rounding errors to the next exchange. None sends float32.
        between: "machines": replicas of one machine sum their gradients in each step, and machines
            exchange weights. "replicas": each replica trains independently.
        elastic: with `fit(workers=)`: workers come and go, as with `tfmw run --elastic`. Rounds
            continue without a lost worker until it is back.

    Raises:
        UsageError: a value is wrong, or values contradict each other.
    """

    every: int | str | datetime.timedelta
    _: dataclasses.KW_ONLY
    fragments: int = 1
    overlap: int = 0
    compression: str | None = None
    between: str = "replicas"
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.seconds is None:
            require_whole("every", self.every, 1)
        require_whole("fragments", self.fragments, 1)
        require_whole("overlap", self.overlap, 0)
        if self.fragments > self.steps:
            raise UsageError(
                f"received fragments={self.fragments} and every={self.every}: expected at most one "
                "fragment for each step."
            )
        if self.overlap >= self.steps // self.fragments:
            raise UsageError(
                f"received overlap={self.overlap}: expected fewer than every // fragments = "
                f"{self.steps // self.fragments} steps, as an exchange must end before the next "
                "one begins."
            )
        require_choice("compression", self.compression, (None, *LEVELS))
        require_choice("between", self.between, ("replicas", "machines"))
        if self.elastic and (self.fragments > 1 or self.overlap or self.between != "replicas"):
            raise UsageError(
                "received fragments, overlap or between for workers that come and go: they "
                "exchange all weights at once. Leave these out, or train without elastic=True and "
                "tfmw run --elastic."
            )

    @property
    def steps(self) -> int:
        """Steps between two exchanges of the same weights; no limit if `every` is a time."""
        return sys.maxsize if isinstance(self.every, str | datetime.timedelta) else self.every

    @property
    def seconds(self) -> float | None:
        """Seconds between two exchanges; None if `every` is a number of steps."""
        if not isinstance(self.every, str | datetime.timedelta):
            return None
        seconds = Schedule(self.every).seconds
        if not seconds:
            raise UsageError(
                f"received every={self.every!r}: expected a number of steps, or a time such as "
                '"10 s".'
            )
        return seconds

    @property
    def outer(self) -> dict[str, Any]:
        """Configuration of the optimizer of the common weights, which sets them to the mean here.

        Its gradient is (common weights - mean of the replicas' weights).
        """
        return _config_of(keras.optimizers.SGD(learning_rate=1.0))

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON, for the record of a backup."""
        names = ("fragments", "overlap", "compression", "between", "elastic", "outer", "seconds")
        return {"every": self.steps, **{name: getattr(self, name) for name in names}}

    def refuse_other(self, record: dict[str, Any] | None) -> None:
        """Raises UsageError if a backup was written with other settings."""
        saved = None if record is None else record["feed"].get("rounds")
        if saved is not None and saved != self.as_json():
            raise UsageError(
                f"the backup was written with {saved}, this call has {self.as_json()}: resume with "
                "the same sync=, or use another backup_dir."
            )

    # ------------------------------------------------------------ the schedule

    def begun_after(self, step: int) -> int | None:
        """The fragment whose exchange begins after a step of an epoch, from 1; or None."""
        return self.applied_after(step + self.overlap)

    def applied_after(self, step: int) -> int | None:
        """The fragment whose exchanged values are applied after a step, or None."""
        for fragment in range(self.fragments):
            end = (fragment + 1) * self.steps // self.fragments
            if step > 0 and (step - end) % self.steps == 0:
                return fragment
        return None

    def steps_to_next(self, step: int) -> int:
        """Number of steps after `step` until an exchange begins or ends."""
        if self.seconds is not None:
            return sys.maxsize
        acts = (self.begun_after, self.applied_after)
        due = (s for s in itertools.count(step + 1) if any(act(s) is not None for act in acts))
        return next(due) - step


@dataclasses.dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """DiLoCo, experimental: local SGD whose common weights have an optimizer of their own.

        outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        history = tfmw.fit(model, dataset, sync=tfmw.DiLoCo(every=100, outer_optimizer=outer))

    The outer gradient is (common weights - mean of the replicas' weights) (Douillard et al.,
    arXiv 2311.08105).

    Args:
        every, fragments, overlap, compression, between, elastic: see `LocalSGD`.
        outer_optimizer: a Keras optimizer, its name or its configuration. None: the one of the
            paper, SGD with a rate of 0.7 and Nesterov momentum of 0.9.

    Raises:
        UsageError: a value is wrong, or values contradict each other.
    """

    outer_optimizer: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        optimizer = self.outer_optimizer
        if optimizer is None:
            optimizer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        # A configuration can be compared, and sent to other processes.
        object.__setattr__(self, "outer_optimizer", _config_of(optimizer))

    @property
    def outer(self) -> dict[str, Any]:
        config: dict[str, Any] = self.outer_optimizer
        return config


def settings_of(arguments: FitArguments) -> LocalSGD | None:
    """The settings of a call; None if it sums gradients in each step.

    Raises:
        UsageError: `sync` is no such object, or other arguments contradict it.
    """
    settings = arguments.sync
    if settings is None:
        return None
    if not isinstance(settings, LocalSGD):
        raise UsageError(
            f"received sync={settings!r}: expected tfmw.LocalSGD(every=50), tfmw.DiLoCo(every=100) "
            "or None."
        )
    if os.environ.get(ROUNDS):
        settings = dataclasses.replace(settings, elastic=True)
    if settings.seconds is not None and not settings.elastic:
        raise UsageError(
            f"received every={settings.every!r}: expected a whole number from 1 up. A time is for "
            "workers that come and go: tfmw run --elastic, or elastic=True with fit(workers=)."
        )
    if arguments.gradient_compression is not None:
        raise UsageError(
            "received sync and gradient_compression: no gradients are sent then. Use "
            'compression="int8" of sync.'
        )
    if arguments.shard_optimizer is True:
        raise UsageError(
            "received sync and shard_optimizer=True: each replica makes its own updates then. "
            "Leave one of them out."
        )
    return settings


def _config_of(optimizer: Any) -> dict[str, Any]:
    """The configuration of an optimizer, its name or its configuration."""
    # Keras changes the configuration
    given = dict(optimizer) if isinstance(optimizer, dict) else optimizer
    try:
        config: dict[str, Any] = keras.optimizers.serialize(keras.optimizers.get(given))
    except (ValueError, TypeError) as e:
        raise UsageError(
            f"received outer_optimizer={optimizer!r}: expected one of keras.optimizers, such as "
            f"keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True) ({e})."
        ) from None
    # Keras numbers the names of a process's optimizers, which differ in a resumed run.
    config["config"].pop("name", None)
    return config
