"""Slurm's commands without Slurm: `slurm_commands.py FOLDER sbatch --parsable job.sbatch`.

`tests.helpers.fake_slurm` puts this program on PATH. Nodes are names, tasks are processes of this
machine, and a file in FOLDER has the queue. There is no daemon: a command that frees or returns a
node starts the waiting jobs. Options are those that tfmw and its tests use, as in sbatch(1) and so
on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
CPUS = 4  # of each node
KILL_WAIT_S = 5.0
MARK = f"FAKE_SLURM={FOLDER}"  # in the environment of each process of a job
_DIES_WITH_ITS_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


@contextlib.contextmanager
def queue() -> Iterator[dict[str, Any]]:
    """The nodes and the jobs, for one process at a time."""
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads((FOLDER / "queue.json").read_text())
        yield state
        start_jobs(state)
        (FOLDER / "queue.json").write_text(json.dumps(state))


def start_jobs(state: dict[str, Any]) -> None:
    """Starts the jobs that wait, in their order, as far as there are nodes."""
    for number, job in state["jobs"].items():
        if job["state"] != "PENDING":
            continue
        free = {n: CPUS - used(state, n) for n, s in state["nodes"].items() if s == "IDLE"}
        least, most = job["nodes"]
        each = -(-job["tasks"] // least) if job["tasks"] else 1
        wanted = CPUS if job["exclusive"] else each
        found = [node for node, cpus in free.items() if cpus >= wanted][:most]
        if len(found) < least:
            return
        job.update(state="RUNNING", on=found, each=wanted, exit=0)
        subprocess.Popen(
            [sys.executable, "-I", __file__, str(FOLDER), "_batch", number],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(FOLDER / "batch.log", "ab"),  # noqa: SIM115
            env=without_job(),
        )


def used(state: dict[str, Any], node: str) -> int:
    """The CPUs of a node that jobs have."""
    running = (job for job in state["jobs"].values() if job["state"] == "RUNNING")
    return sum(job["each"] for job in running if node in job["on"])


def without_job() -> dict[str, str]:
    """The environment without variables of a job, in which this command may be running."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FAKE_SLURM"))}


def parsed(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(options, the rest of the command line)."""
    options = {}
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        if name in ("nodes", "partition", "format", "states", "user") and not value:
            value = words.pop(0)
        options[name] = value
    return options, words


def fail(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(1)


# ---- Commands -----------------------------------------------------------------------------------


def sbatch(words: list[str]) -> None:
    given, (script, *arguments) = parsed(words)
    lines = re.findall(r"^#SBATCH (.*)$", Path(script).read_text(), re.MULTILINE)
    options = {**parsed(lines)[0], **given}
    if options.get("partition", "all") != "all":
        fail("sbatch: error: invalid partition specified: " + options["partition"])
    tasks = int(options.get("ntasks", 0))
    first, _, last = options.get("nodes", "1").partition("-")
    with queue() as state:
        number = str(len(state["jobs"]) + 1)
        state["jobs"][number] = {
            "state": "PENDING",
            "nodes": [int(first), int(last or first)],
            "tasks": tasks,
            "exclusive": "exclusive" in options,
            "stays": "no-kill" in options,
            "restarts": 0,
            "script": Path(script).read_text(),
            "arguments": arguments,
            "output": options["output"],
            "environ": without_job(),
            "folder": os.getcwd(),
        }
    print(number)


def batch(number: str) -> None:
    """Runs the script of a job on its first node, and ends what it leaves."""
    with queue() as state:
        job = state["jobs"][number]
    variables = {
        "FAKE_SLURM": str(FOLDER),
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": ",".join(job["on"]),
        "SLURM_JOB_NUM_NODES": str(len(job["on"])),
        "SLURM_JOB_PARTITION": "all",
        "SLURM_NTASKS": str(job["tasks"] or len(job["on"])),
        "SLURMD_NODENAME": job["on"][0],
    }
    if job["restarts"]:
        variables["SLURM_RESTART_COUNT"] = str(job["restarts"])
    script = FOLDER / f"job_{number}.sh"
    script.write_text(job["script"])
    with open(job["output"], "ab") as output:
        shell = subprocess.Popen(
            ["/bin/bash", str(script), *job["arguments"]],
            cwd=job["folder"],
            env={**job["environ"], **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    (FOLDER / f"shell_{number}").write_text(str(shell.pid))
    status = shell.wait()
    kill_job(number)
    with queue() as state:
        job = state["jobs"][number]
        if job["state"] == "RUNNING" and job["restarts"] == int(
            variables.get("SLURM_RESTART_COUNT", 0)
        ):
            job.update(state="COMPLETED" if status == 0 else "FAILED", exit=max(status, 0))


def srun(words: list[str]) -> int:
    """Runs a step of the job in whose batch script this is."""
    options, command = parsed(words)
    count = int(options["ntasks"])
    with queue() as state:
        up = [n for n in state["jobs"][os.environ["SLURM_JOB_ID"]]["on"] if reachable(state, n)]
    nodes = up[: int(options.get("nodes", len(up)))]
    places = sorted(place % len(nodes) for place in range(count))
    per_node = ",".join(str(places.count(i)) for i in range(len(nodes)))
    tasks = []
    for rank, place in enumerate(places):
        variables = {
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(place),
            "SLURM_LOCALID": str(rank - places.index(place)),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": ",".join(nodes),
            "SLURM_STEP_TASKS_PER_NODE": per_node,
            "SLURMD_NODENAME": nodes[place],
        }
        with open(options["output"].replace("%t", str(rank)), "ab") as log:
            task = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL),
            )
        tasks.append(task)

    def end(*_: object) -> None:
        for task in tasks:
            task.terminate()

    signal.signal(signal.SIGTERM, end)
    return max(abs(task.wait()) for task in tasks)


def reachable(state: dict[str, Any], node: str) -> bool:
    return state["nodes"][node] != "DOWN"


def scontrol(words: list[str]) -> None:
    _, (verb, *rest) = parsed(words)
    if verb == "update":
        node, new = (dict(w.split("=") for w in rest)[k] for k in ("NodeName", "State"))
        lost = new == "DOWN"
        with queue() as state:
            state["nodes"][node] = "DOWN" if lost else "DRAIN" if new == "DRAIN" else "IDLE"
            jobs = [n for n, job in state["jobs"].items() if lost and node in job.get("on", ())]
            gone = [n for n in jobs if state["jobs"][n]["state"] == "RUNNING"]
            gone = [n for n in gone if not state["jobs"][n]["stays"]]
        for number in gone:
            requeue(number)
    elif verb == "requeue":
        # It may be a process of the job, which is about to be killed.
        command = [sys.executable, "-I", __file__, str(FOLDER), "_requeue", rest[0]]
        subprocess.run(command, env=without_job(), start_new_session=True, check=True)
    else:
        with queue() as state:
            job = state["jobs"].get(rest[-1])
        if job is None:
            fail("slurm_load_jobs error: Invalid job id specified")
        print(f"JobId={rest[-1]} JobState={job['state']} ExitCode={job.get('exit', 0)}:0")


def requeue(number: str) -> None:
    with queue() as state:
        job = state["jobs"][number]
        job.update(state="REQUEUED", restarts=job["restarts"] + 1)
    kill_job(number)
    with queue() as state:
        state["jobs"][number].update(state="PENDING", on=[])


def scancel(words: list[str]) -> None:
    options, numbers = parsed(words)
    if "batch" in options:
        shell = int((FOLDER / f"shell_{numbers[0]}").read_text())
        os.kill(shell, getattr(signal, "SIG" + options["signal"]))
        return
    with queue() as state:
        living = [n for n, j in state["jobs"].items() if j["state"] in ("PENDING", "RUNNING")]
        chosen = [n for n in living if "user" in options or n in numbers]
        for number in chosen:
            state["jobs"][number].update(state="CANCELLED", exit=0)
    for number in chosen:
        kill_job(number, signal.SIGTERM)


def squeue(words: list[str]) -> None:
    options, _ = parsed(words)
    living = ("PENDING", "RUNNING", "REQUEUED")
    with queue() as state:
        for number, job in state["jobs"].items():
            if job["state"] in living and job["state"] in options.get("states", job["state"]):
                shown = options.get("format", "%i").replace("%i", number)
                print(shown.replace("%T", job["state"]))


def sinfo(words: list[str]) -> None:
    options, _ = parsed(words)
    with queue() as state:
        for node, now in state["nodes"].items():
            if node not in options.get("nodes", node).split(","):
                continue
            word = now.lower() if now != "IDLE" or not used(state, node) else "mix"
            if word.upper() in options.get("states", word.upper()):
                print(options["format"].replace("%N", node).replace("%t", word))


# ---- Processes ----------------------------------------------------------------------------------


def processes(*variables: str) -> list[int]:
    """The processes of jobs that have these variables."""
    wanted = {each.encode() for each in (MARK, *variables)}
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(environ.read_bytes().split(b"\0")):
                found.append(int(environ.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_job(number: str, first: signal.Signals = signal.SIGKILL) -> None:
    """Ends all processes of a job: asks them, if that is the first signal, and kills them."""
    own = f"SLURM_JOB_ID={number}"
    send(first, own)
    deadline = time.monotonic() + KILL_WAIT_S
    while processes(own) and time.monotonic() < deadline:
        time.sleep(0.02)
    while processes(own):
        send(signal.SIGKILL, own)
        time.sleep(0.02)


def send(number: signal.Signals, *variables: str) -> None:
    for pid in processes(*variables):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


COMMANDS = {
    "sbatch": sbatch,
    "srun": srun,
    "scontrol": scontrol,
    "scancel": scancel,
    "squeue": squeue,
    "sinfo": sinfo,
    "_batch": lambda words: batch(words[0]),
    "_requeue": lambda words: requeue(words[0]),
    "_lose": lambda words: send(signal.SIGKILL, f"SLURMD_NODENAME={words[0]}"),
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[2]](sys.argv[3:]))
