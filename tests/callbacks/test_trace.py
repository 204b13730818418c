"""`tfmw.callbacks.Trace`: all workers in one file, and what other accounts of its steps say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tfmw
from tests.helpers import perfetto
from tests.helpers.cluster import PROGRAMS, run_command
from tfmw.errors import UsageError
from tfmw.observe import tracing

Event = dict[str, Any]


def seconds(events: list[Event]) -> float:
    return sum(event["dur"] for event in events) / 1e6


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two workers, which was killed once."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "results").mkdir()
    command = ["run", "--workers", "2", "--max-restarts", "1", str(PROGRAMS / "traced.py")]
    status, output = run_command(
        "tfmw", *command, folder, env={"TFMW_RESULT": str(folder / "results")}
    )
    assert status == 0, output
    return folder


@pytest.mark.process
@pytest.mark.nightly
def test_a_trace_of_a_run_that_was_killed(killed: Path) -> None:
    assert {path.name for path in (killed / "traces").iterdir()} == {"trace.json"}
    events = json.loads((killed / "traces/trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "worker 0", 1: "worker 1"}
    assert_in_chromes_format(events)
    assert {"backup"} <= {e["name"] for e in events if e.get("cat") == "background"}
    assert_all_steps(killed, events)


@pytest.mark.nightly
@pytest.mark.process
def test_perfetto_reads_a_trace(killed: Path) -> None:
    """Its trace processor finds every event in its row, and totals that other accounts have."""
    path = killed / "traces/trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    expected = [
        ((f"worker {e['pid']}", rows[e["pid"], e["tid"]], e["cat"], e["name"]), e["ts"], e["dur"])
        for e in events
        if "ts" in e
    ]
    found = perfetto.read(path)
    seen = [((e["process"], e["thread"], e["cat"], e["name"]), e["ts"], e["dur"]) for e in found]
    assert len(seen) == len(expected)
    for one, other in zip(sorted(seen), sorted(expected), strict=True):
        assert one[0] == other[0]
        assert one[1:] == pytest.approx(other[1:], rel=0, abs=0.01)
    assert_all_steps(killed, found)


def assert_all_steps(folder: Path, events: list[Event]) -> None:
    """Each worker's steps of both attempts, and the accounts of the last epoch."""
    for rank in (0, 1):

        def row(name: str, rank: int = rank) -> list[Event]:
            return [e for e in events if e.get("cat") == name and e["pid"] == rank]

        numbers = [int(step["name"].split()[1]) for step in row("steps")]
        assert set(numbers) == set(range(3, 25))  # of both attempts
        assert len(numbers) > len(set(numbers))  # those after the backup were trained again
        result = json.loads((folder / f"results/worker_{rank}.json").read_text())
        assert_accounts_agree(result, row)


def assert_in_chromes_format(events: list[Event]) -> None:
    """Checks Perfetto's format: known fields; events of one row nest, but do not overlap."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    # To Perfetto a thread's number is its own over all processes, and 0 is a process's main one.
    assert len({tid for _, tid in named} - {0, 1}) == len(named)
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event.keys() == {"ph", "pid", "tid", "name", "args"}
            continue
        assert event.keys() == {"ph", "pid", "tid", "cat", "name", "ts", "dur", "args"}
        assert event["ph"] == "X"
        assert type(event["ts"]) is type(event["dur"]) is float
        assert event["dur"] >= 0
        row = event["pid"], event["tid"]
        assert row in named
        rows.setdefault(row, []).append((event["ts"], -event["dur"]))
    for found in rows.values():
        around: list[float] = []  # when they end
        for begin, minus_dur in sorted(found):
            while around and around[-1] <= begin + 0.01:
                around.pop()
            assert not around or begin - minus_dur <= around[-1] + 0.01
            around.append(begin - minus_dur)


def assert_accounts_agree(result: dict[str, Any], row: Callable[[str], list[Event]]) -> None:
    """The last epoch by the trace, by `Log`, and by the ring's clock, as `tfmw bench`."""
    begin, end = (1e6 * at for at in result["ends"][-2:])

    def of_epoch(name: str) -> list[Event]:
        return [event for event in row(name) if begin < event["ts"] < end]

    steps, split = of_epoch("steps"), result["splits"][-1]
    assert len(steps) == 8
    inside = [
        exchange
        for exchange in of_epoch("exchanges")
        if any(s["ts"] <= exchange["ts"] < s["ts"] + s["dur"] for s in steps)
    ]
    total, waiting, exchanging = seconds(steps), seconds(of_epoch("input")), seconds(inside)
    assert total == agreeing(8 * split["step_s"])
    assert waiting == agreeing(8 * split["input_s"])
    assert exchanging == agreeing(8 * split["communication_s"])
    assert total - waiting - exchanging == agreeing(8 * split["compute_s"])
    # `tfmw bench` takes the time of gradients from the ring.
    last = [took for what, took in result["spans"] if what == "gradients"][-len(inside) :]
    assert {exchange["name"] for exchange in inside} == {"gradients"}
    assert exchanging == agreeing(sum(last))


def agreeing(expected: float) -> Any:
    """Approximate time of eight steps, within 5 % and 2 ms a step: their clocks are read apart.

    On a busy machine a thread may lose its core between two lines.
    """
    return pytest.approx(expected, rel=0.05, abs=0.016)


@pytest.mark.parametrize("steps", [(3, 3), (-1, 4), (5, 2)])
def test_steps_that_are_none(steps: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="expected the first step and the one after the last"):
        tfmw.callbacks.Trace("traces", steps=steps)


def line(begin: float) -> str:
    return json.dumps({"row": "steps", "name": "s", "begin": begin, "end": begin, "details": {}})


def test_the_clocks_of_several_machines_are_compared(tmp_path: Path) -> None:
    """Worker 1 runs on another machine, which has been up for 100 s longer."""
    files = {
        "worker_0.0": ({"machine": "a", "zero": 1000.0}, 50.0),
        "worker_1.0": ({"machine": "b", "zero": 900.0}, 150.0),
        "worker_2.0": ({"machine": "a", "zero": 1000.001}, 50.0),
        "worker_10.0": ({"machine": "a", "zero": 1000.0}, 51.0),
    }
    for name, (clock, begin) in files.items():
        text = f"{json.dumps(clock)}\n{line(begin)}\n"
        (tmp_path / f"{name}.jsonl").write_text(text + '{"row": "st')  # killed within a line
    out = tracing.join(tmp_path)
    assert out is not None
    events = json.loads(out.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["worker 0", "worker 1", "worker 2", "worker 10"]
    assert sorted(e["ts"] for e in events if e["ph"] == "X") == [50e6, 50e6, 50e6, 51e6]
    assert tracing.join(tmp_path) is None


def test_a_trace_of_one_process_without_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras
    import numpy as np

    monkeypatch.delenv("TFMW_ATTEMPT", raising=False)
    (tmp_path / "worker_0.0.jsonl").write_text(line(1.0) + "\n")  # of a run that was ended
    x: np.ndarray = np.ones([8, 2], "float32")
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for steps in ((0, 3), (1, 2)):
        trace = tfmw.callbacks.Trace(tmp_path, steps)
        tfmw.fit(model, x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=[trace])
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = [e["name"] for e in events if e.get("cat") == "steps"]
        assert names == [f"step {n + 1}" for n in range(*steps)]
    with pytest.raises(ZeroDivisionError):
        tfmw.fit(model, x, x[:, :1], verbose=0, callbacks=[trace, Fails()])
    tfmw.fit(model, x, x[:, :1], verbose=0)
    assert not tracing.is_wanted()


def Fails() -> Any:
    import keras

    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: 1 / 0)
