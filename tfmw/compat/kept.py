"""The state that tfmw keeps with a user's model, its seeds and its slots: one attribute of each.

    kept_with(model).drivers

Because of this prefix neither Keras nor TensorFlow treats the attribute as the object's own: it is
not saved, and no step is traced anew because of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

ATTRIBUTE = "_self_tfmw"


@dataclasses.dataclass
class Kept:
    """State that calls of tfmw keep for later ones."""

    # On a model:
    drivers: Sequence[Any] = ()  # drivers of its last calls, with their traced steps
    batch_driver: Any = None  # the same for `train_on_batch`, and the objects that it depends on
    updates: Sequence[Any] = ()  # the `ShardedUpdate`s of the call that has the model now
    last_updates: Sequence[str] = ()  # a description of each of those of the last call
    unbuilt: Sequence[Any] = ()  # parts that `build_all` has left unbuilt
    # On a model, or the state of a seed generator: whether replicas have different seeds now.
    is_placed: bool = False
    # On a slot: whether it has values of all replicas, until the next steps empty it.
    is_gathered: bool = False


def kept_with(part: Any) -> Kept:
    """The state that is kept with a Keras model or variable."""
    kept: Kept = vars(part).setdefault(ATTRIBUTE, Kept())
    return kept
