"""`tfmw submit`, `tfmw jobs`, `tfmw logs`, `tfmw cancel`: jobs on an engine, from a shell.

tfmw submit --on slurm --workers 8 --set partition=gpu train.py --epochs 5
tfmw jobs --on slurm
tfmw logs --follow slurm:4711
tfmw cancel slurm:4711
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfmw.errors import PREEMPTED, UsageError

if TYPE_CHECKING:  # `tfmw run --help` must not wait for their import
    from tfmw.engines.engine import Engine
    from tfmw.engines.job import Job

_STATUS = {"done": 0, "preempted": PREEMPTED}


def add_parsers(commands: Any) -> None:
    """Adds the four commands to those of `tfmw`."""
    run = commands.add_parser(
        "submit",
        help="run a script on an engine: Slurm, Ray, Spark, or this machine",
        usage="tfmw submit --on ENGINE --workers N [options] SCRIPT [its flags]",
        description="Queues a job that runs SCRIPT in every task of a new cluster, prints its id "
        "and returns; the job continues.",
        epilog="Exit status with --follow: 0 done, 1 failed, cancelled or lost, 75 preempted.",
        allow_abbrev=False,
    )
    run.add_argument("--on", required=True, metavar="ENGINE", help="slurm, ray, spark or local")
    run.add_argument(
        "--workers",
        default="2",
        metavar="N",
        help="number of tasks, or least,most: as many as fit; default: 2",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="when a task dies, restart all, from the newest backup, up to N times; default: 3",
    )
    run.add_argument(
        "--follow", action="store_true", help="print the tasks' output until the job ends"
    )
    add_settings(run)
    run.set_defaults(main=_submit)
    listed = commands.add_parser("jobs", help="list the jobs of an engine", allow_abbrev=False)
    listed.add_argument("--on", required=True, metavar="ENGINE", help="slurm, ray or local")
    add_settings(listed)
    listed.set_defaults(main=_jobs)
    logs = commands.add_parser("logs", help="print the output of a job", allow_abbrev=False)
    logs.set_defaults(main=_logs)
    cancel = commands.add_parser("cancel", help="end a job", allow_abbrev=False)
    cancel.set_defaults(main=_cancel)
    for command in (logs, cancel):
        command.add_argument("id", metavar="ID", help="such as slurm:4711")
        add_settings(command)
    logs.add_argument("--follow", action="store_true", help="until the job ends")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds `--set` to a command."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="a setting of the engine, such as partition=gpu; may be repeated",
    )


def engine_with(name: str, settings: Sequence[str]) -> Engine:
    """The engine of a name, with settings as "partition=gpu".

    Raises:
        UsageError: an unknown engine or setting.
    """
    from tfmw.engines import submit

    engine = submit.engine_of(name)
    known = {field.name for field in dataclasses.fields(engine)}
    values = {}
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not equals or field not in known:
            raise UsageError(
                f"received --set {setting}: expected NAME=VALUE with a setting of {name}: "
                f"{', '.join(sorted(known))}."
            )
        try:
            values[field] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[field] = text
    return dataclasses.replace(engine, **values)


def attached(job_id: str, settings: Sequence[str]) -> Job:
    """The job of an id, on an engine with settings.

    Raises:
        UsageError: there is no such job, engine or setting.
    """
    from tfmw.engines import submit

    name = job_id.partition(":")[0]
    return submit.attach(job_id, on=engine_with(name, settings) if settings else None)


def _submit(options: argparse.Namespace) -> int:
    from tfmw.engines import submit

    engine = engine_with(options.on, options.settings)
    if not options.program:
        raise UsageError("received no script to submit: add its path and its flags.")
    job = submit.submit(
        options.program[0],
        options.program[1:],
        _workers(options.workers),
        on=engine,
        max_restarts=options.max_restarts,
    )
    print(job.id, flush=True)
    print(f"tfmw: {job.where}", file=sys.stderr)
    return _followed(job) if options.follow else 0


def _jobs(options: argparse.Namespace) -> int:
    from tfmw.engines import submit

    for job in submit.jobs(engine_with(options.on, options.settings)):
        details = job.details()
        hosts = ",".join(dict.fromkeys(details.get("hosts", ())))
        step = details.get("step", -1)
        at = f"step {step}" if step >= 0 else ""
        print(f"{job.id:<20} {details['state']:<11} {at:<12} {hosts}".rstrip())
    return 0


def _logs(options: argparse.Namespace) -> int:
    job = attached(options.id, options.settings)
    if options.follow:
        return _followed(job)
    sys.stdout.write(job.logs())
    return 0


def _cancel(options: argparse.Namespace) -> int:
    job = attached(options.id, options.settings)
    job.cancel()
    print(f"{job.id} {job.status()}")
    return 0


def _workers(text: str) -> Any:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers) or len(numbers) > 2:
        raise UsageError(f"received --workers {text}: expected a number, or two, such as 2,8.")
    values = tuple(map(int, numbers))
    return values if len(values) == 2 else values[0]


def _followed(job: Job) -> int:
    job.logs(follow=True)
    return _STATUS.get(job.status(), 1)
