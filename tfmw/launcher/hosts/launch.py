"""Implementation of `tfmw run --hosts ... --max-restarts N`: runs a script on several hosts.

    settings = HostSettings(("h0", "h1"), options=RunOptions(max_restarts=3))
    status = launch_on_hosts(["train.py", "--backup_dir=/shared/run7"], settings)

All errors of the command are found here, before any task starts.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tfmw import __version__
from tfmw.cluster import addresses
from tfmw.cluster.cluster import BACKUP_DIR, TOKEN
from tfmw.cluster.signals import Signals
from tfmw.errors import ClusterError, UsageError
from tfmw.launcher.hosts.lease import DIRECTORY, Lease, lease_of
from tfmw.launcher.hosts.settings import HostSettings
from tfmw.launcher.hosts.supervisor_loop import run_on_hosts
from tfmw.launcher.options import LocalRun, require
from tfmw.launcher.run import check_program
from tfmw.storage.bucket import is_bucket

SHORTEST_TOKEN = 16  # minimum number of characters


def launch_on_hosts(
    argv: Sequence[str],
    settings: HostSettings,
    *,
    host: int | None = None,
    rendezvous: str | None = None,
    token_file: Path | None = None,
    module: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Runs a script on all hosts; prints the last lines, and returns the exit status.

    Args:
        argv: the script's path, or the module's name, and its flags.
        settings: settings of all hosts, whose ports may be missing; `facts` are added here.
        host: index of this host; None: that of the only address which belongs to this machine.
        rendezvous: "dir:/path" or "s3://bucket/run7"; None: in the --backup-dir of tfmw
            run or of the program.
        token_file: file with the token; None: TFMW_TOKEN has it.
        module: whether argv[0] is a module.
        log_dir: the run's folder is created in it.

    Raises:
        UsageError: an argument is wrong.
    """
    check_program(argv, module)
    hosts = _checked_hosts(settings.hosts)
    settings = dataclasses.replace(settings, hosts=hosts, facts=_facts(argv, settings))
    _check_settings(settings)
    host = addresses.local_index(hosts, host)
    lease = lease_of(rendezvous_of(argv) if rendezvous is None else rendezvous, host)
    token = _token(token_file, hosts, lease)
    job = LocalRun(
        command=["module" if module else "script", *argv],
        tasks=[("worker", index) for index in range(settings.workers_per_host)],
        options=dataclasses.replace(settings.options, isolate="off"),
        log_dir=log_dir,
        env={"TFMW_EVALUATOR": "1"} if settings.evaluator else {},
    )
    with Signals() as stop:
        return run_on_hosts(job, settings, host, lease, token, stop)


def _checked_hosts(names: Sequence[str]) -> tuple[str, ...]:
    """The addresses of all hosts, with their ports."""
    hosts = tuple(addresses.with_port(name, addresses.DEFAULT_PORT) for name in names)
    addresses.validated("hosts", hosts, "--hosts")
    for address in hosts:
        if hosts.count(address) > 1:
            raise ClusterError(f"--hosts lists {address} twice; give every host once.")
    return hosts


def _check_settings(settings: HostSettings) -> None:
    settings.options.check(settings.workers_per_host)
    hosts = len(settings.hosts)
    few = 1 <= settings.least_hosts <= hosts
    require(
        settings,
        ("workers_per_host", settings.workers_per_host >= 1, "an integer of at least 1"),
        ("ps", settings.ps >= 0, "an integer of at least 0"),
        ("min_hosts", few, f"1 to {hosts}, the number of hosts"),
        ("rejoin_timeout_s", (settings.rejoin_timeout_s or 0.0) >= 0, "seconds, at least 0"),
    )
    if settings.options.isolate == "on":
        raise UsageError(
            "--isolate on closes the tasks' network, and with --hosts tasks of several hosts train "
            "together; leave one of the two out."
        )
    if settings.options.min_workers is not None:
        raise UsageError(
            "--min-workers is for one machine; with --hosts give --min-hosts, the least number of "
            "hosts."
        )


def rendezvous_of(argv: Sequence[str]) -> str:
    """Path of the lock, beside the program's backups."""
    found = backup_dir_of(argv) or os.environ.get(BACKUP_DIR)
    if found is not None and is_bucket(found):
        return f"{found.rstrip('/')}/supervisors"
    if found is None or "://" in found:
        raise UsageError(
            "restarts on several hosts require a lock that all of them reach, and the script has "
            "no --backup_dir in a directory or a bucket; add --rendezvous "
            "dir:/a/directory/that/all/hosts/share, or s3://bucket/run7."
        )
    return f"{DIRECTORY}{Path(found) / 'supervisors'}"


def backup_dir_of(argv: Sequence[str]) -> str | None:
    """The value of --backup_dir in a program's flags; None if they have none."""
    found = None
    for word, following in itertools.pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name.lstrip("-").replace("-", "_") == "backup_dir":
            found = value if equals else following
    return found or None


def _token(token_file: Path | None, hosts: Sequence[str], lease: Lease) -> bytes:
    """The token that supervisors prove to each other."""
    source, token = TOKEN, os.environ.get(TOKEN, "").strip()
    if token_file is not None:
        source = f"--token-file {token_file}"
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{source} cannot be read ({error}); write it with tfmw token."
            ) from None
    elif not token and all(map(_is_loopback, hosts)):
        try:
            return lease.secret()
        except OSError as error:
            raise UsageError(f"the hosts' key cannot be read ({error}); set {TOKEN}.") from None
    if not token:
        raise UsageError(
            "supervisors on a network require a token, the same on all hosts: "
            f"export {TOKEN}=$(tfmw token) on one host, and the same value on all others, "
            "or --token-file with a file that all hosts read."
        )
    if len(token) < SHORTEST_TOKEN:
        raise UsageError(
            f"the token in {source} has {len(token)} characters; expected at least "
            f"{SHORTEST_TOKEN}, as tfmw token makes them."
        )
    return token.encode()


def _is_loopback(address: str) -> bool:
    host, _ = addresses.split(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _facts(argv: Sequence[str], settings: HostSettings) -> dict[str, str]:
    """Settings that every host must share; tasks compare the versions of TensorFlow and Keras."""
    return {
        "the command": " ".join(argv),
        "--workers-per-host": str(settings.workers_per_host),
        "--ps": str(settings.ps),
        "--evaluator": str(settings.evaluator),
        "--min-hosts": str(settings.min_hosts),
        "--rejoin-timeout": str(settings.rejoin_timeout_s),
        "--max-restarts": str(settings.options.max_restarts),
        "tfmw": __version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
    }
