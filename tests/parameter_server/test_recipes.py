"""Recipes on parameter servers as users start them: in terminals, and by TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys

import pytest

from tests.helpers.by_hand import Process, free_addresses
from tests.helpers.cluster import ONE_THREAD, ROOT

pytestmark = pytest.mark.process


@pytest.fixture
def terminals(tmp_path):
    """Starts a recipe in a terminal of its own: start(name, recipe, flags, environment)."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "TFMW_TTY")}
    kept |= {**ONE_THREAD, "TFDS_DATA_DIR": str(tmp_path / "data"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    kept |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:

        def start(name, recipe, *flags, **environ):
            command = [sys.executable, str(ROOT / "recipes" / recipe), *flags]
            process = Process(name, command, {**kept, **environ})
            stack.callback(process.kill)
            return process

        yield start


def old_lines(addresses):
    """The flags of TensorFlow 1's scripts: task -> flags. They name no coordinator."""
    hosts = [f"--ps_hosts={','.join(addresses[:2])}", f"--worker_hosts={','.join(addresses[2:])}"]
    return {
        f"{job} {index}": [*hosts, f"--job_name={job}", f"--task_index={index}", "--max_steps=40"]
        for job in ("ps", "worker")
        for index in range(2)
    }


def neighbours(count):
    """Addresses with consecutive ports, as people choose them."""
    while True:
        first = int(free_addresses(1)[0].rpartition(":")[2])
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("", port)))
            return [f"localhost:{port}" for port in range(first, first + count)]


@pytest.mark.nightly
def test_four_terminals(terminals):
    """Worker 0's process starts the coordinator, and shows what it prints."""
    lines = old_lines(neighbours(4))
    tasks = {"ps 0": terminals("ps 0", "digits.py", *lines["ps 0"])}
    tasks["ps 0"].wait_for("ps 0 waits for the coordinator at localhost:")
    for name in ("worker 1", "ps 1", "worker 0"):
        tasks[name] = terminals(name, "digits.py", *lines[name])
    assert accuracy(tasks["worker 0"]) > 0.5
    assert {name: task.end() for name, task in tasks.items()} == dict.fromkeys(tasks, 0)
    others = [task for name, task in tasks.items() if name != "worker 0"]
    assert not any("accuracy" in task.output for task in others)


@pytest.mark.nightly
def test_chief_in_a_fifth_terminal_coordinates(terminals):
    addresses = free_addresses(4)
    lines = old_lines(addresses)
    flags = [*lines["ps 0"], "--job_name=chief", "--task_index=0"]
    chief = terminals("chief", "digits.py", *flags)
    chief.wait_for("chief waits for worker 0")
    tasks = {name: terminals(name, "digits.py", *lines[name]) for name in lines}
    assert accuracy(chief) > 0.5
    assert {name: task.end() for name, task in tasks.items()} == dict.fromkeys(tasks, 0)
    assert "accuracy" not in tasks["worker 0"].output


@pytest.mark.nightly
def test_a_coordinator_and_the_worker_that_started_it_end_together(terminals):
    flags = old_lines(free_addresses(4))["worker 0"]
    first = terminals("worker 0", "digits.py", *flags)
    first.wait_for("chief waits for")
    late = terminals("chief", "digits.py", *flags, "--job_name=chief")
    assert late.end() == 2
    assert "leave this process out" in late.output.splitlines()[-1]
    first.kill()
    assert first.output_ended, "the coordinator holds the terminal open"

    second = terminals("worker 0", "digits.py", *flags)
    second.wait_for("chief waits for")
    (coordinator,) = second.children()
    os.kill(coordinator, signal.SIGKILL)
    assert second.end() == 1
    assert "its coordinator ended with status -9" in second.output


def accuracy(chief):
    """Accuracy that the recipe prints at the end, on a chief that exits with 0."""
    assert chief.end(200) == 0, chief.output
    return float(re.findall(r"validation accuracy: (\d\.\d{4})", chief.output)[-1])


@pytest.mark.nightly
def test_five_terminals_whose_servers_serve_one_training_after_another(terminals):
    hosts = free_addresses(5)
    cluster = [
        *(f"--worker_hosts={hosts[1]},{hosts[2]}", f"--ps_hosts={hosts[3]},{hosts[4]}"),
        *(f"--chief_host={hosts[0]}", "--strategy=parameter_server"),
    ]
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    servers = [
        terminals(
            f"{job} {index}", "digits.py", *cluster,
            f"--job_name={job}", f"--task_index={index}", "--existing_servers",
        )
        for job, index in tasks
    ]  # fmt: skip
    # Twice the recipe's epochs: asynchronous updates end at another accuracy each time.
    first = terminals("chief", "digits.py", *cluster, "--job_name=chief", "--epochs=24")
    assert accuracy(first) >= 0.97
    # Another script, a model with tables that are divided, on the servers that are there.
    flags = ["--job_name=chief", "--min_shard_bytes=65536", "--batch_size=64"]
    second = terminals("chief", "recommender.py", *cluster, *flags)
    # An eighth of the recipe's data, which comes to 0.94 of 0.95; guessing gives 0.5.
    assert 0.6 <= accuracy(second) <= 0.97
    assert [server.running for server in servers] == [True] * 4


@pytest.mark.nightly
def test_by_tf_config_with_a_master_and_an_evaluator(terminals, tmp_path):
    names = ["master", "worker", "ps"]
    cluster = {name: [address] for name, address in zip(names, free_addresses(3), strict=True)}
    flags = ["--strategy=parameter_server", "--max_steps=40", f"--backup_dir={tmp_path / 'backup'}"]
    tasks = {
        name: terminals(
            name, "digits.py", *flags,
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": name, "index": 0}}),
        )
        for name in [*names, "evaluator"]
    }  # fmt: skip
    assert accuracy(tasks["master"]) > 0.5
    assert {name: task.end() for name, task in tasks.items()} == dict.fromkeys(tasks, 0)
    done = json.loads((tmp_path / "backup" / "evaluation" / "done.json").read_text())
    assert list(done) == ["40"]
    assert done["40"]["val_accuracy"] == pytest.approx(accuracy(tasks["master"]), abs=1e-3)


@pytest.mark.nightly
def test_a_table_that_the_coordinator_never_has(run_cluster):
    """Two tables of 128 MB and their slots, on two servers."""
    flags = ["--strategy=parameter_server", "--buckets=1000000", "--width=32", "--max_steps=20"]
    recipe = str(ROOT / "recipes" / "recommender.py")
    run = run_cluster(recipe, *flags, "--min_shard_bytes=1048576", workers=1, ps=2)
    (size,) = re.findall(r"weights and slots: (\d+) MB", run.output)
    (grown,) = re.findall(r"memory that this process took for them: (\d+) MB", run.output)
    assert 755 <= int(size) < 760
    assert 0 < int(grown) < 200, "most of it for graphs, with any number of rows"
