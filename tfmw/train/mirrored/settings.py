"""Settings of a model that all tasks must have: rates, losses, activations, vocabularies.

    settings = Settings(model)
    settings.digest                         # what tasks exchange first, as settings are long
    group.require_same(settings.read())     # UsageError: tasks disagree about loss_weights: ...

Gradients of models that differ in a dropout rate or a loss could be summed, but the result would be
of no model. Such models come from values that each task draws for itself, and from hosts with other
flags or another version of a script. Weights may differ: all tasks take the chief's.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import keras

from tfmw.train.checkpoint import compatibility


class Settings:
    """Settings of a model.

    Args:
        model: a compiled and built model.

    Attributes:
        digest: a checksum of the settings that the model has now, equal on all machines. A callback
            may change them later, which has no effect on steps that are traced.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.digest = zlib.crc32(json.dumps(self.read()).encode())

    def read(self) -> dict[str, Any]:
        """Name -> JSON value; see `compatibility.settings`."""
        return compatibility.settings(self._model)
