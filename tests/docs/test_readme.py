"""The code in README.md and in the guides runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import ONE_THREAD, ROOT, tfmw_command

pytestmark = pytest.mark.multiprocess

# What the documents leave to the reader.
READER = """
import keras, numpy as np, tensorflow as tf

x = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int32")


def make_model():
    model = keras.Sequential(
        [keras.Input([4], name="image"), keras.layers.Dense(1, "sigmoid", name="probabilities")]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def make_data():
    return tf.data.Dataset.from_tensor_slices((x, y))


images = x
"""


def blocks(document: str) -> list[str]:
    """The Python code in a document. What isn't Python of today's is marked ```py."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.M)


def run(program: str, folder: Path) -> None:
    path = folder / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path],
        cwd=folder,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_and_the_guides(tmp_path):
    """One block after the other, as somebody would who reads on from page to page."""
    guides = ("training", "backups", "export")
    found = [blocks(page) for page in ("README.md", *(f"docs/{name}.md" for name in guides))]
    assert all(found), "a page without code"
    code = "\n".join(block for page in found for block in page)
    for left_open, filled in (
        ("model = ...", "model = make_model()"),
        ("dataset = ...", "dataset = make_data().batch(64)"),
        ("/shared", str(tmp_path / "shared")),
        ("epochs=50", "epochs=2"),
        ("build/digits", "build/model"),
    ):
        assert left_open in code, left_open
        code = code.replace(left_open, filled)
    check = "assert len(history.history['loss']) == 5 and model.built"
    run(f"{READER}\n{code}\n{check}\n", tmp_path)
    assert (tmp_path / "build/model/saved_model.pb").exists()


def test_migration(tmp_path):
    code = [block for block in blocks("docs/migration.md") if not block.startswith("# on servers")]
    assert len(code) == 5
    lines = [READER, "here = dict(globals())"]
    for block in code:
        lines += [f"exec({block!r}, space := dict(here))"]
        if "results = tfmw.launch" in block:
            lines += ["assert [len(r['loss']) for r in space['results']] == [3, 3]"]
    run("\n".join(lines), tmp_path)
    for name in ("build/model", "build/estimated"):
        assert (tmp_path / name / "saved_model.pb").exists()


ON_SERVERS = [block for block in blocks("docs/migration.md") if block.startswith("# on servers")]


def test_blocks_for_parameter_servers_are_collected():
    assert len(ON_SERVERS) == 2


@pytest.mark.parametrize("code", ON_SERVERS, ids=["tutorial", "tf1"])
def test_migration_from_parameter_server_scripts(tmp_path, code):
    (tmp_path / "train.py").write_text(f"{READER}\n{code}\nprint('all is done')\n")
    command = ["run", "--workers", "2", "--ps", "1", "train.py"]
    with tfmw_command(*command, cwd=tmp_path) as process:
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert "[chief] all is done" in output
    assert "step 20/20" in output
