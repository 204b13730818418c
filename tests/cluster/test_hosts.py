"""`tfmw run --hosts`: one task on each host, by the same command everywhere.

On one machine the hosts are two addresses of its loopback, which don't tell a host which one it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.by_hand import free_ports
from tests.helpers.cluster import ONE_THREAD, PROGRAMS, ROOT

HOSTS = "127.0.0.1:7001,198.51.100.2"  # the second is for documentation (RFC 5737)


def tfmw(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {"PYTHONPATH": str(ROOT), "TFMW_NO_INIT": "1", **environ}
    command = [sys.executable, "-m", "tfmw", *args]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=600, check=False
    )


def test_each_host_is_one_task() -> None:
    """The first host's address is one of this machine's."""
    done = tfmw("run", "--hosts", HOSTS, str(PROGRAMS / "print_cluster.py"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "cluster": {"worker": ["127.0.0.1:7001", "198.51.100.2:2222"]},
        "task": {"type": "worker", "index": 0},
    }


def test_host_index_and_parameter_servers() -> None:
    options = ["--hosts=h0,h1,h2", "--host_index=2", "--ps=1"]
    done = tfmw("run", *options, str(PROGRAMS / "print_cluster.py"))
    assert json.loads(done.stdout) == {
        "cluster": {"chief": ["h0:2222"], "worker": ["h1:2222"], "ps": ["h2:2222"]},
        "task": {"type": "ps", "index": 0},
    }


@pytest.mark.parametrize(
    ("args", "environ", "message"),
    [
        (
            ["--hosts", "198.51.100.1,198.51.100.2"],
            {},
            "address of this machine; pass --host-index",
        ),
        (
            ["--hosts", "198.51.100.1,h1.invalid"],
            {},
            "no address is known here for h1.invalid; pass",
        ),
        (["--hosts", "h0,h1", "--host-index", "2"], {}, "--host-index is 2; expected 0 to 1"),
        (["--hosts", "h0,h1", "--host-index", "-1"], {}, "--host-index is -1; expected 0 to 1"),
        (["--hosts", HOSTS, "--workers", "2"], {}, "leave one of the two out"),
        (["--hosts", HOSTS, "--max-restarts", "2"], {}, "add --rendezvous dir:"),
        (["--hosts", HOSTS], {"TF_CONFIG": "{}"}, "unset it or drop --hosts"),
        (["--hosts", "127.0.0.1,"], {}, "address 1 of"),
    ],
)
def test_wrong_use(args: list[str], environ: dict[str, str], message: str) -> None:
    done = tfmw("run", *args, str(PROGRAMS / "print_cluster.py"), **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.process
@pytest.mark.nightly
def test_two_hosts_train_by_the_same_command(tmp_path: Path) -> None:
    """A recipe on two addresses: the same losses on both, one export."""
    first, second = free_ports(2)
    hosts = f"127.0.0.1:{first},127.0.0.2:{second}"
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {**ONE_THREAD, "PYTHONPATH": str(ROOT)}
    recipe = [str(ROOT / "recipes" / "digits.py"), "--max_steps=5", f"--export_dir={tmp_path}/m"]
    command = [sys.executable, "-m", "tfmw", "run", "--hosts", hosts]
    tasks = [
        subprocess.Popen(
            [*command, "--host-index", str(i), *recipe],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [task.communicate(timeout=600)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(outputs)
    assert re.search(r"validation accuracy: 0\.\d+", outputs[0])
    assert "accuracy" not in outputs[1]
    assert (tmp_path / "m" / "saved_model.pb").exists()
