"""One example in one process: `program.py EDITED.py RESULT [--floatx float64]`.

Without a cluster Keras runs it; as a task of `tfmw run`, tfmw. Writes `RESULT-<task>.npz`, an array
of each log, result, prediction and weight, and `RESULT-<task>.json`: warnings, and the error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

TASK = os.environ.get("TFMW_TASK", "").replace(" ", "_")
METHODS = ("fit", "evaluate", "predict")


def handed_over(source: str) -> str:
    """The source with calls of Keras's methods as tfmw's functions; those of callbacks remain."""
    call = r"(?<![\w.])(?!self\.)((?:\w+\.)*\w+)\.(fit|evaluate|predict)\(\s*"
    return re.sub(call, r"tfmw.\2(\1, ", source)


class Recorder:
    """Calls, with less to do, and keeps their results."""

    def __init__(self, stand_ins: Any):
        self._stand_ins = stand_ins
        self._calls = 0
        self._inside = False
        self.arrays: dict[str, Any] = {}

    def function(self, name: str, function: Any) -> Any:
        """The method or function of that name, recorded."""

        @functools.wraps(function)
        def recorded(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(model, *args, **kwargs)
            if name == "fit":
                most = kwargs.get("initial_epoch", 0) + self._stand_ins.EPOCHS
                kwargs["epochs"] = min(kwargs.get("epochs", 1), most)
            if kwargs.get("batch_size"):
                kwargs["batch_size"] = min(kwargs["batch_size"], self._stand_ins.BATCH)
            kwargs["verbose"] = 0
            self._inside = True
            try:
                result = function(model, *args, **kwargs)
            finally:
                self._inside = False
            self._keep(name, model, result)
            return result

        return recorded

    def _keep(self, name: str, model: Any, result: Any) -> None:
        import keras
        import numpy as np

        kept: Any = result
        if name == "fit":
            kept = {log: np.stack(values) for log, values in result.history.items()}
            kept = {
                "logs": kept,
                "weights": {f"{i}_{w.name}": w.numpy() for i, w in enumerate(model.weights)},
            }
        for path, value in keras.tree.flatten_with_path(kept):
            place = "/".join(map(str, path))
            self.arrays[f"{self._calls}_{name}/{place}"] = np.asarray(value)
        self._calls += 1


class Tfmw:
    """The module, with recorded functions, so that the module itself stays as it is."""

    def __init__(self, recorder: Recorder):
        import tfmw

        self._module = tfmw
        for name in METHODS:
            setattr(self, name, recorder.function(name, getattr(tfmw, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--floatx", default="float64")
    arguments = parser.parse_args()
    said: list[str] = []
    shown = warnings.showwarning

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        said.append(str(message))
        shown(message, *args, **kwargs)

    warnings.showwarning = show
    import keras
    import numpy as np

    from tests.examples import stand_ins

    stand_ins.take_place()
    keras.config.set_floatx(arguments.floatx)
    keras.utils.set_random_seed(7)
    recorder = Recorder(stand_ins)
    source = arguments.source.read_text()
    scope: dict[str, Any] = {"__name__": "__main__", "stand_ins": stand_ins}
    if TASK:
        source = handed_over(source)
        scope["tfmw"] = Tfmw(recorder)
    else:
        for name in METHODS:
            setattr(keras.Model, name, recorder.function(name, getattr(keras.Model, name)))
    error = ""
    try:
        exec(compile(source, str(arguments.source), "exec"), scope)
    except Exception:
        error = traceback.format_exc()
        print(error, file=sys.stderr)
    result = f"{arguments.result}-{TASK or 'keras'}"
    np.savez(f"{result}.npz", **recorder.arrays)
    Path(f"{result}.json").write_text(json.dumps({"error": error, "warnings": said}))
    return bool(error)


if __name__ == "__main__":
    sys.exit(main())
