"""The arguments of a call of fit as one value, checked once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmw import data
from tfmw.compat import datasets, models
from tfmw.data import record_index
from tfmw.errors import UsageError, require_choice
from tfmw.storage import disk
from tfmw.train.callbacks.roles import BackupAndRestore, without_backup

PRECISIONS = ("mixed_bfloat16", "mixed_float16")

_MAY_DIFFER = {
    *("model", "x", "callbacks", "verbose", "strategy", "workers", "on"),
    *("backup_dir", "export_dir", "given"),
}  # arguments of tasks that train together; they compare the data later
_OF_DATA = {"y", "sample_weight", "validation_data"}

COMPRESSIONS = {"fp16": tf.float16, "bf16": tf.bfloat16}
"""Types in which gradients are sent, by the choice of `fit(gradient_compression=...)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The arguments of `tfmw.fit`; see there.

    Raises:
        UsageError: an unknown `gradient_compression`, `precision` or `shard_optimizer`.
    """

    model: Any
    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: Any
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: dict[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: Any
    strategy: Any
    workers: Any  # a number, (least, most), a `Workers`, or None
    on: Any
    backup_dir: str | os.PathLike[str] | None
    backup_every: Any
    export_dir: str | os.PathLike[str] | None
    seed: int | None
    gradient_compression: str | None
    precision: str | None
    shard_optimizer: Any
    split_batch: bool
    sync: Any  # a tfmw.LocalSGD
    given: frozenset[str]  # names of the arguments that the caller has passed

    def __post_init__(self) -> None:
        compressions = (None, *COMPRESSIONS)
        require_choice("gradient_compression", self.gradient_compression, compressions)
        require_choice("precision", self.precision, (None, "float32", *PRECISIONS))
        require_choice("shard_optimizer", self.shard_optimizer, (True, False, "auto"))
        if not hasattr(self.epochs, "__index__"):
            raise UsageError(f"received epochs={self.epochs!r}: expected an integer, such as 5.")

    def within_limits(self) -> FitArguments:
        """These arguments with at most the epochs and steps that `keras.config` allows."""
        max_epochs, _ = models.limits_for_debugging()
        epochs = self.epochs
        if max_epochs and max_epochs < epochs:
            warnings.warn(f"Limiting epochs to {max_epochs}", stacklevel=3)
            epochs = max_epochs
        validation_steps = self.validation_steps
        if self.validation_data is not None or self.validation_split:
            validation_steps = limited_steps(validation_steps)
        return dataclasses.replace(
            self,
            epochs=epochs,
            steps_per_epoch=limited_steps(self.steps_per_epoch),
            validation_steps=validation_steps,
        )

    def split(self) -> FitArguments:
        """These arguments after `validation_split` is applied, if it is given."""
        if not self.validation_split or self.validation_data is not None:
            return self
        (x, y, sample_weight), validation_data = datasets.train_validation_split(
            (self.x, self.y, self.sample_weight), validation_split=self.validation_split
        )
        return dataclasses.replace(
            self, x=x, y=y, sample_weight=sample_weight, validation_data=validation_data
        )

    @property
    def of_all(self) -> dict[str, Any]:
        """The arguments that must be equal on all tasks, by name; of data, whether there is some.

        Tasks may have different callbacks, displays and directories.
        """
        names = sorted(vars(self).keys() - _MAY_DIFFER - _OF_DATA)
        found = {name: getattr(self, name) for name in names}
        return found | {name: presence(getattr(self, name)) for name in sorted(_OF_DATA)}

    @property
    def source(self) -> data.Source:
        """The training data."""
        return data.Source(
            self.x,
            self.y,
            self.sample_weight,
            self.batch_size,
            self.steps_per_epoch,
            self.shuffle,
            self.class_weight,
            self.split_batch,
        )

    @property
    def validation_source(self) -> data.Source | None:
        """The validation data, or None."""
        if self.validation_data is None:
            return None
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self.validation_data)
        # Datasets are already batched; arrays are batched like the training data.
        is_batched = isinstance(x, keras.utils.PyDataset) or data.is_grain(x)
        is_batched |= datasets.is_dataset(x) or callable(x)
        batch_size = None if is_batched else self.validation_batch_size or self.batch_size
        return data.Source(
            x, y, sample_weight, batch_size, self.validation_steps, split=self.split_batch
        )

    @property
    def backup(self) -> BackupAndRestore | None:
        """The backup callback, or None."""
        asked = without_backup(self.callbacks)[1]
        if self.backup_dir is not None:
            return BackupAndRestore(self.backup_dir, save_freq=self.backup_every)
        return asked

    @property
    def index_dir(self) -> str | None:
        """Directory of the indices of files of records; None if nothing resumes."""
        directory = None if self.backup is None else os.fspath(self.backup.backup_dir)
        if directory is None:
            return None
        return os.path.join(disk.absolute(directory), record_index.DIRECTORY)


def presence(value: Any) -> str:
    """Whether there is some data, for a comparison of arguments."""
    return "none" if value is None else "some"


@contextlib.contextmanager
def trained_in(model: keras.Model, precision: str | None) -> Iterator[None]:
    """Sets layers of policy float32 to the policy `precision`, and back to float32 afterwards.

    Layers of any other policy keep it.

    Raises:
        UsageError: "mixed_float16" with an optimizer that does not scale the loss: small gradients
            would be rounded to zero.
    """
    if precision not in PRECISIONS:
        yield
        return
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if precision == "mixed_float16" and not scaled:
        raise UsageError(
            'precision="mixed_float16" needs an optimizer that scales the loss, received '
            f"{type(model.optimizer).__name__}: compile the model with "
            "keras.optimizers.LossScaleOptimizer(optimizer), or use 'mixed_bfloat16'."
        )
    changed = [
        layer for layer in [model, *models.layers_of(model)] if layer.dtype_policy.name == "float32"
    ]
    try:
        for layer in changed:
            layer.dtype_policy = precision
        yield
    finally:
        for layer in changed:
            layer.dtype_policy = "float32"


def limited_steps(steps: int | None) -> int | None:
    """The number of steps of an epoch, limited by `keras.config.set_max_steps_per_epoch`."""
    _, max_steps = models.limits_for_debugging()
    if not max_steps or (steps is not None and steps <= max_steps):
        return steps
    warnings.warn(f"Limiting steps_per_epoch to {max_steps}", stacklevel=3)
    return max_steps
