"""Reports the network of a task: `isolate_tasks.py`; worker 0 serves, the others connect."""

import contextlib
import json
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path

from tests.programs import _result

config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["worker"][0].rsplit(":", 1)
message = ""
if "look-up" in sys.argv:
    socket.getaddrinfo("data.invalid", 80)
if "download" in sys.argv:
    urllib.request.urlopen("http://data.invalid/mnist.npz", timeout=60)
if config["task"]["index"] == 0:
    with socket.create_server(("", int(port))) as server:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"hello")
else:
    while not message:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((host, int(port))) as connection,
        ):
            message = connection.recv(5).decode()
        time.sleep(0)
(Path(os.environ["TFMW_RESULT"]) / f"file_{config['task']['index']}").touch()
_result.write(
    {
        "namespace": os.readlink("/proc/self/ns/net"),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "message": message,
        "user": [os.getuid(), os.getgid()],
        "owner": os.stat(os.environ["TFMW_ERROR_FILE"].rpartition("/")[0]).st_uid,
        "descriptors": [
            link
            for name in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{name}")
            and (link := os.readlink(f"/proc/self/fd/{name}")).startswith(("net:", "user:"))
        ],
        "left": [name for name in os.environ if name in ("TFMW_NAMESPACES", "TFMW_LAUNCHER_PID")],
    }
)
