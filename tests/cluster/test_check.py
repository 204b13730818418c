"""`tfmw check` on every task of a cluster: its report if all is well, and on each fault.

Real processes on real ports. TensorFlow, which only counts the GPUs here, is asked in one test; in
the others `sitecustomize`, which Python imports when it starts, answers for it, and makes a task
differ from the others as another machine would.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.buckets import NIGHTLY, opened
from tests.helpers.by_hand import free_addresses
from tests.helpers.cluster import ROOT

PRETEND = """
import os, time
from importlib import metadata
from tfmw.cluster import versions

versions.ask_tensorflow = lambda: ("tensorflow", os.environ.get("PRETEND_GPUS", "none"))
clock, version = time.time, metadata.version
time.time = lambda: clock() + float(os.environ.get("PRETEND_AHEAD", "0"))
if "PRETEND_FIREWALL" in os.environ:
    import socket

    connect = socket.create_connection

    def behind_a_firewall(address, *args, **options):
        if str(address[1]) not in os.environ["PRETEND_FIREWALL"]:
            raise TimeoutError("timed out")
        return connect(address, *args, **options)

    socket.create_connection = behind_a_firewall
if "PRETEND_KERAS" in os.environ:
    metadata.version = lambda p: os.environ["PRETEND_KERAS"] if p == "keras" else version(p)
"""


@pytest.fixture(scope="module")
def pretending(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pretend")
    (folder / "sitecustomize.py").write_text(PRETEND)
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.fixture
def addresses() -> list[str]:
    return free_addresses(3)


class Checks:
    """Starts `tfmw check` for tasks of a cluster; all begun ones are waited for at the end."""

    def __init__(self, path: str):
        self._path = path
        self._begun: list[subprocess.Popen[str]] = []

    def begin(
        self, index: int, workers: list[str], *args: str, env: Any = None, cwd: Path = ROOT
    ) -> None:
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        self.begin_as(config, *args, env=env, cwd=cwd)

    def begin_as(
        self, config: dict[str, Any], *args: str, env: Any = None, cwd: Path = ROOT
    ) -> None:
        environ = {**os.environ, "PYTHONPATH": self._path, "TF_CONFIG": json.dumps(config)}
        command = [sys.executable, "-m", "tfmw", "check", *args]
        self._begun.append(
            subprocess.Popen(
                command,
                env={**environ, **(env or {})},
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def end(self) -> list[tuple[int, list[str]]]:
        """(exit status, lines) of each."""
        outputs = [process.communicate(timeout=600)[0] for process in self._begun]
        return [
            (process.returncode, output.splitlines())
            for process, output in zip(self._begun, outputs, strict=True)
        ]

    def stop(self) -> None:
        for process in self._begun:
            process.kill()
            process.communicate()


@pytest.fixture
def checks(pretending: str) -> Iterator[Checks]:
    begun = Checks(pretending)
    yield begun
    begun.stop()


def bad(lines: list[str]) -> list[str]:
    return [line.removeprefix("failed: ") for line in lines if line.startswith("failed: ")]


def test_a_cluster_that_works(checks, addresses, tmp_path):
    shared = tmp_path / "not" / "there" / "yet"
    for index in range(3):
        checks.begin(index, addresses, f"--backup_dir={shared}", "--export-dir", str(tmp_path))
    for index, (status, lines) in enumerate(checks.end()):
        assert (status, bad(lines), lines[-1]) == (0, [], "all is well")
        assert f"ok: port {addresses[index].partition(':')[2]} of this task is free" in lines
        for other in {0, 1, 2} - {index}:
            assert f"ok: worker {other} at {addresses[other]} is reached" in lines
        assert any(line.startswith("ok: 3 tasks agree: Python 3.") for line in lines)
        after = (index + 1) % 3
        message = f"ok: worker {after} is reached on other ports too, which gradients take"
        assert message in lines
        shares = [line for line in lines if "is shared with worker 0" in line]
        assert len(shares) == (2 if index else 0)
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_with_servers(checks, addresses):
    """Servers need no GPU; they are called on, and compared in the rest."""
    cluster = {
        "chief": addresses[:1],
        "worker": addresses[1:2],
        "ps": addresses[2:],
    }
    for task in cluster:
        env = {"PRETEND_GPUS": "an H100" if task == "worker" else "none"}
        checks.begin_as({"cluster": cluster, "task": {"type": task, "index": 0}}, env=env)
    for status, lines in checks.end():
        assert (status, bad(lines)) == (0, [])
        assert not any("gradients" in line for line in lines)


@pytest.mark.nightly
@pytest.mark.process
def test_with_tensorflow_itself(addresses):
    checks = Checks(str(ROOT))
    try:
        for index in range(2):
            checks.begin(index, addresses[:2])
        for status, lines in checks.end():
            assert (status, bad(lines)) == (0, [])
            assert any("tasks agree" in line and "GPUs: " in line for line in lines)
    finally:
        checks.stop()


def test_one_process(checks, tmp_path):
    checks.begin_as({}, "--backup-dir", str(tmp_path))
    ((status, lines),) = checks.end()
    assert status == 0
    assert f"ok: --backup_dir {tmp_path} can be written" in lines


@pytest.mark.process
def test_a_task_that_was_not_started_is_named(checks, addresses):
    for index in range(2):
        checks.begin(index, addresses, "--timeout", "2")
    for index, (status, lines) in enumerate(checks.end()):
        (line,) = bad(lines)
        assert status == 1
        assert line.startswith(f"worker 2 at {addresses[2]} cannot be reached within 2 s")
        assert "no process listens there; start tfmw check for that task too" in line
        assert f"ok: worker {1 - index} at {addresses[1 - index]} is reached" in lines


def test_firewall_that_opens_only_the_ports_of_the_cluster(checks, addresses):
    for index in range(2):
        checks.begin(index, addresses[:2], env={"PRETEND_FIREWALL": " ".join(addresses)})
    for index, (status, lines) in enumerate(checks.end()):
        assert (status, bad(lines), lines[-1]) == (0, [], "all is well")
        (note,) = (line for line in lines if line.startswith("note: "))
        assert f"worker {1 - index} is reached on the port of the cluster and on no other" in note
        assert "timed out" in note
        assert "will take TensorFlow's gRPC" in note


@pytest.mark.nightly
def test_another_token(checks, addresses):
    for index in range(2):
        env = {"TFMW_TOKEN": f"secret {index}"}
        checks.begin(index, addresses[:2], "--timeout", "10", env=env)
    ends = checks.end()
    assert [status for status, _ in ends] == [1, 1]
    # The task that ends first has reached the other, which may find nobody in the end.
    said = "(the other side does not know this training's TFMW_TOKEN): set the same value of it"
    assert any(said in line for _, lines in ends for line in bad(lines))


def test_unknown_host_name(checks, addresses):
    for index in range(2):
        checks.begin(index, [*addresses[:2], "no-such-host.invalid:1"], "--timeout", "5")
    for status, lines in checks.end():
        (line,) = bad(lines)
        assert status == 1
        assert "the name of worker 2, 'no-such-host.invalid:1', is not known here" in line
        assert "/etc/hosts" in line


def test_an_address_of_another_machine(checks, addresses):
    # 198.51.100.0/24 is for documentation (RFC 5737): no machine has it.
    workers = [addresses[0], f"198.51.100.7:{addresses[1].partition(':')[2]}"]
    checks.begin(1, workers, "--timeout", "1")
    ((status, lines),) = checks.end()
    assert status == 1
    assert (
        f"'{workers[1]}', the address of this task (worker 1), is not an address of this machine"
        in (bad(lines)[0])
    )


@pytest.mark.process
@pytest.mark.nightly
def test_a_port_in_use(checks, addresses):
    """Both sides see it: the task itself, and who calls on it and gets another's answer."""
    port = int(addresses[1].partition(":")[2])
    with socket.create_server(("", port)) as holder, contextlib.suppress(OSError):
        holder.settimeout(0.1)
        for index in range(2):
            checks.begin(index, addresses[:2], "--timeout", "2")
        results = checks.end()
    assert [status for status, _ in results] == [1, 1]
    assert f"worker 1 at {addresses[1]} cannot be reached" in bad(results[0][1])[0]
    assert f"port {port} of this task's address" in bad(results[1][1])[0]
    assert "stop the process that holds it" in bad(results[1][1])[0]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"PRETEND_KERAS": "3.8.0"}, ["disagree about keras", "has 3.8.0", "Use the same"]),
        ({"PRETEND_GPUS": "an A100"}, ["GPUs differ", "an A100", "CUDA_VISIBLE_DEVICES"]),
        ({"PRETEND_AHEAD": "300"}, ["clock", "300 s", "NTP"]),
    ],
)
def test_a_task_that_differs(checks, addresses, odd, message):
    for index in range(3):
        checks.begin(index, addresses, env=odd if index == 2 else None)
    results = checks.end()
    assert [status for status, _ in results] == [1, 1, 1]
    assert [len(bad(lines)) for _, lines in results] == [1, 1, 2]
    for _, lines in results:
        assert [word for word in ["worker 2", *message] if word not in bad(lines)[-1]] == []


@pytest.mark.process
def test_descriptions_that_differ(checks, addresses):
    checks.begin(0, addresses[:2])
    checks.begin(1, [addresses[0], addresses[1], "127.0.0.1:1"], "--timeout", "2")
    (status, lines), (_, others) = checks.end()
    assert status == 1
    disagree = "tasks disagree about the cluster: "
    assert f"{disagree}worker 0 lists 2 workers, worker 1 lists 3. Give every" in bad(lines)[0]
    assert any(f"{disagree}worker 1 lists 3 workers, worker 0 lists 2" in b for b in bad(others))


@pytest.mark.process
@pytest.mark.nightly
def test_two_tasks_of_one_index(checks, addresses):
    for index in (0, 1, 1):
        checks.begin(index, addresses, "--timeout", "3")  # they wait for worker 2
    results = checks.end()
    assert any("two processes are worker 1" in b for b in bad(results[0][1]))


@pytest.mark.process
def test_a_directory_that_is_not_shared(checks, addresses, tmp_path):
    """The same path, and another place on each task."""
    for index in range(2):
        own = tmp_path / str(index)
        own.mkdir()
        options = ["--backup-dir", "/proc/self/cwd/run", "--timeout", "2"]
        checks.begin(index, addresses[:2], *options, cwd=own)
    (first, _), (second, lines) = checks.end()
    assert (first, second) == (0, 1)
    assert "--backup_dir /proc/self/cwd/run is not the same here as on worker 0" in bad(lines)[0]


@pytest.mark.parametrize("store", ["s3", *NIGHTLY])
@pytest.mark.parametrize("bucket", ["bucket", "another"])
def test_a_place_in_a_bucket(checks, addresses, monkeypatch, bucket, store):
    with opened(store, monkeypatch) as server:
        place = f"{server.url.replace('bucket', bucket)}/run7"
        for index in range(2):
            checks.begin(index, addresses[:2], f"--backup-dir={place}")
        (first, lines), (second, others) = checks.end()
    if bucket == "bucket":
        assert (first, second) == (0, 0)
        assert any(f"{place} is shared with worker 0" in line for line in others)
    else:
        assert first == 1
        assert "there is no such bucket: create it, or check its name" in bad(lines)[0]


def test_a_directory_that_cannot_be_written(checks, addresses, tmp_path):
    (tmp_path / "file").touch()
    for index in range(2):
        checks.begin(index, addresses[:2], "--export_dir", str(tmp_path / "file" / "export"))
    (status, lines), (other, _) = checks.end()
    assert (status, other) == (1, 0)
    assert "cannot be written (Not a directory): make it" in bad(lines)[0]


def test_directories_that_differ(checks, addresses, tmp_path):
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        checks.begin(index, addresses[:2], "--backup-dir", str(tmp_path / str(index)))
    for status, lines in checks.end():
        assert status == 1
        assert "tasks disagree about --backup_dir: worker" in bad(lines)[0]
        assert bad(lines)[0].endswith("Use the same on every task")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hosts", "h0,h0", "--host-index", "0"], "h0:2222 for both worker 0 and worker 1"),
        (["--host-index", "0"], "--host-index requires --hosts"),
        (["--wrokers", "2"], "--wrokers"),
        (["/tmp", "--backup-dir", "/tmp"], "call it twice"),
    ],
)
def test_wrong_use_is_status_2(checks, args, message):
    checks.begin_as({}, *args, env={"TF_CONFIG": ""})
    ((status, lines),) = checks.end()
    assert status == 2
    assert len(lines) == 1
    assert message in lines[0]


def test_a_wrong_description_is_status_2(checks, addresses):
    checks.begin(5, addresses)
    ((status, lines),) = checks.end()
    assert status == 2
    assert lines[0].startswith("tfmw: TF_CONFIG describes this process as worker 5")


@pytest.mark.process
def test_other_connections_to_the_port_are_ignored(checks, addresses):
    """Connections that send anything but our lines are closed; nothing is answered or executed."""
    checks.begin(0, addresses[:2], "--timeout", "2")
    host, port = addresses[0].split(":")
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04c\n", b'{"tfmw check": {"from": 1}}\n'):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                stranger = socket.create_connection((host, int(port)), timeout=10)
                break
        answer = b""
        with stranger, contextlib.suppress(OSError):  # a reset, if it closes before it has read all
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            while received := stranger.recv(1024):
                answer += received
        assert answer == b""
    ((status, lines),) = checks.end()
    assert status == 1
    (message,) = bad(lines)
    assert message.startswith(f"worker 1 at {addresses[1]} cannot be reached")
