"""Calls group.from_chief and group.from_all many times.

Writes the keys that this task has set in the coordination service, those that it has deleted, and
whether the first one is still there.
"""

import functools

import tensorflow as tf

import tfmw
from tests.programs._result import write
from tfmw import strategies
from tfmw.cluster.group import Group
from tfmw.compat import runtime

CALLS = 500
LONG = "x" * (5 << 20)  # the coordination service refuses messages of more than 4 MB

tfmw.init()
group = Group.of(strategies.current_strategy())
keys: list[str] = []
deleted: list[str] = []
set_key, delete_key = runtime.coordination_set, runtime.coordination_delete


def noted_set(key: str, value: str) -> None:
    keys.append(key)
    set_key(key, value)


def noted_delete(key: str) -> None:
    deleted.append(key)
    delete_key(key)


runtime.coordination_set, runtime.coordination_delete = noted_set, noted_delete
right = group.from_all(LONG) == [LONG] * group.size
for call in range(CALLS):
    right &= group.from_chief(functools.partial(list, [call, group.rank])) == [call, 0]
    right &= group.from_all([call, group.rank]) == [[call, rank] for rank in range(group.size)]
try:
    runtime.coordination_get(group.from_chief(lambda: keys[0]), 0.2)
    there = True
except tf.errors.OpError:
    there = False
write({"right": right, "keys": keys, "deleted": deleted, "first is there": there})
