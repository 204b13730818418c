"""`tfmw.LocalSGD` and `tfmw.DiLoCo`: settings of the replicas' exchanges of weights."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras

from tfmw.errors import UsageError, require_choice, require_whole
from tfmw.train.arguments import FitArguments
from tfmw.train.local_sgd.quantized_sum import LEVELS


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Local SGD, experimental: replicas train independently, then set their weights to the mean.

        history = tfmw.fit(model, dataset, sync=tfmw.LocalSGD(every=50))

    It is made for slow networks: replicas communicate once in `every` steps, and after each epoch.
    The results differ from those of one process.

    Args:
        every: number of steps that each replica trains between two exchanges of the same weights.
        fragments: number of fragments in which the weights are exchanged, in turns, each after
            `every` steps (Streaming DiLoCo, arXiv 2501.18512).
        overlap: number of steps that run during an exchange. A replica then takes half of the
            common weights, and half of its own.
        compression: "int8" or "int4" sends differences of weights in 8 or 4 bits. A worker adds its
            rounding errors to the next exchange. None sends float32.
        between: "machines": replicas of one machine sum their gradients in each step, and machines
            exchange weights. "replicas": each replica trains independently.

    Raises:
        UsageError: a value is wrong, or values contradict each other.
    """

    every: int
    _: dataclasses.KW_ONLY
    fragments: int = 1
    overlap: int = 0
    compression: str | None = None
    between: str = "replicas"

    def __post_init__(self) -> None:
        require_whole("every", self.every, 1)
        require_whole("fragments", self.fragments, 1)
        require_whole("overlap", self.overlap, 0)
        if self.fragments > self.every:
            raise UsageError(
                f"received fragments={self.fragments} and every={self.every}: expected at most one "
                "fragment for each step."
            )
        if self.overlap >= self.every // self.fragments:
            raise UsageError(
                f"received overlap={self.overlap}: expected fewer than every // fragments = "
                f"{self.every // self.fragments} steps, as an exchange must end before the next "
                "one begins."
            )
        require_choice("compression", self.compression, (None, *LEVELS))
        require_choice("between", self.between, ("replicas", "machines"))

    @property
    def outer(self) -> dict[str, Any]:
        """Configuration of the optimizer of the common weights, which sets them to the mean here.

        Its gradient is (common weights - mean of the replicas' weights).
        """
        return _config_of(keras.optimizers.SGD(learning_rate=1.0))

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON, for the record of a backup."""
        names = ("every", "fragments", "overlap", "compression", "between", "outer")
        return {name: getattr(self, name) for name in names}

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
            end = (fragment + 1) * self.every // self.fragments
            if step > 0 and (step - end) % self.every == 0:
                return fragment
        return None

    def steps_to_next(self, step: int) -> int:
        """Number of steps after `step` until an exchange begins or ends."""
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
        every, fragments, overlap, compression, between: see `LocalSGD`.
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
