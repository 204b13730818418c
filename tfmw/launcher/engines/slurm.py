"""Jobs on Slurm: `tfmw.submit(train, workers=8, on="slurm")`.

`sbatch` queues a batch script, which runs the controller. The controller starts each attempt's
tasks by one `srun`. The call and the job's files are in a folder that all nodes share. Slurm
places, limits and accounts jobs. After a node's failure it queues the job again, which then resumes
from its newest backup.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tfmw.cluster.signals import Signals
from tfmw.errors import PREEMPTED, UsageError
from tfmw.launcher.engines import agent
from tfmw.launcher.engines import folder as jobs
from tfmw.launcher.engines.engine import Contact, JobSpec, Layout

SCRIPT = """#!/bin/bash
#SBATCH --job-name=tfmw
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{notice_s}
{setup}
# The signal goes to this shell; the controller has all tasks save their state.
trap 'kill -TERM $controller' TERM
{python} -m tfmw.launcher.engines.slurm control "$TFMW_JOB_FOLDER" &
controller=$!
wait $controller; status=$?
# Interrupted by the signal: the controller is still running.
if kill -0 $controller 2>/dev/null; then wait $controller; status=$?; fi
if [[ $status -eq {preempted} ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
"""

# State codes of scontrol(1) -> Job.status, for a job whose controller has not written its last
# state.
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
_STATES = {
    **dict.fromkeys(_QUEUED, "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING"), "running"),
    "CANCELLED": "cancelled",
}
# error text, slurm_strerror(3), for a number that Slurm does not have
_UNKNOWN_JOB = "Invalid job id"

# State codes, sinfo(1), of nodes that run tasks; a node whose code has a mark, such as "idle*",
# does not respond.
_USABLE = {"alloc", "comp", "drng", "idle", "maint", "mix", "plnd", "resv"}
_LOOK_EVERY_S = 2.0  # interval between two checks of the job's nodes
_SHORT_S = 30.0  # time after which a job with too few remaining nodes is queued again
_GROW_EVERY_S = 30.0  # interval between two requests for more nodes
_GREW_FROM = "grew_from"  # file with the number of tasks that the job had when it requested more
_TIMEOUT_S = 60.0  # timeout of a command of Slurm


class SlurmJob(jobs.FolderJob):
    """A job of Slurm, whose batch script runs its controller."""

    def _state(self) -> str:
        try:
            shown = _command("scontrol", "--oneliner", "show", "job", self._number)
        except UsageError as error:
            return "lost" if _UNKNOWN_JOB in str(error) else ""
        # Format: "JobId=3 ... JobState=COMPLETED Reason=None ...", for some minutes after its end.
        name = shown.partition("JobState=")[2].partition(" ")[0]
        found = _STATES.get(name, "lost") if name else ""
        if found == "lost":
            self.why = f"Slurm ended job {self._number}: {name}"
        return found

    def _kill(self) -> None:
        _cancel(self._number)


@dataclasses.dataclass(frozen=True)
class Slurm(jobs.FolderEngine):
    """A Slurm cluster, whose commands are on PATH.

    Args:
        max_restarts: how often `tfmw.fit` restarts all tasks from the newest backup.
        directory: parent of each job's folder, shared by all nodes; by default `.tfmw` in the home
            directory.
        partition: option of sbatch(1), like the following ones.
        time: time limit, such as "02:00:00".
        account: account that is charged.
        nodes: number of nodes; by default as Slurm decides.
        cpus_per_task: CPUs of each task.
        gpus_per_worker: GPUs of each worker; Slurm sets CUDA_VISIBLE_DEVICES.
        options: further options of sbatch, such as ("--qos=high", "--exclusive").
        setup: lines of the batch script before the tasks start, such as "module load cuda".
        python: the interpreter on the nodes; by default this process's.
        notice_s: seconds before the time limit at which all tasks save their state, and the job is
            queued again.
    """

    partition: str | None = None
    time: str | None = None
    account: str | None = None
    nodes: int | None = None
    cpus_per_task: int = 1
    gpus_per_worker: int = 0
    options: tuple[str, ...] = ()
    setup: str = ""
    python: str = sys.executable
    notice_s: int = 120

    name = "slurm"
    _job = SlurmJob

    @property
    def leave_s(self) -> float:
        return self.notice_s

    def _start(self, folder: Path, spec: JobSpec, undo: contextlib.ExitStack) -> str:
        script = SCRIPT.format(
            notice_s=self.notice_s,
            setup=self.setup,
            python=shlex.quote(self.python),
            preempted=PREEMPTED,
        )
        (folder / "job.sbatch").write_text(script)
        number = _command(
            "sbatch",
            "--parsable",
            *self._options(spec.tasks),
            f"--output={folder / 'controller.log'}",
            str(folder / "job.sbatch"),
            env={"TFMW_JOB_FOLDER": str(folder)},
        ).partition(";")[0]
        undo.callback(_cancel, number)
        (self.root / number).symlink_to(folder.name)
        return number

    def numbers(self) -> list[str]:
        return [n for n in super().numbers() if (self.root / n).is_symlink()]

    def where(self, number: str) -> str:
        return f"Slurm job {number}, its files in {self.root / number}"

    def _options(self, tasks: tuple[int, int]) -> list[str]:
        least, most = tasks
        if least != most and self.nodes is not None:
            raise UsageError(
                f"received nodes={self.nodes} and a range of {least} to {most} tasks: with a range "
                "each node has one task; drop nodes=, or give one number of workers."
            )
        if least != most:
            # One task on each node. If the number of tasks, or of tasks per node, is given, Slurm
            # grants only the least number of nodes.
            size, gpus = [f"--nodes={least}-{most}", "--no-kill"], "--gpus-per-node"
        else:
            size = [f"--ntasks={most}", *([f"--nodes={self.nodes}"] if self.nodes else [])]
            gpus = "--gpus-per-task"
        size.append(f"--cpus-per-task={self.cpus_per_task}")
        if self.gpus_per_worker:
            size.append(f"{gpus}={self.gpus_per_worker}")
        named = {"partition": self.partition, "time": self.time, "account": self.account}
        return [*size, *(f"--{k}={v}" for k, v in named.items() if v), *self.options]


def _cancel(number: str) -> None:
    with contextlib.suppress(UsageError):
        _command("scancel", number)


def _command(*command: str, env: Mapping[str, str] | None = None) -> str:
    """The output of a command of Slurm.

    Raises:
        UsageError: the command is not installed, or fails.
    """
    # The variables are options of other commands, from a job in which this one may be running.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SBATCH_", "SRUN_"))}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**environ, **(env or {})},
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"on='slurm' needs the command {command[0]}, which is not on PATH: call tfmw on a "
            "machine from which jobs can be submitted."
        ) from error
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{command[0]} did not return within {_TIMEOUT_S:g} s; the command was: "
            f"{shlex.join(command)}"
        ) from None
    if done.returncode != 0:
        why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise UsageError(f"{command[0]} failed: {why}; the command was: {shlex.join(command)}")
    return done.stdout.strip()


class SlurmTasks(jobs.FolderTasks):
    """Tasks that one `srun` starts for each attempt, within the job of the controller."""

    requeues = True
    process_name = "srun"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._count = 0
        self._one_on_each_node = False
        self._look_at = 0.0
        self._short_since: float | None = None
        self._grow_at = time.monotonic() + _GROW_EVERY_S

    def hosts(self) -> tuple[str, ...]:
        node = os.environ.get("SLURMD_NODENAME", "")
        return tuple(dict.fromkeys(filter(None, (node, socket.gethostname()))))

    def available(self, least: int, most: int) -> int:
        if least == most and self._count == 0:
            return most
        self._one_on_each_node = least < most
        if time.monotonic() < self._look_at:
            return 0
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        try:
            # The nodes of the job that Slurm can still reach. A silent node stays in the job for
            # minutes (SlurmdTimeout), in which an attempt of all tasks would fail at once.
            nodes = len(_usable("--nodes", os.environ["SLURM_JOB_NODELIST"]))
            whole = nodes >= int(os.environ["SLURM_JOB_NUM_NODES"])
            count = min(most, nodes) if least < most else most if whole else 0
            if count >= least:
                self._short_since = None
                return count
            self._short_since = self._short_since or time.monotonic()
            if time.monotonic() - self._short_since > _SHORT_S:
                _command("scontrol", "requeue", os.environ["SLURM_JOB_ID"])  # ends this process
        except UsageError:  # Slurm's controller does not reply
            pass
        return 0

    def room(self, most: int) -> int:
        """Number of running tasks, plus the idle nodes for which no other job waits."""
        if time.monotonic() < self._grow_at or not self._one_on_each_node:
            return 0
        self._grow_at = time.monotonic() + _GROW_EVERY_S
        had = self.folder / _GREW_FROM
        if had.exists() and int(had.read_text()) >= self._count:
            return 0  # the job was queued again without more nodes: the idle ones are not for it
        partition = os.environ["SLURM_JOB_PARTITION"]
        try:
            if _command("squeue", "--noheader", "--states=PENDING", "--partition", partition):
                return 0
            idle = len(_usable("--partition", partition, "--states=IDLE"))
        except UsageError:  # Slurm's controller does not reply
            return 0
        if idle:
            had.write_text(str(self._count))
        return min(most, self._count + idle)

    def start(self, layout: Layout, contact: Contact) -> None:
        jobs.write_contact(self.folder, contact)
        self._count = count = len(layout)
        command = [
            "srun",
            f"--ntasks={count}",
            *([f"--nodes={count}"] if self._one_on_each_node else []),
            # Slurm holds the resources of the previous step for minutes if one of its nodes is
            # silent.
            *(["--overlap"] if contact.attempt else []),
            "--kill-on-bad-exit=0",
            "--no-kill",
            f"--output={self.folder / 'task_%t.log'}",
            sys.executable,
            "-m",
            "tfmw.launcher.engines.slurm",
            "task",
            str(self.folder),
        ]
        self.run(range(count), command, "srun.log")


def _usable(*which: str) -> set[str]:
    """Names of the nodes on which tasks can run, among those that options of sinfo(1) select."""
    listed = _command("sinfo", "--noheader", "--Node", "--format=%N %t", *which)
    return {name for name, state in map(str.split, listed.splitlines()) if state in _USABLE}


def main(role: str, folder: Path) -> int:
    """Runs the controller in the batch script, or one of the tasks in a step."""
    if role == "control":
        with Signals() as stop:
            state = jobs.control(folder, SlurmTasks, stop)
        return {"done": 0, "queued": PREEMPTED}.get(state, 1)
    agent.main(folder, int(os.environ["SLURM_PROCID"]), os.environ.get("SLURMD_NODENAME"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
