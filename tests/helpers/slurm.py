"""A real Slurm on this machine, for as long as a `with` lasts, beside any other that runs here.

    with OneMachine(folder) as slurm:
        slurm.run("srun", "--ntasks=2", "hostname").stdout

One controller and two nodes, all on loopback. The nodes are called 127.0.0.1 and 127.0.0.2, names
that resolve everywhere, as a real cluster's do. With `Machines` each node has a network of its own.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.helpers.by_hand import free_ports
from tests.helpers.cluster import ONE_THREAD, PYTHONPATH, ROOT
from tests.helpers.network import Machines

INSTALL = "apt-get install slurm-wlm"

# slurm.conf(5). Nothing here is installed, authenticated or accounted: a test's Slurm.
CONF = """
ClusterName=test
SlurmctldHost={host}({controller})
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PluginDir={plugins}
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
MinJobAge=300
KillWait=5
SlurmdTimeout={lost_s}
NodeName={first} NodeHostname={host} NodeAddr={first_address} Port={first_port} CPUs={cpus}
NodeName={second} NodeHostname={host} NodeAddr={second_address} Port={second_port} CPUs={cpus}
PartitionName=all Nodes={first},{second} Default=YES MaxTime=INFINITE State=UP
"""
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 4  # of each node, whatever this machine has (config_overrides)


def environment() -> dict[str, str]:
    """The environment of Slurm's commands, in which no task of another job is running."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TF_CONFIG"))}
    return {**environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH}


class OneMachine:
    """Starts the daemons as children, and ends them.

    Args:
        folder: for configuration, state and logs.
        machines: the nodes; None: both are on loopback.
    """

    def __init__(self, folder: Path, machines: Machines | None = None):
        self._folder = folder
        self._machines = machines
        self.nodes = NODES if machines is None else tuple(machines.addresses)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**environment(), "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> OneMachine:
        ctld_port, first_port, second_port = free_ports(3)
        (library,) = {p.parent for p in Path("/usr/lib").rglob("slurm*/auth_none.so")}
        text = CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=self._folder,
            plugins=library,
            ctld_port=ctld_port,
            controller="127.0.0.1" if self._machines is None else self._machines.gateway,
            lost_s=300 if self._machines is None else 10,
            first=self.nodes[0],
            second=self.nodes[1],
            first_address="127.0.0.1" if self._machines is None else self.nodes[0],
            second_address="127.0.0.1" if self._machines is None else self.nodes[1],
            first_port=first_port,
            second_port=second_port,
            cpus=CPUS,
        )
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "plugstack.conf").touch()
        (self._folder / "state").mkdir()
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._start("slurmctld", "-D", "-i")
            for node in self.nodes:
                (self._folder / f"spool-{node}").mkdir()
                self._start("slurmd", "-D", "-N", node)
            self.wait_until_idle()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, timeout_s: float = 120, **options: Any) -> Any:
        """A client command, such as srun."""
        options = {"capture_output": True, "text": True, "cwd": ROOT, **options}
        env = {**self.env, **options.pop("env", {})}
        return subprocess.run(command, env=env, timeout=timeout_s, check=False, **options)

    def submit(self, *command: str, timeout_s: float = 200, **options: Any) -> int:
        """Submits a batch job and waits for its end: its exit status.

        Args:
            command: options, script and arguments of sbatch(1).
        """
        return self.wait_for_end(self.begin(*command, **options), timeout_s)

    def begin(self, *command: str, **options: Any) -> str:
        """Submits a batch job; returns its number."""
        done = self.run("sbatch", "--parsable", *command, **options)
        assert done.returncode == 0, done.stderr
        return str(done.stdout.strip())

    def wait_for_end(self, number: str, timeout_s: float = 200) -> int:
        """Waits for a job's end, however often it is queued: its exit status."""
        deadline = time.monotonic() + timeout_s
        while True:
            # "JobId=3 ... JobState=COMPLETED Reason=None ... ExitCode=0:0 ..."
            shown = self.run("scontrol", "--oneliner", "show", "job", number).stdout
            job = dict(word.partition("=")[::2] for word in shown.split() if "=" in word)
            if job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return int(job["ExitCode"].partition(":")[0])
            assert time.monotonic() < deadline, f"the job is {job['JobState']}:\n{self.logs()}"
            time.sleep(0.2)

    def lose(self, node: str) -> None:
        """A node dies, and Slurm learns of it."""
        daemon = self._daemons.pop(f"slurmd -D -N {node}")
        daemon.kill()
        daemon.wait()
        self._kill(f"SLURMD_NODENAME={node}")
        self._update(node, "DOWN")

    def bring_back(self, node: str) -> None:
        """A node that was lost starts again."""
        self._start("slurmd", "-D", "-N", node)
        self._update(node, "RESUME")

    def _update(self, node: str, state: str) -> None:
        words = (f"NodeName={node}", f"State={state}", "Reason=test")
        done = self.run("scontrol", "update", *words)
        assert done.returncode == 0, done.stderr

    def logs(self) -> str:
        """Logs of the daemons, for messages."""
        return "\n".join(f"{p.name}:\n{p.read_text()}" for p in self._folder.glob("*.log"))

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        if self._daemons:
            self.run("scancel", "--full", "--user", getpass.getuser())
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = {}
        self._kill()  # ends steps that remain of an unplugged node

    def _kill(self, *variables: str) -> None:
        """Kills the processes of this Slurm that have these variables."""
        wanted = {each.encode() for each in (f"SLURM_CONF={self.env['SLURM_CONF']}", *variables)}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted <= set(environ.read_bytes().split(b"\0")):
                    os.kill(int(environ.parent.name), signal.SIGKILL)

    def _start(self, *command: str) -> None:
        program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, f"{command[0]} is not installed: {INSTALL}"
        if self._machines is not None and command[0] == "slurmd":
            within = self._machines.command(self.nodes.index(command[-1]))
        else:
            within = []
        log = (self._folder / f"{'-'.join(command)}.out.log").open("ab")
        with log:
            self._daemons[" ".join(command)] = subprocess.Popen(
                [*within, program, *command[1:]], env=self.env, stdout=log, stderr=log
            )

    def wait_until_idle(self, timeout_s: float = 60) -> None:
        """Waits until both nodes are there, and have no job."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
            if states == ["idle", "idle"]:
                return
            assert all(d.poll() is None for d in self._daemons.values()), self.logs()
            assert time.monotonic() < deadline, f"the nodes are {states}:\n{self.logs()}"
            time.sleep(0.1)
