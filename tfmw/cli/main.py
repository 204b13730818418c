"""The command `tfmw`.

    tfmw run --workers 2 train.py --epochs 3      # a cluster on this machine
    tfmw run --hosts h0,h1 train.py --epochs 3    # on h0 and on h1: one task on each
    tfmw run --hosts h0,h1 --max-restarts 9 train.py --backup_dir=/shared/run7   # with restarts
    srun tfmw run train.py --epochs 3             # one task of a cluster that srun starts
    tfmw env                                      # a report to paste in an issue
    tfmw check --hosts h0,h1 --backup-dir /shared # on h0 and on h1: tests the cluster
    tfmw check /shared/run7 build/model           # verifies backups and exports
    tfmw bench --workers 2 train.py:make          # measures the parts of a step's time
    tfmw status                                   # the state of this user's runs
    tfmw stacks                                   # the Python stacks of a run's tasks
    tfmw submit --on slurm --workers 8 train.py   # a job on an engine, or on this machine
    tfmw jobs, tfmw logs ID, tfmw cancel ID       # its state, output and end
    tfmw token                                    # a secret for the supervisors of several hosts

Options accept hyphens and underscores. Exit status: 0 all done; 1 a task or a check failed; 2 wrong
usage or wrong cluster description; 75 the tasks saved their state and must be run again; 128 + n
ended by signal n.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfmw import __version__
from tfmw.cli import jobs, program_flags
from tfmw.cluster import Cluster
from tfmw.cluster.cluster import BACKUP_DIR, KERAS
from tfmw.errors import UsageError
from tfmw.launcher.options import RunOptions
from tfmw.launcher.output import say
from tfmw.storage import disk


def _local_path(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL; expected a local directory, which tfmw.storage.upload copies"
        )
    return Path(text)


# Converter of each metavar or flag; a directory of `check` may be a URL.
_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys("NMKI", int),
    "S": float,
    **dict.fromkeys(("--log-dir", "--trace", "--token-file"), _local_path),
}

# field of `RunOptions` -> the attribute of its flag
_RUN_FIELDS = {f.name: f.name.removesuffix("_s") for f in dataclasses.fields(RunOptions)}

_HOSTS = {
    "--hosts H0,H1": "all hosts of the cluster, the chief's first; the same list on every host; "
    "default port: 2222",
    "--host-index I": "index of this host in --hosts, from 0; default: the index of the one with "
    "an address of this machine",
}

_CHECK_OPTIONS = {
    **_HOSTS,
    "--ps N": "number of parameter servers, on the last hosts; default: 0",
    "--backup-dir DIR": "must be shared, and writable",
    "--export-dir DIR": "must be shared, and writable",
    "--timeout S": "seconds to wait for other tasks; default: 60",
    "--kubernetes": "check instead whether jobs can run on Kubernetes, by a job of one task",
}

_BENCH_OPTIONS = {
    "--workers N": "processes; default: 2",
    "--steps K": "steps per epoch; default: 20",
}

_RUN_OPTIONS = {
    "cluster": {
        "--workers N": "number of tasks that train",
        "--ps N": "number of parameter servers; adds a chief; default: 0",
        "--evaluator": "add an evaluator, which evaluates each backup",
        **_HOSTS,
    },
    "scripts of plain Keras": {
        "--keras {on,off}": "on: model.fit and Keras's other methods run on all workers; off: "
        "model.fit raises; default: on, unless the script calls tfmw.init()",
        "--backup-dir DIR": "model.fit saves backups in DIR, and resumes from them",
    },
    "failures of tasks": {
        "--max-restarts N": "when a task dies, replace it alone if the others can wait for it or "
        "do without it, and restart all tasks from the newest backup otherwise, up to N times; "
        "default: 0",
        "--min-workers M": "if a worker dies twice before its first step, continue without it, "
        "with at least M",
        "--monitor-interval S": "seconds between two checks of the tasks; default: 0.05",
        "--hang-timeout S": "a task without progress for S seconds after its first step hangs: "
        "the stacks of all tasks go to their logs, and all tasks restart; default: 0, never",
        "--start-timeout S": "seconds in which every task must start and join; 0: no limit; "
        "default: 120",
        "--preempt-grace S": "seconds in which the tasks save their state and exit after SIGTERM "
        "or SIGUSR1; default: 30",
    },
    "processes": {
        "--standby {auto,on,off}": "a standby process imports TensorFlow, and tasks are forked "
        "from it, at first and after a failure; auto: with several tasks or --max-restarts; "
        "default: auto",
        "--isolate {auto,on,off}": "run the tasks in a private network: nobody else connects to "
        "their ports, and they download through a proxy (http_proxy, https_proxy); auto: if "
        "they start gRPC servers, and the system allows it; default: auto",
    },
    "failures of hosts (with --hosts and --max-restarts)": {
        "--workers-per-host K": "number of workers on each host; default: 1",
        "--min-hosts M": "if hosts are lost, continue with at least M of them; default: all",
        "--rejoin-timeout S": "seconds to wait for missing hosts; default: 30 at the start, then 0",
        "--rendezvous PLACE": "lock that elects the leading host: dir:/a/directory/that/all/share, "
        "or s3://bucket/run7; default: in --backup-dir, or in that of the script",
        "--token-file FILE": "file with the secret of all hosts, from tfmw token; default: the "
        "variable TFMW_TOKEN",
    },
    "output": {
        "--log-dir DIR": "keep each task's output in a folder in DIR",
        "--trace DIR": "write DIR/trace.json, which Perfetto opens: steps, input, exchanges and "
        "backups of all workers; needs --workers",
        "--trace-steps A:B": "trace the steps after A, up to B or the end; default: all",
        "--metrics-port [ADDRESS:]PORT": "serve step, rate, loss and more for Prometheus on this "
        "port, of loopback or of ADDRESS: 0.0.0.0 for all of the machine's (needs tfmw[metrics])",
    },
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, whose message is one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if sys.stdout is None:  # closed by >&-
            raise UsageError("standard output is closed: redirect it, to /dev/null for example.")
        status = _main(argv)
    except UsageError as error:
        print(f"tfmw: {error}", file=sys.stderr)
        status = error.status
    except BrokenPipeError:  # the reader has closed the output
        status = 128 + signal.SIGPIPE
    _flush(quiet=argv[:1] == ["run"])  # `run` has reported it already
    return status


def _flush(quiet: bool) -> None:
    """Flushes the output. At exit Python would do it, with a traceback."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            if stream is sys.stdout and not quiet and not isinstance(error, BrokenPipeError):
                say(f"tfmw: standard output cannot be written ({error.strerror})")
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _main(argv: list[str]) -> int:
    parser = _Parser(prog="tfmw", description="Multi-worker training for Keras 3.")
    parser.add_argument("--version", action="version", version=f"tfmw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _run_parser(commands)
    commands.add_parser(
        "env",
        help="versions, devices, cluster and environment, to paste in an issue",
        description="Prints the versions, the devices, the cluster that tfmw sees, and variables "
        "of the environment that it reads, without secrets: paste it in an issue.",
    ).set_defaults(main=_env)
    commands.add_parser(
        "token",
        help="make a secret for a cluster of several hosts (TFMW_TOKEN, --token-file)",
        description="Prints a new secret. Give all hosts of a cluster the same, in the variable "
        "TFMW_TOKEN or in a file for tfmw run --token-file.",
    ).set_defaults(main=_token)
    _check_parser(commands)
    _bench_parser(commands)
    jobs.add_parsers(commands, _add_options)
    program: list[str] = []
    if argv[:1] in (["run"], ["submit"]):
        own, program = program_flags.split(argv[1:], commands.choices[argv[0]])
        argv = [argv[0], *own]
    elif argv[:1] == ["check"]:
        argv = list(map(program_flags.with_hyphens, argv))
    options, unknown = parser.parse_known_args(argv, argparse.Namespace(program=program))
    if unknown:
        raise UsageError(_unknown_option(unknown[0], argv[0], commands.choices[argv[0]]))
    exit_status: int = options.main(options)
    return exit_status


def _unknown_option(given: str, command: str, parser: argparse.ArgumentParser) -> str:
    """Sentence on an argument that a command does not take, with the option of a similar name."""
    name = given.partition("=")[0]
    similar = difflib.get_close_matches(name, parser._option_string_actions, 1)
    meant = f" Did you mean {similar[0]}?" if similar else ""
    return f"tfmw {command} does not take {name}.{meant} See tfmw {command} --help."


def _env(options: argparse.Namespace) -> int:
    from tfmw.cli import reports

    print(reports.environment(os.environ))
    return 0


def _token(options: argparse.Namespace) -> int:
    print(secrets.token_hex(32))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from tfmw.cli import bench

    return bench.main(options.target, options.workers, options.steps)


def _add_options(parser: argparse._ActionsContainer, options: Mapping[str, str]) -> None:
    """Adds options: {"--flag METAVAR": its help}. An option without a metavar is a switch."""
    for option, text in options.items():
        flag, _, metavar = option.partition(" ")
        if not metavar:
            parser.add_argument(flag, action="store_true", help=text)
        elif metavar.startswith("{"):
            parser.add_argument(flag, choices=metavar.strip("{}").split(","), help=text)
        else:
            kind = _TYPES.get(flag) or _TYPES.get(metavar, str)
            parser.add_argument(flag, type=kind, metavar=metavar, help=text)


def _check_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    check = commands.add_parser(
        "check",
        help="check a cluster before a run, or whether backups and exports are intact",
        usage="tfmw check [--hosts H0,H1] [options], or tfmw check PATH ...",
        description="Without PATH: tests whether a cluster will work. Run it on every task, at "
        "about the same time, in the same way as the run: names, ports, each pair of tasks, "
        "versions, GPUs, clocks, shared directories. With PATH: verifies the checksums of backups "
        "and exports.",
        epilog="Exit status: 0 all checks passed, 1 a check failed, 2 wrong usage or wrong cluster "
        "description.",
        allow_abbrev=False,
    )
    check.set_defaults(main=_check, ps=0, timeout=60.0)
    check.add_argument("paths", nargs="*", metavar="PATH", help="a backup_dir or an export_dir")
    _add_options(check, _CHECK_OPTIONS)
    jobs.add_settings(check)


def _bench_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure where the time of a training step goes, and predict it for more workers",
        usage="tfmw bench [--workers N] [--steps K] (FILE.py|MODULE):FUNCTION",
        description="FUNCTION returns (model, dataset) or (model, dataset, arguments of fit): a "
        "compiled model, and a tf.data.Dataset batched by the global batch size. It is trained on "
        "N new processes of this machine, with everything, without reducing gradients, and with "
        "one batch kept in memory.",
        allow_abbrev=False,
    )
    bench.set_defaults(main=_bench, workers=2, steps=20)
    bench.add_argument("target", metavar="FILE.py:FUNCTION", help="the function")
    _add_options(bench, _BENCH_OPTIONS)


def _run_parser(commands: argparse._SubParsersAction[_Parser]) -> argparse.ArgumentParser:
    run = commands.add_parser(
        "run",
        help="run a script on several processes of this machine",
        usage="tfmw run [--workers N] [options] (SCRIPT | -m MODULE) [its flags]",
        description="Runs SCRIPT, or MODULE, in every task of a fresh cluster on this machine. "
        "With --hosts, run the same command on each host: it runs the one task of its host, "
        "and supervises it with --max-restarts. Without --workers and --hosts, it runs the "
        "task that TF_CONFIG or a scheduler describes.",
        epilog="Exit status: 0 all done, 1 a task failed (the last line names the first one), "
        "2 wrong usage or cluster description, 75 preempted (SIGTERM, SIGUSR1): the tasks have "
        "saved their state, run the same command again.",
        allow_abbrev=False,
    )
    defaults = {flag: getattr(RunOptions, field) for field, flag in _RUN_FIELDS.items()}
    run.set_defaults(main=_run, ps=0, **defaults)
    for group, options in _RUN_OPTIONS.items():
        _add_options(run.add_argument_group(group), options)
    # `program_flags.split` finds the program; this argument is only for the help
    run.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    return run


def _check(options: argparse.Namespace) -> int:
    directories = {
        f"--{name}": value
        for name in ("backup_dir", "export_dir")
        if (value := getattr(options, name)) is not None
    }
    if options.paths:
        if directories or options.hosts:
            raise UsageError(
                "tfmw check takes either paths to verify, or a cluster and its directories; call "
                "it twice."
            )
        from tfmw.cli import reports

        return reports.verify(options.paths)
    if options.kubernetes:
        from tfmw.launcher.engines import kubernetes

        return kubernetes.check(jobs.engine_with("kubernetes", options.settings))
    from tfmw.cluster import check as check_cluster

    cluster = _cluster_of_hosts(options) or Cluster.resolve(os.environ)
    return check_cluster.report(cluster, directories, timeout_s=options.timeout)


def _cluster_of_hosts(options: argparse.Namespace) -> Cluster | None:
    """The cluster that --hosts describes; None if the option is missing."""
    if options.hosts is None:
        if options.host_index is not None:
            raise UsageError("--host-index requires --hosts, the list of all hosts.")
        return None
    return Cluster.of_hosts(_hosts_of(options), options.host_index, options.ps)


def _hosts_of(options: argparse.Namespace) -> list[str]:
    """The hosts in --hosts.

    Raises:
        UsageError: TF_CONFIG describes a cluster, too.
    """
    if os.environ.get("TF_CONFIG", "").strip():
        raise UsageError(
            f"TF_CONFIG is already set to {os.environ['TF_CONFIG']}; unset it or drop --hosts."
        )
    return [host.strip() for host in options.hosts.split(",")]


def _run_on_hosts(options: argparse.Namespace, run_options: RunOptions) -> int | None:
    """Supervises this host's tasks; None if --hosts or --max-restarts is missing."""
    names = ("workers_per_host", "min_hosts", "rejoin_timeout", "rendezvous", "token_file")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.hosts is None or not options.max_restarts > 0:
        if given:
            flag = f"--{next(iter(given)).replace('_', '-')}"
            raise UsageError(
                f"{flag} requires --hosts and --max-restarts: it is for hosts that supervise tasks."
            )
        return None
    from tfmw.launcher.hosts.launch import launch_on_hosts
    from tfmw.launcher.hosts.settings import HostSettings

    settings = HostSettings(
        hosts=tuple(_hosts_of(options)),
        workers_per_host=given.get("workers_per_host", 1),
        ps=options.ps,
        evaluator=options.evaluator,
        min_hosts=options.min_hosts,
        rejoin_timeout_s=given.get("rejoin_timeout"),
        options=run_options,
    )
    return launch_on_hosts(
        options.program,
        settings,
        host=options.host_index,
        rendezvous=options.rendezvous,
        token_file=options.token_file,
        module=options.module is not None,
        log_dir=options.log_dir,
    )


def _run(options: argparse.Namespace) -> int:
    from tfmw.launcher.run import launch_tasks, run_here

    own_flags = {option.split()[0] for group in _RUN_OPTIONS.values() for option in group}
    for name in program_flags.passed_by_mistake(options.program, own_flags):
        say(
            f"tfmw: {options.program[0]} gets {name}, which it does not mention: options of tfmw "
            "run belong before the script"
        )
    from tfmw.observe import metrics_server, tracing

    run_options = RunOptions(**{f: getattr(options, flag) for f, flag in _RUN_FIELDS.items()})
    if options.trace_steps is not None and options.trace is None:
        raise UsageError("--trace-steps needs --trace, the directory for the trace.")
    if options.trace is not None:
        if options.workers is None:
            raise UsageError(
                "--trace joins what the workers of this machine have written, and needs --workers; "
                "elsewhere use tfmw.callbacks.Trace."
            )
        tracing.window(options.trace_steps or "0:")
        os.environ[tracing.TRACE] = str(options.trace.resolve())
        os.environ[tracing.TRACE_STEPS] = options.trace_steps or ""
    for name, value in ((KERAS, options.keras), (BACKUP_DIR, options.backup_dir)):
        if value is not None:
            os.environ[name] = disk.absolute(value) if name == BACKUP_DIR else value
    if options.metrics_port is not None:
        metrics_server.serve(options.metrics_port, from_file=options.workers is not None)
    if options.hosts is not None and options.workers is not None:
        raise UsageError(
            "--hosts starts one task on each host, with all of its GPUs, and --workers several "
            "on this machine; leave one of the two out. Several on each host: --workers-per-host."
        )
    if (supervised := _run_on_hosts(options, run_options)) is not None:
        return supervised
    cluster = _cluster_of_hosts(options)
    if cluster is not None and not cluster.is_single:
        os.environ["TF_CONFIG"] = json.dumps(cluster.as_tf_config())
    if options.workers is None:
        if (
            (options.ps and cluster is None)
            or options.evaluator
            or options.log_dir
            or run_options != RunOptions()
        ):
            raise UsageError(
                "--ps, --evaluator, --log-dir and the options for failures require --workers N; on "
                "several hosts --hosts H0,H1 and --max-restarts N."
            )
        run_here(options.program, module=options.module is not None)
    result = launch_tasks(
        options.program,
        module=options.module is not None,
        workers=options.workers,
        ps=options.ps,
        evaluator=options.evaluator,
        log_dir=options.log_dir,
        options=run_options,
    )
    if options.trace is not None and (trace := tracing.join(options.trace)) is not None:
        say(f"tfmw: trace of all workers: {trace}; open it with https://ui.perfetto.dev")
    for line in result.summary():
        say(line)
    return result.status
