"""Every private name of Keras and TensorFlow that tfmw uses, by subject.

A module lists those that it uses later than at its import as (owner, name) in `PRIVATE_NAMES`.
Checked on TensorFlow 2.18 to 2.21 with Keras 3.8 to 3.15. `missing_names()` returns the names that
the installed versions lack. A test calls it, so an incompatible release fails there first.
Nothing is handed on from here: import the subject, as in `from tfmw.keras_compat import models`.

* `losses`: each replica's weight in the global batch. Read it first: it is why N workers have the
  results of one process.
* `graph`: walks over graphs, for all modules that look at traced functions.
* `dataflow`, `differences`: which values are sums or means over examples, and which compare them.
* `increments`: what steps add to variables of users' own metrics and layers.
* `optimizers`: what is known of optimizers, and updates on each replica, after one reduction of the
  gradients.
* `fused_update`: an optimizer's update as one compiled function.
* `optimizer_part`: the part of an optimizer's state that one worker keeps.
* `memory`: arrays over the memory of tensors, and variables whose memory was freed.
* `models`, `metric_variables`: the parts and variables of a model, and how it is built.
* `objects`: members, attributes and state of Keras's objects.
* `placement`: a model's variables on the devices of a strategy, and back.
* `model_methods`: `model.fit` refused, and one writer, in a process that has joined a cluster; what
  other libraries have wrapped around `model.fit`.
* `datasets`: the inputs, functions and seeds of `tf.data` pipelines, and the time of their stages.
* `file_datasets`, `rebuilding`: pipelines over files, and pipelines built again over a source.
* `shuffles`: the order of a shuffle, and the seeds that its passes draw.
* `runtime`: TensorFlow's runtime and its coordination service.
* `parameter_servers`: remote rows, iterators on workers, an optimizer's slots.
* `row_origins`: rows of sparse gradients that all replicas look up, or those of their examples.
* `row_updates`: rows that a layer replaces in a step, the optimizer's slots of them, and counts of
  ids on all replicas.
* `table_variables`: Keras variables whose rows are made on parameter servers.

May import: `tfmw.errors`, `tfmw.runtime`.
"""

import importlib
import pkgutil


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
