"""Starts, labels, watches and stops the tasks of a cluster on this machine.

    results = tfmw.launch(train, args=(10,), workers=2)          # a function, on two processes
    result = launch_tasks(["train.py", "--epochs", "3"], workers=2, log_dir="logs")
    sys.exit(result.status)

Files of a run: `<log_dir>/<run>/attempt_0/<task>/output.log`, what the task wrote, byte for byte;
`error.json` beside it, what `record_error` wrote in the task.

Environment of each task, beside TF_CONFIG: `TFMW_ERROR_FILE`; `TFMW_TASK` ("worker 0");
`TFMW_LOCAL_TASKS` and `TFMW_LOCAL_RANK`, the number of tasks on this machine and this one's
place; `TFMW_TTY=1` where the launcher writes to a terminal.

This module uses the standard library only.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tfmw import _call
from tfmw._attempt import (
    FAREWELL_S,
    GRACE_S,
    TASK_COMMAND,
    Attempt,
    Failure,
    Signals,
    describe_status,
    task_name,
)
from tfmw._output import Display
from tfmw._progress import report_progress
from tfmw._record import record_error
from tfmw.cluster import Cluster
from tfmw.errors import TaskFailed, UsageError

__all__ = [
    "Failure",
    "Result",
    "launch",
    "launch_tasks",
    "record_error",
    "report_progress",
    "run_here",
]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Args:
        status: 0 all done; 1 a task failed; 2 wrong usage or cluster description, told by a task;
            128 + n the launcher got signal n.
        tasks: exit status by task name, -9 for SIGKILL; also of the tasks that were ended.
        failures: the tasks that failed on their own, the cause first.
        directory: the run's folder; None if it was temporary and nobody needs it any more.
    """

    status: int
    tasks: dict[str, int]
    failures: tuple[Failure, ...]
    directory: Path | None

    def summary(self) -> list[str]:
        """Lines for the user; the last one names the first task that failed and its own error."""
        if self.status > 128:
            logs = f"; their logs: {self.directory}" if self.directory else ""
            return [f"tfmw: {describe_status(128 - self.status)}: all tasks were ended{logs}"]
        if not self.failures:
            return []
        cause, *others = self.failures
        lines = [f"tfmw: {other.task} failed too: {_what(other)}" for other in others]
        if cause.detail:
            origin = "error" if cause.error else "output"
            lines += [f"tfmw: {origin} of {cause.task}:", *(f"    {line}" for line in cause.detail)]
        lines.append(f"tfmw: log of {cause.task}: {cause.log}")
        first = " first," if others else ""
        lines.append(
            f"tfmw: {cause.task} failed{first} after {cause.seconds:.1f} s: {_what(cause)}"
        )
        return lines


def _what(failure: Failure) -> str:
    return (
        f"{failure.error} ({failure.how})"
        if failure.error and failure.how
        else (failure.error or failure.how)
    )


def launch_tasks(
    argv: Sequence[str],
    *,
    module: bool = False,
    workers: int = 2,
    ps: int = 0,
    evaluator: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    live: bool | None = None,
    grace_s: float = GRACE_S,
    farewell_s: float = FAREWELL_S,
) -> Result:
    """Runs a script in each task of a fresh local cluster, and waits for its end.

    Args:
        argv: the script's path, or the module's name, and its flags.
        module: whether argv[0] is a module, as with `python -m`.
        workers: number of tasks that train; worker 0 is the chief.
        ps: number of parameter servers. With any, one more task, the chief, coordinates.
        evaluator: whether to start an evaluator beside them.
        log_dir: the run's folder is made in it; otherwise a temporary one, kept after a failure.
        env: added to the environment of the tasks.
        stdout: where their output goes, `sys.stdout` unless given.
        live: whether the chief's output passes through unlabelled, for its progress bar; by
            default where `stdout` is a terminal or a notebook.
        grace_s: seconds between SIGTERM and SIGKILL for tasks that are ended.
        farewell_s: seconds in which ps, and workers beside them, leave once the chief is done.

    Returns:
        How it ended. Nothing of `Result.summary` is printed yet.

    Raises:
        UsageError: no such script, a wrong number of tasks, TF_CONFIG is set, a folder that can't
            be written.
    """
    _check_program(argv, module)
    command = ["module" if module else "script", *argv]
    with Signals() as stop:
        result, _ = _run(
            command,
            layout(workers, ps, evaluator),
            log_dir=log_dir,
            env=env,
            stdout=stdout,
            live=live,
            grace_s=grace_s,
            farewell_s=farewell_s,
            stop=stop,
        )
    return result


def run_here(argv: Sequence[str], *, module: bool = False) -> NoReturn:
    """Becomes the one task that the environment describes: TF_CONFIG, a scheduler, or alone.

    Args:
        argv: the script's path, or the module's name, and its flags.
        module: whether argv[0] is a module, as with `python -m`.

    Raises:
        UsageError: no such script, or a wrong cluster description.
    """
    _check_program(argv, module)
    Cluster.resolve(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*TASK_COMMAND, "module" if module else "script", *argv])


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: int = 2,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    live: bool | None = None,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Runs `fn(*args)` in each worker of a fresh local cluster.

    Args:
        fn: a function that the workers can import, or, with cloudpickle installed, any function:
            one that is defined in a notebook or a script, a lambda.
        args: its arguments; they are pickled.
        workers: number of processes; each has joined the cluster when the function starts.
        log_dir: the run's folder is made in it; otherwise a temporary one, kept after a failure.
        env: added to the environment of the workers.
        stdout: where their output goes, `sys.stdout` unless given.
        live: whether the chief's output passes through unlabelled, as in `launch_tasks`.
        grace_s: seconds between SIGTERM and SIGKILL for workers that are ended.

    Returns:
        What the function returned in each worker, in order.

    Raises:
        UsageError: a wrong number of workers, TF_CONFIG is set, a function that can't be sent.
        TaskFailed: a worker died without an exception.
        Exception: otherwise, what the function raised in the first worker that failed, with a
            `TaskFailed` as its cause that carries the worker's traceback.
    """
    tasks = layout(workers, 0, False)
    payload = _call.pack(fn, args)
    with Signals() as stop:
        result, outcomes = _run(
            ["call"],
            tasks,
            log_dir=log_dir,
            env=env,
            stdout=stdout,
            live=live,
            grace_s=grace_s,
            payload=payload,
            stop=stop,
        )
    if result.status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if result.status > 128:
        signal.raise_signal(result.status - 128)  # the handler of before is back
    if result.failures:
        _raise_failure(result, outcomes)
    values = []
    for name, outcome in outcomes.items():
        if outcome is None:
            raise TaskFailed(f"{name} ended with exit status 0 before the function returned.")
        values.append(outcome[0])
    return values


def _raise_failure(result: Result, outcomes: Mapping[str, _call.Outcome | None]) -> NoReturn:
    """Raises the error of the task that failed first, as that task raised it."""
    cause = result.failures[0]
    outcome = outcomes[cause.task]
    if outcome is None or outcome[1] is None:
        raise TaskFailed("\n".join(result.summary()))
    _, error, text = outcome
    if not isinstance(error, Exception):  # SystemExit must not end the caller
        raise TaskFailed(f"{cause.task} failed: {_what(cause)}\n\n{text}")
    raise error from TaskFailed(f"{cause.task} failed:\n\n{text}")


def layout(workers: int, ps: int, evaluator: bool) -> list[tuple[str, int]]:
    """(kind, index) of each task of a local cluster."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers is {workers!r}; expected an integer of at least 1.")
    if isinstance(ps, bool) or not isinstance(ps, int) or ps < 0:
        raise UsageError(f"ps is {ps!r}; expected an integer of at least 0.")
    tasks = [("chief", 0)] if ps else []
    tasks += [("worker", i) for i in range(workers)]
    tasks += [("ps", i) for i in range(ps)]
    tasks += [("evaluator", 0)] if evaluator else []
    return tasks


def _run(
    command: Sequence[str],
    tasks: Sequence[tuple[str, int]],
    *,
    log_dir: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    stdout: TextIO | None,
    live: bool | None,
    grace_s: float,
    stop: Signals,
    farewell_s: float = FAREWELL_S,
    payload: bytes | None = None,
) -> tuple[Result, dict[str, _call.Outcome | None]]:
    """One run, and what each task returned by its name. A run is one attempt."""
    environ = {**os.environ, **(env or {})}
    if environ.get("TF_CONFIG", "").strip():
        raise UsageError(
            f"TF_CONFIG is already set to {environ['TF_CONFIG']}; unset it or drop --workers."
        )
    stdout = sys.stdout if stdout is None else stdout
    terminal = stdout.isatty() or ("ipykernel" in sys.modules and stdout is sys.stdout)
    chief = task_name(*tasks[0]) if (terminal if live is None else live) else None
    display = Display(stdout, chief)
    directory = _run_directory(log_dir)
    attempt = Attempt(
        tasks,
        command,
        directory / "attempt_0",
        _task_environment(environ, terminal),
        display,
        live=chief,
        payload=payload,
        grace_s=grace_s,
        farewell_s=farewell_s,
        stop=stop,
    )
    try:
        attempt.start()
        attempt.watch()
    finally:
        attempt.end()
    failures = tuple(attempt.failures())
    # A scheduler sends its signal to all processes: then the tasks die of it too.
    if stop.received and all(-failure.status in stop.received for failure in failures):
        failures, status = (), 128 + stop.received[0]
    elif failures:
        status = 2 if failures[0].usage else 1
    else:
        status = 128 + signal.SIGPIPE if display.broken else 0
    if status == 0 and log_dir is None:
        shutil.rmtree(directory, ignore_errors=True)
    result = Result(
        status=status,
        tasks={task.name: task.status or 0 for task in attempt.tasks},
        failures=failures,
        directory=directory if directory.exists() else None,
    )
    return result, attempt.outcomes()


def _check_program(argv: Sequence[str], module: bool) -> None:
    """Raises UsageError where the script or the module isn't there, before anything is started."""
    if not argv:
        raise UsageError("no script is given; write its path, or -m and a module.")
    program = argv[0]
    if not module:
        if not os.path.isfile(program) and not os.path.isfile(os.path.join(program, "__main__.py")):
            raise UsageError(
                f"there is no script {program!r} in {os.getcwd()}; give the path of a Python file."
            )
        return
    # Only the first name: finding a submodule imports its package, perhaps with TensorFlow.
    top = program.partition(".")[0]
    search = [os.getcwd(), *sys.path]
    if importlib.machinery.PathFinder.find_spec(top, search) is None:
        raise UsageError(f"there is no module {program!r}; install it, or start where it lies.")


def _run_directory(log_dir: str | os.PathLike[str] | None) -> Path:
    """A new folder for this run: <log_dir>/20260131-120000-4242, or a temporary one."""
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix="tfmw-"))
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(1))):
            directory = Path(log_dir, name + suffix)
            try:
                directory.mkdir(parents=True)
                return directory
            except FileExistsError:
                if not Path(log_dir).is_dir():
                    raise
    except OSError as error:
        raise UsageError(
            f"no folder can be made in the log directory {log_dir}: {error.strerror}; "
            "name another with --log-dir."
        ) from error
    raise AssertionError("unreachable")


def _task_environment(environ: Mapping[str, str], terminal: bool) -> dict[str, str]:
    """What all tasks get; Attempt adds what differs."""
    env = dict(environ)
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greetings, once per task
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("TFMW_TTY", None)
    if terminal:
        env["TFMW_TTY"] = "1"
        env.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    return env
