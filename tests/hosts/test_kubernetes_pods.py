"""The command of recipes/schedulers/kubernetes-hosts.yaml, and a pod that is made anew.

No Kubernetes runs here: the test sets up each pod itself. A pod has the index and the token in its
environment, the volume, and the names of all pods. A new pod keeps its name while its address
changes (kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode). `make nightly`
runs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.cluster import ROOT
from tests.helpers.hosts import NETWORK, Hosts, Loopback, Namespaces, network
from tfmw.train.saved_model import verify_export as verify

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(600)]

MANIFEST = ROOT / "recipes" / "schedulers" / "kubernetes-hosts.yaml"


def job() -> dict[str, Any]:
    return next(m for m in yaml.safe_load_all(MANIFEST.read_text()) if m["kind"] == "Job")


class Pods(Hosts):
    """The pods of the Job: each runs the container's command, with names for all.

    Args:
        folder: for everything.
        cables: a host for each pod.
        job: the manifest.
    """

    def __init__(self, folder: Path, cables: Loopback | Namespaces, job: dict[str, Any]) -> None:
        spec = job["spec"]["template"]["spec"]
        container = spec["containers"][0]
        names = {entry["name"] for entry in container["env"]}
        assert names == {"TFMW_TOKEN"}, "the secret is all that a pod is given"
        bin_ = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        super().__init__(folder, cables, env={"TFMW_TOKEN": "0123456789abcdef" * 4, "PATH": bin_})
        shared = folder / "shared"
        shared.mkdir()
        self.lock = shared / "run7" / "supervisors"
        (mount,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "shared")
        *self._shell, text = container["command"]
        self._text = text.replace(f"{mount}/", f"{shared}/")
        self.pods = [
            f"{job['metadata']['name']}-{index}.{spec['subdomain']}"
            for index in range(job["spec"]["completions"])
        ]
        self._dns = folder / "etc_hosts"
        self.serve_names()

    def serve_names(self) -> None:
        """Names that DNS resolves now: a file in the place of each pod's /etc/hosts."""
        lines = map(" ".join, zip(self.cables.addresses, self.pods, strict=True))
        self._dns.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def command(self, host: int) -> list[str]:
        if isinstance(self.cables, Loopback):  # without the right to mount anything: addresses
            text = self._text
            for name, address in zip(self.pods, self.cables.addresses, strict=True):
                text = text.replace(name, address)
            return [*self._shell, text]
        names = f'mount --bind "{self._dns}" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", names, "pod", *self._shell, self._text]

    def start(self, host: int, **env: str) -> None:
        super().start(host, JOB_COMPLETION_INDEX=str(host), **env)

    def make_anew(self, host: int) -> None:
        """A pod that has died is replaced: the same name, another address."""
        process = self.processes[host]
        assert process is not None
        process.wait()
        if isinstance(self.cables, Namespaces):
            old, new = self.cables.addresses[host], f"{NETWORK}.{100 + host}"
            ip = ["ip", "-n", f"tfmwh{host}", "addr"]
            subprocess.run([*ip, "del", f"{old}/24", "dev", "eth0"], check=True)
            subprocess.run([*ip, "add", f"{new}/24", "dev", "eth0"], check=True)
            self.cables.addresses[host] = new
            self.serve_names()
        self.start(host)


def test_a_pod_is_made_anew_under_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    manifest = job()
    count = manifest["spec"]["completions"]
    with contextlib.ExitStack() as stack:
        cables = stack.enter_context(network(count))
        pods = Pods(tmp_path, cables, manifest)
        stack.enter_context(pods)
        pods.wait_for_any("attempt 0 on")
        pods.signal_all(count - 1, signal.SIGKILL)
        pods.wait_for_any("is lost: ")
        pods.make_anew(count - 1)
        _, found = pods.wait_for_any("tfmw: attempt 1 on (.*)")
        assert len(found[1].split(", ")) == count, pods.output()
        assert pods.end() == [0] * count, pods.output()
        assert pods.record()["attempt"] == 1
    assert verify(tmp_path / "shared" / "run7" / "model") == []
