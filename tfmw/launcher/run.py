"""Starts, labels, watches and stops the tasks of a cluster on this machine.

    results = tfmw.launch(train, args=(10,), workers=2)          # a function, on two processes
    result = launch_tasks(["train.py", "--epochs", "3"], workers=2, log_dir="logs")
    sys.exit(result.status)

Files of a run: `<log_dir>/<run>/attempt_<n>/<task>/output.log`, what the task wrote, byte for byte;
beside it `error.json`, what `record_error` wrote in the task, and `progress`, what
`report_progress` did. A task that was started again by itself has its files in `<task>.<n>`.

Environment of each task, beside TF_CONFIG: `TFMW_ERROR_FILE` and `TFMW_PROGRESS_FILE`; `TFMW_TASK`
("worker 0"); `TFMW_ATTEMPT`, 0 at first, and `TFMW_MAX_RESTARTS`; `TFMW_LOCAL_TASKS` and
`TFMW_LOCAL_RANK`, the number of tasks on this machine and this one's place; `TFMW_TTY=1` where the
launcher writes to a terminal.

A task that gets SIGTERM may save its state and leave with status 75 (`errors.PREEMPTED`): then it
is run again, by the launcher where that was not the one to be told to leave, else by whoever
started the launcher, which leaves with 75 too.

This module uses the standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import itertools
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tfmw.cluster import Cluster
from tfmw.errors import PREEMPTED, TaskFailed, UsageError
from tfmw.launcher import call, isolation
from tfmw.launcher.attempt import FAREWELL_S, GRACE_S, Attempt, Setting, task_name, wait
from tfmw.launcher.failure import Failure, describe_status
from tfmw.launcher.output import Display, is_watched
from tfmw.launcher.restart import Choice, End, Policy, Terms
from tfmw.launcher.spawn import TASK_COMMAND, Host, terminal_size
from tfmw.runtime.progress import report_progress
from tfmw.runtime.recorded_errors import record_error
from tfmw.runtime.signals import LEAVE, Signals

__all__ = [
    "Failure",
    "Result",
    "Terms",
    "launch",
    "launch_tasks",
    "record_error",
    "report_progress",
    "run_here",
]


_said: set[str] = set()
"""Notes that launches of this process have given."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Args:
        status: 0 all done; 1 a task failed; 2 wrong usage or cluster description, told by a task;
            75 the tasks saved their state, left, and are to be run again; 128 + n the launcher got
            signal n.
        tasks: exit status by task name, -9 for SIGKILL; also of the tasks that were ended. Those
            of the last attempt.
        failures: the tasks that failed on their own, where the run failed; the first cause first,
            then what failed beside it, then the causes of later attempts.
        directory: the run's folder; None if it was temporary and nobody needs it any more.
        attempts: how often all tasks were started.
        restarts: how many restarts counted, of all tasks or of one.
        hint: one more line for the user; "" for none.
    """

    status: int
    tasks: dict[str, int]
    failures: tuple[Failure, ...]
    directory: Path | None
    attempts: int = 1
    restarts: int = 0
    hint: str = ""

    def summary(self) -> list[str]:
        """Lines for the user; the last one names the first task that failed and its own error."""
        if self.status == PREEMPTED:
            return [
                "tfmw: the tasks saved their state and left; the same command goes on from there"
            ]
        if self.status > 128:
            logs = f"; their logs: {self.directory}" if self.directory else ""
            return [f"tfmw: {describe_status(128 - self.status)}: all tasks were ended{logs}"]
        if not self.failures:
            return []
        cause, *others = self.failures
        several = len({failure.attempt for failure in self.failures}) > 1
        lines = [
            f"tfmw: {other.task} failed too{_attempt(other, several)}: {other.what}"
            for other in others
        ]
        if cause.detail:
            origin = "error" if cause.error else "output"
            lines += [f"tfmw: {origin} of {cause.task}:", *(f"    {line}" for line in cause.detail)]
        lines += [f"tfmw: {self.hint}"] if self.hint else []
        lines.append(f"tfmw: log of {cause.task}: {cause.log}")
        first = " first," if others else ""
        lines.append(
            f"tfmw: {cause.task} failed{first}{_attempt(cause, several)} after "
            f"{cause.seconds:.1f} s: {cause.what}"
        )
        return lines


def _attempt(failure: Failure, several: bool) -> str:
    return f" in attempt {failure.attempt}" if several else ""


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
    terms: Terms | None = None,
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
        terms: restarts, time limits, copied processes, the private network.

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
            terms=terms or Terms(),
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
    compute_with_onednn(os.environ)
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
    max_restarts: int = 0,
    isolate: Choice = "auto",
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
        max_restarts: how often all workers are started again after one has failed; the function
            goes on from its own backup.
        isolate: whether the workers have no network but their own: "auto", "on" or "off".

    Returns:
        What the function returned in each worker, in order.

    Raises:
        UsageError: a wrong number of workers, TF_CONFIG is set, a function that can't be sent.
        TaskFailed: a worker died without an exception.
        Exception: otherwise, what the function raised in the first worker that failed, with a
            `TaskFailed` as its cause that carries the worker's traceback.
    """
    tasks = layout(workers, 0, False)
    payload = call.pack(fn, args)
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
            terms=Terms(max_restarts=max_restarts, isolate=isolate),
        )
    if result.status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if result.status == PREEMPTED:
        raise TaskFailed("\n".join(result.summary()))
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


def _raise_failure(result: Result, outcomes: Mapping[str, call.Outcome | None]) -> NoReturn:
    """Raises the error of the task that failed first, as that task raised it."""
    cause = result.failures[0]
    outcome = outcomes[cause.task]
    if outcome is None or outcome[1] is None:
        raise TaskFailed("\n".join(result.summary()))
    _, error, text = outcome
    if not isinstance(error, Exception):  # SystemExit must not end the caller
        raise TaskFailed(f"{cause.task} failed: {cause.what}\n\n{text}")
    raise error from TaskFailed(f"{cause.task} failed:\n\n{text}")


_ORDER = ("chief", "worker", "ps", "evaluator")


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
    terms: Terms,
    farewell_s: float = FAREWELL_S,
    payload: bytes | None = None,
) -> tuple[Result, dict[str, call.Outcome | None]]:
    """One run, and what each task returned by its name: attempts until one is the last."""
    workers = sum(kind == "worker" for kind, _ in tasks)
    terms.check(workers)
    environ = {**os.environ, **(env or {})}
    if environ.get("TF_CONFIG", "").strip():
        raise UsageError(
            f"TF_CONFIG is already set to {environ['TF_CONFIG']}; unset it or drop --workers."
        )
    stdout = sys.stdout if stdout is None else stdout
    terminal = is_watched(stdout)
    chief = task_name(*tasks[0]) if (terminal if live is None else live) else None
    display = Display(stdout, chief)
    with contextlib.ExitStack() as held:
        directory = _run_directory(log_dir)
        network, note = _network(terms.isolate, command, tasks, environ)
        if network is not None:
            held.callback(network.close)
        host = held.enter_context(Host(network.namespaces if network else ()))
        task_env = _task_environment(environ, terminal)
        if _wants_copies(terms, len(tasks), task_env):
            host.copy_from_now_on(command, task_env, keep=payload is not None)
        if note and (payload is None or note not in _said):
            _said.add(note)  # a notebook launches from cell after cell
            print(f"tfmw: {note}", file=sys.stderr, flush=True)
        setting = Setting(
            command=command,
            directory=directory,
            env=task_env,
            host=host,
            display=display,
            live=chief,
            payload=payload,
            stop=stop,
            terms=terms,
            grace_s=grace_s,
            farewell_s=farewell_s,
        )
        policy = Policy(terms, workers)
        attempt, failures = _attempts(setting, policy, tasks)
    status = _status(attempt, failures, stop, display)
    failures = failures if status in (1, 2) else ()
    if status == 0 and log_dir is None:
        shutil.rmtree(directory, ignore_errors=True)
    result = Result(
        status=status,
        tasks={task.name: task.status or 0 for task in attempt.tasks},
        failures=failures,
        directory=directory if directory.exists() else None,
        attempts=attempt.number + 1,
        restarts=policy.restarts,
        hint=_network_hint(failures) if network else "",
    )
    return result, attempt.outcomes()


def _attempts(
    setting: Setting, policy: Policy, tasks: Sequence[tuple[str, int]]
) -> tuple[Attempt, tuple[Failure, ...]]:
    """Attempts until the policy has enough: the last one, and what failed, the first cause first.

    A run whose last attempt ended well has no failures.
    """
    failures: tuple[Failure, ...] = ()
    stop = setting.stop
    for number in itertools.count():
        setting.host.wait(stop.received, setting.terms.start_timeout_s or float("inf"))
        attempt = Attempt(setting, tasks, number, policy)
        try:
            attempt.start()
            attempt.watch()
            again = not stop.received and policy.restarts < setting.terms.max_restarts
            # Tasks that have lost another one can't go on or leave in order; and what is on disk
            # is whole at any moment.
            attempt.end(0.0 if again and attempt.failures() else None)
        finally:
            attempt.end()
        failed = attempt.failures()
        failures += (*attempt.came_back(), *(failed if not failures else failed[:1]))
        decision = policy.after(
            End(
                failures=failed,
                step=attempt.step(),
                seconds=attempt.seconds(),
                left=attempt.left(),
                signals=tuple(stop.received),
            )
        )
        if decision.line and not setting.display.broken:
            setting.display.line(f"tfmw: {decision.line}")
        if not decision.again or setting.display.broken:
            return attempt, failures if failed else ()
        wait(decision.delay_s, stop)
        if stop.received:
            return attempt, ()
        others = [task for task in tasks if task[0] != "worker"]
        workers = [("worker", index) for index in range(decision.workers)]
        tasks = sorted([*others, *workers], key=lambda task: _ORDER.index(task[0]))
    raise AssertionError("unreachable")


def _status(attempt: Attempt, failures: Sequence[Failure], stop: Signals, display: Display) -> int:
    """Exit status of a run whose last attempt is this one."""
    passed_on = {*stop.received, signal.SIGTERM}
    # A scheduler sends its signal to all processes: then the tasks die of it too.
    if stop.received and all(-failure.status in passed_on for failure in failures):
        return PREEMPTED if attempt.left() and stop.received[0] in LEAVE else 128 + stop.received[0]
    if failures:
        return 2 if failures[0].usage else 1
    if attempt.left():
        return PREEMPTED
    return 128 + signal.SIGPIPE if display.broken else 0


def _wants_copies(terms: Terms, tasks: int, env: Mapping[str, str]) -> bool:
    """Whether one process imports TensorFlow for all tasks.

    Scripts that tfmw doesn't initialize may set what TensorFlow reads when it is imported.
    """
    if terms.standby == "auto":
        return (tasks > 1 or terms.max_restarts > 0) and env.get("TFMW_NO_INIT") != "1"
    return terms.standby == "on"


def _network(
    choice: Choice,
    command: Sequence[str],
    tasks: Sequence[tuple[str, int]],
    environ: Mapping[str, str],
) -> tuple[isolation.Network | None, str]:
    """The tasks' private network, or None; and what the user should know about it."""
    opens = sum(kind != "evaluator" for kind, _ in tasks) > 1
    if choice == "off" or (choice == "auto" and not opens):
        return None, ""
    if choice == "auto" and (found := isolation.objection(command[1:], environ)):
        why, reachable = found
        return None, (
            f"the tasks keep this machine's network, because {why}; their ports, which ask for no "
            "password, are open to it: --isolate on closes them"
        ) * reachable
    try:
        network = isolation.create()
    except isolation.Impossible as error:
        if choice == "on":
            raise UsageError(
                f"--isolate on: this system allows no private network ({error}); drop it, or allow "
                "user namespaces."
            ) from error
        return None, (
            f"this system allows no private network for the tasks ({error}); their ports, which "
            "ask for no password, are open to whoever reaches this machine"
        )
    if choice == "on":
        return network, ""
    return network, (
        "the tasks live in a private network: nobody reaches them, and they reach nobody; for "
        "downloads, gs:// and the like use --isolate off"
    )


# What the errors of programs that miss the network say: urllib, requests, tf.io.gfile, gRPC.
_NO_NETWORK = re.compile(
    "name resolution|name or service not known|network is unreachable|could(n't| not) resolve host|"
    "max retries exceeded|failed to resolve",
    re.IGNORECASE,
)


def _network_hint(failures: Sequence[Failure]) -> str:
    """For a program that may have failed because it was in a private network."""
    text = "\n".join(line for f in failures[:1] for line in (f.error, *f.detail))
    if not _NO_NETWORK.search(text):
        return ""
    return "the tasks had no network, only their own: --isolate off gives them this machine's"


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
    compute_with_onednn(env)
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("TFMW_TTY", None)
    if terminal:
        env["TFMW_TTY"] = "1"
        env.setdefault("COLUMNS", str(terminal_size().columns))
    return env


def compute_with_onednn(env: MutableMapping[str, str]) -> None:
    """Has TensorFlow take oneDNN's kernels, as it does by itself on newer x86 processors only.

    It decides when it is imported, so a script could not. On processors with AVX2 alone its own
    kernels make a step of ResNet50 2.4 times as long (bench/steps.py).
    """
    if platform.machine() in ("x86_64", "AMD64"):
        env.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
