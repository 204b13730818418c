"""Downloads by everything that users download by: `downloads.py http://... https://... PORT`.

The addresses are those of a server outside; PORT is that of another one at this machine's
localhost. Worker 0 also asks the server outside whether it can connect to the ports of the tasks.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import requests
import tensorflow as tf
import tensorflow_datasets as tfds
from mlflow import MlflowClient

import tfmw
from tests.programs import _result

http, https, local_port = sys.argv[1:]
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
folder = Path(os.environ["TFMW_RESULT"], os.environ["TFMW_TASK"])
found: dict[str, Any] = {"namespace": os.readlink("/proc/self/ns/net")}


def read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}"
    return body.decode()


# Messages that tf.distribute sends over gRPC must not need the proxy.
strategy = tfmw.strategies.multi_worker_mirrored(collectives="grpc")
add = tf.function(
    lambda: strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tf.constant(1.0)
        )
    )
)
found["sum"] = float(strategy.experimental_local_results(add())[0])

for scheme, address in (("http", http), ("https", https)):
    found[f"urllib {scheme}"] = read(f"{address}/file")
    found[f"requests {scheme}"] = requests.get(f"{address}/file", timeout=60).text
    with requests.Session() as session:  # connections that are kept
        sent = [
            session.post(f"{address}/echo", data=body, timeout=60) for body in ("a", "b" * 10**6)
        ]
    found[f"post {scheme}"] = [len(response.text) for response in sent]
    target = str(folder / scheme)
    fetched = tfds.download.DownloadManager(download_dir=target, register_checksums=False).download(
        f"{address}/file"
    )
    found[f"tfds {scheme}"] = Path(fetched).read_text()
found["git"] = subprocess.run(
    ["git", "ls-remote", f"{http}/repository"], capture_output=True, text=True
).stdout
found["mlflow"] = [e.name for e in MlflowClient(tracking_uri=https).search_experiments()]
found["by the user's proxy"] = [read(f"{s}://data.example/file") for s in ("http", "https")]
with tf.io.gfile.GFile("gs://bucket/file") as file:
    found["gs"] = file.read()
found["localhost"] = read(f"http://localhost:{local_port}/file")
found["nobody"] = read("http://nobody.invalid:1/")
if os.environ["TFMW_LOCAL_RANK"] == "0":
    own = socket.create_server(("", 0))
    with own:
        ports = [address.rpartition(":")[2] for address in cluster]
        ports += [str(own.getsockname()[1]), os.environ["http_proxy"].rpartition(":")[2]]
        found["ports"] = {port: read(f"{http}/connect/{port}") for port in ports}
_result.write(found)
