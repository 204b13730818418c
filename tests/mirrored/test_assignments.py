"""Number of assignments of a traced function to variables."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfmw.train.mirrored.sharded_update import assignments


@pytest.mark.process
def test_assignments_are_found_in_loops_branches_and_functions() -> None:
    read, once, twice, within = (tf.Variable([1.0, 2.0]) for _ in range(4))

    @tf.function(jit_compile=True)
    def grow(by: Any) -> None:
        within.assign_add(by)

    def body(step: Any) -> Any:
        once.assign(read + 1.0)
        twice.assign_sub(read)
        tf.cond(step > 1, lambda: twice.scatter_nd_update([[0]], [1.0]), twice.read_value)
        grow(read)
        return step + 1

    @tf.function(autograph=False)
    def loop() -> Any:
        return tf.while_loop(lambda step: step < 3, body, [tf.constant(0)])

    found = assignments(loop.get_concrete_function())
    assert [found[id(v.handle)] for v in (read, once, twice, within)] == [0, 1, 2, 1]
