"""`tfmw bench`: the formula, and the command on real workers."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.helpers.cluster import tfmw_command
from tfmw.tools.cost import PARTS, Cost, report

MEASURED = Cost(
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
    assert re.search(r"^overhead +4.00", report(beside, 128, 10**6), re.MULTILINE)


def test_prediction_for_a_slower_network():
    there = MEASURED.on(2, bandwidth=12.5e6, latency=0.010)  # 100 Mbit/s, 10 ms
    assert there.communication == pytest.approx(0.8 + 0.02)
    assert there.bound_by == "communication"


def test_efficiency_of_one_worker_is_1():
    assert MEASURED.on(1).step == pytest.approx(0.030)
    assert MEASURED.on(1).efficiency() == 1.0


def test_report_names_the_bound_and_the_remedy():
    text = report(MEASURED, 128, 2_500_000)
    assert "global batch 128: 3,048 examples/s" in text
    assert "bound by compute: more workers share the work" in text
    assert re.search(r"^1024 +\d", text, re.MULTILINE)


@pytest.mark.multiprocess
def test_the_command_on_two_workers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "def make():\n"
        # Much to send and little to compute, so that a busy machine cannot hide what is sent.
        "    model = keras.Sequential([keras.Input((1500,)), keras.layers.Dense(1500)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    x = np.random.rand(64, 1500).astype('float32')\n"
        "    return model, tf.data.Dataset.from_tensor_slices((x, x)).batch(16)\n"
    )
    with tfmw_command("bench", "--steps", "3", f"{tmp_path}/mine.py:make") as process:
        output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    assert "2 worker(s), 2,251,500 parameters, global batch 16" in output
    parts = {
        name: float(ms)
        for name, ms in re.findall(
            r"^(compute|overhead|communication|input|step) +([\d.]+)", output, re.MULTILINE
        )
    }
    assert parts["step"] == pytest.approx(sum(parts[name] for name in PARTS), abs=0.03)
    assert parts["communication"] > 0
    assert "the weights are updated on every worker (" in output
    assert "a step sums 2 times" in output  # 9 MB of weights, and the bias
    assert "expected on N such workers" in output


@pytest.mark.parametrize(
    ("target", "said"),
    [("make", "expected FILE.py:FUNCTION"), ("/nowhere/a.py:make", "there is no file"),
     ("nowhere_at_all:make", "there is no module")],
)  # fmt: skip
def test_wrong_target_raises_one_sentence(target, said):
    with tfmw_command("bench", target) as process:
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert said in output
    assert len(output.strip().splitlines()) == 1
