"""The formula of bench/forecast.py, and a forecast from real workers."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from bench.forecast import Forecast, Span, overlap, report
from tests.helpers.cluster import ROOT

MEASURED = Forecast(
    workers=2, compute=0.030, communication=0.012, input=0.0, gradient_bytes=10**7, latency=0.001
)


def test_bandwidth_excludes_latency():
    # 2 (2-1)/2 * 10 MB in 12 ms - 2 * 1 ms
    assert MEASURED.bandwidth == pytest.approx(10**7 / 0.010)


def test_prediction_for_the_measured_cluster_is_the_measurement():
    assert MEASURED.on(2).step == pytest.approx(MEASURED.step)


def test_prediction_for_four_workers():
    # 2 * 3/4 * 10 MB at 1 GB/s + 6 messages
    assert MEASURED.on(4).communication == pytest.approx(0.015 + 0.006)
    assert MEASURED.on(4).efficiency() == pytest.approx(0.030 / 0.051)


def test_each_pack_of_gradients_waits_for_its_own_messages():
    packs = dataclasses.replace(MEASURED, sums=3)
    assert packs.bandwidth == pytest.approx(10**7 / 0.006)
    assert packs.on(2).step == pytest.approx(MEASURED.step)
    assert packs.on(4, latency=0.01).communication == pytest.approx(1.5 * 0.006 + 3 * 6 * 0.01)


def test_overhead_is_a_part_of_a_step_on_several_workers_only():
    beside = dataclasses.replace(MEASURED, overhead=0.004)
    assert beside.step == pytest.approx(0.046)
    assert beside.on(4).step == pytest.approx(0.030 + 0.004 + 0.015 + 0.006)
    assert beside.on(1).step == pytest.approx(0.030)
    assert beside.efficiency() == pytest.approx(0.030 / 0.046)


def test_a_sharded_update_is_divided_by_the_workers():
    shared = dataclasses.replace(MEASURED, update=0.004)  # 8 ms on one worker
    assert shared.on(2).step == pytest.approx(shared.step)
    assert shared.on(4).update == pytest.approx(0.002)
    assert shared.on(1).step == pytest.approx(0.038)
    assert shared.efficiency() == pytest.approx(0.038 / 0.046)
    assert shared.on(1).efficiency() == 1.0


def test_what_the_backward_pass_hides_is_not_a_part_of_a_step():
    # Gradients travel for 16 ms, for 4 of them while earlier layers are computed, of 10 possible.
    hidden = dataclasses.replace(MEASURED, hidden=0.004, window=0.010)
    assert hidden.step == pytest.approx(MEASURED.step)
    assert hidden.bandwidth == pytest.approx(10**7 / 0.014)
    assert hidden.on(2).step == pytest.approx(hidden.step)
    slow = hidden.on(2, bandwidth=10**8)  # 100 ms, and two messages
    assert slow.communication == pytest.approx(0.102 - 0.010)
    assert slow.hidden == pytest.approx(0.010)
    # If that is less than the rest after the backward pass, the rest counts.
    fast = hidden.on(2, latency=0.0)
    assert fast.communication == pytest.approx(0.014 * 12 / 16)
    assert "4.00 ms of 16.00 ms that gradients travel are hidden" in report(hidden)


def test_workers_of_one_machine_sum_first():
    there = MEASURED.on(8, bandwidth=10**8, machines=2)
    # 2 (2-1)/2 * 10 MB between machines, and 2 * 3/4 * 10 MB through memory
    assert there.communication == pytest.approx(0.1 + 1.5 * 10**7 / 4.8e9 + 2 * 0.001)
    assert there.communication < MEASURED.on(8, bandwidth=10**8).communication
    assert MEASURED.on(8, machines=8).step == pytest.approx(MEASURED.on(8).step)


def test_workers_that_outnumber_the_processors_compute_in_turns():
    there = dataclasses.replace(MEASURED, overhead=0.004, input=0.001).on(4, processors=2)
    assert there.compute == pytest.approx(0.060)
    assert there.overhead == pytest.approx(0.008)
    assert there.input == pytest.approx(0.002)
    assert there.communication == pytest.approx(0.015 + 0.006)
    assert MEASURED.on(2, processors=4).step == pytest.approx(MEASURED.step)


def _step(begin: float) -> list[Span]:
    """Two packs of gradients, 2 ms each with 3 ms between them, the weights, and a metric."""
    at = [("gradients", 0, 2), ("gather", 5, 7), ("weights", 9, 10), ("metrics", 11, 30)]
    return [Span(what, begin + a / 1000, begin + b / 1000) for what, a, b in at]


def test_overlap_is_what_the_exchanges_take_beyond_what_a_step_waits_for():
    spans = [span for step in range(5) for span in _step(step)]
    hidden, window = overlap(spans, 5, exposed=0.0035)
    assert hidden == pytest.approx(0.0015)
    assert window == pytest.approx(0.0045)
    assert overlap(spans, 5, exposed=1.0) == pytest.approx((0.0, 0.003))
    spans[0] = spans[0]._replace(begin=-9.0)  # the first step waits for others that trace it
    assert overlap(spans, 5, exposed=0.0035) == pytest.approx((hidden, window))
    assert overlap([], 5, exposed=0.0) == (0.0, 0.0)
    assert overlap(spans[:-4], 5, exposed=0.0) == (0.0, 0.0)  # steps that differ


def test_prediction_for_a_slower_network():
    there = MEASURED.on(2, bandwidth=12.5e6, latency=0.010)  # 100 Mbit/s, 10 ms
    assert there.communication == pytest.approx(0.8 + 0.02)
    assert there.bound_by == "communication"


def test_a_round_sends_what_gradients_hide_as_well():
    there = dataclasses.replace(MEASURED, update=0.004, hidden=0.004, window=0.010)
    rounds = there.with_rounds(100, 0)
    assert rounds.communication == pytest.approx(there.network / 400)
    assert rounds.network == rounds.communication
    # One worker alone takes the whole update, too.
    assert rounds.efficiency() == pytest.approx(0.038 / rounds.step)


def test_efficiency_of_one_worker_is_1():
    assert MEASURED.on(1).step == pytest.approx(0.030)
    assert MEASURED.on(1).efficiency() == 1.0


def test_report_has_the_steps_of_more_workers():
    assert re.search(r"^1024 +\d", report(MEASURED), re.MULTILINE)


@pytest.mark.process
@pytest.mark.nightly
def test_a_forecast_from_two_workers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "def make():\n"
        "    model = keras.Sequential([keras.Input((1500,)), keras.layers.Dense(1500)])\n"
        "    model.compile('adam', 'mse')\n"
        "    x = np.random.rand(64, 1500).astype('float32')\n"
        "    return model, tf.data.Dataset.from_tensor_slices((x, x)).batch(16)\n"
    )
    command = [sys.executable, "-m", "bench.forecast", "--steps", "3", f"{tmp_path}/mine.py:make"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a step sums 2 times" in done.stdout  # 9 MB of weights, and the bias
    assert re.search(r"^1024 +\d", done.stdout, re.MULTILINE)
