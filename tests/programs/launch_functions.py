"""Functions for `tfmw.launch`."""

import os
import random
import signal
import sys
from typing import Any


def rank_and(value: Any) -> tuple[int, Any]:
    """Its place and what it got."""
    return int(os.environ["TFMW_LOCAL_RANK"]), value


def is_copy_of(template: int) -> bool:
    """Whether this process shows the command line of a process that has imported TensorFlow."""
    with open("/proc/self/cmdline") as ours, open(f"/proc/{template}/cmdline") as theirs:
        return "tensorflow" in sys.modules and ours.read() == theirs.read()


def draw() -> tuple[float, float, float]:
    """Numbers from generators that nobody has seeded."""
    import numpy as np
    import tensorflow as tf

    return random.random(), float(np.random.rand()), float(tf.random.uniform([]))


def fail_on_1(error: Exception) -> None:
    """Raises on worker 1."""
    if os.environ["TFMW_TASK"] == "worker 1":
        raise error
    signal.pause()


def die_on_1() -> None:
    """Dies without an exception on worker 1."""
    if os.environ["TFMW_TASK"] == "worker 1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def leave() -> None:
    """Ends the process before the function returns."""
    os._exit(0)


class Awkward(Exception):
    """An exception that pickle takes and can't give back."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def fail_awkwardly_on_1() -> None:
    """Raises what can't travel."""
    if os.environ["TFMW_TASK"] == "worker 1":
        raise Awkward(1, 2)
    signal.pause()
