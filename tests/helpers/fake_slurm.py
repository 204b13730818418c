"""Slurm's commands over processes of this machine, where Slurm itself says nothing more.

    with FakeSlurm(folder) as slurm:
        slurm.run("squeue", "--noheader").stdout

As `tests.helpers.slurm.OneMachine`, which runs the real daemons. See programs/slurm_commands.py.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from tests.helpers.cluster import PROGRAMS
from tests.helpers.slurm import NODES, OneMachine, environment

COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")


class FakeSlurm(OneMachine):
    """Two nodes, and the commands of Slurm, which a process with `env` finds first."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.nodes = NODES
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        self._script = (sys.executable, "-I", str(PROGRAMS / "slurm_commands.py"), str(folder))
        for name in COMMANDS:
            (bin_folder / name).write_text(
                f'#!/bin/sh\nexec {shlex.join([*self._script, name])} "$@"\n'
            )
            (bin_folder / name).chmod(0o755)
        self.env = environment()
        self.env["PATH"] = f"{bin_folder}{os.pathsep}{self.env['PATH']}"
        state = {"nodes": dict.fromkeys(NODES, "IDLE"), "jobs": {}}
        (folder / "queue.json").write_text(json.dumps(state))

    def __enter__(self) -> FakeSlurm:
        return self

    def lose(self, node: str) -> None:
        self.run(*self._script, "_lose", node)
        self._update(node, "DOWN")

    def bring_back(self, node: str) -> None:
        self._update(node, "RESUME")

    def stop(self) -> None:
        self.run("scancel", "--full", "--user", "any")
