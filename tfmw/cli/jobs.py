"""`tfmw submit`, `jobs`, `logs` and `cancel`: jobs on an engine; `status` and `stacks`: any run."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfmw.errors import PREEMPTED, UsageError
from tfmw.launcher import run_files
from tfmw.launcher.run_status import RunStatus

if TYPE_CHECKING:  # `tfmw run --help` must not wait for their import
    from tfmw.launcher.engines.engine import Engine
    from tfmw.launcher.engines.job import Job

_STATUS = {"done": 0, "preempted": PREEMPTED}
_SHOWN_HOSTS = 8
_SUBMIT_OPTIONS = {
    "--workers N[,M]": "number of tasks that train, or the least and the most: as many as fit; "
    "default: 2",
    "--ps N": "number of parameter servers; adds a chief; default: 0",
    "--evaluator": "add an evaluator, which evaluates each backup",
    "--max-restarts N": "when a task dies, restart all, from the newest backup, up to N times; a "
    "worker of parameter servers and an evaluator restart alone; default: 0",
    "--follow": "print the tasks' output until the job ends",
}
_SLOW_S = 1.0  # an exchange that takes longer gets a line


def add_parsers(commands: Any, add_options: Callable[[Any, Mapping[str, str]], None]) -> None:
    """Adds the six commands to the parser of `tfmw`.

    Args:
        commands: the parser's commands.
        add_options: adds {"--flag METAVAR": its help} to a parser.
    """
    which = "the run: its name, the end of its name, or the process id of its tfmw run"

    def command(name: str, main: Callable[[argparse.Namespace], int], **texts: str) -> Any:
        parser = commands.add_parser(name, allow_abbrev=False, **texts)
        parser.set_defaults(main=main)
        return parser

    status = command(
        "status",
        _status,
        help="the steps, rates and waits of this user's runs",
        description="Shows each task of the runs of this user on this machine: its step, its rate, "
        "the exchange that it is in, and for whom it waits; and where the run's time went.",
    )
    status.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help=f"{which}; or a job on an engine, such as slurm:4711; default: all runs here",
    )
    add_settings(status)
    add_options(status, {"--json": "everything, as JSON"})
    stacks = command(
        "stacks",
        _stacks,
        help="the Python stacks of each task of a run",
        description="Shows the Python stacks of all threads of each task of a run that is alive.",
    )
    stacks.add_argument("run", nargs="?", metavar="RUN", help=f"{which}; default: the only one")
    run = command(
        "submit",
        _submit,
        help="run a script on an engine: Kubernetes, Slurm, Ray, Spark, or this machine",
        usage="tfmw submit --on ENGINE --workers N [options] SCRIPT [its flags]",
        description="Queues a job that runs SCRIPT in every task of a new cluster, prints its id "
        "and returns; the job continues.",
        epilog="Exit status with --follow: 0 done, 1 failed, cancelled or lost, 75 preempted.",
    )
    engines = "kubernetes, local, ray, slurm, spark, or an engine of another package"
    run.add_argument("--on", required=True, metavar="ENGINE", help=engines)
    add_options(run, _SUBMIT_OPTIONS)
    run.set_defaults(workers="2", ps=0, max_restarts=0)
    add_settings(run)
    listed = command(
        "jobs",
        _jobs,
        help="list the jobs of an engine",
        description="Lists the id, state, step and hosts of each job of this user on an engine.",
    )
    listed.add_argument("--on", required=True, metavar="ENGINE", help=engines)
    add_settings(listed)
    logs = command(
        "logs",
        _logs,
        help="print the output of a job",
        description="Prints the output of all tasks of a job, each line with its task and host.",
    )
    cancel = command(
        "cancel",
        _cancel,
        help="end a job",
        description="Ends all tasks of a job, and prints its state. Its output and backups stay.",
    )
    for parser in (logs, cancel):
        parser.add_argument("id", metavar="ID", help="the job, such as slurm:4711")
        add_settings(parser)
    add_options(logs, {"--follow": "print further output until the job ends"})


def add_settings(parser: Any) -> None:
    """Adds the option --set to a parser."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="a setting of the engine, such as partition=gpu; may be repeated",
    )


def engine_with(name: str, settings: Sequence[str]) -> Engine:
    """Engine of a name, with settings such as "partition=gpu".

    Raises:
        UsageError: an unknown engine or setting.
    """
    from tfmw.launcher.engines import submit

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


def _attached(job_id: str, settings: Sequence[str]) -> Job:
    """Job of an id, on an engine with settings.

    Raises:
        UsageError: the job, engine or setting does not exist.
    """
    from tfmw.launcher.engines import submit

    name = job_id.partition(":")[0]
    return submit.attach(job_id, on=engine_with(name, settings) if settings else None)


def _submit(options: argparse.Namespace) -> int:
    from tfmw.launcher.engines import submit

    engine = engine_with(options.on, options.settings)
    if not options.program:
        raise UsageError("received no script to submit: add its path and its flags.")
    job = submit.submit(
        options.program[0],
        options.program[1:],
        _workers(options.workers),
        on=engine,
        max_restarts=options.max_restarts,
        ps=options.ps,
        evaluator=options.evaluator,
    )
    print(job.id, flush=True)
    print(f"tfmw: {job.where}", file=sys.stderr)
    return _followed(job) if options.follow else 0


def _jobs(options: argparse.Namespace) -> int:
    from tfmw.launcher.engines import submit

    for job in submit.jobs(engine_with(options.on, options.settings)):
        details = job.details()
        hosts = ",".join(dict.fromkeys(details.get("hosts", ())))
        step = details.get("step", -1)
        at = f"step {step}" if step >= 0 else ""
        print(f"{job.id:<20} {details['state']:<11} {at:<12} {hosts}".rstrip())
    return 0


def _logs(options: argparse.Namespace) -> int:
    job = _attached(options.id, options.settings)
    if options.follow:
        return _followed(job)
    sys.stdout.write(job.logs())
    return 0


def _cancel(options: argparse.Namespace) -> int:
    job = _attached(options.id, options.settings)
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


def _status(options: argparse.Namespace) -> int:
    if ":" in (options.run or ""):
        job = _attached(options.run, options.settings)
        details = {"job": job.id, "where": job.where, **job.details()}
        print(json.dumps(details, indent=2) if options.json else "\n".join(_job_lines(details)))
        return 0
    answers = [run.status() for run in _chosen(options.run)]
    if options.json:
        print(json.dumps(answers, indent=2))
        return 0 if answers else 1
    if answers:
        print("\n\n".join("\n".join(_run_lines(answer)) for answer in answers))
    return _found(answers)


def _stacks(options: argparse.Namespace) -> int:
    found = _chosen(options.run)
    if len(found) > 1:
        names = ", ".join(run.name for run in found)
        raise UsageError(f"several runs are alive: {names}; name one: tfmw stacks {found[0].name}")
    for run in found:
        for task, text in run.stacks().items():
            print(f"== {task}\n{text.rstrip()}\n")
    return _found(found)


def _found(runs: Sequence[Any]) -> int:
    """Exit status 1, with a line, if there is no run; 0 otherwise."""
    if not runs:
        print("no run of this user is alive on this machine")
    return 0 if runs else 1


def _chosen(name: str | None) -> list[RunStatus]:
    found = run_files.runs()
    if name is None:
        return found
    chosen = [run for run in found if name == str(run.pid) or run.name.endswith(name)]
    if not chosen:
        alive = ", ".join(run.name for run in found) or "none"
        raise UsageError(f"no run of this user is called {name!r}; alive on this machine: {alive}.")
    return chosen


def _job_lines(details: dict[str, Any]) -> list[str]:
    """Lines of `tfmw status` on one job of an engine."""
    about = [details["state"]]
    if "attempt" in details:
        about.append(f"attempt {details['attempt']}")
    if restarts := details.get("restarts"):
        about.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    if details.get("backup"):
        about.append(f"keeps {details['backup']}")
    out = [f"job {details['job']}: {', '.join(about)}", details["where"]]
    names, hosts = details.get("tasks", ()), details.get("hosts", ())
    tasks = [f"{name} on {host}" for name, host in zip(names, hosts, strict=True)]
    width = max(map(len, tasks), default=0)
    for task, step in zip(tasks, details.get("steps", [-1] * len(tasks)), strict=True):
        out.append(f"{task:{width}}" + (f" | step {step:7,}" if step >= 0 else ""))
    if details.get("waiting"):
        waits_s = time.time() - details["waiting_since"]
        out.append(f"tasks wait for {waits_s:.0f} s: {details['waiting']}")
    out += [details[name] for name in ("problem", "goodput") if details.get(name)]
    return out


def _run_lines(answer: dict[str, Any]) -> list[str]:
    """Lines of `tfmw status` on one run."""
    out = [f"run {answer['run']}, attempt {answer['attempt']}: {' '.join(answer['command'])}"]
    width = max((len(task["task"]) for task in answer["tasks"]), default=0)
    for task in answer["tasks"]:
        fields = [f"{task['task']:{width}}"]
        if task["step"] >= 0:
            fields.append(f"step {task['step']:7,}")
        fields.append(task["stage"])
        if answer["steps_per_s"] is not None and task["stage"] == "training":
            fields.append(f"{answer['steps_per_s']:.1f} steps/s")
        if task["own_s"] is not None:
            fields.append(f"own {1000 * task['own_s']:.1f} ms/step")
        if task["input_s"] is not None:
            fields.append(f"input {1000 * task['input_s']:.1f}")
        if task["waiting"] is not None:
            fields.append(f"waits {100 * task['waiting']:.0f} %")
        if task["exchange"] is not None and task["seconds"] > _SLOW_S:
            waits = f", waits for {task['waiting_for']}" if task["waiting_for"] else ""
            if task["waiting_for"] in answer["elsewhere"]:
                waits += f" on {answer['elsewhere'][task['waiting_for']]}"
            fields.append(f"in {task['exchange']} for {task['seconds']:.0f} s{waits}")
        out.append(" | ".join(fields))
    late = answer["missing"]
    if late is not None and late["seconds"] > _SLOW_S:
        out.append(f"{late['sentence']}, for {late['seconds']:.0f} s")
    if answer["straggler"] is not None:
        out.append(answer["straggler"])
    if answer["goodput"]["line"] is not None:
        out.append(answer["goodput"]["line"])
    if answer["elsewhere"]:
        out.append(_elsewhere(answer["elsewhere"]))
    return out


def _elsewhere(hosts: dict[str, str]) -> str:
    """Line that lists the tasks on other hosts."""
    tasks: dict[str, list[str]] = {}
    for task, host in hosts.items():
        tasks.setdefault(host, []).append(task)
    shown = [f"{', '.join(names)} on {host}" for host, names in tasks.items()]
    more = [f"and {len(shown) - _SHOWN_HOSTS} more"] if len(shown) > _SHOWN_HOSTS else []
    return "on other hosts: " + "; ".join([*shown[:_SHOWN_HOSTS], *more])
