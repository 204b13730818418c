"""A host that is cut off while its chief writes: directories that it may rename, and until when."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.hosts import Hosts, Namespaces, network
from tests.programs._hold import hold_at
from tfmw.storage import fence
from tfmw.storage.directories import atomic_directory

EPOCHS, STEPS = 3, 12


def attempts_of_backups(folder: Path) -> dict[str, int]:
    """{name: the attempt that wrote it} of the backups that are there."""
    found = {}
    for path in folder.glob("step_*"):
        body = json.loads(json.loads((path / "record.json").read_text())["body"])
        found[path.name] = int(body["record"]["attempt"])
    return found


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent does not know yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_slow_writer_of_a_host_that_was_cut_off_writes_nothing(tmp_path):
    """Its supervisor is stopped, so it cannot even end its tasks."""
    file, export = tmp_path / "hold", tmp_path / "export"
    hold_at(file, "before backup", worker=0, after=-1)
    flags = [f"--backup_dir={tmp_path}/backup", f"--export_dir={export}", f"--hold_file={file}"]
    options = ["--max-restarts=9", "--min-hosts=1", "--rejoin-timeout=1"]
    with Hosts(tmp_path, 2, *options, flags=flags, first=1) as hosts:
        _, found = hosts.wait_for_any(r"holds in before backup of attempt (\d+), process (\d+)")
        attempt, writer = map(int, found.groups())
        cut_off = hosts.processes[0]
        assert cut_off is not None
        cut_off.send_signal(signal.SIGSTOP)
        hosts.wait_for(1, f"attempt {attempt + 1} on {hosts.name(1)}, without {hosts.name(0)}")
        hosts.wait_for(1, "continuing without the lock")
        # The other half trains; its writer holds, too, so that it does not end meanwhile.
        hold_at(file, "before backup", worker=0, after=attempt)
        _, found = hosts.wait_for_any(r"holds in before backup of attempt (\d+)")
        assert int(found[1]) == attempt + 1
        deadline = time.monotonic() + 60
        while not has_ended(writer):
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)
        assert attempt not in attempts_of_backups(tmp_path / "backup").values()
        file.unlink()
        cut_off.send_signal(signal.SIGCONT)
        hosts.wait_for(
            0, f"this task belongs to attempt {attempt}, and other hosts have begun attempt"
        )
        assert hosts.end() == [0, 0], hosts.output()
    for worker in hosts.results():
        assert worker["iterations"] == EPOCHS * STEPS
        assert len(worker["history"]["loss"]) == EPOCHS
    assert attempt not in attempts_of_backups(tmp_path / "backup").values()


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_of_two_halves_of_a_cut_network_one_trains_and_the_other_reports_it(tmp_path):
    """Either would be enough by itself."""
    epochs, go = 6, tmp_path / "go"
    flags = [f"--backup_dir={tmp_path}/backup", f"--epochs={epochs}", "--pause=0.7", f"--go={go}"]
    options = ["--max-restarts=9", "--min-hosts=1", "--rejoin-timeout=1"]
    env = {"TFMW_TOKEN": "0123456789abcdef" * 4}
    with (
        network(2) as cables,
        Hosts(tmp_path, cables, *options, program="hosts_fit.py", flags=flags, env=env) as hosts,
    ):
        hosts.steps(0, hosts=2)
        leader = hosts.leader()
        other = 1 - leader
        cables.cut(hosts, other)
        hosts.wait_for(leader, f"attempt 1 on {hosts.name(leader)}, without {hosts.name(other)}")
        since = hosts.now(other)
        hosts.steps(leader, count=2, hosts=1)
        if isinstance(cables, Namespaces):  # a host that is stopped instead cannot report
            hosts.wait_for(
                other,
                f"{hosts.name(leader)} has the lock and cannot be reached from this host; "
                f"attempt 1 runs on {hosts.name(leader)}; trying again",
            )
        assert not [line for line in hosts.lines[other][since:] if "] step " in line]
        cables.mend(hosts, other)
        hosts.steps(other, hosts=2)
        go.touch()
        assert hosts.end() == [0, 0], hosts.output()
    assert [worker["attempt"] for worker in hosts.results()] == [2, 2]
    for worker in hosts.results():
        np.testing.assert_allclose(worker["history"]["ids"], [47.5] * epochs, rtol=1e-6)


def _record(path: Path, attempt: int) -> None:
    """Writes the record of a leader, as a task reads it."""
    data = {"run": "abc", "attempt": attempt}
    path.write_text(json.dumps({"token": "t", "owner": "process 7 on h0", "data": data}))


def test_a_directory_stays_as_it_is_if_a_later_attempt_begins_during_its_write(
    tmp_path, monkeypatch
):
    record, target = tmp_path / "LEADER", tmp_path / "export"
    monkeypatch.setenv(fence.FENCE, str(record))
    monkeypatch.setenv(fence.ATTEMPT, "0")
    for begun in (0, 1):
        with contextlib.ExitStack() as stack:
            if begun:
                stack.enter_context(pytest.raises(fence.Fenced, match="have begun attempt 1"))
            written = Path(stack.enter_context(atomic_directory(str(target))))
            written.mkdir()
            (written / "model").write_text(f"attempt {begun}")
            _record(record, begun)
    assert (target / "model").read_text() == "attempt 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LEADER", "export"]


@pytest.mark.parametrize("fenced", [True, False])
def test_callbacks_write_nothing_at_the_end_of_an_epoch_that_others_train(
    fenced, tmp_path, monkeypatch
):
    record, log = tmp_path / "LEADER", tmp_path / "log.csv"
    monkeypatch.setenv(fence.FENCE, str(record))
    monkeypatch.setenv(fence.ATTEMPT, "0")
    _record(record, 0)

    def others_begin(batch: int, logs: object) -> None:
        _record(record, int(fenced))

    logger = keras.callbacks.CSVLogger(log)
    callbacks = [
        logger,
        keras.callbacks.LambdaCallback(on_train_batch_end=others_begin),
    ]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x: Any = np.ones((4, 2), "float32")
    with pytest.raises(fence.Fenced) if fenced else contextlib.nullcontext():
        tfmw.fit(model, x, x[:, :1], verbose=0, callbacks=callbacks)
    logger.csv_file.close()
    assert (log.read_text() == "") == fenced


def test_only_an_earlier_attempt_of_the_same_run_gives_way(tmp_path, monkeypatch):
    record = tmp_path / "LEADER"
    monkeypatch.delenv(fence.FENCE, raising=False)
    assert fence.owner() == ""
    assert not fence.precedes("process 7 on h0, attempt 1 of run abc")  # not fenced
    monkeypatch.setenv(fence.FENCE, str(record))
    monkeypatch.setenv(fence.ATTEMPT, "2")
    _record(record, 2)
    assert fence.owner() == "attempt 2 of run abc"
    for holder, earlier in (
        ("process 7 on h0, attempt 1 of run abc", True),
        ("process 7 on h0, attempt 2 of run abc", False),
        ("process 7 on h0, attempt 3 of run abc", False),
        ("process 7 on h0, attempt 1 of run other", False),
        ("process 7 on h0", False),
        ("unknown", False),
    ):
        assert fence.precedes(holder) == earlier, holder
