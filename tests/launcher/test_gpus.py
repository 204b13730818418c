"""GPUs of a machine are divided between its tasks: what TensorFlow would read, without a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers.hosts import Hosts
from tfmw.cli import main
from tfmw.launcher.environment import shortage, visible_devices
from tfmw.launcher.run import launch


@pytest.mark.parametrize(
    ("found", "environ", "shares"),
    [
        (4, {}, ["0,1", "2,3"]),
        (11, {}, ["0,1,2,3,4", "5,6,7,8,9"]),  # in the order of numbers
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, ["GPU-a", "GPU-b"]),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        (1, {}, [None, None]),
        (0, {}, [None, None]),
        (4, {}, [None]),  # one task has all
    ],
)
def test_each_task_has_its_share(
    found: int, environ: dict[str, str], shares: list[str | None], tmp_path: Path
) -> None:
    for name in [f"nvidia{i}" for i in range(found)] + ["nvidiactl", "null"]:
        (tmp_path / name).touch()
    got = [visible_devices(rank, len(shares), environ, tmp_path) for rank in range(len(shares))]
    assert visible_devices(None, 1, environ, tmp_path) == {"CUDA_VISIBLE_DEVICES": ""}
    assert got == [{} if s is None else {"CUDA_VISIBLE_DEVICES": s} for s in shares]


def test_workers_without_a_gpu_of_their_own_are_told() -> None:
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert shortage(3, two).startswith("3 workers have to share GPUs, as this machine has 2:")
    assert "machine has 1" in shortage(2, {"CUDA_VISIBLE_DEVICES": "GPU-a"})
    assert shortage(2, two) == shortage(2, {"CUDA_VISIBLE_DEVICES": ""}) == ""


@pytest.mark.multiprocess
def test_tasks_of_one_machine_get_their_share(run_cluster, monkeypatch, tmp_path) -> None:
    """Of `tfmw run`, and of `tfmw.launch`, by which fit(workers=N) starts its workers."""
    env = {"TFMW_NO_INIT": "1", "CUDA_VISIBLE_DEVICES": "3,5,7,9"}
    run = run_cluster("visible_gpus.py", workers=2, ps=1, evaluator=True, env=env)
    assert dict(re.findall(r"(\w+ ?\d?) has GPUs (.*)", run.output)) == {
        "worker 0": "3,5", "worker 1": "7,9", "chief": "", "ps 0": "", "evaluator": "",
    }  # fmt: skip
    assert "have to share" not in run.output
    with (tmp_path / "out").open("w") as out:
        shares = launch(os.getenv, ("CUDA_VISIBLE_DEVICES",), 2, env=env, stdout=out)
        assert shares == ["3,5", "7,9"]
        three = launch(
            os.getenv, ("TFMW_TASK",), 3, env=env | {"CUDA_VISIBLE_DEVICES": "3,5"}, stdout=out
        )
        assert three == ["worker 0", "worker 1", "worker 2"]
    assert (tmp_path / "out").read_text().count("3 workers have to share GPUs") == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("standby", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_tasks_find_their_share_in_their_environment(standby, tmp_path, capsys):
    """The hosts' token is in a file."""
    assert main(["token"]) == 0
    token = tmp_path / "token"
    token.write_text(capsys.readouterr().out)
    options = ["--workers-per-host=2", "--max-restarts=1", f"--token-file={token}"]
    options += [f"--standby={standby}", f"--rendezvous=dir:{tmp_path}/backup/supervisors"]
    env = {"TFMW_NO_INIT": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}
    with Hosts(tmp_path, 2, *options, program="visible_gpus.py", env=env) as hosts:
        assert hosts.end() == [0, 0], hosts.output()
    said = {line for lines in hosts.lines for line in lines if "has GPUs" in line}
    # Workers 0 and 1 are on one host, 2 and 3 on the other.
    assert {line.partition("] ")[2] or line for line in said} == {
        f"worker {worker} has GPUs {gpus}"
        for worker, gpus in ((0, "0,1"), (1, "2,3"), (2, "0,1"), (3, "2,3"))
    }
