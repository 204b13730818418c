"""Progress in log files: one aligned line per interval; TensorFlow's notices are not shown."""

from __future__ import annotations

import importlib
import io
import re
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.cluster import ROOT, tfmw_command
from tfmw._lines import Lines, with_lines
from tfmw._notices import is_notice
from tfmw._output import Display

# What one process without a GPU writes with TensorFlow 2.21.0, and 2.18.1.
NOTICES = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795264727.917557   12869 cudart_stub.cc:31] Could not find cuda drivers on your \
machine, GPU will not be used.
I0000 00:00:1795264728.008634   12869 cpu_feature_guard.cc:227] This TensorFlow binary is \
optimized to use available CPU instructions in performance-critical operations.
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the \
appropriate compiler flags.
E0000 00:00:1795264731.961498   12869 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA \
error: Failed call to cuInit: UNKNOWN ERROR (303)
2026-01-31 12:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. \
You may see slightly different numerical results due to floating-point round-off errors.
E0000 00:00:1732000000.123456   12869 cuda_dnn.cc:8310] Unable to register cuDNN factory: \
Attempting to register factory for plugin cuDNN when one has already been registered
I0000 00:00:1795267204.413700   12602 tf_record_dataset_op.cc:396] The default buffer size is \
262144, which is overridden by the user specified `buffer_size` of 8388608
W0000 00:00:1732000000.123456   12869 computation_placer.cc:177] computation placer already \
registered. Please check linkage and avoid linking the same target more than once.
""".splitlines()

NO_NOTICES = [
    "WARNING: All of it is the user's own",
    "2026-01-31 12:00:00.123456: the user's own clock",
    "E0000 00:00:1795264731.961498   12869 cuda_platform.cc:52] failed call to cuInit: INTERNAL: "
    "CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "E0000 00:00:1795264775.589889   14758 base_collective_executor.cc:252] "
    "BaseCollectiveExecutor::StartAbort INTERNAL: worker 1: ValueError: boom",
    "I0000 but no more",
]


@pytest.mark.parametrize("line", NOTICES)
def test_a_notice_is_known(line):
    assert is_notice(line)


@pytest.mark.parametrize("line", NO_NOTICES)
def test_other_messages_are_not_taken_for_notices(line):
    assert not is_notice(line)


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("live", ["a", None])
def test_notices_are_not_shown_however_they_arrive(live, size):
    out = io.StringIO()
    display = Display(out, live)
    lines = [line for pair in zip(NOTICES, NO_NOTICES * 2, strict=False) for line in pair]
    data = "".join(f"{line}\n" for line in lines).encode()
    for at in range(0, len(data), size):
        display.feed("a", data[at : at + size])
    display.feed("a", b"W0000 00:00:17")
    display.feed("a", b"", final=True)
    kept = [line for line in lines if line not in NOTICES] + ["W0000 00:00:17"]
    label = "" if live else "[a] "
    assert out.getvalue() == "".join(f"{label}{line}\n" for line in kept)


def test_a_bar_is_not_held_back():
    out = io.StringIO()
    display = Display(out, "a")
    for piece in ("\r 1/23", "\b\b\r 2", "2026 so far", "\n", "2", "3/23"):
        display.feed("a", piece.encode())
        if piece == "2":  # may become a date
            assert out.getvalue().endswith("so far\n")
    assert out.getvalue() == "\r 1/23\b\b\r 22026 so far\n23/23"


def played(steps_per_epoch, target, interval_s=10.0, seconds_per_step=0.5):
    """The lines of two epochs, on a clock of our own."""
    out, now = io.StringIO(), [0.0]
    lines = Lines(interval_s, out, clock=lambda: now[0])
    lines.set_params({"epochs": 12, "steps": target, "verbose": "auto"})
    lines.on_train_begin()
    for epoch in (8, 9):
        lines.on_epoch_begin(epoch)
        now[0] += 2  # tracing
        for step in range(steps_per_epoch):
            now[0] += seconds_per_step
            lines.on_train_batch_end(step, {"loss": 1 / (step + 1), "accuracy": 0.0005})
        lines.on_epoch_end(epoch, {"loss": 0.25, "accuracy": 1.0, "val_loss": 0.5})
    return out.getvalue().splitlines()


def test_one_aligned_line_per_interval():
    assert played(50, 50) == [
        "train | epoch  9/12 | step 16/50 |    2.0 steps/s | 0:17 left | loss: 0.0625 | accuracy: "
        "5.0000e-04",
        "train | epoch  9/12 | step 36/50 |    2.0 steps/s | 7.0 s left | loss: 0.0278 | accuracy: "
        "5.0000e-04",
        "train | epoch  9/12 | step 50/50 |    2.0 steps/s | took 0:27 | loss: 0.2500 | accuracy: "
        "1.0000 | val_loss: 0.5000",
        "train | epoch 10/12 | step 16/50 |    2.0 steps/s | 0:17 left | loss: 0.0625 | accuracy: "
        "5.0000e-04",
        "train | epoch 10/12 | step 36/50 |    2.0 steps/s | 7.0 s left | loss: 0.0278 | accuracy: "
        "5.0000e-04",
        "train | epoch 10/12 | step 50/50 |    2.0 steps/s | took 0:27 | loss: 0.2500 | accuracy: "
        "1.0000 | val_loss: 0.5000",
    ]


def test_a_length_that_is_not_known_is_known_after_the_first_pass():
    first, _, end, again, *_ = played(50, None)
    assert " | step 16 |    2.0 steps/s | loss" in first
    assert " | step 50/50 | " in end
    assert " | step 16/50 |    2.0 steps/s | 0:17 left | " in again


def test_lines_are_for_where_nobody_watches(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    importlib.import_module("ipykernel.kernelapp")  # imported is not running
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert [type(c) for c in with_lines([], True, "auto")] == [Lines]
    own = keras.callbacks.ProgbarLogger()
    assert with_lines([own], True, "auto") == [own]
    for verbose in (1, 2):  # the user's choice
        assert with_lines([], True, verbose) == []
    assert with_lines([], False, "auto") == []
    monkeypatch.setattr("sys.stdout", Terminal())
    assert with_lines([], True, "auto") == []


def test_fit_evaluate_and_predict_write_lines(capsys):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x: Any = np.ones([40, 3], "float32")
    tfmw.fit(model, x, x[:, :1], batch_size=10, epochs=2, validation_data=(x, x[:, :1]))
    tfmw.evaluate(model, x, x[:, :1])
    tfmw.predict(model, x)
    out = capsys.readouterr().out
    seconds, loss = r" +[\d.]+ steps/s \| took [\d.]+ s", r" \| loss: [\d.e-]+"
    expected = [
        rf"train \| epoch 1/2 \| step 4/4 \|{seconds}{loss} \| val_loss: [\d.e-]+",
        rf"train \| epoch 2/2 \| step 4/4 \|{seconds}{loss} \| val_loss: [\d.e-]+",
        rf"test \| step 2/2 \|{seconds}{loss}",
        rf"predict \| step 2/2 \|{seconds}",
    ]
    lines = out.splitlines()
    assert len(lines) == len(expected), out
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.multiprocess
def test_a_run_shows_what_the_tasks_say_and_logs_everything(tmp_path):
    """The real TensorFlow on two workers: its notices are in the logs and nowhere else."""
    arguments = ["--workers", "2", "--log-dir", str(tmp_path)]
    recipe = [str(ROOT / "recipes/digits.py"), "--epochs=2"]
    with tfmw_command("run", *arguments, *recipe) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    said = [line for line in output.splitlines() if not line.startswith("tfmw: ")]
    kinds = [re.sub(r"[\d.]+", "0", line)[:24] for line in said]
    assert kinds == ["[worker 0] train | epoch"] * 2 + ["[worker 0] validation ac"], output
    for task in (0, 1):
        (log,) = tmp_path.glob(f"*/attempt_0/worker_{task}/output.log")
        assert any(map(is_notice, log.read_text().splitlines())), "TensorFlow says nothing any more"
