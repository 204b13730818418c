"""States of Python's and NumPy's global random generators, as JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmw.cluster.group import Group


def python_state() -> list[Any]:
    """The state of Python's generator; see `as_python_state`."""
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def as_python_state(saved: Any) -> Any:
    """The argument of `random.setstate` for a result of `python_state`."""
    version, numbers, gauss = saved
    return version, tuple(numbers), gauss


def random_state() -> dict[str, Any]:
    """The states of both generators."""
    numpy_state = dict(np.random.get_state(legacy=False))
    inner = {
        k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in numpy_state["state"].items()
    }
    return {"python": python_state(), "numpy": {**numpy_state, "state": inner}}


def restore_random_state(saved: Mapping[str, Any]) -> None:
    """Sets both generators to a result of `random_state`."""
    random.setstate(as_python_state(saved["python"]))
    numpy_state = dict(saved["numpy"])
    inner = dict(numpy_state["state"])
    if "key" in inner:
        inner["key"] = np.asarray(inner["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": inner})


def share_random_state(group: Group) -> None:
    """Gives every worker the chief's generators. All workers must call it."""
    if group.size > 1:
        restore_random_state(group.from_chief(random_state))
