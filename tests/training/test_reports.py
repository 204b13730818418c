"""Numbers of a training, as Prometheus and `Log` get them."""

from __future__ import annotations

import http.server
import json
import math
import re
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tfmw
from tests.helpers.cluster import PROGRAMS, ROOT, tfmw_command
from tfmw.cluster.sockets import reserved_ports
from tfmw.errors import UsageError
from tfmw.observe import metrics_server
from tfmw.observe.goodput import PARTS
from tfmw.observe.metrics_server import METRICS_FILE
from tfmw.observe.step_times import StepTimes
from tfmw.train.reporter import Reporter

PATIENCE_S = 120


def parsed(text: str) -> dict[str, float]:
    """Name{labels} -> value, by prometheus_client's parser."""
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.process
def test_a_training_is_seen_everywhere(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with reserved_ports(1) as (port,):
        pass
    options = ["--workers", "2", "--isolate", "off", "--metrics-port", str(port)]
    options += ["--trace", str(tmp_path / "trace"), "--trace-steps", "10:20"]
    env = {"TFMW_RESULT": str(tmp_path / "results")}
    program = str(PROGRAMS / "reports.py")
    with tfmw_command("run", *options, program, str(tmp_path), env=env) as run:
        metrics: dict[str, float] = {}
        deadline = time.monotonic() + PATIENCE_S
        while not (
            "tfmw_step_seconds{input}" in metrics and metrics["tfmw_backup_age_seconds"] >= 0
        ):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline, metrics
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                    metrics = parsed(response.read().decode())
            except OSError:  # the launcher starts
                time.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):  # all of 127.0.0.0/8 is this machine
            socket.create_connection(("127.0.0.2", port)).close()
        (tmp_path / "seen").touch()
        output, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, output
    assert metrics["tfmw_workers"] == 2
    assert metrics["tfmw_restarts"] == 0
    assert metrics["tfmw_step"] > 8
    assert metrics["tfmw_steps_per_second"] > 0
    assert metrics["tfmw_examples_per_second"] == pytest.approx(
        16 * metrics["tfmw_steps_per_second"], rel=1e-3
    )
    assert metrics["tfmw_log{loss}"] > 0
    assert metrics["tfmw_exchanges"] > metrics["tfmw_step"]
    assert metrics["tfmw_exchanged_bytes"] > 0
    for part in ("input", "communication", "compute"):
        assert metrics[f"tfmw_step_seconds{{{part}}}"] > 0
    spent = {part: metrics[f"tfmw_run_seconds{{{part}}}"] for part in PARTS}
    assert min(spent[part] for part in ("steps", "data", "compile", "backups", "start")) > 0
    assert spent["restarts"] == 0
    assert metrics["tfmw_goodput"] == pytest.approx(spent["steps"] / sum(spent.values()))
    (line,) = re.findall(r"tfmw: ((?:goodput|took) .*)", output)
    shown = {part: float(s) for part, s in re.findall(r"([\w-]+) ([\d.]+) s", line)}
    for part, name in (("steps", "training"), ("data", "data")):  # less than 0.05 s is left out
        assert shown.get(name, 0.0) > spent[part] - 0.1
    assert shown["training"] > 0

    results = [json.loads((tmp_path / f"results/worker_{i}.json").read_text()) for i in (0, 1)]
    for rank, result in enumerate(results):
        steps, logs = zip(*result["logged"], strict=True)
        assert list(steps) == [8 * (i + 1) for i in range(len(steps))]
        for log in logs[1:]:
            assert (log["rank"], log["workers"]) == (rank, 2)
            assert log["examples_per_s"] == pytest.approx(16 * log["steps_per_s"], rel=1e-6)
            parts = log["input_s"] + log["communication_s"] + log["compute_s"]
            assert parts >= log["step_s"] * 0.999
            assert min(log["input_s"], log["communication_s"]) > 0
            assert log["compute_s"] >= 0, "a wait for the other worker may cover all of it"
            assert log["loss"] > 0
            assert log["goodput"] == log["run_steps_s"] / sum(log[f"run_{p}_s"] for p in PARTS)
        assert sum(log["compute_s"] for log in logs[1:]) > 0
        assert logs[-1]["run_data_s"] > sum(8 * log["input_s"] for log in logs[1:]) * 0.99
    assert f"trace of all workers: {tmp_path}/trace/trace.json" in output
    assert_one_clock(json.loads((tmp_path / "trace/trace.json").read_text())["traceEvents"])


def assert_one_clock(events: list[dict[str, Any]]) -> None:
    """Steps 11 to 20 of two workers, whose exchanges are at the same time."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "worker 0", 1: "worker 1"}
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["cat"]), []).append(event)
    for rank in (0, 1):
        steps = rows[rank, "steps"]
        assert [step["name"] for step in steps] == [f"step {n}" for n in range(11, 21)]
        for step, batch in zip(steps, rows[rank, "input"], strict=True):
            assert batch["ts"] == step["ts"]
            assert 0 < batch["dur"] < step["dur"]
        begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        made = [e for e in rows[rank, "exchanges"] if begin <= e["ts"] <= end]
        # The sums of gradients are within their steps, those of metrics after them.
        assert [e["name"] for e in made[:4]] == ["gradients", "metrics"] * 2
        assert sum(step["dur"] for step in steps) < end - begin
    other = {e["args"]["number"]: e for e in rows[1, "exchanges"]}
    for one in rows[0, "exchanges"]:
        twin = other.get(one["args"]["number"])
        if twin is not None:  # neither has ended before the other has begun
            assert twin["name"] == one["name"]
            assert one["ts"] <= twin["ts"] + twin["dur"]
            assert twin["ts"] <= one["ts"] + one["dur"]
    assert {"callbacks"} <= {e["name"] for e in rows[0, "other"]}


def test_a_file_for_the_node_exporter(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    reporter = Reporter(True, 2, {"TFMW_METRICS_FILE": str(file), "TFMW_ATTEMPT": "3"})
    times = StepTimes(steps=10, examples=100, seconds=1.0)
    reporter.steps(10, 0, {"loss": 0.5, "image": [[1.0]]}, times, saved_at=None)
    reporter.end(20, 1, {"loss": 0.25})
    metrics = parsed(file.read_text())
    assert (metrics["tfmw_step"], metrics["tfmw_restarts"]) == (20, 3)
    assert metrics["tfmw_log{loss}"] == 0.25
    assert math.isnan(metrics["tfmw_backup_age_seconds"])
    assert "tfmw_log{image}" not in metrics


def test_the_epochs_are_those_before_early_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METRICS_FILE, str(tmp_path / "metrics.prom"))
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    # The loss never changes, and so never gets better.
    stops = keras.callbacks.EarlyStopping("loss", patience=1)
    x: np.ndarray = np.zeros([4, 1])
    tfmw.fit(model, x, x, epochs=9, verbose=0, callbacks=[stops], strategy="default")
    assert parsed((tmp_path / "metrics.prom").read_text())["tfmw_epoch"] == 2


def test_only_the_chief_reports(tmp_path: Path) -> None:
    reporter = Reporter(False, 2, {"TFMW_METRICS_FILE": str(tmp_path / "run.prom")})
    reporter.steps(10, 0, {"loss": 0.5}, None, None)
    reporter.end(20, 1, None)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_named() -> None:
    with http.server.HTTPServer(("", 0), http.server.BaseHTTPRequestHandler) as server:
        port = str(server.server_port)
        with pytest.raises(UsageError, match="cannot be served on port"):
            Reporter(True, 1, {"TFMW_METRICS_PORT": port})
        with pytest.raises(UsageError, match="give another port"):
            metrics_server.serve(port, from_file=True, environ={})


def test_other_machines_read_where_an_address_is_given() -> None:
    environ = {"TFMW_METRICS_FILE": "none"}
    for served, reached in [("0.0.0.0:0", "127.0.0.2"), ("[::1]:0", "::1")]:
        port = metrics_server.serve(served, from_file=True, environ=environ)
        with socket.create_connection((reached, port)) as peer:
            assert peer.getpeername()[:2] == (reached, port)


def test_the_dashboard_shows_what_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    Reporter(True, 2, {"TFMW_METRICS_FILE": str(file)}).steps(1, 0, {"loss": 1}, None, None)
    reported = {name.partition("{")[0] for name in parsed(file.read_text())} | {"tfmw_step_seconds"}
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    shown = {name for e in expressions for name in re.findall(r"tfmw_\w+", e)}
    assert shown <= reported
    # The page names each of them, too; epochs are on the page only.
    page = (ROOT / "docs/howto/monitor.md").read_text()
    assert reported - shown == {"tfmw_epoch"}
    assert all(f"`{name}" in page for name in reported)
