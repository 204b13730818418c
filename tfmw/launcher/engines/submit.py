"""Functions and scripts on an engine: `tfmw.launch(on=)`, `tfmw.submit`, `tfmw.attach`.

results = tfmw.launch(train, args=(10,), workers=8, on="ray")       # waits
job = tfmw.submit(train, args=(10,), workers=8, on="slurm")         # returns at once
job = tfmw.attach("slurm:4711")
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TextIO

from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.launcher import run as local_launcher
from tfmw.launcher.engines.engine import Engine, JobSpec, task_range
from tfmw.launcher.engines.job import Job
from tfmw.launcher.options import GRACE_S, AutoOnOff, RunOptions
from tfmw.launcher.output import is_watched
from tfmw.launcher.remote.messages import Setup
from tfmw.launcher.spawn import terminal_size
from tfmw.observe.trackers import RUN_ID

# The module of each engine; its class is `tfmw.engines.Local`, ...
_ENGINES = {
    "kubernetes": "kubernetes",
    "local": "local_jobs",
    "ray": "ray",
    "slurm": "slurm",
    "spark": "spark",
}

ENTRY_POINTS = "tfmw.engines"
"""Group of the entry points by which other packages add engines: name -> class."""

# Settings of TensorFlow and of its libraries, which tasks on other machines need too.
_TRAVEL = ("TF_", "KERAS_", "OMP_", "XLA_", "NCCL_", "TFDS_")


def engine_names() -> list[str]:
    """Names of tfmw's engines, and of those of other packages."""
    return [*_ENGINES, *sorted(entry_points(group=ENTRY_POINTS).names - _ENGINES.keys())]


def engine_of(on: str | Engine) -> Engine:
    """The engine of an `on=` argument.

    Raises:
        UsageError: the name is unknown, or the engine's library is not installed.
    """
    if isinstance(on, Engine):
        return on
    if on in _ENGINES:
        module = importlib.import_module(f"tfmw.launcher.engines.{_ENGINES[on]}")
        own: Engine = getattr(module, on.capitalize())()
        return own
    for entry in entry_points(group=ENTRY_POINTS, name=on):
        engine = entry.load()()
        if isinstance(engine, Engine) and engine.name == on:
            return engine
        raise UsageError(
            f"received on={on!r}, which is {entry.value}: expected a subclass of "
            f"tfmw.engines.Engine whose name is {on!r}."
        )
    raise UsageError(
        f"received on={on!r}: expected {', '.join(map(repr, engine_names()))}, or an engine with "
        "its settings, such as tfmw.engines.Slurm(partition='gpu')."
    )


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: int | tuple[int, int] = 2,
    *,
    on: str | Engine = "local",
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    live: bool | None = None,
    grace_s: float = GRACE_S,
    max_restarts: int = 0,
    isolate: AutoOnOff = "auto",
) -> list[Any]:
    """Runs `fn(*args)` in each worker of a fresh cluster, on this machine or on an engine.

    Args:
        fn: a function that the workers can import. With cloudpickle installed it may be any
            function, also one of a notebook or a script, or a lambda.
        args: its arguments; they are pickled.
        workers: number of processes; each has joined the cluster when the function starts. Engines
            also accept (least, most), and start as many as have room.
        on: the system that runs them: "kubernetes", "local", "ray", "slurm", "spark", or an engine
            with its settings, such as `tfmw.engines.Ray(resources={"CPU": 4})`.
        log_dir: the run's folder is created in it; by default in a temporary directory, which is
            kept after a failure. Only with on="local".
        env: environment variables added for the workers.
        stdout: the stream for their output; by default `sys.stdout`.
        live: whether the chief's output is printed without labels, for its progress bar; by
            default if `stdout` is a terminal or a notebook.
        grace_s: seconds between SIGTERM and SIGKILL for workers that are ended. Only with
            on="local".
        max_restarts: number of times that all workers are restarted after a failure; the function
            resumes from its own backup.
        isolate: whether the workers run in a private network: "auto", "on" or "off". Only with
            on="local".

    Returns:
        The result of the function in each worker, in order.

    Raises:
        UsageError: a wrong number of workers, TF_CONFIG is set, or the function cannot be pickled.
        TaskFailed: a worker died without an exception.
        Exception: the exception of the function in the first worker that failed. Its cause is a
            `TaskFailed` with the worker's traceback.
        KeyboardInterrupt: the job was cancelled, and nothing of it is left.
    """
    engine = engine_of(on)
    out = sys.stdout if stdout is None else stdout
    if engine.name == "local":
        return local_launcher.launch(
            fn,
            args,
            workers,
            log_dir=log_dir,
            env=env or {},
            stdout=out,
            live=live,
            grace_s=grace_s,
            max_restarts=max_restarts,
            isolate=isolate,
        )
    given = {"log_dir": log_dir, "grace_s": grace_s != GRACE_S, "isolate": isolate != "auto"}
    if (name := next((name for name, value in given.items() if value), None)) is not None:
        raise UsageError(f"{name}= is for on='local' alone: leave it out with on={engine.name!r}.")
    live = is_watched(out) if live is None else live
    return finish(start(engine, call.pack(fn, args), workers, max_restarts, env, live=live), out)


def submit(
    fn: Callable[..., Any] | str | os.PathLike[str],
    args: Sequence[Any] = (),
    workers: int | tuple[int, int] = 2,
    *,
    on: str | Engine = "local",
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    ps: int = 0,
    evaluator: bool = False,
) -> Job:
    """Starts `fn(*args)`, or a script, in each task of a new cluster, and returns at once.

    The job continues when this process ends (on Spark it ends with it); `attach` finds it again.

    Args:
        fn: a function, as in `launch`, or the path of a script.
        args: the function's arguments, or the script's flags.
        workers: number of processes, or (least, most).
        on: the system that runs them, as in `launch`.
        env: environment variables added for the tasks.
        max_restarts: number of times that tasks are restarted after a failure: all of them, or one
            alone if it is an evaluator, or a worker of parameter servers.
        ps: number of parameter servers. With any, one more task, the chief, coordinates, and
            `Job.result` has its result alone.
        evaluator: whether to start an evaluator beside them; its result comes last.

    Returns:
        The job: `Job.id`, `Job.status`, `Job.logs`, `Job.result`, `Job.cancel`.

    Raises:
        UsageError: wrong arguments, or the engine refuses the job.
    """
    engine = engine_of(on)
    what: dict[str, Any] = {"ps": ps, "evaluator": evaluator}
    payload: call.Payload = ()
    if callable(fn):
        payload = call.pack(fn, args)
    else:
        local_launcher.check_program([os.fspath(fn)], module=False)
        path = Path(fn).absolute()
        what["command"] = ("script", str(path), *map(str, args))
        what["script"] = path.read_bytes() if path.is_file() else b""
    return start(engine, payload, workers, max_restarts, env, **what)


def attach(job_id: str, on: Engine | None = None) -> Job:
    """The job that another process has submitted.

    Args:
        job_id: its `Job.id`, such as "slurm:4711".
        on: the engine, if its settings differ from the default ones.

    Raises:
        UsageError: the job does not exist, or its engine is not available.
    """
    name, colon, number = job_id.partition(":")
    known = engine_names() if on is None else [on.name]
    if not colon or not number or name not in known:
        raise UsageError(
            f"received the job {job_id!r}: expected an engine and a number, such as "
            f"'{'slurm' if on is None else on.name}:4711'; tfmw jobs lists them. An engine of "
            "another package needs an entry point, or is passed by on=."
        )
    engine = engine_of(name) if on is None else on
    return engine.attach(number)


def jobs(on: str | Engine) -> list[Job]:
    """The jobs of an engine whose results are available, the oldest first.

    Args:
        on: the engine, as in `launch`.

    Raises:
        UsageError: the engine does not exist.
    """
    engine, found = engine_of(on), []
    for number in engine.numbers():
        with contextlib.suppress(UsageError):  # it has been removed since
            found.append(engine.attach(number))
    return found


def start(
    engine: Engine,
    payload: call.Payload,
    workers: int | tuple[int, int],
    max_restarts: int,
    env: Mapping[str, str] | None = None,
    *,
    command: tuple[str, ...] = ("call",),
    live: bool = False,
    stays: bool = False,
    script: bytes = b"",
    ps: int = 0,
    evaluator: bool = False,
) -> Job:
    """Submits a job, with the settings of this process.

    Args:
        engine: the engine that runs it.
        payload: the packed call; empty for a script.
        workers, max_restarts, env, ps, evaluator: arguments of `submit`.
        command, live, stays, script: fields of `Setup`.
    """
    grace_s = engine.leave_s if max_restarts else None
    options = RunOptions(max_restarts=max_restarts, preempt_grace_s=grace_s)
    least, most = task_range(workers)
    options.check(most)
    if os.environ.get("TF_CONFIG", "").strip():
        raise UsageError(
            f"TF_CONFIG is already set to {os.environ['TF_CONFIG']}; unset it or drop on=."
        )
    travels = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_TRAVEL) and name != "TF_CONFIG"
    }
    setup = Setup(
        command=command,
        options=options,
        env={
            RUN_ID: os.environ.get(RUN_ID) or secrets.token_hex(8),
            **travels,
            **(env or {}),
            **({"TFMW_EVALUATOR": "1"} if evaluator else {}),
        },
        folder=os.getcwd(),
        live=live,
        columns=terminal_size().columns,
        stays=stays,
        body=script,
    )
    spec = JobSpec(setup, (least, most), ps, evaluator)
    return engine.submit(spec, payload)


def finish(
    job: Job, out: TextIO | None = None, stopped: Callable[[Job], None] = lambda job: None
) -> list[Any]:
    """Prints a job's output, and returns its result; nothing of the job remains.

    Args:
        job: the job.
        out: the stream to print to; by default `sys.stdout`.
        stopped: called with the cancelled job after Ctrl-C.
    """
    try:
        print(f"tfmw: {job.where}", file=sys.stderr, flush=True)
        job.logs(follow=True, out=out)
        return job.result()
    except KeyboardInterrupt:
        job.cancel()
        stopped(job)
        raise
    finally:
        job.cancel()
        job.forget()
