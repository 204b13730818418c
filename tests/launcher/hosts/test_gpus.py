"""GPUs of a host are divided between its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.hosts import Hosts
from tfmw.cli import main
from tfmw.launcher.hosts.gpus import visible_devices


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


@pytest.mark.multiprocess
@pytest.mark.parametrize("standby", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_tasks_find_their_share_in_their_environment(standby, tmp_path, capsys):
    """Of a machine without GPUs: what TensorFlow would read. The hosts' token is in a file."""
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
