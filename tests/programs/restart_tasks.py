"""Tasks that do, attempt by attempt, what their flags say, without TensorFlow.

    restart_tasks.py "worker 1@0=step:3 kill" "worker 0@0=serve" "*@1=step:4"

`<task>@<attempt>=` comes before `*@<attempt>=`; a task without either is done at once. Each writes
what it is to TFMW_RESULT/<task>@<attempt>.json first.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from tfmw.errors import PREEMPTED
from tfmw.observe.progress import blocking_call, report_progress

TASK = os.environ["TFMW_TASK"]
ATTEMPT = os.environ["TFMW_ATTEMPT"]
RESULT = Path(os.environ["TFMW_RESULT"])


def step(number: str) -> None:
    report_progress(int(number))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError(f"bad batch in attempt {ATTEMPT}")


def leave() -> None:
    sys.exit(PREEMPTED)


def wait() -> None:
    print(f"ready {os.getpid()}", flush=True)
    signal.pause()


def stubborn(name: str = "") -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name:
        open_gate(name)
    while True:
        wait()


def gate(name: str) -> None:
    """Waits until another task, or the test, writes to the gate."""
    path = RESULT / name
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path)
    path.open().read()


def open_gate(name: str) -> None:
    """Opens a gate for all tasks that wait at it, or will wait."""
    path = RESULT / name
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path)
    path.open("w").close()


def stuck_in_a_function_of_its_own() -> None:
    threading.Event().wait()


def steps_until_lag() -> None:
    """Goes on for two seconds, then lets the task go that waits at the gate."""
    for step in range(1, 101):
        report_progress(step)
        threading.Event().wait(0.02)
    open_gate("lag")


def long_call(seconds: str) -> None:
    """Blocks for so long, as an export may, then lets the waiting task continue."""
    with blocking_call("export"):
        threading.Event().wait(float(seconds))
    open_gate("over")


def serve(name: str = "") -> None:
    """Leaves together with the others once one of them is told to, as tfmw.fit does."""

    def told(number: int, frame: object) -> None:
        for other in RESULT.glob("*.pid"):
            if other.stem != TASK:
                os.kill(int(other.read_text()), signal.SIGUSR1)
        sys.exit(PREEMPTED)

    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(PREEMPTED))
    signal.signal(signal.SIGTERM, told)
    temporary = RESULT / f".{TASK}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(RESULT / f"{TASK}.pid")
    if name:
        open_gate(name)
    while True:
        wait()


def serve_alone() -> NoReturn:
    """Leaves once it is told to, and tells nobody."""
    signal.signal(signal.SIGTERM, lambda number, frame: leave())
    while True:
        wait()


def tell(task: str) -> None:
    """Sends SIGTERM to another task that serves."""
    (RESULT / f"{TASK}.pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(PREEMPTED))
    os.kill(int((RESULT / f"{task.replace('_', ' ')}.pid").read_text()), signal.SIGTERM)


def note() -> None:
    facts = {
        "config": json.loads(os.environ.get("TF_CONFIG", "null")),
        "environ": dict(os.environ),
        "max_restarts": os.environ["TFMW_MAX_RESTARTS"],
        "log": os.environ["TFMW_ERROR_FILE"],
        "pid": os.getpid(),
        "tensorflow": "tensorflow" in sys.modules,
        "argv": sys.argv[1:],
    }
    file = RESULT / f"{TASK}@{ATTEMPT}.json"
    while file.exists():  # the task has been started again by itself
        file = file.with_suffix(".again.json")
    file.write_text(json.dumps(facts))


if __name__ == "__main__":
    note()
    actions = dict(flag.split("=", 1) for flag in sys.argv[1:] if "=" in flag)
    own = actions.get(f"{TASK}@{ATTEMPT}", actions.get(f"*@{ATTEMPT}", ""))
    if "." in Path(os.environ["TFMW_ERROR_FILE"]).parent.name:  # worker_1.1: started again alone
        own = actions.get(f"{TASK}@again", "")
    for action in own.split():
        name, _, argument = action.partition(":")
        globals()[name](*[argument] if argument else [])
