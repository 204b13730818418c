"""The code in README.md and in the guides runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.helpers.buckets import s3
from tests.helpers.cluster import ROOT, run_command
from tfmw.storage.bucket import Bucket

pytestmark = pytest.mark.process

# Definitions that the documents leave to the reader.
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

# The guides start from a program like that in README.md.
TRAINED = """
import tfmw

tfmw.init()
model = make_model()
dataset = make_data().batch(64)
history = tfmw.fit(model, dataset, epochs=5)
tfmw.export(model, "build/model")
"""


def blocks(document: str) -> list[str]:
    """The Python code in a document, without blocks marked ```py, which are not today's Python."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.M)


def run(program: str, folder: Path) -> str:
    """The output of a program, which ends without an error."""
    folder.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text(program)
    status, output = run_command("python", path, cwd=folder)
    assert status == 0, output
    return output


def lines_of_losses(text: str) -> list[list[float]]:
    """The losses in each line of README.md's program: that of each epoch."""
    lines = re.findall(r"loss by epoch: (\d.*)", text)
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in lines]


def test_the_readme(tmp_path):
    """Its program runs as it stands, on one process and on two workers, and prints its output."""
    (program,) = blocks("README.md")
    alone = run(program, tmp_path / "alone")
    assert (tmp_path / "alone/build/model/saved_model.pb").exists()
    (tmp_path / "two").mkdir()
    (tmp_path / "two/train.py").write_text(program)
    command = ("tfmw", "run", "--workers", "2", "train.py")
    status, together = run_command(*command, cwd=tmp_path / "two")
    assert status == 0, together
    assert (tmp_path / "two/build/model/saved_model.pb").exists()
    one, two, other = lines_of_losses(f"{alone}\n{together}")  # a line of each process
    assert len(one) == 5, f"{alone}\n{together}"
    assert two == other == pytest.approx(one, abs=2e-4)
    shown = lines_of_losses((ROOT / "README.md").read_text())
    picture = (ROOT / "docs/images/terminal.svg").read_text()
    assert picture == runpy.run_path(str(ROOT / "docs/terminal.py"))["svg"]()
    # Processors differ in the last digits.
    assert [*shown, *lines_of_losses(picture)] == 6 * [pytest.approx(one, abs=1e-2)], one


GUIDES = ("notebooks", "backups", "callbacks", "tune-performance", "export", "faq")


@pytest.mark.nightly
def test_the_guides(tmp_path, monkeypatch):
    """One block after the other, as somebody would who reads on from page to page."""
    found = [blocks(f"docs/howto/{name}.md") for name in GUIDES]
    assert all(found), "a page without code"
    code = "\n".join(block for page in found for block in page)
    for left_open, filled in (
        ("/shared", str(tmp_path / "shared")),
        ("epochs=50", "epochs=2"),
        ("build/digits", "build/model"),
    ):
        assert left_open in code, left_open
        code = code.replace(left_open, filled)
    check = "assert len(history.history['loss']) == 5 and model.built"
    with s3(monkeypatch):
        run(f"{READER}\n{TRAINED}\n{code}\n{check}\n", tmp_path)
        assert {"run7/backups.json", "digits/saved_model.pb"} <= Bucket(
            "s3://bucket"
        ).names().keys()
    assert (tmp_path / "build/model/saved_model.pb").exists()


RECORDS = """
import tfmw

for number in range(2):
    with tf.io.TFRecordWriter(f"train-{number}.tfrecord") as file:
        for image, label in zip(x[number::2], y[number::2]):
            features = {
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=image)),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            file.write(example.SerializeToString())
for number in range(2):
    tfmw.storage.upload(f"train-{number}.tfrecord", f"s3://bucket/train-{number}.tfrecord")
model = make_model()
"""


@pytest.mark.nightly
def test_loading_data(tmp_path, monkeypatch):
    code = "\n".join(blocks("docs/howto/load-data.md"))
    assert code.count("tfmw.fit(") == 5
    assert "gs://bucket/" in code
    check = "assert int(model.optimizer.iterations) == 5 * 2 * 4  # calls, epochs, batches of 64"
    with s3(monkeypatch):
        run(f"{READER}\n{RECORDS}\n{code.replace('gs://bucket/', '')}\n{check}\n", tmp_path)


def migration() -> list[str]:
    """The code of all pages on migration."""
    pages = sorted((ROOT / "docs/howto/migrate").glob("*.md"))
    return [block for page in pages for block in blocks(str(page.relative_to(ROOT)))]


@pytest.mark.nightly
def test_migration(tmp_path):
    code = [block for block in migration() if not block.startswith("# on servers")]
    assert len(code) == 6
    lines = [READER, "here = dict(globals())"]
    for block in code:
        lines += [f"exec({block!r}, space := dict(here))"]
        if "results = tfmw.launch" in block:
            lines += ["assert [len(r['loss']) for r in space['results']] == [3, 3]"]
    run("\n".join(lines), tmp_path)
    for name in ("build/model", "build/estimated", "build/from_tf_keras"):
        assert (tmp_path / name / "saved_model.pb").exists()


ON_SERVERS = [block for block in migration() if block.startswith("# on servers")]


def test_blocks_for_parameter_servers_are_collected():
    assert len(ON_SERVERS) == 2


@pytest.mark.parametrize("code", ON_SERVERS, ids=["tutorial", "tf1"])
@pytest.mark.nightly
def test_migration_from_parameter_server_scripts(tmp_path, code):
    (tmp_path / "train.py").write_text(f"{READER}\n{code}\nprint('all is done')\n")
    command = ("tfmw", "run", "--workers", "2", "--ps", "1", "train.py")
    status, output = run_command(*command, cwd=tmp_path)
    assert status == 0, output
    assert "[chief] all is done" in output
    assert "step 20/20" in output
