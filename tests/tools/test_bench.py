"""`tfmw bench`: the report, and the command on real workers."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from bench import __main__ as bench
from bench import figures, steps
from tests import breaks
from tests.helpers.cluster import PROGRAMS, tfmw_command
from tfmw.cli.bench import PARTS, ROUND_S, Cost, beside_keras, load, report
from tfmw.errors import UsageError

MEASURED = Cost(workers=2, compute=0.030, communication=0.012, input=0.0)


def test_parts_are_in_the_report_if_there_are_any():
    beside = dataclasses.replace(MEASURED, overhead=0.004, update=0.004)
    assert beside.step == pytest.approx(0.050)
    assert re.search(r"^overhead +4.00", report(beside, 128, 10**6), re.MULTILINE)
    assert re.search(r"^update +4.00", report(beside, 128, 10**6), re.MULTILINE)
    assert not re.search(r"^update ", report(MEASURED, 128, 10**6), re.MULTILINE)


def test_report_names_the_bound_and_the_remedy():
    text = report(MEASURED, 128, 2_500_000)
    assert "global batch 128: 3,048 examples/s" in text
    assert "bound by compute: more workers share the work" in text


def test_the_last_line_says_whether_workers_pay():
    faster = beside_keras(MEASURED, 0.063)
    assert faster.endswith(
        "takes 63.00 ms for such a step: 2 workers of this machine are 1.50 times as fast"
    )
    slower = beside_keras(MEASURED, 0.021)
    assert "and is 2.00 times as fast: on this machine alone, more processes do not pay" in slower


def test_rounds_are_proposed_where_they_take_less_time():
    slow = dataclasses.replace(MEASURED, communication=4.0, update=0.005)
    # Compute and the whole update; of a round of 100 steps 1 s on the network, 0.6 s of computing.
    rounds = slow.with_rounds(100, 10**7)
    assert rounds.step == pytest.approx(0.030 + 2 * 0.005 + (1 + 10**7 * ROUND_S) / 100)
    assert f"compression='int8') about {1000 * rounds.step:.2f} ms" in report(slow, 128, 10**7)
    assert "LocalSGD" not in report(MEASURED, 128, 10**7)
    assert "LocalSGD" not in report(dataclasses.replace(slow, workers=1), 128, 10**7)


@pytest.mark.process
@pytest.mark.nightly
def test_the_command_on_two_workers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, time, keras, numpy as np, tensorflow as tf\n"
        "def wait(value):\n"
        "    time.sleep(0.03 * (os.environ['TFMW_TASK'] == 'worker 1'))\n"
        "    return value\n"
        "class Slow(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        one = tf.ensure_shape(tf.numpy_function(wait, [tf.ones([])], tf.float32), [])\n"
        "        return x * one\n"
        "    def compute_output_shape(self, shape):\n"
        "        return shape\n"
        # A slow network, so that a busy machine cannot hide what is sent.
        "from tfmw.train.mirrored.collectives.ring import Ring\n"
        "reduce_scatter = Ring.reduce_scatter\n"
        "def slow_network(self, *args, **options):\n"
        "    time.sleep(0.1)\n"
        "    return reduce_scatter(self, *args, **options)\n"
        "Ring.reduce_scatter = slow_network\n"
        "def make():\n"
        "    model = keras.Sequential([keras.Input((1500,)), keras.layers.Dense(1500), Slow()])\n"
        "    model.compile('adam', 'mse')\n"
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
            r"^(compute|update|overhead|communication|input|step) +([\d.]+)", output, re.MULTILINE
        )
    }
    assert parts["step"] == pytest.approx(sum(parts.get(name, 0.0) for name in PARTS), abs=0.03)
    assert parts["communication"] > 0, output
    assert re.search(r"one plain Keras process with all cores takes [\d.]+ ms", output)
    assert "the weights are updated sharded over 2 workers" in output
    assert parts["update"] > 0
    assert re.search(r"^worker 1 is the slowest: \d+ ms of a step before its", output, re.MULTILINE)


ASLEEP = """
import time, keras, numpy as np, tensorflow as tf

def asleep(x, seconds):
    def wait(value):
        time.sleep(seconds)
        return value
    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)

class Asleep(keras.layers.Layer):
    def call(self, x):
        return x * asleep(tf.ones([]), 0.15)
    def compute_output_shape(self, shape):
        return shape

def make():
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(1), Asleep()])
    model.compile("sgd", "mse")
    x = np.ones([160, 8], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
    return model, data.map(lambda x, y: (asleep(x, 0.3), y))

if __name__ == "__main__":
    import tfmw
    tfmw.fit(*make(), epochs=2, verbose=0)
"""


@pytest.mark.nightly
@pytest.mark.process
def test_steps_take_as_long_in_a_trace(tmp_path):
    """Steps mostly sleep, so that a busy machine changes their time little.

    The parts of a step are differences of runs here; `tests/callbacks/test_trace.py` compares those
    of a trace with other accounts of the same steps.
    """
    (tmp_path / "asleep.py").write_text(ASLEEP)
    with tfmw_command("bench", "--steps", "4", f"{tmp_path}/asleep.py:make") as process:
        output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    (by_bench,) = re.findall(r"^step +([\d.]+)", output, re.MULTILINE)
    traced = ["run", "--workers", "2", "--trace", f"{tmp_path}/traces", "--trace-steps", "10:20"]
    with tfmw_command(*traced, f"{tmp_path}/asleep.py") as process:
        output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    events = json.loads((tmp_path / "traces/trace.json").read_text())["traceEvents"]
    steps = [e for e in events if e.get("cat") == "steps" and e["pid"] == 0]
    mean_ms = sum(e["dur"] for e in steps) / len(steps) / 1000
    assert mean_ms == pytest.approx(float(by_bench), rel=0.05)


@pytest.mark.parametrize(
    ("target", "said"),
    [("make", "expected FILE.py:FUNCTION"), ("/nowhere/a.py:make", "there is no file"),
     ("nowhere_at_all:make", "there is no module"),
     (f"{PROGRAMS / 'print_cluster.py'}:made", "has no function 'made'"),
     (f"{PROGRAMS / 'print_cluster.py'}:process", "has no function 'process'")],
)  # fmt: skip
def test_wrong_target_raises_one_sentence(target, said):
    with tfmw_command("bench", target) as process:
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 2
    assert said in output
    assert len(output.strip().splitlines()) == 1


def test_a_file_that_trains_as_it_is_imported_is_told_where_to(tmp_path):
    (tmp_path / "trains_at_once.py").write_text(
        "from tfmw.errors import UsageError\ndef make(): ...\nraise UsageError('no fit here.')"
    )
    with pytest.raises(UsageError, match=r"cannot be imported: no fit here\. .* below if __name__"):
        load(f"{tmp_path}/trains_at_once.py:make")


def test_a_word_of_no_title_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--only", "a stop"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no title has 'a stop' in it" in capsys.readouterr().err


def test_a_word_of_no_promise_runs_no_test(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["breaks", "goodputt"])
    assert breaks.main() == 2
    assert "No promise in tests/breaks.toml has the words goodputt." in capsys.readouterr().out


def test_pages_have_the_tables_of_the_file_of_results():
    found = figures.results()
    benchmarks, readme, of_bench = (page.read_text() for page in figures.PAGES)
    for text in (benchmarks, readme, of_bench):
        assert figures.written(text, found) == text, "python -m bench.figures writes it"
    tables = re.findall(r"^\| ---", benchmarks, re.MULTILINE)
    assert len(tables) == len(re.findall("<!-- figures: ", benchmarks)) > 10
    assert "<!-- figures: speed -->" in readme
    assert "<!-- figures: figures -->" in of_bench
    other = {**found, "short": {**found["short"], "rows": [["an epoch"], ["0.5"]]}}
    assert "| an epoch |\n| --- |\n| 0.5 |" in figures.written(benchmarks, other)
    empty = "<!-- figures: short -->\n<!-- end of figures -->\na\n<!-- end of figures -->"
    assert figures.written(empty, other).endswith("figures -->\na\n<!-- end of figures -->")


def test_tables_of_a_run_have_ranges():
    nan = float("nan")  # a contender that failed in a round
    ms = {
        ("mlp", 2, "tfmw"): [20.0, 30.0],
        ("mlp", 2, "all_cores"): [40.0, 40.0],
        ("mlp", 2, "alone"): [25.0, 25.0],
        ("mlp", 2, "ddp"): [40.0, nan],
    }
    found = steps.page_tables(ms)
    (row,) = found["steps"][1:]
    assert row == ["MLP, 25M parameters, Adam", "0.50 to 0.75", "", "0.50", "", "0.80 to 1.20", ""]
    assert found["speed"] == (
        "Time of a step of two workers with one core each, divided by that of one plain Keras "
        "process with all cores: 0.50 to 0.75; by that of PyTorch DDP on two workers: 0.50."
    )
    first, beside_alone, second, bound = steps.figures(ms)
    assert first.cells == ["a step of mlp: tfmw / all_cores, 2 workers", "0.62", "0.50 to 0.75", ""]
    assert beside_alone.cells[1:] == ["1.00", "0.80 to 1.20", "1.2"]
    assert second.cells[1:] == ["0.50", "0.50", "0.4"]
    assert bound.cells == ["a step of mlp: alone / ddp, 2 workers", "0.62", "0.62", ""]


def test_rounds_end_in_time_and_go_on_after_a_failure(monkeypatch):
    def run(contender, work, workers):
        if contender == "ddp":
            raise RuntimeError("no torch")
        return [0.002]

    monkeypatch.setattr(steps, "run", run)
    monkeypatch.setattr(steps, "FAILED", [])
    turns = [("cnn", 2, "tfmw"), ("cnn", 2, "ddp"), ("mlp", 2, "tfmw")]
    *_, found = steps.measured(turns, 2, float("inf"))
    assert [len(ms) for ms in found.values()] == [2, 2, 2]
    assert found["mlp", 2, "tfmw"] == [2.0, 2.0]
    assert [f"round {n}: cnn, 2 worker(s), ddp" for n in (1, 2)] == steps.FAILED
    *_, found = steps.measured(turns, 2, 0.0)
    assert [len(ms) for ms in found.values()] == [1, 1, 1], "the first round alone"


def test_a_measurement_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    def failing():
        yield [figures.Figure("first", [1.0])], {"short": [["a"], ["1"]]}
        raise RuntimeError("later")

    def other():
        yield [figures.Figure("second", [2.0, 4.0], 3.0)], {"whole": [["b"], ["2"]]}

    (tmp_path / "results.json").write_text('{"kept": {"commit": "c", "rows": [["k"]]}}')
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results.json")
    parts = [bench._Part("one", failing), bench._Part("two", other)]
    monkeypatch.setattr(bench, "_parts", lambda rounds, ends_at: parts)
    monkeypatch.setattr("sys.argv", ["bench"])
    with pytest.raises(SystemExit, match="failed: one"):
        bench.main()
    found = figures.results()
    assert {"kept", "short", "whole", "figures"} == found.keys()
    assert found["figures"]["rows"][1:] == [
        ["first", "1.00", "1.00", ""],
        ["second", "3.00", "2.00 to 4.00", "3"],
    ]
    assert "RuntimeError: later" in capsys.readouterr().err
