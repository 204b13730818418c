"""Every task trains with the others, then exports to a path of its own: only one may write.

export_cluster.py DIRECTORY
"""

import sys
from pathlib import Path

import keras
import numpy as np

import tfmw
from tests.programs import _result

cluster = tfmw.init()
directory = Path(sys.argv[1])
fitted, exported = (directory / f"{name}_{cluster.index}" for name in ("fit", "export"))

keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.Input((4,), name="features"),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, name="scores"),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rng = np.random.default_rng(0)
x = rng.normal(size=(100, 4)).astype(np.float32)
tfmw.fit(model, x, x.argmax(axis=1) % 3, batch_size=16, epochs=2, verbose=0, export_dir=fitted)
returned = tfmw.export(model, exported)
_result.write(
    {
        "returned": returned,
        "wrote": [path.exists() for path in (fitted, exported)],
        "inputs": x[:5].tolist(),
        "scores": model(x[:5], training=False).numpy().tolist(),
    }
)
