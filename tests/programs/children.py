"""A script whose children import it again: children.py spawn|forkserver."""

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import tfmw
from tests.programs._result import write
from tfmw.cluster import Cluster, membership
from tfmw.observe import task_process

cluster = tfmw.init()  # in children, too


def load(number: int) -> dict[str, Any]:
    """A part of the data, in a child."""
    return {
        "x": float(number),
        "cluster": repr(cluster),
        "joined": membership.joined() is not None,
        "progress": task_process.own_path("TFMW_PROGRESS_FILE"),
    }


if __name__ == "__main__":
    import keras
    import numpy as np

    context: Any = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        parts = pool.map(load, range(4))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        parts += executor.map(load, range(4, 6))
    script = "import tfmw; print(tfmw.init())"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    config = json.loads(os.environ["TF_CONFIG"])
    config["task"]["index"] = 1 - cluster.index
    x: Any = np.array([[part.pop("x")] for part in parts], "float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")
    history = tfmw.fit(model, x, x, batch_size=6, verbose=0).history
    write(
        {
            "cluster": repr(cluster),
            "children": parts,
            "script": found.stdout.strip(),
            "of the other task": repr(
                Cluster.resolve({**os.environ, "TF_CONFIG": json.dumps(config)})
            ),
            "progress": task_process.own_path("TFMW_PROGRESS_FILE"),
            "loss": history["loss"],
        }
    )
