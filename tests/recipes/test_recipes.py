"""The recipes as users start them: alone, by hand in two terminals, by TF_CONFIG, by make demo."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent import futures
from pathlib import Path

import common
import coordinator
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

import tfmw
from tests.helpers.buckets import NIGHTLY, opened
from tests.helpers.by_hand import free_addresses
from tests.helpers.cases import cases
from tests.helpers.cluster import LEAN, ONE_THREAD, ROOT, run_cluster, run_command
from tfmw import Cluster, UsageError
from tfmw.train.saved_model import verify_export as verify

DIGITS = ROOT / "recipes" / "digits.py"
PREDICT = ROOT / "recipes" / "predict.py"
# Runs a recipe whose first weights and order of examples are the same each time.
SEEDED = """
import os, runpy, sys, keras
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
keras.utils.set_random_seed(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ACCURACY = re.compile(r"validation accuracy: (\d\.\d{4})\s*$", re.MULTILINE)


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """Digits prepared once for the module, and no cluster left over in the environment."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "TFMW_TTY")}
    data = tmp_path_factory.mktemp("data")
    return {**kept, **ONE_THREAD, "TFDS_DATA_DIR": str(data), "TF_CPP_MIN_LOG_LEVEL": "2"}


def start(command, environ, **kwargs):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def finish(processes, timeout_s=300):
    """Wait for all; return (status, stdout, stderr) of each. None outlives a failure."""
    try:
        ended = [(*process.communicate(timeout=timeout_s), process) for process in processes]
        return [(process.returncode, out, err) for out, err, process in ended]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def accuracy(text):
    return float(ACCURACY.findall(text)[-1])


def digits(text, what):
    return [int(digit) for digit in re.findall(rf"{what} (\d)", text)]


@pytest.mark.process
@pytest.mark.nightly
def test_recipe_without_flags_learns_and_exports(environ, tmp_path):
    command = ["-c", SEEDED, DIGITS, f"--export_dir={tmp_path / 'model'}"]
    ((status, out, err),) = finish([start(command, environ, cwd=tmp_path)])
    assert status == 0, err
    assert accuracy(out) >= 0.97
    assert verify(tmp_path / "model") == []

    ((status, out, err),) = finish([start([PREDICT, f"--export_dir={tmp_path}/model"], environ)])
    assert status == 0, err
    labels, predicted = digits(out, "label"), digits(out, "predicted")
    assert len(labels) == 6
    assert sum(a == b for a, b in zip(labels, predicted, strict=True)) >= 5
    assert out.count("@") > 20  # the images


@pytest.mark.process
def test_make_demo(environ, tmp_path):
    """The newcomer's first command, in a copy of the checkout, with this environment's tools."""
    for name in ("Makefile", "pyproject.toml", "recipes", "tfmw"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    recipe = tmp_path / "recipes" / "digits.py"
    seeded = "keras.utils.set_random_seed(1)\n\n\ndef main()"
    recipe.write_text(recipe.read_text().replace("def main()", seeded, 1))
    done = subprocess.run(
        ["make", "--old-file=.venv/.installed", "demo", f"BIN={Path(sys.executable).parent}"],
        cwd=tmp_path,
        # It installs no matplotlib, which Keras would import.
        env={**environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{LEAN}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(done.stdout) >= 0.97
    assert done.stdout.count("epoch 12/12") == 1, "one task shows progress"
    labels, predicted = digits(done.stdout, "label"), digits(done.stdout, "predicted")
    assert len(labels) == 6
    assert sum(a == b for a, b in zip(labels, predicted, strict=True)) >= 5
    assert verify(tmp_path / "build" / "digits") == []


def by_hand(index, hosts):
    return [f"--worker_hosts={','.join(hosts)}", f"--task_index={index}"], {}


def by_tf_config(index, hosts):
    config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
    return [], {"TF_CONFIG": json.dumps(config)}


@pytest.mark.process
@pytest.mark.parametrize("described", cases([by_hand], [by_tf_config]))
def test_two_terminals(environ, described):
    hosts = free_addresses(2)

    def run(index):
        arguments, env = described(index, hosts)
        env["TFDS_DATA_DIR"] = environ["TFDS_DATA_DIR"]
        return run_command("python", DIGITS, "--max_steps=5", *arguments, env=env)

    with futures.ThreadPoolExecutor() as pool:
        tasks = list(pool.map(run, range(2)))
    assert [status for status, _ in tasks] == [0, 0], tasks
    assert ACCURACY.search(tasks[0][1]), "the chief tells the accuracy"
    assert not ACCURACY.search(tasks[1][1]), "and nobody else"
    assert re.search(r"(?<!\d)5/5(?!\d)", tasks[0][1]), "--max_steps"


@pytest.mark.nightly
@pytest.mark.process
def test_mnist_on_two_workers_on_mock_data(run_cluster, tmp_path):
    run = run_cluster(
        "mnist_on_mock_data.py", "--epochs=2", f"--export_dir={tmp_path / 'mnist'}", workers=2
    )
    assert re.search(r"validation accuracy: [01]\.\d{4}", run.output)
    assert "2/2" in run.output  # 100 examples in batches of 64
    assert verify(tmp_path / "mnist") == []


@pytest.mark.process
@pytest.mark.nightly
def test_images_text_and_features_on_two_workers(run_cluster, tmp_path, monkeypatch):
    """The models learn, and their exports take files' pixels, sentences and columns as they are."""
    monkeypatch.chdir(tmp_path)  # digits become files there
    result = run_cluster("recipes.py", str(tmp_path), workers=2).chief
    assert result["images"] > 0.7, result
    assert result["text"] > 0.9, result
    assert result["features"] > 0.9, result
    for name in result:
        assert verify(tmp_path / name) == []
    files = sorted((tmp_path / "build/recipe-images/7").iterdir())
    assert len(files) > 100
    text = tf.saved_model.load(tmp_path / "text").signatures["serving_default"]
    praised = text(
        text=tf.constant([["the film not bad the plot great"], ["the film not good the plot bad"]])
    )
    assert (praised["praise"].numpy()[:, 0] > 0.5).tolist() == [True, False]
    table = tf.saved_model.load(tmp_path / "features").signatures["serving_default"]
    columns = {"age": [[79.0]], "income": [[5000.0]], "job": [["clerk"]], "channel": [["web"]]}
    answers = table(**{name: tf.constant(value) for name, value in columns.items()})
    assert answers["answers"].numpy()[0, 0] > 0.9


def write_tars(folder: Path, counts: dict[str, int]) -> None:
    """Tar files of samples: digits in large images, so that a part of a file is counted."""
    drawn = np.random.default_rng(0)
    for name, count in counts.items():
        with tarfile.open(folder / name, "w") as tar:
            for number in range(count):
                pixels = drawn.integers(0, 255, [120, 120, 1]).astype("uint8")
                png = tf.io.encode_png(pixels).numpy()
                for extension, content in (("png", png), ("cls", str(number % 10).encode())):
                    info = tarfile.TarInfo(f"{number}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def write_rows(folder: Path, counts: dict[str, int]) -> None:
    """Parquet files of the table that features.py makes."""
    import features

    for seed, (name, count) in enumerate(counts.items()):
        columns, label = features.make_rows(seed, count)
        table = {column: values[:, 0] for column, values in columns.items()}
        pyarrow.parquet.write_table(pyarrow.table({**table, "label": label}), folder / name, 64)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("store", ["s3", *NIGHTLY])
@pytest.mark.parametrize("recipe", ["images.py", "features.py"])
def test_recipes_in_a_bucket_on_two_workers_killed_three_times(
    tmp_path, monkeypatch, recipe, store
):
    """Their bits are those of an undisturbed run over local files. Each worker reads its part."""
    write, kind, flag = {
        "images.py": (write_tars, "tar", "tars"),
        "features.py": (write_rows, "parquet", "rows"),
    }[recipe]
    names = [f"train-{n}.{kind}" for n in (0, 1)]
    write(tmp_path, {names[0]: 100, names[1]: 60, f"test.{kind}": 40})

    def run(folder, name, kills="", restarts=0):
        several = f"{folder}/train-*.{kind}"
        if folder == str(tmp_path):
            several = ",".join(f"{folder}/{name}" for name in names)
        arguments = [f"--{flag}={several}", f"--test_{flag}={folder}/test.{kind}"]
        arguments += [f"--index_dir={folder}/index"] if kind == "tar" else []
        arguments += ["--epochs=3", "--batch_size=16", f"--backup_dir={folder}/{name}"]
        options = ["--isolate=off", f"--max-restarts={restarts}"]
        return run_cluster(
            "recipe_killed.py", recipe, kills, *arguments, options=options, env=ONE_THREAD
        )

    expected = run(str(tmp_path), "undisturbed")
    with opened(store, monkeypatch) as server:
        tfmw.storage.upload(tmp_path, f"{server.url}/data")
        folder = f"{server.url}/data"
        if kind == "tar":  # the index is made once
            for name in (*names, f"test.{kind}"):
                tfmw.data.from_tars(f"{folder}/{name}", ["png", "cls"], index_dir=f"{folder}/index")
        server.sent_to.clear()
        undisturbed = run(folder, "whole")
        read = {server.sent_to[f"worker-{index}"] for index in (0, 1)}
        killed = run(folder, "killed", kills="1:5,0:14,1:23", restarts=3)
    assert killed.output.count("tfmw: restart ") == 3, killed.output
    for worker in (*undisturbed, *killed):
        assert worker["weights"] == expected[0]["weights"]
        assert worker["history"] == expected[0]["history"]
    if kind == "tar" and store == "s3":  # requests of S3 name their client
        sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.tar")}
        part = 3 * sum(sizes.values()) / 2  # of three epochs with their validations
        assert max(read) <= 1.05 * part, (read, part)


@pytest.fixture(scope="module", autouse=True)
def _parsed():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["recipe"])


def test_the_flags_are_those_of_the_contract():
    own = flags.FLAGS.get_flags_for_module(common)
    assert {flag.name for flag in own} == {
        *("strategy", "collectives", "epochs", "max_steps", "batch_size", "backup_dir"),
        *("export_dir", "job_name", "task_index", "worker_hosts", "ps_hosts", "sync_replicas"),
        *("replicas_to_aggregate", "num_gpus", "chief_host", "existing_servers"),
        "min_shard_bytes",
    }


def test_cluster_from_flags():
    saved = flagsaver.save_flag_values()
    try:
        flags.FLAGS(["recipe"])
        assert common.cluster_from_flags() is None
        flags.FLAGS(["recipe", "--worker_hosts=h0:1,h1:2", "--task_index=1"])
        assert common.cluster_from_flags() == Cluster(workers=("h0:1", "h1:2"), index=1)
    finally:
        flagsaver.restore_flag_values(saved)


def test_address_of_the_coordinator_is_of_no_other_task():
    """The coordinator starts beside worker 0; clusters of one host have different ones."""
    host, port = coordinator.address(["h0:2223"], ["h2:2221"]).split(":")
    assert host == "h0"
    workers, servers = ["h0:2223", f"h1:{port}"], [f"h2:{int(port) + 1}"]
    assert coordinator.address(workers, servers) == f"h0:{int(port) + 2}"
    assert coordinator.address(["h0:2224"], ["h2:2221"]) != f"h0:{port}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task_index=1"], "--task_index is given and --worker_hosts is not"),
        (["--job_name=worker"], "--job_name is given and --worker_hosts is not"),
        (["--worker_hosts=h0:1,h1:2"], "names 2 workers and --task_index is missing"),
        (["--worker_hosts=h0,h1", "--task_index=0"], "'h0'"),
        (["--worker_hosts=h0:1,h1:2", "--task_index=2"], "worker 2"),
        (["--ps_hosts=h0:1"], "--ps_hosts is given and --worker_hosts is not"),
        (["--sync_replicas"], "--sync_replicas is for parameter servers"),
        (["--replicas_to_aggregate=2"], "--sync_replicas is for parameter servers"),
        (
            ["--worker_hosts=h0:2,h1:2", "--ps_hosts=h2:1", "--job_name=worker"],
            "--worker_hosts names 2 tasks and --task_index is missing",
        ),
        (["--num_gpus=1000"], "--num_gpus=1000, but TensorFlow sees"),
        (["--strategy=none_such"], "none_such"),
        (["--collectives=none_such"], "none_such"),
    ],
)
def test_wrong_flags_are_one_sentence(arguments, message):
    saved = flagsaver.save_flag_values()
    try:
        flags.FLAGS(["recipe", *arguments])
        with pytest.raises(UsageError, match=re.escape(message)) as caught:
            common.init()
        assert "\n" not in str(caught.value)
    finally:
        flagsaver.restore_flag_values(saved)


@pytest.mark.process
@pytest.mark.parametrize("argument", cases(["stray"], ["--ps_hosts=h0:1"]))
def test_a_wrong_command_line_ends_with_status_2_and_no_traceback(argument):
    status, output = run_command("python", DIGITS, argument)
    assert status == 2
    last = output.strip().splitlines()[-1]
    assert last.startswith("digits.py: ")
    assert argument.split("=")[0] in last
    assert "Traceback" not in output


@pytest.mark.process
def test_the_help_of_a_recipe_lists_its_flags():
    _, output = run_command("python", ROOT / "recipes/images.py", "--help")
    assert "--epochs: Epochs over the training data." in output
    assert "--image_dir: A folder of images for each class" in output
