"""Exports beyond TensorFlow: converted to TF-Lite and to ONNX, and run there.

A plain TensorFlow process, TF Serving's signature and TFSMLayer: tests/export/test_export.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.export.test_export import MODELS
from tests.helpers.cluster import PROGRAMS
from tfmw.train.saved_model import export

ENVIRON = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}


def command(*args: str) -> None:
    run = subprocess.run(
        [sys.executable, *args],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder with the export "model", its inputs, and what the model answers, by name."""
    make, inputs, _, _ = MODELS["subclassed_dict"]
    folder = tmp_path_factory.mktemp("serving")
    model = make()
    export(model, folder / "model")
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    answer = model(arrays, training=False)
    (folder / "inputs.json").write_text(json.dumps(inputs))
    return folder, inputs, {name: np.asarray(value) for name, value in answer.items()}


def check(folder: Path, inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert result["inputs"] == sorted(inputs)
    assert sorted(result["outputs"]) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(result["outputs"][name], values, rtol=1e-5)


def run(kind: str, folder: Path, model: str) -> None:
    program = str(PROGRAMS / "serve_elsewhere.py")
    command(program, kind, str(folder / model), *(str(folder / f) for f in FILES))


FILES = ("inputs.json", "result.json")


@pytest.mark.nightly
@pytest.mark.process
def test_tf_lite_has_the_same_names(
    exported: tuple[Path, dict[str, Any], dict[str, Any]],
) -> None:
    folder, inputs, expected = exported
    run("lite", folder, "model")
    check(folder, inputs, expected)


@pytest.mark.nightly
@pytest.mark.process
def test_onnx_has_the_same_names(
    exported: tuple[Path, dict[str, Any], dict[str, Any]],
) -> None:
    folder, inputs, expected = exported
    options = ["--signature_def", "serving_default", "--tag", "serve", "--opset", "18"]
    model = ["--saved-model", str(folder / "model"), "--output", str(folder / "model.onnx")]
    command("-m", "tf2onnx.convert", *model, *options)
    run("onnx", folder, "model.onnx")
    check(folder, inputs, expected)
