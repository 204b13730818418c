"""Runs a script on several hosts: what `tfmw run --hosts ... --max-restarts N` calls.

    status = launch_on_hosts(["train.py", "--backup_dir=/shared/run7"], HostOptions(("h0", "h1")))

Everything that can be wrong with the command is found here, before anything starts.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmw import __version__
from tfmw.cluster import addresses
from tfmw.errors import ClusterError, UsageError
from tfmw.hosts.actions import HostSettings
from tfmw.hosts.lease import DIRECTORY, Lease, lease_of
from tfmw.hosts.supervisor_loop import run_on_hosts
from tfmw.launcher.options import LocalRun, RunOptions
from tfmw.launcher.run import check_program
from tfmw.runtime.signals import Signals

TOKEN = "TFMW_TOKEN"
SHORTEST_TOKEN = 16  # characters


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """The options of `tfmw run` that concern several hosts.

    Args:
        hosts: names or addresses of all hosts, the same everywhere, with a port or without (2222).
        host: which of them this is; None: the only one whose address is one of this machine's.
        workers_per_host: tasks that train, on each host.
        ps: number of parameter servers, on all hosts together.
        evaluator: whether the host that leads has an evaluator.
        min_hosts: how few hosts may train; None: all of them.
        rejoin_timeout_s: seconds to wait for hosts that are not there.
        rendezvous: "dir:/path" or "etcd://host:2379/key"; None: in the program's --backup_dir.
        token_file: holds the token; None: it is in TFMW_TOKEN.
    """

    hosts: Sequence[str]
    host: int | None = None
    workers_per_host: int = 1
    ps: int = 0
    evaluator: bool = False
    min_hosts: int | None = None
    rejoin_timeout_s: float = 30.0
    rendezvous: str | None = None
    token_file: Path | None = None


def launch_on_hosts(
    argv: Sequence[str],
    options: HostOptions,
    run_options: RunOptions,
    *,
    module: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Runs a script on all hosts; returns the exit status. The last lines are printed.

    Args:
        argv: the script's path, or the module's name, and its flags.
        options: which hosts, and how they find each other.
        run_options: restarts, time limits, standby.
        module: whether argv[0] is a module.
        log_dir: the run's folder is made in it.

    Raises:
        UsageError: any of that is wrong.
    """
    check_program(argv, module)
    hosts = _checked_hosts(options)
    _check_options(options, run_options, len(hosts))
    host = addresses.local_index(hosts) if options.host is None else options.host
    lease = lease_of(_rendezvous(options, argv), host)
    token = _token(options, hosts, lease, os.environ)
    settings = HostSettings(
        hosts=hosts,
        workers_per_host=options.workers_per_host,
        min_hosts=options.min_hosts or len(hosts),
        rejoin_timeout_s=options.rejoin_timeout_s,
        options=run_options,
        facts=_facts(argv, options, run_options),
        ps=options.ps,
        evaluator=options.evaluator,
    )
    job = LocalRun(
        command=["module" if module else "script", *argv],
        tasks=[("worker", index) for index in range(options.workers_per_host)],
        options=dataclasses.replace(run_options, isolate="off"),
        log_dir=log_dir,
        env={"TFMW_EVALUATOR": "1"} if options.evaluator else {},
    )
    with Signals() as stop:
        return run_on_hosts(job, settings, host, lease, token, stop)


def _checked_hosts(options: HostOptions) -> tuple[str, ...]:
    hosts = tuple(addresses.with_port(host, addresses.DEFAULT_PORT) for host in options.hosts)
    addresses.validated("hosts", hosts, "--hosts")
    for host in hosts:
        if hosts.count(host) > 1:
            raise ClusterError(f"--hosts lists {host} twice; give every host once.")
    if options.host is not None and not 0 <= options.host < len(hosts):
        raise ClusterError(
            f"--host-index is {options.host}; expected 0 to {len(hosts) - 1}, an index of --hosts."
        )
    return hosts


def _check_options(options: HostOptions, run_options: RunOptions, hosts: int) -> None:
    run_options.check(options.workers_per_host)
    if options.workers_per_host < 1:
        raise UsageError(
            f"--workers-per-host is {options.workers_per_host}; expected an integer of at least 1."
        )
    if options.ps < 0:
        raise UsageError(f"--ps is {options.ps}; expected an integer of at least 0.")
    if options.min_hosts is not None and not 1 <= options.min_hosts <= hosts:
        raise UsageError(
            f"--min-hosts is {options.min_hosts}; expected 1 to {hosts}, the number of hosts."
        )
    if not options.rejoin_timeout_s >= 0:
        raise UsageError(
            f"--rejoin-timeout is {options.rejoin_timeout_s}; expected seconds, at least 0."
        )
    if run_options.isolate == "on":
        raise UsageError(
            "--isolate on closes the tasks' network, and with --hosts tasks of several hosts train "
            "together; leave one of the two out."
        )
    if run_options.min_workers is not None:
        raise UsageError(
            "--min-workers is for one machine; with --hosts give --min-hosts, the least number of "
            "hosts."
        )


def _rendezvous(options: HostOptions, argv: Sequence[str]) -> str:
    if options.rendezvous is not None:
        return options.rendezvous
    found = backup_dir_of(argv)
    if found is None or "://" in found:
        raise UsageError(
            "restarts on several hosts require a lock that all of them reach, and the script has "
            + (
                "no --backup_dir"
                if found is None
                else f"its --backup_dir at {found}, without locks"
            )
            + "; add --rendezvous dir:/a/directory/that/all/hosts/share, or etcd://host:2379/run7."
        )
    return f"{DIRECTORY}{Path(found) / 'supervisors'}"


def backup_dir_of(argv: Sequence[str]) -> str | None:
    """The value of --backup_dir in a program's flags; None: it has none."""
    found = None
    for word, following in itertools.pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name.lstrip("-").replace("-", "_") == "backup_dir":
            found = value if equals else following
    return found or None


def _token(
    options: HostOptions, hosts: Sequence[str], lease: Lease, environ: Mapping[str, str]
) -> bytes:
    """The token that supervisors prove to each other."""
    source, token = TOKEN, environ.get(TOKEN, "").strip()
    if options.token_file is not None:
        source = f"--token-file {options.token_file}"
        try:
            token = options.token_file.read_text(encoding="utf-8").strip()
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


def _facts(argv: Sequence[str], options: HostOptions, run: RunOptions) -> dict[str, str]:
    """Settings that every host must share; tasks compare the versions of TensorFlow and Keras."""
    return {
        "the command": " ".join(argv),
        "--workers-per-host": str(options.workers_per_host),
        "--ps": str(options.ps),
        "--evaluator": str(options.evaluator),
        "--min-hosts": str(options.min_hosts),
        "--rejoin-timeout": str(options.rejoin_timeout_s),
        "--max-restarts": str(run.max_restarts),
        "tfmw": __version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
    }
