"""Counts traces of calls on two virtual devices, and tries changes between the calls."""

from __future__ import annotations

import functools
from typing import Any

import keras

import tfmw
from tests.matrix.columns import virtual_devices
from tests.mirrored import test_cached_driver as tests
from tests.programs import _result
from tfmw.compat import memory
from tfmw.compat.kept import kept_with

virtual_devices(2)
STRATEGY = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
CALLS = [
    functools.partial(call, strategy=STRATEGY)
    for call in (functools.partial(tests.fit, shuffle=False), tests.evaluate, tests.predict)
]

found: dict[str, Any] = {}
model = tests.made()
found["traces"] = [[tests.traces(model, call) for call in CALLS] for _ in range(2)]
copies = list(kept_with(model).drivers[0].driver.copies.values())
found["copies"], found["freed"] = len(copies), sum(map(memory.is_freed, copies))
another = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
found["of another strategy"] = tests.traces(
    model, functools.partial(tests.evaluate, strategy=another)
)
named = functools.partial(tests.evaluate, strategy="mirrored")
found["of the name"] = [tests.traces(model, named) for _ in range(2)]


def set_weights(model: keras.Model) -> None:
    model.set_weights([w * 0.5 for w in model.get_weights()])
    model.optimizer.learning_rate = 0.05


def by_keras(model: keras.Model) -> None:
    model.fit(tests.X, tests.Y, batch_size=8, verbose=0, shuffle=False)


def without_kept(model: keras.Model) -> None:
    kept_with(model).drivers = ()
    CALLS[0](model)


found["changes"] = {}
for name, change in {**tests.CHANGES, **tests.VARIABLES_CHANGE, "weights": set_weights}.items():
    other_fit = without_kept if name in tests.VARIABLES_CHANGE else by_keras
    ours, other = tests.made(False), tests.made(False)
    traced = []
    for _ in range(3):
        traced.append(tests.traces(ours, CALLS[0]))
        other_fit(other)
        change(ours)
        change(other)
    weights = [[w.ravel().tolist() for w in model.get_weights()] for model in (ours, other)]
    found["changes"][name] = [*weights, traced[1]]
_result.write(found)
