"""Every private name of Keras and TensorFlow that tfmw uses, by subject.

They were checked on TensorFlow 2.18 to 2.21 with Keras 3.8 to 3.15. A test looks for each in the
installed versions, so an incompatible release fails there first. The package exports nothing:
import the subject, as in `from tfmw.compat import models`.

Read `losses` first: each replica's weight in the global batch gives N workers the results of one
process. `dataflow` finds the values of a step that are sums or means over examples. `placement`
copies a model's variables to the devices of a strategy, and back.

May import: `tfmw.errors`.
"""

import keras

from tfmw.errors import UsageError

if keras.backend.backend() != "tensorflow":
    raise UsageError(
        f"the Keras backend is {keras.backend.backend()!r}, and tfmw trains on TensorFlow: set "
        "KERAS_BACKEND=tensorflow before Keras is imported."
    )
