"""Jobs on Slurm: `tfmw.submit(train, workers=8, on="slurm")`.

`sbatch` queues a batch script, which runs the controller; that starts each attempt's tasks by one
`srun`. The call and the job's files are in a folder that all nodes share. Slurm places, limits and
accounts: after a node's failure it queues the job again, which then goes on from its newest backup.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tfmw.engines import agent
from tfmw.engines.engine import Contact, JobSpec, Place
from tfmw.engines.folder import (
    FolderEngine,
    FolderPlace,
    FolderTasks,
    control,
    write_contact,
    write_job,
)
from tfmw.errors import PREEMPTED, UsageError
from tfmw.launcher.failure import describe_status, tail

SCRIPT = """#!/bin/bash
#SBATCH --job-name=tfmw
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{notice_s}
{setup}
# The signal goes to this shell; the controller has all tasks save their state.
trap 'kill -TERM $controller' TERM
{python} -m tfmw.engines.slurm control "$TFMW_JOB_FOLDER" &
controller=$!
wait $controller; status=$?
# Interrupted by the signal: the controller is still running.
if kill -0 $controller 2>/dev/null; then wait $controller; status=$?; fi
if [[ $status -eq {preempted} ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
"""

# scontrol(1), JOB STATE CODES -> Job.status; of a job whose controller has not said how it ended.
_STATES = {
    "PENDING": "queued",
    "CONFIGURING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_HOLD": "queued",
    "SUSPENDED": "queued",
    "RUNNING": "running",
    "COMPLETING": "running",
    "CANCELLED": "cancelled",
}
_TIMEOUT_S = 60.0  # of a command of Slurm
_END_S = 20.0  # in which the tasks of an attempt end


@dataclasses.dataclass(frozen=True)
class Slurm(FolderEngine):
    """A Slurm cluster, whose commands are on PATH.

    Args:
        max_restarts: how often `tfmw.fit` starts all tasks again from the newest backup.
        directory: in which each job has its folder, shared by all nodes; by default `.tfmw` in the
            home directory.
        partition: as in sbatch(1), and so are the next ones.
        time: such as "02:00:00".
        account: to which it is charged.
        nodes: number of nodes; by default as Slurm decides.
        cpus_per_task: of each task.
        gpus_per_task: of each task; Slurm sets CUDA_VISIBLE_DEVICES.
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
    gpus_per_task: int = 0
    options: tuple[str, ...] = ()
    setup: str = ""
    python: str = sys.executable
    notice_s: int = 120

    name = "slurm"

    def submit(self, spec: JobSpec, payload: bytes) -> tuple[str, Place]:
        folder = write_job(self.root, spec, payload)
        script = SCRIPT.format(
            notice_s=self.notice_s,
            setup=self.setup,
            python=shlex.quote(self.python),
            preempted=PREEMPTED,
        )
        (folder / "job.sbatch").write_text(script)
        try:
            number = _command(
                "sbatch",
                "--parsable",
                *self._options(spec.workers),
                f"--output={folder / 'controller.log'}",
                str(folder / "job.sbatch"),
                env={"TFMW_JOB_FOLDER": str(folder)},
            ).partition(";")[0]
        except UsageError:
            shutil.rmtree(folder)
            raise
        (self.root / number).symlink_to(folder.name)
        return number, self.attach(number)

    def attach(self, number: str) -> Place:
        return _SlurmPlace(self.folder(number), number)

    def numbers(self) -> list[str]:
        return [n for n in super().numbers() if (self.root / n).is_symlink()]

    def where(self, number: str) -> str:
        return f"Slurm job {number}, its files in {self.root / number}"

    def _options(self, workers: tuple[int, int]) -> list[str]:
        least, most = workers
        if least != most and self.nodes is None:
            # One task on each node: Slurm then may grant fewer of them.
            size = [f"--nodes={least}-{most}", "--ntasks-per-node=1", "--no-kill"]
        else:
            size = [f"--ntasks={most}", *([f"--nodes={self.nodes}"] if self.nodes else [])]
        size.append(f"--cpus-per-task={self.cpus_per_task}")
        if self.gpus_per_task:
            size.append(f"--gpus-per-task={self.gpus_per_task}")
        named = {"partition": self.partition, "time": self.time, "account": self.account}
        return [*size, *(f"--{k}={v}" for k, v in named.items() if v), *self.options]


class _SlurmPlace(FolderPlace):
    """The place of a job of Slurm.

    Args:
        folder: of the job.
        number: of the job.
    """

    def __init__(self, folder: Path, number: str) -> None:
        super().__init__(folder, lambda: job_state(number), lambda: self._end())
        self._number = number

    def cancel(self) -> None:
        """See `Place.cancel`; a job that is still queued has no controller."""
        super().cancel()
        if job_state(self._number) == "queued":
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(UsageError):
            _command("scancel", self._number)


def job_state(number: str) -> str:
    """`Job.status` of a job as far as Slurm knows; "lost" for one that it has forgotten."""
    # "JobId=3 ... JobState=COMPLETED Reason=None ...", for some minutes after its end
    try:
        shown = _command("scontrol", "--oneliner", "show", "job", number)
    except UsageError:
        return "lost"
    _, _, rest = shown.partition("JobState=")
    return _STATES.get(rest.split()[0] if rest else "", "lost")


def _command(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints.

    Raises:
        UsageError: it is not installed, or fails.
    """
    # Options for other commands, of a job in which this one may be running.
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
    if done.returncode != 0:
        why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise UsageError(f"{command[0]} failed: {why}; the command was: {shlex.join(command)}")
    return done.stdout.strip()


class SlurmTasks(FolderTasks):
    """One `srun` for each attempt, within the job of the controller.

    Args:
        folder: of the job.
    """

    requeues = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._srun: subprocess.Popen[bytes] | None = None
        self._count = 0

    def hosts(self) -> tuple[str, ...]:
        node = os.environ.get("SLURMD_NODENAME", "")
        return tuple(dict.fromkeys(filter(None, (node, socket.gethostname()))))

    def available(self, least: int, most: int) -> int:
        if least == most:
            return most
        # "h1,h2": the nodes of the job that Slurm can still reach.
        up = _command("sinfo", "--noheader", "--Node", "--format=%N %t", "--nodes", _nodes())
        usable = {n for n, state in map(str.split, up.splitlines()) if state.isalpha()}
        count = min(most, len(usable))
        return count if count >= least else 0

    def start(self, count: int, contact: Contact) -> None:
        write_contact(self.folder, contact)
        self._count = count
        log = self.folder / "task_%t.log"
        with open(self.folder / "srun.log", "ab") as errors:
            self._srun = subprocess.Popen(
                [
                    "srun",
                    f"--ntasks={count}",
                    "--kill-on-bad-exit=0",
                    "--no-kill",
                    f"--output={log}",
                    sys.executable,
                    "-m",
                    "tfmw.engines.slurm",
                    "task",
                    str(self.folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def lost(self) -> dict[int, str]:
        if self._srun is None or self._srun.poll() is None:
            return {}
        how = describe_status(self._srun.returncode)
        why = " ".join((f"srun has ended: {how}", *tail(self.folder / "srun.log", 1)))
        return dict.fromkeys(range(self._count), why)

    def end(self) -> None:
        if self._srun is None:
            return
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            try:
                self._srun.send_signal(number)
                self._srun.wait(_END_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self._srun = None


def _nodes() -> str:
    return os.environ["SLURM_JOB_NODELIST"]


def main(role: str, folder: Path) -> int:
    """In the batch script: runs the controller. In a step: one of the tasks."""
    if role == "control":
        state = control(folder, SlurmTasks)
        return {"done": 0, "queued": PREEMPTED}.get(state, 1)
    agent.main(folder, int(os.environ["SLURM_PROCID"]), os.environ.get("SLURMD_NODENAME"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
