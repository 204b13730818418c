"""Division of a machine's GPUs between its tasks, as TensorFlow would read it, without a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers.hosts import Hosts
from tfmw.cli.main import main
from tfmw.launcher.environment import gpu_note, visible_devices
from tfmw.launcher.run import launch


@pytest.mark.parametrize(
    ("found", "environ", "shares"),
    [
        (4, {}, ["0,1", "2,3"]),
        (11, {}, ["0,1,2,3,4", "5,6,7,8,9"]),  # in the order of numbers
        (4, {"CUDA_VISIBLE_DEVICES": "-1"}, [None, None]),
        (4, {"CUDA_VISIBLE_DEVICES": "2,3,-1,0,1"}, ["2", "3"]),  # the list ends at -1
        (4, {"CUDA_VISIBLE_DEVICES": "2,3,4,0,1"}, ["2", "3"]),  # and at a GPU that is not there
        (0, {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}, ["2,3", "4,5"]),  # no files to count
        (4, {"CUDA_VISIBLE_DEVICES": "0,1,0"}, [None, None]),  # CUDA then shows none
        (4, {"CUDA_VISIBLE_DEVICES": "0,1,0 1"}, [None, None]),  # of "0 1", CUDA reads 0
        (4, {"CUDA_VISIBLE_DEVICES": " 1, 01x,+2,3"}, [None, None]),
        (4, {"CUDA_VISIBLE_DEVICES": " 1, 02x,+3"}, ["1", "2"]),
        (4, {"CUDA_VISIBLE_DEVICES": "0,GPU-a"}, [None, None]),
        (4, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,2,GPU-c,GPU-d"}, ["GPU-a", "GPU-b"]),
        (4, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-a"}, [None, None]),
        (1, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d"}, ["MIG-a", "MIG-b"]),
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


def test_gpus_keep_cudas_numbers_in_a_container(tmp_path: Path) -> None:
    for name in ("nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    shares = [visible_devices(rank, 2, {}, tmp_path)["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert shares == ["0", "1"]


def test_shared_and_idle_gpus_are_told(tmp_path: Path) -> None:
    def note(tasks: int, listed: str) -> str:
        return gpu_note(tasks, {"CUDA_VISIBLE_DEVICES": listed}, tmp_path)

    assert note(3, "0,1").startswith("3 workers have to share GPUs, as this machine has 2:")
    assert "machine has 1" in note(2, "GPU-a")
    assert note(2, "0,1") == note(2, "") == note(2, "-1") == note(1, "0,1,2") == ""
    assert note(3, "0,1,2,3,4,5,6,7").startswith(
        "2 of 8 GPUs stay idle: each of 3 workers gets 2, as all get the same number;"
    )
    assert note(2, "MIG-a,MIG-b,MIG-c").startswith("1 of 3 GPUs stay idle: each of 2 workers")


@pytest.mark.process
def test_tasks_of_one_machine_get_their_share(run_cluster, monkeypatch, tmp_path) -> None:
    """Tasks of `tfmw run`, and of `tfmw.launch`, by which fit(workers=N) starts its workers."""
    env = {"TFMW_NO_INIT": "1", "CUDA_VISIBLE_DEVICES": "3,5,7,9"}
    run = run_cluster("visible_gpus.py", workers=2, ps=1, evaluator=True, env=env)
    assert dict(re.findall(r"(\w+ ?\d?) has GPUs (.*)", run.output)) == {
        "worker 0": "3,5", "worker 1": "7,9", "chief": "", "ps 0": "", "evaluator": "",
    }  # fmt: skip
    assert "have to share" not in run.output
    assert "idle" not in run.output
    with (tmp_path / "out").open("w") as out:
        shares = launch(os.getenv, ("CUDA_VISIBLE_DEVICES",), 2, env=env, stdout=out)
        assert shares == ["3,5", "7,9"]
        three = launch(
            os.getenv, ("TFMW_TASK",), 3, env=env | {"CUDA_VISIBLE_DEVICES": "3,5"}, stdout=out
        )
        assert three == ["worker 0", "worker 1", "worker 2"]
        none = env | {"CUDA_VISIBLE_DEVICES": "-1"}
        assert launch(os.getenv, ("CUDA_VISIBLE_DEVICES",), 2, env=none, stdout=out) == ["-1"] * 2
    assert (tmp_path / "out").read_text().count("3 workers have to share GPUs") == 1


@pytest.mark.process
@pytest.mark.parametrize("standby", ["off", pytest.param("on", marks=pytest.mark.nightly)])
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
