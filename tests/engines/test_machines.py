"""Ray and Slurm on machines with networks of their own, which are network namespaces: as root.

The digits are trained there, a folder that one machine has for itself is refused as `backup_dir`,
a cable is cut, and Ray's head dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import wait_for
from tests.engines.kernels import DIGITS
from tests.helpers.cluster import MARK, ONE_THREAD, PYTHONPATH, marked
from tests.helpers.network import Machines
from tests.helpers.slurm import OneMachine

pytestmark = [pytest.mark.nightly, pytest.mark.process, pytest.mark.timeout(600)]

TIMEOUT_S = 250
HEAD_PORT = 6379

# Programs of a user. `engine` is the engine, and they print their findings, as JSON, at the end.

FIT = f"""{DIGITS}
import json


class SaysWhere(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("network", os.readlink("/proc/self/ns/net"), flush=True)


there = fitted(on=engine, callbacks=[SaysWhere()])
print(json.dumps(equal(there, fitted())))
"""

REFUSED = f"""{DIGITS}
import json
from tfmw.errors import UsageError

try:
    fitted(on=engine, backup_dir=folder)
except UsageError as error:
    print(json.dumps(str(error)))
"""

ALONE = """
import json, os, time
from pathlib import Path
import tfmw


def waits_until_it_is_alone(folder):
    from tests.engines.contract import meet, wait_for
    if os.environ["TFMW_ATTEMPT"] == "0":
        meet(folder, "up")
        wait_for(lambda: False)
    return os.environ["TFMW_ATTEMPT"]


job = tfmw.submit(
    waits_until_it_is_alone, (folder,), (1, 2), on=engine, max_restarts=3, env={"TFMW_NO_INIT": "1"}
)
while len(list(Path(folder).glob("up_*"))) < 2:
    time.sleep(0.1)
hosts = job.details()["hosts"]
Path(folder, "cut").touch()
print(json.dumps([hosts, job.result(150), job.details()["hosts"], job.logs()]))
job.forget()
"""

WAITS = """
import json, time
import tfmw
from tests.engines import contract
from tfmw.errors import TaskFailed

try:
    tfmw.launch(contract.runs_forever, (folder,), 2, on=engine, max_restarts=3, env=contract.PLAIN)
except TaskFailed as error:
    print(json.dumps(str(error)), flush=True)
"""


class User:
    """A machine from which programs use an engine.

    Args:
        engine: an expression.
        folder: directory of the programs.
        within: prefix of a command that is to run on the machine.
        env: environment of the programs.
    """

    def __init__(
        self,
        engine: str,
        folder: Path,
        within: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._within = within
        self._env = {**os.environ, **ONE_THREAD, **(env or {}), "PYTHONPATH": PYTHONPATH}

    @contextlib.contextmanager
    def starts(self, program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
        """Starts one of the programs, which has a folder."""
        script = self._folder / "program.py"
        head = f"import tfmw\nengine = tfmw.engines.{self._engine}\nfolder = {str(folder)!r}\n"
        script.write_text(head + program)
        with open(self._folder / "errors", "wb") as errors:
            process = subprocess.Popen(
                [*self._within, sys.executable, str(script)],
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def finds(self, process: subprocess.Popen[str]) -> tuple[Any, str]:
        """Result of a running program, and its whole output."""
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, (self._folder / "errors").read_text()[-5000:]
        return json.loads(out.splitlines()[-1]), out

    def runs(self, program: str, folder: Path) -> tuple[Any, str]:
        """Runs a program; returns its result and its whole output."""
        with self.starts(program, folder) as process:
            return self.finds(process)


class OnMachines:
    """The promises; a subclass for each engine."""

    def test_fit_equals_that_of_two_workers(
        self, user: User, machines: Machines, tmp_path: Path
    ) -> None:
        equal, out = user.runs(FIT, tmp_path)
        assert equal
        said = r"^\[worker (\d) on (\S+)\] network (\S+)$"
        found = {int(rank): where for rank, *where in re.findall(said, out, re.MULTILINE)}
        assert sorted(found) == [0, 1]
        assert sorted(host for host, _ in found.values()) == machines.addresses
        assert found[0][1] != found[1][1], "each task in the network of its machine"

    def test_backup_dir_of_one_machine_is_refused(
        self, user: User, machines: Machines, tmp_path: Path
    ) -> None:
        own = machines.own / "backups"
        refused, out = user.runs(REFUSED, own)
        assert f"backup_dir {own} is not the same here as on worker 0 on" in refused
        assert "mount one file system there" in refused
        assert "train |" not in out, "before the first step"

    def test_goes_on_without_a_machine_whose_cable_is_cut(
        self, user: User, ranged: User, machines: Machines, tmp_path: Path
    ) -> None:
        """The engine has workers=(1, 2), and the first machine has the controller."""
        with ranged.starts(ALONE, tmp_path) as process:
            wait_for(lambda: (tmp_path / "cut").exists() or process.poll() is not None)
            machines.unplug(1)
            try:
                (hosts, result, left, logs), _ = ranged.finds(process)
            finally:
                machines.plug(1)
        assert sorted(hosts) == machines.addresses
        assert len(result) == 1
        assert int(result[0]) >= 1
        assert left == machines.addresses[:1]
        assert "its connection was lost" in logs


@pytest.fixture(scope="class")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(2, tmp_path_factory.mktemp("machines")) as machines:
        yield machines


@pytest.fixture(scope="class")
def slurm(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachine]:
    with OneMachine(tmp_path_factory.mktemp("slurm"), machines) as slurm:
        yield slurm


@pytest.mark.nightly
class TestSlurm(OnMachines):
    @pytest.fixture
    def user(self, slurm: OneMachine, tmp_path: Path) -> User:
        engine = f"Slurm(directory={str(tmp_path / 'jobs')!r}, nodes=2, options=('--mem=0',))"
        return User(engine, tmp_path, env=slurm.env)

    @pytest.fixture
    def ranged(self, slurm: OneMachine, tmp_path: Path) -> User:
        engine = f"Slurm(directory={str(tmp_path / 'jobs')!r}, options=('--mem=0',))"
        return User(engine, tmp_path, env=slurm.env)

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, slurm: OneMachine) -> Iterator[None]:
        yield
        wait_for(lambda: not slurm.run("squeue", "--noheader").stdout.strip())


class RayNodes:
    """A head on the first machine, and one more node on the second.

    Args:
        machines: the two.
    """

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._mark = uuid.uuid4().hex
        self.engine = f"Ray(address='{machines.addresses[0]}:{HEAD_PORT}')"
        # A token in the home directory would make the head ask for it, and no other node has it.
        self._auth = {"RAY_AUTH_MODE": "disabled"}

    @contextlib.contextmanager
    def run(self, folder: Path) -> Iterator[RayNodes]:
        """Runs them, with logs in a folder."""
        with contextlib.ExitStack() as stack:
            # Ray's sockets lie in there: their whole path may have 107 bytes.
            short = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)
            head = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false", "--temp-dir"]
            head.append(stack.enter_context(short))
            for machine, role in enumerate((head, [f"--address={self._address()}"])):
                log = stack.enter_context(open(folder / f"ray_{machine}.log", "wb"))
                node = subprocess.Popen(
                    [
                        *self._machines.command(machine),
                        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                        *("--node-ip-address", self._machines.addresses[machine], "--num-cpus=1"),
                        *role,
                    ],
                    env=self._env(machine),
                    stdout=log,
                    stderr=log,
                )
                stack.callback(node.wait)
                stack.callback(self.kill, machine)
                stack.callback(node.terminate)
            logs = [folder / f"ray_{machine}.log" for machine in (0, 1)]
            wait_for(lambda: all("Ray runtime started" in log.read_text() for log in logs))
            yield self

    def _address(self) -> str:
        return f"{self._machines.addresses[0]}:{HEAD_PORT}"

    def _env(self, machine: int) -> dict[str, str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TF_CONFIG"))}
        ours = {"PYTHONPATH": PYTHONPATH, "RAY_USAGE_STATS_ENABLED": "0"}
        return {**environ, **ONE_THREAD, **ours, **self._auth, MARK: f"{self._mark}-{machine}"}

    def user(self, folder: Path, machine: int = 0) -> User:
        """A user on one of the machines."""
        return User(self.engine, folder, self._machines.command(machine)[:2], self._auth)

    def kill(self, machine: int) -> None:
        """Kills all processes of a node."""
        for pid in marked(f"{self._mark}-{machine}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[str]:
        """Actors and tasks of tfmw that remain."""
        found = [c for i in (0, 1) for c in marked(f"{self._mark}-{i}").values()]
        return [c for c in found if re.search("_(Task|Controller)Actor|tfmw/launcher", c)]


@pytest.fixture(scope="class")
def nodes(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with RayNodes(machines).run(tmp_path_factory.mktemp("ray")) as nodes:
        yield nodes


class TestRay(OnMachines):
    @pytest.fixture
    def user(self, nodes: RayNodes, tmp_path: Path) -> User:
        return nodes.user(tmp_path)

    @pytest.fixture
    def ranged(self, user: User) -> User:
        return user

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, nodes: RayNodes) -> Iterator[None]:
        yield
        wait_for(lambda: not nodes.left())


@pytest.mark.parametrize("machine", [0, 1])
def test_killed_head_of_ray_ends_the_call_in_one_sentence(
    machines: Machines, tmp_path: Path, machine: int
) -> None:
    """The caller is on the head's machine or on another; nothing is left afterwards."""
    with RayNodes(machines).run(tmp_path) as nodes:
        user = nodes.user(tmp_path, machine)
        with user.starts(WAITS, tmp_path) as process:
            wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2 or process.poll() is not None)
            assert nodes.left()
            nodes.kill(0)
            said, _ = user.finds(process)
        at = rf"{re.escape(machines.addresses[0])}:{HEAD_PORT}"
        assert re.fullmatch(
            rf"ray:\w+ has no result: Ray's head at {at} has not been reachable for 20 s "
            r"\(Connection refused\), and without it Ray ends all tasks, and soon this process: "
            r"start the cluster and the job again; a fit with a backup_dir resumes\.",
            said,
        )
        wait_for(lambda: not nodes.left())
