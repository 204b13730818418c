"""A user's step as it is traced for one replica.

    with replica_step():
        model.train_step(batch)

Within the context, the user's own functions of `tf.function` are part of the step. TensorFlow keeps
the trace of a function, and uses it wherever the function is called next. But each trace of a step
is another one: the one before the training only creates variables, and optimizers apply nothing in
it; and every driver has its own weights of losses, copies of variables and sums. So a step has the
operations of such a function in its own graph, as if it were not decorated.

Workers draw different numbers of `tf.random` for different examples. They draw the same ones for
all else, such as noise on a weight or its gradient. Those of the first worker are the numbers of
one process. Keras's generators of seeds differ by replica (`placement.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function import polymorphic_function as polymorphic
from tensorflow.python.ops import gen_random_ops
from tensorflow.python.util import tf_decorator

from tfmw.compat.objects import install_hooks, overridden


@dataclasses.dataclass(frozen=True)
class _Step:
    rows: int | None  # number of the replica's examples, if the step runs eagerly


_thread = threading.local()  # MirroredStrategy traces each replica in a thread of its own


def replica_step(rows: int | None = None) -> contextlib.AbstractContextManager[None]:
    """The context in which this thread traces a replica's step, or runs it eagerly.

    Args:
        rows: the number of the replica's examples, if it runs eagerly.
    """
    _install_hooks()
    return overridden([(_thread, "step", _Step(rows))])


@functools.cache
def _install_hooks() -> None:
    hooks: list[tuple[Any, str, Any]] = [
        (polymorphic.Function, "__call__", _call_function),
        (tf.random.Generator, "_prepare_key_counter", _key_and_counter),
        *[(gen_random_ops, name, _draw) for name in _DRAWS],
    ]
    install_hooks(hooks, lambda: getattr(_thread, "step", None))


# ---------------------------------------------------------------- functions of tf.function

_LIBRARIES = ("keras.", "tensorflow.", "tfmw.")


def _call_function(_: _Step, original: Any, function: Any, *arguments: Any, **named: Any) -> Any:
    if not _is_of_user(function):
        return original(function, *arguments, **named)
    python_function, status = function.python_function, ag_ctx.Status.DISABLED
    if function._autograph and not tf.executing_eagerly():
        python_function = autograph_util.py_func_from_autograph(python_function)
        status = ag_ctx.Status.ENABLED
    with ag_ctx.ControlStatusCtx(status=status):
        return python_function(*arguments, **named)


def _is_of_user(function: Any) -> bool:
    """Whether a function has code, and that is not of Keras, TensorFlow or tfmw."""
    if type(function) is not polymorphic.Function:  # one that was loaded has only graphs
        return False
    _, code = tf_decorator.unwrap(function.python_function)
    while isinstance(code, functools.partial):
        code = code.func
    return not (getattr(code, "__module__", None) or "").startswith(_LIBRARIES)


# ---------------------------------------------------------------- random numbers of TensorFlow

_DRAWS = ("random_standard_normal", "random_uniform", "random_uniform_int", "truncated_normal")
_APART = 0x3C6EF373  # replicas' seeds are this far apart, modulo the greatest one
_MOST = 2**31 - 1


def _draw(step: _Step, original: Any, shape: Any, *arguments: Any, **named: Any) -> Any:
    """Draws by an operation with two seeds, which TensorFlow draws if there are none."""
    if named.get("seed2") is not None and _is_of_examples(step, shape):
        named["seed2"] = (named["seed2"] + _replica() * _APART) % _MOST
    return original(shape, *arguments, **named)


def _key_and_counter(step: _Step, original: Any, generator: Any, shape: Any) -> Any:
    """The key and counter of a draw from a `tf.random.Generator`."""
    key, counter = original(generator, shape)
    if _is_of_examples(step, shape):
        key = tf.bitwise.bitwise_xor(key, tf.constant(_replica() * _APART, key.dtype))
    return key, counter


def _is_of_examples(step: _Step, shape: Any) -> bool:
    """Whether a shape has the size of a batch, which is unknown while a step is traced."""
    known = tf.get_static_value(tf.convert_to_tensor(shape))
    if known is None or step.rows is None:
        return known is None
    return list(known[:1]) == [step.rows]  # a guess: a weight may have as many rows


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))
