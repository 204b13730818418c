"""Progress in log files: one aligned line per interval; TensorFlow's notices are not shown."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import io
import os
import pty
import re
import struct
import termios
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.cluster import ROOT, assert_examples_per_step, tfmw_command
from tfmw.launcher.failure import tail
from tfmw.launcher.output import Display, without_notices
from tfmw.train import fit_context
from tfmw.train.callbacks.progress_bar import Bar, Lines, Throughput, with_progress

# Output of one process without a GPU, with TensorFlow 2.18.1, 2.21.0 and 2.22.0rc0.
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
W0000 00:00:1795949849.518936   11602 local_rendezvous.cc:412] Local rendezvous is aborting with \
status: NOT_FOUND: Cannot find this iterator's analytical model. Did you disable autotune for it?
E0000 00:00:1796052670.113037    9274 cuda_platform.cc:57] failed call to cuInit: INTERNAL: CUDA \
error: Failed call to cuInit: UNKNOWN ERROR (303)
=== Source Location Trace: ===
external/xla/xla/stream_executor/cuda/cuda_status.cc:50

E0000 00:00:1795567655.672878   14773 base_collective_executor.cc:252] \
BaseCollectiveExecutor::StartAbort INTERNAL: worker 1: ValueError: in two
lines [type.googleapis.com/tensorflow.CoordinationServiceError='\\x18\\x01\\"\\n\\x06worker']
""".splitlines(keepends=True)

NO_NOTICES = [
    "WARNING: All of it is the user's own",
    "2026-01-31 12:00:00.123456: the user's own clock",
    "E0000 00:00:1795264731.961498   12869 cuda_platform.cc:52] failed call to cuInit: INTERNAL: "
    "CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "=== Source Location Trace: ===",
    "E0000 00:00:1795264775.589889   14758 base_collective_executor.cc:252] "
    "BaseCollectiveExecutor::StartAbort INTERNAL: worker 1: ValueError: boom",
    "I0000 but no more",
]


# Output of the survivors of collectives="grpc" once a worker is killed, with TensorFlow 2.21.0.
ECHO = """\
E0000 00:00:1795322305.180684    2442 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: \
recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling \
/tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}
E0000 00:00:1795322305.181298    2442 base_collective_executor.cc:252] \
BaseCollectiveExecutor::StartAbort UNAVAILABLE: recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling \
/tensorflow.WorkerService/CompleteInstance:
:UNKNOWN:Error received from peer  {grpc_message:"recvmsg:Connection reset by peer", grpc_status:14}
E0000 00:00:1796090012.179417   28956 ring_alg.cc:291] Aborting RingReduce with CANCELLED: CANCELLED
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling \
/tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_message:"CANCELLED", grpc_status:1} \
[type.googleapis.com/tensorflow.DerivedStatus='']
"""


def test_notices_and_follow_up_errors_are_left_out():
    assert without_notices("".join(NOTICES)) == without_notices(ECHO) == ""
    for text in (*NO_NOTICES, "\n".join(["a worker is gone", *ECHO.split("\n")[1:3]])):
        assert without_notices(text) == text
        assert without_notices(f"{''.join(NOTICES)}{text}\n{ECHO}") == f"{text}\n"


@pytest.mark.parametrize("live", ["a", None])
def test_the_display_shows_none(live):
    """Each message arrives in one piece, as TensorFlow writes it."""
    out = io.StringIO()
    display = Display(out, live)
    for text in (*NO_NOTICES, "unfinished"):
        display.feed("a", "".join([*NOTICES[:4], *NOTICES[6:], ECHO]).encode())
        display.feed("a", f"{text}\n".encode())
    display.feed("a", b"", final=True)
    label = "" if live else "[a] "
    assert out.getvalue() == "".join(f"{label}{text}\n" for text in (*NO_NOTICES, "unfinished"))


def test_a_follow_up_error_inside_a_bar_leaves_the_bar():
    out = io.StringIO()
    display = Display(out, "a")
    for text in ("\r 1/23", "\b\b\r 2/23 - loss: 0.5", ECHO, "\b\b\r 3/23"):
        display.feed("a", text.encode())
    assert out.getvalue() == "\r 1/23\b\b\r 2/23 - loss: 0.5\b\b\r 3/23"


def test_the_end_of_a_log_is_shown_without_notices(tmp_path):
    log = tmp_path / "output.log"
    log.write_text("".join([*(f"{line}\n" for line in NO_NOTICES), *NOTICES]))
    assert tail(log) == tuple(NO_NOTICES)
    log.write_text("".join(NOTICES))
    assert tail(log) == ()


def played(steps_per_epoch, target, interval_s=10.0, seconds_per_step=0.5, tracing=2):
    """The lines of two epochs, on a clock of our own."""
    out, now, examples = io.StringIO(), [0.0], [0]
    clock = functools.partial(now.__getitem__, 0)
    throughput = Throughput(functools.partial(examples.__getitem__, 0), clock)
    lines = Lines(throughput, interval_s, out)
    lines.set_params({"epochs": 12, "steps": target, "verbose": "auto"})
    lines.on_train_begin()
    for epoch in (8, 9):
        lines.on_epoch_begin(epoch)
        now[0] += tracing if epoch == 8 else 0
        for step in range(steps_per_epoch):
            now[0] += seconds_per_step
            examples[0] += 640
            lines.on_train_batch_end(step, {"loss": 1 / (step + 1), "accuracy": 0.0005})
        now[0] += 4  # validation
        examples[0] += 1000
        lines.on_epoch_end(epoch, {"loss": 0.25, "accuracy": 1.0, "val_loss": 0.5})
    return out.getvalue().splitlines()


def test_a_long_trace_is_shown_beside_the_rate_without_it():
    lines = played(8, 8)
    assert "2.0 steps/s |   1,280 examples/s | took 0:10 | " in lines[0]
    long = played(8, 8, tracing=30)[-2:]
    assert "2.0 steps/s |   1,280 examples/s | took 0:38, 0:30 to the first step | " in long[0]
    assert "took 8.0 s | " in long[1]


def test_one_aligned_line_per_interval():
    epochs, rates = (" 9", "10"), "   2.0 steps/s |   1,280 examples/s"
    assert played(50, 50) == [
        f"train | epoch {epoch}/12 | step {rest}"
        for epoch, first, second in zip(epochs, (16, 20), (36, 40), strict=True)
        for rest in (
            f"{first}/50 | {rates} | 0:{(50 - first) // 2} left | loss: {1 / first:.4f} | "
            "accuracy: 5.0000e-04",
            f"{second}/50 | {rates} | {(50 - second) / 2:.1f} s left | loss: {1 / second:.4f} | "
            "accuracy: 5.0000e-04",
            f"50/50 | {rates} | took 0:{31 if epoch == epochs[0] else 29} | loss: 0.2500 | "
            "accuracy: 1.0000 | val_loss: 0.5000",
        )
    ]


def test_unknown_length_is_known_after_the_first_epoch():
    first, _, end, again, *_ = played(50, None)
    assert " | step 16 |    2.0 steps/s |   1,280 examples/s | loss" in first
    assert " | step 50/50 | " in end
    assert " | step 20/50 |    2.0 steps/s |   1,280 examples/s | 0:15 left | " in again


def test_the_rate_of_a_single_call_counts_its_tracing():
    now = [0.0]
    throughput = Throughput(lambda: int(now[0]) * 100, clock=lambda: now[0])
    assert (throughput.steps, throughput.examples) == (0, 0)
    now[0] = 4
    throughput.update(8)
    assert (throughput.steps, throughput.examples) == (2, 100)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(monkeypatch, columns, target=938, steps=938, seconds_per_step=0.01, metrics=1):
    """The states of a bar on a terminal, as it shows them; the last one of the epoch last."""
    out, now, examples = Terminal(), [0.0], [0]
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = Bar(Throughput(lambda: examples[0], clock=lambda: now[0]))
    bar.set_params({"epochs": 1, "steps": target, "verbose": 1})
    bar.on_train_begin()
    bar.on_epoch_begin(0)
    logs = {f"metric_{i}": 0.5 for i in range(metrics)}
    for step in range(steps):
        now[0] += seconds_per_step
        examples[0] += 64
        bar.progbar.interval = 0.0
        bar.on_train_batch_end(step, logs)
    bar.on_epoch_end(0, logs)
    plain = re.sub(r"\x1b\[\d+m|\x08", "", out.getvalue())
    return [state.rstrip() for state in re.split(r"[\r\n]+", plain) if state]


def test_bar_is_that_of_keras_with_examples_per_second(monkeypatch):
    states = drawn(monkeypatch, columns=200)
    assert len(states) == 939
    for state in states:
        pattern = r" *\d+/938 ━{20} \d+m?s \d+[mu]?s/step - 6,400 examples/s - metric_0: 0\.5000"
        assert re.fullmatch(pattern, state), state


@pytest.mark.parametrize("columns", [60, 64, 70, 80, 90, 100])
@pytest.mark.parametrize("target", [938, None])
@pytest.mark.parametrize("metrics", [1, 2, 3])
def test_no_state_of_the_bar_is_wider_than_its_terminal(monkeypatch, columns, target, metrics):
    """A state wider than the terminal could not be overwritten: each state would stay."""
    *states, last = drawn(monkeypatch, columns, target, metrics=metrics)
    keras_own = [state for state in states if "examples/s" not in state]
    longest = max(map(len, keras_own), default=0) - (16 if target else 0)  # the bar can be short
    assert all(len(state) < columns for state in states if "examples/s" in state)
    assert not keras_own or longest + len(" - 6,400 examples/s") >= columns - 8, "it would fit"
    assert " - 6,400 examples/s - metric_0: 0.5000" in last


def test_lines_are_for_output_to_files(monkeypatch):
    importlib.import_module("ipykernel.kernelapp")  # imported is not running
    monkeypatch.setattr("sys.stdout", io.StringIO())

    def added(shows, verbose):
        return [type(c) for c in with_progress([], shows, verbose, lambda: 0)]

    assert added(True, "auto") == [Lines]
    own = keras.callbacks.ProgbarLogger()
    for verbose in ("auto", 1):
        assert with_progress([own], True, verbose, lambda: 0) == [own]
    assert added(True, 1) == [Bar]  # the user's choice
    assert added(True, 2) == []
    assert added(False, "auto") == []
    monkeypatch.setattr("sys.stdout", Terminal())
    assert added(True, "auto") == [Bar]
    assert added(False, 1) == []
    assert with_progress([], True, "auto") == [], "nobody knows how many examples: Keras's own"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["known", "unknown", "function", "ragged"])
@pytest.mark.parametrize("eagerly", [False, True])
def test_examples_are_counted_one_by_one(monkeypatch, kind, eagerly):
    """Counts 25 examples in batches of 10, and 7 for validation, with known batches or not."""
    x: Any = np.arange(25, dtype="float32")[:, None]
    batches: Any = tf.data.Dataset.from_tensor_slices((x, x)).batch(10)
    if kind == "unknown":
        batches = batches.filter(lambda x, y: True)
    elif kind == "ragged":
        sizes = [3, 12, 10]
        splits = tf.RaggedTensor.from_row_lengths(x, sizes)
        batches = tf.data.Dataset.from_tensor_slices(splits).map(lambda r: (r, r))
    seen: list[int] = []
    given: list[Any] = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(given[0]())

    def with_progress(callbacks, shows, verbose, examples=None, overlapping=False):
        given.append(examples)
        return callbacks

    monkeypatch.setattr(fit_context, "with_progress", with_progress)
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=eagerly)
    data = (lambda context: batches) if kind == "function" else batches
    validation = (x[:7], x[:7])
    tfmw.fit(model, data, epochs=2, validation_data=validation, callbacks=[Seen()])
    first = [3, 15, 25] if kind == "ragged" else [10, 20, 25]
    assert seen == [*first, *(25 + 7 + n for n in first)]


def test_fit_evaluate_and_predict_write_lines(capsys):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x: Any = np.ones([40, 3], "float32")
    tfmw.fit(model, x, x[:, :1], batch_size=10, epochs=2, validation_data=(x, x[:, :1]))
    tfmw.evaluate(model, x, x[:, :1])
    tfmw.predict(model, x)
    out = capsys.readouterr().out
    steps, seconds, loss = (
        r" +[\d.]+ steps/s \|",
        r" took [\d.:]+( s)?(, [\d.:]+( s)? to the first step)?",
        r" \| loss: [\d.e-]+",
    )
    examples = r" +[\d,]+ examples/s \|"
    expected = [
        rf"train \| epoch 1/2 \| step 4/4 \|{steps}{examples}{seconds}{loss} \| val_loss: [\d.e-]+",
        rf"train \| epoch 2/2 \| step 4/4 \|{steps}{examples}{seconds}{loss} \| val_loss: [\d.e-]+",
        rf"test \| step 2/2 \|{steps}{examples}{seconds}{loss}",
        rf"predict \| step 2/2 \|{steps}{examples}{seconds}",
    ]
    lines = out.splitlines()
    assert len(lines) == len(expected), out
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_on_a_terminal_they_draw_bars_and_return_what_keras_returns(monkeypatch):
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "200")
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x: Any = np.ones([40, 3], "float32")
    told: list[Any] = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: told.append([*logs])
    )
    history = tfmw.fit(model, x, x[:, :1], batch_size=10, callbacks=[seen], validation_split=0.2)
    assert tfmw.evaluate(model, x, x[:, :1], return_dict=True).keys() == {"loss"}
    tfmw.predict(model, x)
    assert history.history.keys() == {"loss", "val_loss"}
    assert told == [["loss"]] * 4
    plain = re.sub(r"\x1b\[\d+m|\x08", "", out.getvalue())
    fit, test, predict = [line.split("\r")[-1] for line in plain.strip().split("\n")]
    assert re.match(
        r"4/4 ━{20} \d+s \d+[mu]?s/step - [\d,]+ examples/s - loss: .* - val_loss: ", fit
    )
    assert re.match(r"2/2 ━{20} \d+s \d+[mu]?s/step - [\d,]+ examples/s - loss: ", test)
    assert re.match(r"2/2 ━{20} \d+s \d+[mu]?s/step - [\d,]+ examples/s *$", predict)


@pytest.mark.nightly  # `make test` has the README and `make demo`
@pytest.mark.process
def test_run_prints_task_output_and_logs_everything(tmp_path):
    """The real TensorFlow on two workers: its notices are in the logs and nowhere else."""
    arguments = ["--workers", "2", "--log-dir", str(tmp_path)]
    recipe = [str(ROOT / "recipes/digits.py"), "--epochs=2"]
    with tfmw_command("run", *arguments, *recipe) as run:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    said = [line for line in output.splitlines() if not line.startswith("tfmw: ")]
    kinds = [re.sub(r"[\d.]+", "0", line)[:24] for line in said]
    # A slow machine shows more lines within an epoch.
    assert set(kinds[:-1]) == {"[worker 0] train | epoch"}, output
    assert kinds[-1] == "[worker 0] validation ac", output
    assert len(re.findall(r"step +23/23 \|", output)) == 2
    assert_examples_per_step(output, 1438 / 23)  # of both workers
    for task in (0, 1):
        (log,) = tmp_path.glob(f"*/attempt_0/worker_{task}/output.log")
        text = log.read_text()
        assert without_notices(text) != text, "TensorFlow says nothing any more"


@pytest.mark.nightly
@pytest.mark.process
def test_run_on_a_terminal_has_one_bar_with_examples_per_second(tmp_path):
    """Two workers on 80 columns, where the whole bar has no place beside the rate."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    arguments = ["--workers", "2", "--log-dir", str(tmp_path)]
    recipe = [str(ROOT / "recipes/digits.py"), "--epochs=2"]
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with tfmw_command("run", *arguments, *recipe, env={"COLUMNS": "0"}, **terminal) as run:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(ours, 1 << 16):
                shown += data
        os.close(ours)
        assert run.wait(timeout=600) == 0, shown
    text = re.sub(r"\x1b\[\d+m|\x08", "", shown.decode())
    states = [state.rstrip() for state in re.split(r"[\r\n]+", text) if "/23 " in state]
    done = [state for state in states if " - val_loss: " in state]
    assert len(done) == 2
    assert len(states) > 4, "the bars move"
    numbers = r"accuracy: \d\.\d{4}(e\+00)? - loss: \d\.\d{4}"
    for state in states:
        pattern = rf"[ \d]\d/23 ━+ [\d:]+s? \d+[mu]?s/step - [\d,]+ examples/s - {numbers}"
        assert re.match(pattern, state), state
        assert len(state) < 80 or state in done
    assert "━" * 20 in done[0], "Keras's own"


def test_overlapping_calls_count_from_the_start_of_the_epoch():
    times = iter([0.0, 0.0, 3.0, 3.01])
    throughput = Throughput(clock=lambda: next(times), overlapping=True)
    throughput.begin()
    for steps in (30, 60):  # the second worker's are reported right after the first's
        throughput.update(steps)
    assert throughput.steps == pytest.approx(60 / 3.01)
