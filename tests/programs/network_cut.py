"""Two tasks in two network namespaces; the cable between them is cut: network_cut.py DIRECTORY.

Runs in a network namespace of its own (`unshare -n`), where it may do what it likes. Prints what
the tasks wrote and how they ended, as JSON.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PORT = 20_000
ADDRESSES = ["10.99.0.1", "10.99.0.2"]

directory = Path(sys.argv[1])
program = Path(__file__).parent / "train_long.py"


here: tuple[str, ...] = ()  # prefix of a command that is to run in this namespace


def ip(*words: str, inside: tuple[str, ...] = here) -> None:
    subprocess.run([*inside, "ip", *words], check=True)


other = subprocess.Popen(
    ["unshare", "-n", "sh", "-c", "echo there; exec sleep 600"], stdout=subprocess.PIPE, text=True
)
assert other.stdout is not None
assert other.stdout.readline() == "there\n"
there: tuple[str, ...] = ("nsenter", "-n", "-t", str(other.pid))
ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(other.pid))
for inside, device, address in ((here, "here", ADDRESSES[0]), (there, "there", ADDRESSES[1])):
    ip("link", "set", "lo", "up", inside=inside)
    ip("address", "add", f"{address}/24", "dev", device, inside=inside)
    ip("link", "set", device, "up", inside=inside)

tasks: list[subprocess.Popen[str]] = []
for index, inside in enumerate((here, there)):
    config = {
        "cluster": {"worker": [f"{a}:{PORT}" for a in ADDRESSES]},
        "task": {"type": "worker", "index": index},
    }
    log = directory / f"task_{index}.log"
    with open(log, "w") as file:
        tasks.append(
            subprocess.Popen(
                [*inside, sys.executable, program, directory / "backups", directory / "cut"],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
try:
    logs = [directory / f"task_{index}.log" for index in range(2)]
    deadline = time.monotonic() + 90
    while not all("epoch 3\n" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        assert not any(task.poll() for task in tasks), [log.read_text() for log in logs]
        time.sleep(0.05)
    ip("link", "set", "here", "down")
    cut = time.monotonic()
    (directory / "cut").touch()
    ended = []
    for task in tasks:
        task.wait(timeout=600)
        ended.append(time.monotonic() - cut)
finally:
    for task in tasks:
        task.kill()
        task.wait()
    other.kill()
    other.wait()
print(
    json.dumps(
        {
            "statuses": [task.returncode for task in tasks],
            "seconds": ended,
            "logs": [log.read_text()[-3000:] for log in logs],
        }
    )
)
