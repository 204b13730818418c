"""A user's own functions of `tf.function` that a step calls, as part of the step.

    with inlined():
        model.train_step(batch)     # it, or what it calls, may be decorated with tf.function

TensorFlow keeps the trace of a function, and uses it wherever the function is called next. But each
trace of a step is another one. The one before the training only creates variables, and optimizers
apply nothing in it; and every driver has its own weights of losses, copies of variables and sums.
So a step has the operations of such a function in its own graph, as if it were not decorated.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function import polymorphic_function as polymorphic
from tensorflow.python.util import tf_decorator

from tfmw.compat.objects import overridden

_LIBRARIES = ("keras.", "tensorflow.", "tfmw.")


class _Thread(threading.local):  # MirroredStrategy traces each replica in a thread of its own
    inlines = False


_thread = _Thread()


def inlined() -> contextlib.AbstractContextManager[None]:
    """The context in which this thread makes such functions part of the step that it traces."""
    _install_hook()
    return overridden([(_thread, "inlines", True)])


@functools.cache
def _install_hook() -> None:
    original = polymorphic.Function.__call__

    @functools.wraps(original)
    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        if not _thread.inlines or not _is_of_user(function):
            return original(function, *arguments, **named)
        python_function, status = function.python_function, ag_ctx.Status.DISABLED
        if function._autograph and not tf.executing_eagerly():
            python_function = autograph_util.py_func_from_autograph(python_function)
            status = ag_ctx.Status.ENABLED
        with ag_ctx.ControlStatusCtx(status=status):
            return python_function(*arguments, **named)

    polymorphic.Function.__call__ = call


def _is_of_user(function: Any) -> bool:
    """Whether a function has code, and that is not of Keras, TensorFlow or tfmw."""
    if type(function) is not polymorphic.Function:  # one that was loaded has only graphs
        return False
    _, code = tf_decorator.unwrap(function.python_function)
    while isinstance(code, functools.partial):
        code = code.func
    return not (getattr(code, "__module__", None) or "").startswith(_LIBRARIES)
