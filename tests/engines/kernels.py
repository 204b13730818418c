"""Promises of every engine to a notebook, as tests that each engine's own test class inherits.

    class TestRayKernel(KernelContract):
        on = "'ray'"

The kernels are real ones, and the model is a class of theirs, trained on the digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.engines.contract import TIMEOUT_S, wait_for
from tests.engines.test_kernel import Cell, Kernel
from tfmw.engines import Engine

DIGITS = """
import os, time
import keras
import tfmw
from tfmw import datasets


def make_data():
    return datasets.load("tfmw_digits", "train", as_supervised=True).batch(64)


def make_model():
    class Digits(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = keras.layers.Rescaling(1 / 16)
            self.hidden = keras.layers.Dense(64, activation="relu")
            self.out = keras.layers.Dense(10)

        def call(self, x):
            return self.out(self.hidden(keras.ops.reshape(self.scale(x), (-1, 64))))

    keras.utils.set_random_seed(1)
    model = Digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def fitted(**where):
    model = make_model()
    history = tfmw.fit(model, make_data(), epochs=2, workers=2, **where)
    return history.history, model.get_weights(), int(model.optimizer.iterations)


def equal(one, other):
    (history, weights, steps), (history2, weights2, steps2) = one, other
    same = all((a == b).all() for a, b in zip(weights, weights2, strict=True))
    return history == history2 and same and steps == steps2
"""
"""A notebook's cell, and the beginning of a script."""


class KernelContract:
    """The promises; see the module."""

    on = ""
    """The engine, as an expression in a cell."""

    setup = ""
    """Code of the first cell, after `DIGITS`."""

    @pytest.fixture
    def engine(self) -> Engine:
        """The same engine, in this process."""
        raise NotImplementedError

    @pytest.fixture
    def kernel(self, engine: Engine, tmp_path: Path) -> Iterator[Kernel]:
        kernel = Kernel(tmp_path)
        try:
            first = kernel.run(DIGITS + self.setup)
            assert first.error is None, first.error
            yield kernel
        finally:
            kernel.close()

    def has_backup(self, engine: Engine) -> bool:
        """Whether the job of the running cell keeps a backup."""
        return any(job.details().get("backup") for job in tfmw.jobs(engine))

    def wait_until_nothing_is_left(self, kernel: Kernel) -> None:
        """Waits until nothing is left of the job of a cell that has ended."""

    def test_fit_in_a_cell_equals_that_of_two_workers(self, kernel: Kernel) -> None:
        cell = kernel.run(f"equal(fitted(on={self.on}), fitted())", TIMEOUT_S)
        assert cell.error is None, cell.error
        assert cell.value == "True"
        assert len(re.findall(r"^Epoch 1/2", cell.stdout, re.MULTILINE)) == 2
        assert "examples/s" in cell.stdout
        assert "[worker 0" not in cell.stdout, "one live progress bar"
        self.wait_until_nothing_is_left(kernel)

    def test_interrupted_cell_brings_home_what_was_reached(
        self, kernel: Kernel, engine: Engine
    ) -> None:
        request = kernel.client.execute(
            "import tfmw.train.on_workers as local\n"
            "local._BACKUP_OF_JOB_EVERY = 'epoch'\n"
            "model = make_model()\n"
            f"tfmw.fit(model, make_data(), epochs=100_000, workers=2, on={self.on})"
        )
        cell = Cell()
        interrupted = False
        for _ in kernel.messages(request, cell, 200):
            if not interrupted and "Epoch 3/" in cell.stdout:
                wait_for(lambda: self.has_backup(engine))
                kernel.manager.interrupt_kernel()
                interrupted = True
        assert cell.error is not None
        assert cell.error["ename"] == "KeyboardInterrupt", cell.error
        kept = re.search(r"stopped; the model has the weights of step (\d+)", cell.stdout)
        assert kept, cell.stdout[-2000:]
        assert "[worker 0" not in cell.stdout, "one live progress bar"
        assert kernel.run("int(model.optimizer.iterations)").value == kept[1]
        self.wait_until_nothing_is_left(kernel)


class OutlivesKernel:
    """Tests of an engine whose jobs outlive the kernel."""

    on = ""

    def wait_until_nothing_is_left(self, kernel: Any) -> None:
        raise NotImplementedError

    def test_killed_kernel_leaves_the_job_which_another_process_finds(
        self, kernel: Kernel, engine: Engine, tmp_path: Path
    ) -> None:
        cell = kernel.run(
            "class OfTheNotebook: pass\n"
            "def waits_for_a_file(path):\n"
            "    print('waiting', flush=True)\n"
            "    while not os.path.exists(path): time.sleep(0.1)\n"
            "    return OfTheNotebook.__name__, os.environ['TFMW_TASK']\n"
            f"job = tfmw.submit(waits_for_a_file, ({str(tmp_path / 'go')!r},), 2, on={self.on},"
            " env={'TFMW_NO_INIT': '1'})\n"
            "job.id"
        )
        assert cell.error is None, cell.error
        job = tfmw.attach(cell.value.strip("'"), on=engine)
        wait_for(lambda: job.logs().count("waiting") == 2)
        kernel.manager.shutdown_kernel(now=True)
        assert job.status() == "running"
        (tmp_path / "go").touch()
        name = "OfTheNotebook"
        assert job.result(TIMEOUT_S) == [(name, "worker 0"), (name, "worker 1")]
        job.forget()
        self.wait_until_nothing_is_left(kernel)
