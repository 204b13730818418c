"""A real etcd on this machine, with a folder of its own.

with etcd(tmp_path) as (endpoint, process): ...       # "127.0.0.1:12345"
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tfmw.cluster.sockets import reserved_ports
from tfmw.storage.etcd import Client


@contextlib.contextmanager
def etcd(
    folder: Path, host: str = "127.0.0.1", certificate: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs etcd until the end of the `with`.

    Args:
        folder: for its data and its log.
        host: the address at which it listens.
        certificate: of TLS, with its key; None: without TLS.
    """
    scheme = "http" if certificate is None else "https"
    tls = [] if certificate is None else [f"--cert-file={certificate}", f"--key-file={certificate}"]
    environ = {} if certificate is None else {"ETCDCTL_CACERT": str(certificate)}
    with reserved_ports(2) as ports:
        client, peer = ports
    with open(folder / "etcd.log", "wb") as log:
        process = subprocess.Popen(
            [
                "etcd",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={scheme}://{host}:{client}",
                f"--advertise-client-urls={scheme}://{host}:{client}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
                *tls,
            ],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                Client(f"{scheme.replace('http', 'etcd')}://{host}:{client}", environ).get("up")
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "etcd.log").read_text()
                assert process.poll() is None, (folder / "etcd.log").read_text()
        yield f"{host}:{client}", process
    finally:
        process.kill()
        process.wait()
