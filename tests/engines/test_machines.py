"""Ray and Slurm on machines with networks of their own, which are network namespaces: as root.

The digits are trained there, a folder that one machine has for itself is refused as `backup_dir`,
and a cable is cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.kernels import DIGITS
from tests.helpers.cluster import ONE_THREAD, PYTHONPATH
from tests.helpers.network import Machines
from tests.helpers.slurm import OneMachine

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

TIMEOUT_S = 200

# With the expression of an engine, the folder that differs, and one that all share.
SCRIPT = f"""{DIGITS}
import json, sys
from pathlib import Path

from tfmw.errors import TaskFailed, UsageError

engine, own, shared = eval(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
found = {{"equal": equal(fitted(on=engine), fitted())}}
try:
    fitted(on=engine, backup_dir=own + "/backups")
except TaskFailed as error:
    found["refused"] = str(error)


def hosts_until_alone(folder):
    from tests.engines.contract import meet, wait_for
    if os.environ["TFMW_ATTEMPT"] == "0":
        meet(folder, "up")
        wait_for(lambda: False)
    return os.environ["TFMW_ATTEMPT"]


job = tfmw.submit(
    hosts_until_alone, (str(shared),), (1, 2), on=eval(sys.argv[4]), max_restarts=3,
    env={{"TFMW_NO_INIT": "1"}},
)
while len(list(shared.glob("up_*"))) < 2:
    time.sleep(0.1)
found["hosts"] = job.details()["hosts"]
(shared / "cut").touch()
found["alone"] = [job.result(150), job.details()["hosts"], job.logs()]
print(json.dumps(found))
"""


def run(
    machines: Machines,
    folder: Path,
    engine: str,
    ranged: str,
    *,
    within: Sequence[str] = (),
    env: dict[str, str],
) -> dict[str, Any]:
    """What the script prints; the second machine's cable is cut when it asks for it."""
    shared = folder / "shared"
    shared.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    with open(folder / "errors", "wb") as errors:
        process = subprocess.Popen(
            [
                *within,
                *(sys.executable, str(folder / "script.py"), engine, str(machines.own)),
                *(str(shared), ranged),
            ],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, **env},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not (shared / "cut").exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            machines.unplug(1)
            out, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, (folder / "errors").read_text()[-5000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def check(found: dict[str, Any], machines: Machines) -> None:
    assert found["equal"]
    own = machines.own / "backups"
    first, second = machines.addresses
    assert sorted(found["hosts"]) == [first, second]
    assert f"backup_dir {own} is not the same here as on worker 0 on" in found["refused"]
    assert "mount one file system there" in found["refused"]
    result, hosts, logs = found["alone"]
    assert len(result) == 1
    assert int(result[0]) >= 1
    assert hosts == [first]
    assert "its connection was lost" in logs


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(2, tmp_path) as machines:
        yield machines


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_slurm(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with OneMachine(tmp_path / "slurm", machines) as slurm:
        ranged = f"tfmw.engines.Slurm(directory={str(tmp_path / 'jobs')!r}, options=('--mem=0',))"
        engine = ranged.replace("options", "nodes=2, options")
        check(run(machines, tmp_path, engine, ranged, env=slurm.env), machines)
        assert not slurm.run("squeue", "--noheader").stdout.strip()


@pytest.mark.timeout(600)
def test_ray(machines: Machines, tmp_path: Path) -> None:
    first, _ = machines.addresses
    with contextlib.ExitStack() as stack:
        env = {**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, "RAY_USAGE_STATS_ENABLED": "0"}

        def start(machine: int, *options: str) -> None:
            log = stack.enter_context(open(tmp_path / f"ray_{machine}.log", "wb"))
            command = [
                *machines.command(machine),
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                *("--node-ip-address", machines.addresses[machine], *options),
            ]
            node = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(node.wait)
            stack.callback(node.terminate)

        # Ray's sockets lie in there: their whole path may have 107 bytes.
        short = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)
        options = ("--port=6379", "--num-cpus=1", "--include-dashboard=false")
        start(0, "--head", *options, "--temp-dir", stack.enter_context(short))
        start(1, f"--address={first}:6379", "--num-cpus=1")
        engine = f"tfmw.engines.Ray(address='{first}:6379')"
        within = machines.command(0)[:2]
        check(run(machines, tmp_path, engine, engine, within=within, env={}), machines)
