"""The time of each stage of a running pipeline, from tf.data's own model."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import iterator_model_ops

_PASSIVE = frozenset({"Root", "Prefetch", "Model", "Options", "FiniteTake"})


def slowest_stage(iterator: Any) -> tuple[str, float] | None:
    """The stage of a pipeline that takes longest.

    Args:
        iterator: over a dataset, after some elements.

    Returns:
        (name of tf.data's op without version, such as "Map"; seconds of the stage per element of
        the dataset, divided by the number of its threads), or None if there is no model.
    """
    try:
        model = iterator_model_ops.get_model_proto(iterator)
    except (tf.errors.OpError, AttributeError, TypeError, ValueError):
        return None  # autotuning is off, or an iterator over several devices
    elements = max(
        (node.num_elements for node in model.nodes.values() if node.name == "Root"), default=0
    )
    if not elements:
        return None
    found: dict[str, float] = {}
    for node in model.nodes.values():
        name = re.sub(r"(V\d+)?(\(.*)?$", "", node.name)
        threads = [p.state_value for p in node.parameters if p.name == "parallelism"]
        if name not in _PASSIVE:
            seconds = node.processing_time / 1e9 / elements / max([1.0, *threads])
            found[name] = max(found.get(name, 0.0), seconds)
    return max(found.items(), key=lambda pair: pair[1], default=None)


PRIVATE_NAMES: list[tuple[Any, str]] = [(iterator_model_ops, "get_model_proto")]
"""(owner, name) of each private name that this module uses; see `keras_compat.missing_names`."""
