"""Wrong use of `tfmw run --hosts --max-restarts`: one sentence each, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cluster import PROGRAMS
from tfmw.cli.main import main
from tfmw.cluster.cluster import BACKUP_DIR
from tfmw.launcher.hosts.launch import backup_dir_of, rendezvous_of
from tfmw.launcher.hosts.settings import HostSettings

HOSTS = "127.0.0.1:7001,198.51.100.2"  # the second is for documentation (RFC 5737)
SUPERVISED = ["--hosts", HOSTS, "--max-restarts", "2", "--rendezvous", "dir:build/supervisors"]


@pytest.mark.parametrize(
    ("args", "environ", "said"),
    [
        ([*SUPERVISED, "--min-hosts", "3"], {}, "expected 1 to 2, the number of hosts"),
        ([*SUPERVISED, "--workers-per-host", "0"], {}, "integer of at least 1"),
        ([*SUPERVISED, "--rejoin-timeout", "-1"], {}, "expected seconds, at least 0"),
        ([*SUPERVISED, "--min-workers", "1"], {}, "give --min-hosts"),
        ([*SUPERVISED, "--isolate", "on"], {}, "leave one of the two out"),
        ([*SUPERVISED, "--ps", "-1"], {}, "integer of at least 0"),
        ([*SUPERVISED, "--host-index", "2"], {}, "expected 0 to 1"),
        ([*SUPERVISED, "--rendezvous", "zoo://k"], {}, "expected dir:/path"),
        (SUPERVISED, {"TFMW_TOKEN": ""}, "export TFMW_TOKEN=$(tfmw token) on one host"),
        (SUPERVISED, {"TFMW_TOKEN": "short"}, "has 5 characters; expected at least 16"),
        ([*SUPERVISED, "--token-file", "no/such"], {}, "cannot be read"),
        (["--hosts", HOSTS, "--min-hosts", "1"], {}, "requires --hosts and --max-restarts"),
        (["--rendezvous", "dir:/x", "--workers", "2"], {}, "requires --hosts and --max-restarts"),
    ],
)
def test_wrong_use(
    args: list[str],
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TF_CONFIG", "TFMW_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *args, str(PROGRAMS / "print_cluster.py")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["train.py"], None),
        (["train.py", "--backup_dir", "/shared/a"], "/shared/a"),
        (["train.py", "--epochs=3", "--backup-dir=/shared/a"], "/shared/a"),
        (["train.py", "--backup_dir"], None),
    ],
)
def test_the_lock_is_in_the_backups_directory(argv: list[str], found: str | None) -> None:
    assert backup_dir_of(argv) == found


def test_the_lock_is_in_the_backups_of_a_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKUP_DIR, "/shared/run7")
    assert rendezvous_of(["train.py"]) == "dir:/shared/run7/supervisors"
    assert rendezvous_of(["train.py", "--backup_dir=/own"]) == "dir:/own/supervisors"


def test_a_token_is_long_and_new_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["token"]) == 0
    one, other = capsys.readouterr().out.split()
    assert one != other
    assert len(bytes.fromhex(one)) == 32


def test_hosts_of_one_name_are_told_apart_by_their_ports() -> None:
    """Two hosts may be two ports of localhost, to try a run on one machine."""
    settings = HostSettings(hosts=("localhost:1", "localhost:2", "h2:1"))
    assert settings.names(range(3)) == "localhost:1, localhost:2, h2"
