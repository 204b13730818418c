"""`tfmw submit`, `tfmw jobs`, `tfmw logs`, `tfmw cancel`: jobs on an engine, from a shell.

tfmw submit --on slurm --workers 8 --set partition=gpu train.py --epochs 5
tfmw jobs --on slurm
tfmw logs --follow slurm:4711
tfmw cancel slurm:4711
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfmw.errors import PREEMPTED, UsageError
from tfmw.tools.engine_options import add_settings, attached, engine_with

if TYPE_CHECKING:  # `tfmw run --help` must not wait for its import
    from tfmw.engines.job import Job

COMMANDS = ("submit", "jobs", "logs", "cancel")

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
    listed = commands.add_parser("jobs", help="list the jobs of an engine", allow_abbrev=False)
    listed.add_argument("--on", required=True, metavar="ENGINE", help="slurm, ray or local")
    add_settings(listed)
    for name, what in (("logs", "print the output of a job"), ("cancel", "end a job")):
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        command.add_argument("id", metavar="ID", help="such as slurm:4711")
        add_settings(command)
        if name == "logs":
            command.add_argument("--follow", action="store_true", help="until the job ends")


def main(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Runs one of the commands; returns the exit status."""
    from tfmw.engines import submit

    if options.command == "submit":
        engine = engine_with(options.on, options.settings)
        if not program:
            raise UsageError("received no script to submit: add its path and its flags.")
        job = submit.submit(
            program[0],
            program[1:],
            _workers(options.workers),
            on=engine,
            max_restarts=options.max_restarts,
        )
        print(job.id, flush=True)
        print(f"tfmw: {job.where}", file=sys.stderr)
        return _followed(job) if options.follow else 0
    if options.command == "jobs":
        for job in submit.jobs(engine_with(options.on, options.settings)):
            details = job.details()
            hosts = ",".join(dict.fromkeys(details.get("hosts", ())))
            step = details.get("step", -1)
            at = f"step {step}" if step >= 0 else ""
            print(f"{job.id:<20} {details['state']:<11} {at:<12} {hosts}".rstrip())
        return 0
    job = attached(options.id, options.settings)
    if options.command == "cancel":
        job.cancel()
        print(f"{job.id} {job.status()}")
        return 0
    if options.follow:
        return _followed(job)
    sys.stdout.write(job.logs())
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
