"""A run as a sequence of attempts, until the restart policy ends it.

    with Signals() as stop:
        result, outcomes = run_locally(LocalRun(command, tasks, options), stop)

`attempt.py` makes one attempt; `orchestrator.py` makes the next one if `restart.py` decides so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from tfmw.cluster.cluster import BACKUP_DIR, ISOLATED
from tfmw.cluster.signals import Signals
from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.launcher.attempt import Attempt, AttemptContext
from tfmw.launcher.environment import make_run_directory, task_environment
from tfmw.launcher.failure import Failure
from tfmw.launcher.network import Gateway, choose_network, network_hint, starts_grpc
from tfmw.launcher.options import LocalRun
from tfmw.launcher.orchestrator import LOOK_S, Orchestrator, RunOver
from tfmw.launcher.output import Display, is_watched, say
from tfmw.launcher.process import divisions, task_name
from tfmw.launcher.restart import AttemptOutcome, Decision, RestartPolicy
from tfmw.launcher.result import Result, exit_status, restart_hint
from tfmw.launcher.run_files import published
from tfmw.launcher.run_status import RunStatus
from tfmw.launcher.spawn import Spawner
from tfmw.launcher.state_folder import state_folder
from tfmw.observe import goodput
from tfmw.observe.goodput import Division
from tfmw.observe.trackers import RUN_ID

_printed_notes: set[str] = set()
"""Notes that runs of this process have already printed."""


def run_locally(job: LocalRun, stop: Signals) -> tuple[Result, dict[str, call.Outcome | None]]:
    """Runs attempts until the restart policy ends the run.

    Returns:
        The result of the run, and the function's outcome in each task, by the task's name.

    Raises:
        UsageError: invalid options, TF_CONFIG is set, a folder that can't be written.
    """
    environ = environment_of(job)
    with contextlib.ExitStack() as stack:
        context = make_context(job, environ, stop, stack)
        backend = _LocalAttempts(context, RestartPolicy(job.options, job.workers))
        orchestrator = Orchestrator(backend.policy, backend)
        stack.callback(backend.close)
        with contextlib.suppress(RunOver):
            while not orchestrator.step(time.monotonic()):
                pass
    attempt = backend.last
    assert attempt is not None
    stopped = stop.received and not orchestrator.over  # between two attempts
    failures = () if stopped else orchestrator.failures
    return run_result(context, attempt, failures, backend.policy.restarts)


def environment_of(job: LocalRun) -> dict[str, str]:
    """The environment of a run's tasks, with the id of the run.

    Raises:
        UsageError: invalid options, or TF_CONFIG is set.
    """
    job.options.check(job.workers)
    environ = {**os.environ, **job.env}
    if environ.get("TF_CONFIG", "").strip():
        raise UsageError(
            f"TF_CONFIG is already set to {environ['TF_CONFIG']}; unset it or drop --workers."
        )
    return {**environ, RUN_ID: environ.get(RUN_ID) or secrets.token_hex(8)}


def run_result(
    context: AttemptContext, attempt: Attempt, failures: Sequence[Failure], restarts: int = 0
) -> tuple[Result, dict[str, call.Outcome | None]]:
    """The result of a run after its last attempt has ended; see `run_locally`."""
    status = exit_status(
        failures,
        preempted=attempt.preempted(),
        signals=context.stop.received,
        output_broken=context.display.broken,
    )
    failures = tuple(failures) if status in (1, 2) else ()
    if status == 0 and context.run.log_dir is None:
        shutil.rmtree(context.directory, ignore_errors=True)
    result = Result(
        status=status,
        tasks={task.name: task.status or 0 for task in attempt.tasks},
        failures=failures,
        directory=context.directory if context.directory.exists() else None,
        attempts=attempt.number + 1,
        restarts=restarts,
        hint=_hint(context, failures),
        goodput=goodput.line(
            {t: d.until(goodput.now(), goodput.OTHER) for t, d in divisions(attempt.tasks).items()}
        ),
        shown=bool(failures) and context.display.has_shown(failures[0].detail),
    )
    outcomes = {task: call.loaded(data) for task, data in attempt.results().items()}
    return result, outcomes


def _hint(context: AttemptContext, failures: Sequence[Failure]) -> str:
    """One more line for the user; "" for none."""
    job = context.run
    if context.spawner.namespaces and (found := network_hint(failures)):
        return found
    if job.payload is not None or job.options.max_restarts > 0:
        return ""
    return restart_hint(failures, has_backups=BACKUP_DIR in context.env)


def make_context(
    job: LocalRun, environ: Mapping[str, str], stop: Signals, stack: contextlib.ExitStack
) -> AttemptContext:
    """Creates the context of all attempts: their folder, network, environment and fork server."""
    terminal = is_watched(job.stdout)
    live = task_name(*job.tasks[0]) if (terminal if job.live is None else job.live) else None
    display = Display(job.stdout, live)
    stack.callback(display.close)
    directory = make_run_directory(job.log_dir)
    network, note = choose_network(job.options.isolate, starts_grpc(job.tasks, environ))
    namespaces: tuple[int, ...] = ()
    proxies: dict[str, str] = {}
    if network is not None:
        stack.callback(network.close)
        namespaces = network.namespaces
        proxies = stack.enter_context(Gateway(network.listeners, environ)).environment
    spawner = stack.enter_context(Spawner(namespaces))
    spawner.tell_reaper(folder=job.scratch)
    # a notebook's run, whose kernel may be killed
    if job.log_dir is None and job.payload is not None:
        spawner.tell_reaper(folder=str(directory))
    outlives = ""
    if job.options.max_restarts > 0:
        outlives = stack.enter_context(state_folder(lambda f: spawner.tell_reaper(folder=f)))
    env = task_environment(environ, terminal)
    if network is not None or note or job.options.isolate == "off":
        env[ISOLATED] = str(int(network is not None))
    several = len(job.tasks) > 1 or job.options.max_restarts > 0
    # A script that tfmw does not initialize may set variables that TensorFlow reads at its import.
    useful = several and env.get("TFMW_NO_INIT") != "1"
    if job.options.standby == "on" or (job.options.standby == "auto" and useful):
        # Tasks get their run's id and proxy when they are forked, so that the next run can use the
        # same fork server.
        shared = {name: value for name, value in env.items() if name != RUN_ID}
        spawner.fork_from_now_on(job.command, shared, keep=job.payload is not None)
    if note and (job.payload is None or note not in _printed_notes):
        _printed_notes.add(note)  # a notebook may launch from each cell
        say(f"tfmw: {note}")
    status = RunStatus(directory, job.command)
    stack.enter_context(published(status))
    return AttemptContext(
        run=job,
        directory=directory,
        status=status,
        env=env | proxies,
        spawner=spawner,
        display=display,
        live=live,
        stop=stop,
        state_folder=outlives,
    )


@dataclasses.dataclass(eq=False)
class _LocalAttempts:
    """The attempts of a run on this machine: the backend of its `Orchestrator`."""

    context: AttemptContext
    policy: RestartPolicy
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.last: Attempt | None = None
        self._tasks = self.context.run.tasks
        self._before: dict[str, Division] = {}

    def begin(self, due: bool, now: float) -> Attempt | None:
        stop, last = self.context.stop.received, self.last
        if last is not None and (stop or self.context.display.broken):
            raise RunOver
        if not due:
            self.sleep(LOOK_S)
            return None
        self.context.spawner.wait(stop, self.context.run.options.start_timeout_s or float("inf"))
        number = 0 if last is None else last.number + 1
        self.last = Attempt(self.context, self._tasks, number, self.policy, before=self._before)
        self.last.start()
        return self.last

    def is_over(self, attempt: Attempt, now: float) -> bool:
        return attempt.poll(self.context.run.options.monitor_interval_s)

    def outcome(self, attempt: Attempt, now: float) -> AttemptOutcome:
        stop, most = self.context.stop.received, self.context.run.options.max_restarts
        # No grace period: tasks that have lost a peer cannot shut down in order, and files on disk
        # are complete at any moment.
        restarting = not stop and self.policy.restarts < most
        attempt.end(0.0 if restarting and attempt.failures() else None)
        self._before = {t: d.before_a_restart() for t, d in divisions(attempt.tasks).items()}
        return attempt.outcome()

    def judged(self, outcome: AttemptOutcome, decision: Decision) -> None:
        self._tasks = [t for t in self._tasks if t[0] != "worker" or t[1] < decision.workers]
        if decision.restart and self.last is not None:
            self.last.results()  # closes their files: those of the next attempt count

    def notify(self, text: str) -> None:
        if not self.context.display.broken:
            self.context.display.line(f"tfmw: {text}")

    def close(self) -> None:
        """Ends the tasks of the last attempt, after an error too."""
        if self.last is not None:
            self.last.end()
