"""Jobs of this machine that outlive the process that submits them: `tfmw.submit(..., on="local")`.

This is the shortest engine: read it as an example.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tfmw.cluster.signals import Signals
from tfmw.launcher.engines import folder as jobs
from tfmw.launcher.engines.engine import Contact, JobSpec, Layout
from tfmw.launcher.environment import visible_devices


class LocalJob(jobs.FolderJob):
    """A job whose controller is a process of this machine."""

    def _pid(self) -> int:
        """The process id of its controller; 0 if that has ended."""
        pid = int((self.folder / "pid").read_text())
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return 0
        # A process that has just been started has no command line for a moment.
        controls = not command or os.fsencode(self.folder) in command.split(b"\0")
        return pid if controls and state not in "ZX" else 0

    def _state(self) -> str:
        return "running" if self._pid() else "lost"

    def _kill(self) -> None:
        if pid := self._pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Local(jobs.FolderEngine):
    """Processes of this machine.

    Args:
        max_restarts: how often `tfmw.fit` restarts all tasks from the newest backup.
        directory: parent of each submitted job's folder; by default `.tfmw` in the home directory.
    """

    name = "local"
    _job = LocalJob

    def _start(self, folder: Path, spec: JobSpec, undo: contextlib.ExitStack) -> str:
        with open(folder / "controller.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tfmw.launcher.engines.local_jobs", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        undo.callback(process.kill)
        threading.Thread(target=process.wait, daemon=True).start()
        (folder / "pid").write_text(str(process.pid))
        return folder.name


class LocalTasks(jobs.FolderTasks):
    """Children of the controller."""

    def hosts(self) -> tuple[str, ...]:
        return ("127.0.0.1",)

    def start(self, layout: Layout, contact: Contact) -> None:
        jobs.write_contact(self.folder, contact)
        training = [rank for rank, (kind, _) in enumerate(layout) if kind == "worker"]
        for rank in range(len(layout)):
            share = training.index(rank) if rank in training else None
            agent = "tfmw.launcher.engines.agent"
            command = [sys.executable, "-m", agent, str(self.folder), str(rank)]
            env = os.environ | visible_devices(share, len(training), os.environ)
            self.run([rank], command, f"task_{rank}.log", env)


if __name__ == "__main__":
    with Signals() as stop:
        jobs.control(Path(sys.argv[1]), LocalTasks, stop)
