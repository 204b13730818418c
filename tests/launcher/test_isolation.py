"""The tasks' private network: its members, its cost, and the message if there is none."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import each
from tests.helpers.cluster import PROGRAMS, ROOT, ClusterRun, run_command, tfmw_command
from tfmw.errors import UsageError
from tfmw.launcher import isolation
from tfmw.launcher.network import starts_grpc
from tfmw.launcher.options import RunOptions
from tfmw.launcher.run import launch_tasks

NO_INIT = {"TFMW_NO_INIT": "1"}
PROGRAM = str(PROGRAMS / "isolate_tasks.py")


# ---- row 34: in the network ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two tasks with --isolate on: (exit status, output, what each found)."""
    folder = tmp_path_factory.mktemp("isolated")
    command = ["run", "--workers", "2", "--isolate", "on", "--log-dir", str(folder), PROGRAM]
    with tfmw_command(*command, env={**NO_INIT, "TFMW_RESULT": str(folder)}) as run:
        output, _ = run.communicate(timeout=600)
    found = [json.loads((folder / f"worker_{i}.json").read_text()) for i in (0, 1)]
    return run.returncode, output, found, folder


class TestRow34:
    def test_tasks_share_a_network_namespace(self, isolated):
        status, output, tasks, _ = isolated
        assert status == 0, output
        assert tasks[0]["namespace"] == tasks[1]["namespace"]
        assert tasks[0]["namespace"] != os.readlink("/proc/self/ns/net")
        assert tasks[1]["message"] == "hello"

    def test_there_is_only_loopback(self, isolated):
        for task in each(isolated[2]):
            assert task["interfaces"][0] == "lo"
            # Other names are templates that the kernel puts into every namespace, all of them down.
            assert not {"eth0", "docker0"} & set(task["interfaces"])

    def test_files_and_the_user_stay_the_same(self, isolated):
        _, _, tasks, folder = isolated
        for index, task in enumerate(each(tasks)):
            assert task["user"] == [os.getuid(), os.getgid()]
            assert task["owner"] == os.getuid()
            status = (folder / f"file_{index}").stat()
            assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())

    def test_descriptors_are_closed_in_the_tasks(self, isolated):
        for task in each(isolated[2]):
            assert task["descriptors"] == []
            assert task["left"] == []

    def test_isolate_on_prints_no_note(self, isolated):
        assert isolated[1] == ""

    def test_unprivileged_user_gets_a_private_network(self, tmp_path):
        """A user namespace gives it; root gives up its rights to test this."""
        code = (
            "import os, socket\n"
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from tfmw.launcher import isolation\n"
            "network = isolation.create()\n"
            "assert len(network.namespaces) == 2, network\n"
            "isolation.enter(network.namespaces)\n"
            "assert os.getuid() == int(sys.argv[1])\n"
            "open(sys.argv[2], 'w').close()\n"
            "with socket.create_connection(network.listeners[0].getsockname()):\n"
            "    network.listeners[0].accept()\n"
        )
        command = [sys.executable, "-c", code, str(os.getuid()), str(tmp_path / "file")]
        if os.getuid() == 0:
            command = ["setpriv", "--bounding-set=-sys_admin", *command]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "file").stat().st_uid == os.getuid()


# ---- auto ---------------------------------------------------------------------------------------


class TestAuto:
    @pytest.mark.parametrize(
        ("tasks", "environ", "expected"),
        [
            ([("worker", 0), ("worker", 1)], {}, False),
            ([("worker", 0), ("worker", 1)], {"CUDA_VISIBLE_DEVICES": "0,1"}, True),
            ([("worker", 0), ("worker", 1)], NO_INIT, True),
            ([("worker", 0), ("evaluator", 0)], NO_INIT, False),
            ([("chief", 0), ("worker", 0), ("ps", 0)], {}, True),
        ],
    )
    def test_tasks_that_start_grpc_are_isolated(self, tasks, environ, expected):
        assert starts_grpc(tasks, {"CUDA_VISIBLE_DEVICES": "", **environ}) == expected

    def test_one_task_opens_no_port(self, tmp_path, capfd):
        env = {**NO_INIT, "TFMW_RESULT": str(tmp_path), "PYTHONPATH": str(ROOT)}
        program = [str(PROGRAMS / "launch_tasks.py")]
        launch_tasks(program, workers=1, env=env, stdout=io.StringIO())
        assert capfd.readouterr().err == ""

    def test_failure_without_a_network_prints_a_hint(self, run_cluster):
        run: ClusterRun = run_cluster("isolate_tasks.py", "look-up", env=NO_INIT, status=1)
        assert "the tasks ran in a private network" in run.output
        assert "--isolate off" in run.output

    def test_failure_of_a_download_prints_none(self, run_cluster):
        """The proxy has looked for the host in this machine's network."""
        run: ClusterRun = run_cluster("isolate_tasks.py", "download", env=NO_INIT, status=1)
        assert "data.invalid" in run.output
        assert "--isolate off" not in run.output


# ---- where it isn't possible --------------------------------------------------------------------


class TestImpossible:
    @pytest.fixture(autouse=True)
    def forbidden(self, monkeypatch):
        def create(ports: Any) -> isolation.Network:
            raise isolation.Impossible("Operation not permitted")

        monkeypatch.setattr(isolation, "create", create)

    def launch(self, tmp_path: Path, isolate: Any) -> int:
        env = {**NO_INIT, "TFMW_RESULT": str(tmp_path), "PYTHONPATH": str(ROOT)}
        program = [str(PROGRAMS / "launch_tasks.py")]
        options = RunOptions(isolate=isolate)
        return launch_tasks(program, env=env, stdout=io.StringIO(), options=options).status

    def test_on_is_refused_in_one_sentence(self, tmp_path):
        with pytest.raises(UsageError, match=r"allows no private network \(Operation not per") as e:
            self.launch(tmp_path, "on")
        assert e.value.status == 2

    def test_auto_prints_a_note_and_continues(self, tmp_path, capfd):
        assert self.launch(tmp_path, "auto") == 0
        assert "allows no private network for the tasks (Operation" in capfd.readouterr().err

    def test_off_prints_nothing(self, tmp_path, capfd):
        assert self.launch(tmp_path, "off") == 0
        assert capfd.readouterr().err == ""


def test_system_without_namespaces_is_detected(tmp_path):
    """The test runs in a user namespace that allows no further network namespace."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tfmw.launcher import isolation\n"
        "try: isolation.create()\n"
        "except isolation.Impossible as e: print('impossible:', e)\n"
    )
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$0" -c "$1"'
    command = ["unshare", "-Ur", "sh", "-c", shell, sys.executable, code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "impossible: unshare: No space left on device\n", result.stderr


# ---- row 34: a description with public addresses ------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("elsewhere", "warned"), [("8.8.8.8:2222", True), ("192.168.7.7:2222", False)]
)
def test_a_public_address_in_a_description_is_warned_about(elsewhere, warned):
    """The chief waits for the others and calls nobody, so nothing goes to that address."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        here = f"127.0.0.1:{held.getsockname()[1]}"
    jobs = {"chief": [here], "worker": ["127.0.0.1:1"], "ps": [elsewhere]}
    config = {"cluster": jobs, "task": {"type": "chief", "index": 0}}
    code = "import tfmw; tfmw.init(start_timeout_s=0.3)"
    _, output = run_command("python", "-c", code, env={"TF_CONFIG": json.dumps(config)})
    assert "did not connect within 0.3 s" in output
    message = f"{elsewhere} is a public address; keep the cluster in a private network"
    assert (message in output) == warned, output
