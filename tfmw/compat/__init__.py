"""Every private name of Keras and TensorFlow that tfmw uses, by subject.

Names that a module does not import, but uses later, are in its `PRIVATE_NAMES` as (owner, name).
They were checked on TensorFlow 2.18 to 2.21 with Keras 3.8 to 3.15. `missing_names()` returns the
names that the installed versions lack. A test calls it, so an incompatible release fails there
first. The package exports nothing: import the subject, as in `from tfmw.compat import models`.

Read `losses` first: each replica's weight in the global batch gives N workers the results of one
process. `dataflow` finds the values of a step that are sums or means over examples. `placement`
copies a model's variables to the devices of a strategy, and back.

May import: `tfmw.errors`.
"""

import importlib
import pkgutil

import keras

from tfmw.errors import UsageError

if keras.backend.backend() != "tensorflow":
    raise UsageError(
        f"the Keras backend is {keras.backend.backend()!r}, and tfmw trains on TensorFlow: set "
        "KERAS_BACKEND=tensorflow before Keras is imported."
    )


def missing_names() -> list[str]:
    """Private names that tfmw uses and the installed versions lack; [] if all exist."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.walk_packages(__path__, f"{__name__}.")
    ]
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for module in modules
        for owner, name in getattr(module, "PRIVATE_NAMES", ())
        if not hasattr(owner, name)
    ]
