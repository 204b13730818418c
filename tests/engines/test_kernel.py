"""`tfmw.fit(..., workers=2)` and `tfmw.launch` in cells of a real kernel that uses TensorFlow."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.helpers.cluster import MARK, ONE_THREAD, ROOT, marked, template_and_copies
from tfmw.launcher.options import PREEMPT_GRACE_S
from tfmw.launcher.output import collapse

pytestmark = pytest.mark.process

FIRST_CELL = """
import keras
import numpy as np
import tensorflow as tf

total = int(tf.reduce_sum([1, 2]))  # from here on this process can join no cluster
x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512, seed=1).batch(32)


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale


class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.hidden = keras.layers.Dense(16, activation="relu")
        self.out = keras.layers.Dense(2)

    def call(self, x):
        return self.out(self.hidden(self.scale(x)))


def make_model():
    model = Network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


model = make_model()
import tfmw

total
"""


class Cell:
    """Output of a cell, in order of arrival: [(seconds since the first message, message)]."""

    def __init__(self) -> None:
        self.shown: list[tuple[float, dict[str, Any]]] = []
        self.error: dict[str, Any] | None = None
        self.value = ""

    def stream(self, name: str) -> str:
        return "".join(
            m["content"]["text"]
            for _, m in self.shown
            if m["msg_type"] == "stream" and m["content"]["name"] == name
        )

    @property
    def stdout(self) -> str:
        return self.stream("stdout")


class Kernel:
    """A kernel, and every process that comes from it by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        # A notebook has no terminal whose width (COLUMNS) could make its bars shorter.
        environ = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "COLUMNS")}
        environ |= {**ONE_THREAD, "PYTHONPATH": str(ROOT), MARK: self.mark}
        self.manager = KernelManager(kernel_name="python3")
        quiet = subprocess.DEVNULL
        self.manager.start_kernel(env=environ, cwd=str(folder), stdout=quiet, stderr=quiet)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=600)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def run(self, code: str, timeout_s: float = 150) -> Cell:
        cell = Cell()
        for _ in self.messages(self.client.execute(code), cell, timeout_s):
            pass
        return cell

    def messages(self, request: str, cell: Cell, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yields messages of the cell of this request, until the kernel is idle again."""
        began = time.monotonic()
        while True:
            left = timeout_s - (time.monotonic() - began)
            message = self.client.get_iopub_msg(timeout=max(left, 0.01))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            if kind == "error":
                cell.error = content
            if kind == "execute_result":
                cell.value = content["data"]["text/plain"]
            cell.shown.append((time.monotonic() - began, message))
            yield message

    def tasks(self) -> list[int]:
        """The living workers that this kernel has started."""
        found = [pid for pid, command in marked(self.mark).items() if "launcher/task.py" in command]
        templates, _ = template_and_copies(found)
        return [pid for pid in found if pid not in templates]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        first = kernel.run(FIRST_CELL)
        assert first.error is None, first.error
        assert first.value == "3"
        yield kernel
    finally:
        kernel.close()
    assert not marked(kernel.mark)


@pytest.fixture(scope="module")
def fitted(kernel: Kernel) -> Cell:
    return kernel.run("history = tfmw.fit(model, dataset, epochs=3, workers=2)")


def test_fit_in_a_cell(kernel: Kernel, fitted: Cell) -> None:
    assert fitted.error is None, fitted.error
    told = kernel.run(
        "_, accuracy = model.evaluate(x, y, verbose=0)\n"
        "twin = make_model()\n"
        "again = twin.fit(dataset, verbose=0)\n"
        "(history.epoch, len(history.history['loss']), int(model.optimizer.iterations),"
        " history.history['loss'][-1] < history.history['loss'][0], accuracy > 0.8,"
        " model.history is history, len(again.epoch))"
    )
    assert told.value == "([0, 1, 2], 3, 48, True, True, True, 1)", told.error or told.value


def test_one_live_progress_bar(fitted: Cell) -> None:
    lines = [re.sub(r"\x1b\[[\d;]*m", "", collapse(x)) for x in fitted.stdout.split("\n") if x]
    assert [line.split(" ")[0] for line in lines] == ["Epoch", "16/16"] * 3, lines
    bar = r"16/16 ━{20} \d+s \d+[mu]?s/step - [\d,]+ examples/s - accuracy: "
    assert all(re.match(bar, line) for line in lines[1::2]), lines
    states = fitted.stdout.count("/16\x1b[0m")
    assert states > 3, "each bar has been drawn more than once"
    when = {
        text: at
        for at, message in fitted.shown
        for text in ("Epoch 1/3", "Epoch 3/3")
        if text in message["content"].get("text", "")
    }
    assert when["Epoch 1/3"] < when["Epoch 3/3"] < fitted.shown[-1][0] + 1e-9
    assert "[worker 1]" not in fitted.stdout
    assert "cuda" not in fitted.stream("stderr") + fitted.stdout


def test_launch_returns_results_in_order(kernel: Kernel) -> None:
    cell = kernel.run(
        "import os\n"
        "def rank_and(value):\n"
        "    return int(os.environ['TFMW_LOCAL_RANK']), Network.__name__, value * 2\n"
        "tfmw.launch(rank_and, (21,), workers=2)"
    )
    assert cell.value == "[(0, 'Network', 42), (1, 'Network', 42)]", cell.error


def test_worker_error_is_raised_with_its_traceback(kernel: Kernel) -> None:
    cell = kernel.run(
        "def fails_on_1():\n"
        "    if os.environ['TFMW_TASK'] == 'worker 1':\n"
        "        raise KeyError('no such key')\n"
        "    return 'fine'\n"
        "tfmw.launch(fails_on_1, workers=2)"
    )
    assert cell.error is not None
    assert (cell.error["ename"], cell.error["evalue"]) == ("KeyError", "'no such key'")
    traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(cell.error["traceback"]))
    assert "worker 1 failed" in traceback
    assert re.search(r", line 3, in fails_on_1\b", traceback), "the worker's own line"


def test_dataset_of_python_functions_is_refused_before_any_process_starts(kernel: Kernel) -> None:
    cell = kernel.run(
        "import subprocess\n"
        "popen, subprocess.Popen = subprocess.Popen, None  # whatever starts a process, breaks\n"
        "python = dataset.map(lambda x, y: (tf.numpy_function(lambda v: v, [x], tf.float32), y))\n"
        "try:\n"
        "    tfmw.fit(model, python, workers=2)\n"
        "finally:\n"
        "    subprocess.Popen = popen"
    )
    assert cell.error is not None
    assert cell.error["ename"] == "UsageError"
    assert "holds Python functions" in cell.error["evalue"]
    assert "pass a callable that builds it in each process" in cell.error["evalue"]


def test_interrupted_cell_ends_the_workers_and_keeps_their_weights(kernel: Kernel) -> None:
    code = """
model = make_model()
fresh = [w.copy() for w in (model(x[:1]), model.get_weights())[1]]
tfmw.fit(model, dataset.repeat(), epochs=10_000, steps_per_epoch=400, workers=2)
"""
    cell, first, seconds = Cell(), 0.0, 0.0
    for message in kernel.messages(kernel.client.execute(code), cell, 150):
        if "Epoch" not in message["content"].get("text", ""):
            continue
        first = first or time.monotonic()
        if not seconds and time.monotonic() - first > 4:  # backups are two seconds apart
            workers = kernel.tasks()
            assert len(workers) == 2
            seconds = interrupted(kernel, workers)
    # Ended at once, not given the time in which preempted workers save their state.
    assert 0 < seconds < PREEMPT_GRACE_S / 2, f"the workers ended after {seconds:.2f} s"
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    kept = re.search(r"stopped; the model has the weights of step (\d+)", cell.stdout)
    assert kept, cell.stdout[-500:]
    told = kernel.run(
        "(int(model.optimizer.iterations),"
        " any((a != b).any() for a, b in zip(fresh, model.get_weights())))"
    )
    assert told.value == f"({kept[1]}, True)"
    assert int(kept[1]) > 0
    assert kernel.tasks() == []


def interrupted(kernel: Kernel, workers: list[int]) -> float:
    """Interrupts the cell; seconds until all workers have ended, by the kernel's own word."""
    handles = [os.pidfd_open(pid) for pid in workers]
    try:
        began = time.monotonic()
        kernel.manager.interrupt_kernel()
        for handle in handles:
            ready, _, _ = select.select([handle], [], [], 30)
            assert ready
        return time.monotonic() - began
    finally:
        for handle in handles:
            os.close(handle)
