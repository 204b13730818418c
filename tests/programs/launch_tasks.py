"""Tasks that do what their flag says, without TensorFlow: `launch_tasks.py "worker 1=fail"`.

A task without a flag writes its result and is done.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tests.programs import _result
from tfmw.errors import UsageError
from tfmw.observe.recorded_errors import record_error

PAUSE = [sys.executable, "-c", "import signal; signal.pause()"]
CHILD = [sys.executable, "-c", "import signal; print('child', flush=True); signal.pause()"]


class UnavailableError(Exception):
    """An error named as the one that TensorFlow raises when a peer is lost."""


def ready() -> None:
    """Signals the test that this task has reached its point."""
    print(f"ready {os.getpid()}", flush=True)


def await_error_of(task: str) -> None:
    """Returns once the other task's error is recorded."""
    path = Path(os.environ["TFMW_ERROR_FILE"]).parent.parent / task / "error.json"
    while not path.exists():
        os.sched_yield()


def await_mark(name: str) -> None:
    """Returns once the test has made a file of this name."""
    while not (Path(os.environ["TFMW_RESULT"]) / name).exists():
        os.sched_yield()


def wait() -> None:
    ready()
    signal.pause()


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    while True:
        signal.pause()


def parent() -> None:
    # Each prints once the system shows its environment, by which it is found.
    subprocess.Popen(CHILD)
    subprocess.Popen(CHILD, start_new_session=True)
    wait()


def leave_children() -> None:
    for own_session in (False, True):
        subprocess.Popen(
            PAUSE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=own_session,
        )


def bar() -> None:
    sys.stdout.write("Epoch 1\n" + "".join(f"\b\b\b\r {i}/9 " for i in range(1, 10)) + "\nand\r")


def fail_in_a_layer() -> None:
    raise ValueError(
        "Exception encountered when calling Dense.call().\n\n"
        "expected 3 features,\nreceived 4\n\nArguments received by Dense.call():\n  • x=..."
    )


def fail() -> None:
    raise ValueError("bad batch")


def make_folder() -> None:
    os.mkdir(Path(os.environ["TFMW_RESULT"]) / "folder")


def fail_elsewhere() -> None:
    os.chdir("/")
    fail()


def fail_last() -> None:
    """Fails after worker 0 has left with the echo of it."""
    await_error_of("worker_0")
    fail()


def fail_and_hang() -> None:
    atexit.register(signal.pause)
    fail()


def echo_last() -> None:
    """The error of a task whose peer has failed; usually it is the first to have left."""
    await_error_of("worker_1")
    echo()


def echo() -> None:
    try:
        raise UnavailableError("worker 1 has gone")
    except UnavailableError as error:
        raise RuntimeError("training failed") from error


def usage() -> None:
    raise UsageError("the model is not compiled; call compile first.")


def usage_too() -> None:
    """The same, once worker 1 has failed with it."""
    await_error_of("worker_1")
    usage()


def catch() -> None:
    """Its error ends the other task, and not this one."""
    record_error(ValueError("bad batch"))


def leave_3() -> None:
    sys.exit(3)


def leave_words() -> None:
    sys.exit("no data here")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_last() -> None:
    """Dies after worker 0 has left with the echo of it."""
    await_error_of("worker_0")
    kill()


def unfinished_line() -> None:
    os.write(1, b"no newline \xff\xfe")


def progress() -> None:
    """Prints progress as Keras does, and a line of the other worker once the first half shows."""
    print(f"a terminal: {sys.stdout.isatty()} {os.environ.get('TFMW_TTY')}")
    sys.stdout.write("\r1/2 \x1b[32m=\x1b[0m.")
    sys.stdout.flush()
    await_mark("second_half")
    sys.stdout.write("\b" * 6 + "\r2/2 ==\n")


def interrupt() -> None:
    await_mark("in_the_middle")
    print("hello from the middle")


def babble() -> NoReturn:
    while True:
        print("babble", flush=True)


def done() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    _result.write(
        {
            "argv": sys.argv,
            "config": json.loads(os.environ["TF_CONFIG"]),
            "name": __name__,
            "path": sys.path[0],
            "session": os.getsid(0) == os.getpid(),
            "terminal": sys.stdout.isatty(),
            "env": {k: v for k, v in os.environ.items() if k.startswith(("TFMW_", "TF_CPP"))},
        }
    )


if __name__ == "__main__":
    actions = dict(flag.split("=", 1) for flag in sys.argv[1:] if "=" in flag)
    globals()[actions.get(os.environ["TFMW_TASK"], "done")]()
