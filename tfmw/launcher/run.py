"""The launcher's entry points: run a script or a function on a fresh local cluster.

    results = tfmw.launch(train, args=(10,), workers=2)          # a function, on two processes
    result = launch_tasks(["train.py", "--epochs", "3"], workers=2, log_dir="logs")
    sys.exit(result.status)

Files of a run: `<log_dir>/<run>/attempt_<n>/<task>/output.log`, the task's output, with the last
text of a progress bar; beside it `error.json`, written by `record_error` in the task, and
`progress`, written by `report_progress`. A task that was restarted alone has its files in
`<task>.<n>`.

Environment of each task, in addition to TF_CONFIG: `TFMW_ERROR_FILE` and `TFMW_PROGRESS_FILE`;
`TFMW_TASK` ("worker 0"); `TFMW_RUN_ID`, the same in all attempts; `TFMW_ATTEMPT`, 0 at first, and
`TFMW_MAX_RESTARTS`; `TFMW_LOCAL_TASKS` and `TFMW_LOCAL_RANK`, the number of tasks on this machine
and the rank of this one; `TFMW_TTY=1` if the launcher writes to a terminal.

A task that receives SIGTERM may save its state and exit with status 75 (`errors.PREEMPTED`). The
launcher then runs it again. If the launcher itself received the signal, it exits with 75 too.

This module uses the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tfmw.cluster import Cluster
from tfmw.cluster.signals import Signals
from tfmw.errors import PREEMPTED, Preempted, TaskFailed, UsageError
from tfmw.launcher import call, run_files
from tfmw.launcher.attempts import run_locally
from tfmw.launcher.environment import compute_with_onednn, require_working_directory
from tfmw.launcher.options import AutoOnOff, LocalRun, RunOptions, task_layout
from tfmw.launcher.result import Result
from tfmw.launcher.spawn import TASK_COMMAND


def launch_tasks(
    argv: Sequence[str],
    *,
    module: bool = False,
    workers: int = 2,
    ps: int = 0,
    evaluator: bool = False,
    env: Mapping[str, str] | None = None,
    **of_run: Any,
) -> Result:
    """Runs a script in each task of a fresh local cluster, and waits for its end.

    Args:
        argv: the script's path, or the module's name, and its flags.
        module: whether argv[0] is a module, as with `python -m`.
        workers: number of tasks that train; worker 0 is the chief.
        ps: number of parameter servers. With any, one more task, the chief, coordinates.
        evaluator: whether to start an evaluator beside them.
        env: environment variables added for the tasks.
        of_run: other fields of `LocalRun`.

    Returns:
        The result of the run. The caller prints `Result.summary`.

    Raises:
        UsageError: the script does not exist, a wrong number of tasks, TF_CONFIG is set, or the
            folder cannot be written.
    """
    check_program(argv, module)
    job = LocalRun(
        command=["module" if module else "script", *argv],
        tasks=task_layout(workers, ps, evaluator),
        env={**(env or {}), **({"TFMW_EVALUATOR": "1"} if evaluator else {})},
        **of_run,
    )
    with Signals() as stop:
        return run_locally(job, stop)[0]


def run_here(argv: Sequence[str], *, module: bool = False) -> NoReturn:
    """Runs a script in this process, as the task that the environment describes.

    Args:
        argv: the script's path, or the module's name, and its flags.
        module: whether argv[0] is a module, as with `python -m`.

    Raises:
        UsageError: the script does not exist, or a wrong cluster description.
    """
    check_program(argv, module)
    cluster = Cluster.resolve(os.environ)
    compute_with_onednn(os.environ)
    command = ["module" if module else "script", *argv]
    with contextlib.suppress(OSError, UsageError):  # in this case it runs without `tfmw status`
        os.environ.update(run_files.keep_files(cluster, command))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*TASK_COMMAND, *command])


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: Any = 2,
    *,
    max_restarts: int = 0,
    isolate: AutoOnOff = "auto",
    **of_run: Any,
) -> list[Any]:
    """Runs `fn(*args)` in each worker of a fresh local cluster.

    Args:
        fn, args, workers, max_restarts, isolate: see `tfmw.launch`.
        of_run: other fields of `LocalRun`.

    Returns:
        The result of the function in each worker, in order.

    Raises:
        UsageError, TaskFailed, Exception: as in `tfmw.launch`.
        Preempted: this process received SIGTERM or SIGUSR1, and the function has saved its state.
    """
    job = LocalRun(
        command=["call"],
        tasks=task_layout(workers, 0, False),
        options=RunOptions(max_restarts=max_restarts, isolate=isolate),
        payload=call.pack(fn, args),
        **of_run,
    )
    with Signals() as stop:
        result, outcomes = run_locally(job, stop)
    return return_values(result, outcomes)


def return_values(result: Result, outcomes: Mapping[str, call.Outcome | None]) -> list[Any]:
    """The function's result in each worker; raises the error that ended the run, if any."""
    if result.status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if result.status == PREEMPTED:
        raise Preempted(
            "the workers saved their state and exited; the same command resumes the run"
        )
    if result.status > 128:
        signal.raise_signal(result.status - 128)  # the previous handler is restored
    if result.failures:  # the first one, as that task raised it
        cause = result.failures[0]
        _, error, text = outcomes.get(cause.task) or (None, None, "")
        if error is None:  # the task has never connected, or was killed
            raise TaskFailed("\n".join(result.summary()))
        if not isinstance(error, Exception):  # SystemExit must not end the caller
            raise TaskFailed(f"{cause.task} failed: {cause.description}\n\n{text}")
        raise error from TaskFailed(f"{cause.task} failed:\n\n{text}")
    values = []
    for name, outcome in outcomes.items():
        if outcome is None:
            raise TaskFailed(f"{name} ended with exit status 0 before the function returned.")
        values.append(outcome[0])
    return values


def check_program(argv: Sequence[str], module: bool) -> None:
    """Raises UsageError if the script or the module does not exist, before any task starts."""
    if not argv:
        raise UsageError("received no script: pass its path, or -m and a module.")
    program = argv[0]
    if module:
        # Only the first name: finding a submodule imports its package, perhaps with TensorFlow.
        top = program.partition(".")[0]
        search = [require_working_directory(), *sys.path]
        if importlib.machinery.PathFinder.find_spec(top, search) is None:
            raise UsageError(f"there is no module {program!r}; install it, or start in its folder.")
    elif not any(map(os.path.isfile, (program, os.path.join(program, "__main__.py")))):
        raise UsageError(
            f"there is no script {program!r} in {require_working_directory()}; pass the path "
            "of a Python file."
        )
