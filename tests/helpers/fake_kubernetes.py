"""A Kubernetes of the tests: an API server, its Job controller, and a kubelet of processes.

    with FakeKubernetes(tmp_path) as cluster:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)

A pod is a process of this machine with the pod's environment; all pods have the address 127.0.0.1.
Created objects are checked against Kubernetes' own schemas, and requests against the Roles of
recipes/schedulers/kubernetes-engine.yaml: this process may do what `tfmw-submit` allows, pods what
`tfmw-controller` allows. `cluster.faults` are HTTP statuses of the next replies.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime
import hashlib
import http.server
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.parse
import uuid
from pathlib import Path
from typing import Any, Self

import kubernetes_validate
import yaml

from tests.helpers.cluster import ONE_THREAD, PYTHONPATH, ROOT

Object = dict[str, Any]
SCHEMA = kubernetes_validate.latest_version()
ROLES = {
    role["metadata"]["name"]: {
        (verb, resource)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for role in yaml.safe_load_all((ROOT / "recipes/schedulers/kubernetes-engine.yaml").read_text())
    if role["kind"] == "Role"
}
KINDS = {"jobs": "Job", "pods": "Pod", "secrets": "Secret", "events": "Event"}


class FakeKubernetes:
    """A cluster with one namespace, "training".

    Attributes:
        room: number of the tasks' pods that have room at a time.
        images: the images that can be pulled.
        faults: statuses of the next replies, the first one first.
        away: whether connections are closed without a reply.
        requests: (method, path) of each request.
        denied: pairs (verb, resource) that nobody may do.
        refuse_pods: message of a quota that refuses all pods; "": there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.room = 100
        self.images = {"tfmw:test"}
        self.faults: collections.deque[int] = collections.deque()
        self.away = False
        self.requests: list[tuple[str, str]] = []
        self.denied: set[tuple[str, str]] = set()
        self.refuse_pods = ""
        self.objects: dict[tuple[str, str], Object] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # by the pod's name
        self.lock = threading.RLock()
        self._names = itertools.count()
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.cluster = self  # type: ignore[attr-defined]
        self.kubeconfig = self._kubeconfig("tfmw-submit")
        self._of_pods = self._kubeconfig("tfmw-controller")
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=[0.05]),
            threading.Thread(target=self._work),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _kubeconfig(self, role: str) -> Path:
        port = self._server.server_address[1]
        named = {"cluster": "test", "user": "test", "namespace": "training"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "test", "user": {"token": role}}],
            "contexts": [{"name": "test", "context": named}],
        }
        path = self.folder / role
        path.write_text(yaml.safe_dump(config))
        return path

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # ---- the API -------------------------------------------------------------------------------

    def created(self, kind: str, content: Object) -> Object:
        if content["kind"] in ("Job", "Secret", "Pod"):
            kubernetes_validate.validate(content, SCHEMA, strict=True)
        name = content["metadata"]["name"]
        if (kind, name) in self.objects:
            raise _Refused(409, f"{kind} {name!r} already exists")
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        own = {"uid": str(uuid.uuid4()), "creationTimestamp": now, "namespace": "training"}
        content["metadata"] |= own
        if kind == "secrets":
            texts = content.pop("stringData", {})
            content["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in texts.items()}
        self.objects[kind, name] = content
        return content

    def listed(self, kind: str, labels: str = "", about: str = "") -> list[Object]:
        wanted = [pair.split("=") for pair in labels.split(",") if pair]
        found = [content for (k, _), content in self.objects.items() if k == kind]
        if about:
            name = about.partition("=")[2]
            found = [content for content in found if content["involvedObject"]["name"] == name]
        return [
            content
            for content in found
            if all(content["metadata"].get("labels", {}).get(k) == v for k, v in wanted)
        ]

    def delete(self, kind: str, name: str) -> Object:
        content = self.objects.get((kind, name))
        if content is None:
            raise _Refused(404, f"{kind} {name!r} not found")
        if kind == "pods" and name in self.processes:
            if "deletionTimestamp" not in content["metadata"]:
                grace = content["spec"].get("terminationGracePeriodSeconds", 30)
                content["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                content["_kill_at"] = time.monotonic() + grace
                with contextlib.suppress(ProcessLookupError):
                    self.processes[name].send_signal(signal.SIGTERM)
        else:
            del self.objects[kind, name]
        return content

    def event(self, about: str, reason: str, message: str) -> None:
        name = f"{about}.{next(self._names)}"
        content = {"kind": "Event", "apiVersion": "v1", "metadata": {"name": name}}
        content |= {"involvedObject": {"name": about}, "reason": reason, "message": message}
        self.created("events", content)

    # ---- controllers and the kubelet -----------------------------------------------------------

    def _work(self) -> None:
        while not self._stopped.wait(0.05):
            with self.lock:
                self._collect()
                for job in self.listed("jobs"):
                    self._run_job(job)
                for pod in self.listed("pods"):
                    self._run_pod(pod)

    def _collect(self) -> None:
        """Deletes the objects whose owner is gone."""
        alive = {content["metadata"]["uid"] for content in self.objects.values()}
        for (kind, name), content in list(self.objects.items()):
            owners = content["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in alive for owner in owners):
                self.delete(kind, name)

    def _run_job(self, job: Object) -> None:
        spec, name = job["spec"], job["metadata"]["name"]
        pods = [p for p in self.listed("pods") if p["metadata"]["labels"]["job-name"] == name]
        status = job.setdefault("status", {})
        if spec.get("suspend"):
            for pod in pods:
                self.delete("pods", pod["metadata"]["name"])
            status["started"] = []
            return
        if status.get("conditions"):
            return
        failed = [p for p in pods if p["status"]["phase"] == "Failed"]
        if spec.get("completionMode") == "Indexed":
            started = status.setdefault("started", [])
            for index in range(spec["completions"]):
                if index not in started and self._new_pod(job, index):
                    started.append(index)
        elif failed and spec["backoffLimit"] == 0:
            message = "Job has reached the specified backoff limit"
            status["conditions"] = [{"type": "Failed", "status": "True", "message": message}]
        elif all(p["status"]["phase"] == "Failed" for p in pods):
            self._new_pod(job, None)

    def _new_pod(self, job: Object, index: int | None) -> bool:
        name = job["metadata"]["name"]
        if self.refuse_pods:
            if not self.listed("events", about=f"={name}"):
                self.event(name, "FailedCreate", self.refuse_pods)
            return False
        template = json.loads(json.dumps(job["spec"]["template"]))
        meta = template.setdefault("metadata", {})
        meta["labels"] = {**meta.get("labels", {}), "job-name": name}
        part = "" if index is None else f"-{index}"
        meta["name"] = f"{name}{part}-{next(self._names):05d}"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name}
        meta["ownerReferences"] = [{**owner, "uid": job["metadata"]["uid"]}]
        if index is not None:
            key = "batch.kubernetes.io/job-completion-index"
            meta["annotations"] = {**meta.get("annotations", {}), key: str(index)}
            for container in template["spec"]["containers"]:
                container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        self.created("pods", pod)["status"] = {"phase": "Pending"}
        return True

    def _run_pod(self, pod: Object) -> None:
        name, status = pod["metadata"]["name"], pod["status"]
        container = pod["spec"]["containers"][0]
        process = self.processes.get(name)
        if process is None and status["phase"] == "Pending":
            busy = sum(is_task(p) and "podIP" in p["status"] for p in self.listed("pods"))
            if is_task(pod) and busy >= self.room:
                message = "0/2 nodes are available: 2 Insufficient cpu."
                unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
                status["conditions"] = [{**unscheduled, "reason": "Unschedulable"}]
                return
            status |= {"podIP": "127.0.0.1", "conditions": []}
            if container["image"] not in self.images:
                self._fail_pull(pod, container["image"])
                return
            self._start(pod)
        elif process is not None and status["phase"] == "Running":
            if time.monotonic() > pod.get("_kill_at", time.monotonic() + 1):
                os.killpg(process.pid, signal.SIGKILL)
            if process.poll() is not None:
                self._end(pod, process.returncode)
        elif "deletionTimestamp" in pod["metadata"]:
            del self.objects["pods", name]

    def _fail_pull(self, pod: Object, image: str) -> None:
        name = pod["metadata"]["name"]
        if not pod["status"].get("containerStatuses"):
            message = f'Failed to pull image "{image}": {image}: not found'
            self.event(name, "Failed", message)
            self.event(name, "Failed", "Error: ErrImagePull")
        waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
        pod["status"]["containerStatuses"] = [container_status({"waiting": waiting})]

    def _start(self, pod: Object) -> None:
        container, name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        environ = {n: v for n, v in os.environ.items() if n in ("PATH", "HOME", "LANG", "TMPDIR")}
        environ |= {**ONE_THREAD, "PYTHONPATH": PYTHONPATH, "KUBECONFIG": str(self._of_pods)}
        try:
            for variable in container["env"]:
                environ[variable["name"]] = variable.get("value") or self._value(pod, variable)
        except KeyError as absent:  # the pod waits for its Secret
            waiting = {"reason": "CreateContainerConfigError", "message": f"{absent} not found"}
            pod["status"]["containerStatuses"] = [container_status({"waiting": waiting})]
            return
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                container["command"],
                env=environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pod["status"]["phase"] = "Running"
        pod["status"]["containerStatuses"] = [container_status({"running": {}})]

    def _value(self, pod: Object, variable: Object) -> str:
        source = variable["valueFrom"]
        if reference := source.get("secretKeyRef"):
            data = self.objects["secrets", reference["name"]]["data"]
            return base64.b64decode(data[reference["key"]]).decode()
        found: Any = pod
        for part in source["fieldRef"]["fieldPath"].split("."):
            found = found[part]
        return str(found)

    def _end(self, pod: Object, returncode: int) -> None:
        log = (self.folder / f"{pod['metadata']['name']}.log").read_text(errors="replace")
        code = returncode if returncode >= 0 else 128 - returncode
        how = {"exitCode": code, "reason": "Error" if code else "Completed"}
        if returncode == -signal.SIGSYS:  # the tests' way to say so
            how |= {"exitCode": 137, "reason": "OOMKilled"}
        how["message"] = log[-2048:] if code else ""
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["containerStatuses"] = [container_status({"terminated": how})]

    # ---- what tests do -------------------------------------------------------------------------

    def pods(self, role: str, job: str = "") -> list[Object]:
        """Running pods, the oldest first."""
        with self.lock:
            labels = f"tfmw/role={role}" + (f",tfmw/job={job}" if job else "")
            found = self.listed("pods", labels)
            return [pod for pod in found if pod["status"]["phase"] == "Running"]

    def drain(self, pod: Object, why: str) -> None:
        """Evicts a pod, as `kubectl drain` does."""
        with self.lock:
            taken = {"type": "DisruptionTarget", "status": "True", "message": why}
            pod["status"]["conditions"] = [taken]
            self.delete("pods", pod["metadata"]["name"])


def is_task(pod: Object) -> bool:
    """Whether a pod has a task."""
    labels: dict[str, str] = pod["metadata"]["labels"]
    return labels.get("tfmw/role") == "task" and pod["status"]["phase"] in ("Pending", "Running")


def container_status(state: Object) -> Object:
    """The status of the container."""
    about = {"name": "tfmw", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    if "terminated" in state:
        state = {"terminated": state["terminated"]}
    return {**about, "state": state}


def discovered(path: str) -> Object:
    """The reply to a question for the kinds of objects, as kubectl asks it."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": "batch/v1", "version": "v1"}
        group = {"name": "batch", "versions": [version], "preferredVersion": version}
        return {"apiVersion": "v1", "kind": "APIGroupList", "groups": [group]}
    served = path.partition("/")[2].partition("/")[2]
    if served not in ("v1", "batch/v1"):
        raise _Refused(404, f"{path} not found")
    resources = [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind}
        | {"verbs": ["create", "delete", "get", "list"]}
        for name, kind in KINDS.items()
        if (served == "v1") is (name != "jobs")
    ]
    found = {"groupVersion": served, "resources": resources}
    return {"apiVersion": "v1", "kind": "APIResourceList", **found}


class _Refused(Exception):
    """A status, and its message."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        cluster: FakeKubernetes = self.server.cluster  # type: ignore[attr-defined]
        url = urllib.parse.urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        with cluster.lock:
            cluster.requests.append((self.command, url.path))
            fault = cluster.faults.popleft() if cluster.faults else 0
        if cluster.away:
            self.close_connection = True
            return
        try:
            if fault:
                raise _Refused(fault, "injected")
            if url.path.endswith("/portforward"):
                self._may(cluster, "get", "pods/portforward")
                self._forward(cluster, url)
                return
            with cluster.lock:
                query = dict(urllib.parse.parse_qsl(url.query))
                reply = self._reply(cluster, url.path, query, body)
                status, data = 200, json.dumps(reply, default=str).encode()
        except _Refused as refused:
            status, message = refused.args
            data = json.dumps({"kind": "Status", "code": status, "message": message}).encode()
        except kubernetes_validate.ValidationError as error:
            status = 422
            data = json.dumps({"kind": "Status", "code": 422, "message": str(error)}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _handle

    def _may(self, cluster: FakeKubernetes, verb: str, resource: str) -> None:
        # kubectl sends its token over TLS only
        role = self.headers.get("Authorization", "Bearer tfmw-submit").removeprefix("Bearer ")
        if (verb, resource) in cluster.denied or (verb, resource) not in ROLES[role]:
            what = f"cannot {verb} resource {resource!r}"
            raise _Refused(403, f'{resource} is forbidden: User "{role}" {what}')

    def _reply(
        self, cluster: FakeKubernetes, path: str, query: dict[str, str], body: Object
    ) -> Object:
        parts = path.strip("/").split("/")
        if path == "/version/":
            return {**dict.fromkeys(VERSION_FIELDS, ""), "major": "1", "minor": "33+"}
        if "namespaces" not in parts:
            return discovered(path)
        namespace, kind, *name = parts[parts.index("namespaces") + 1 :]
        verb = {"GET": "get" if name else "list", "POST": "create"}
        verb |= {"DELETE": "delete"}
        self._may(cluster, verb[self.command], kind)
        if namespace != "training":
            raise _Refused(404, f"namespaces {namespace!r} not found")
        if self.command == "POST":
            return cluster.created(kind, body)
        if self.command == "DELETE":
            cluster.delete(kind, name[0])
            return {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success"}
        if not name:
            items = cluster.listed(
                kind, query.get("labelSelector", ""), query.get("fieldSelector", "")
            )
            version = "batch/v1" if kind == "jobs" else "v1"
            return {"apiVersion": version, "kind": f"{KINDS[kind]}List", "items": items}
        if (kind, name[0]) not in cluster.objects:
            raise _Refused(404, f"{kind} {name[0]!r} not found")
        content = cluster.objects[kind, name[0]]
        return content

    # ---- a forwarded port: RFC 6455, and Kubernetes' subprotocol v4.channel.k8s.io -------------

    def _forward(self, cluster: FakeKubernetes, url: urllib.parse.SplitResult) -> None:
        port = int(urllib.parse.parse_qs(url.query)["ports"][0])
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        sending = threading.Lock()

        def send(channel: int, data: bytes, opcode: int = 2) -> None:
            payload = bytes([channel]) + data if opcode == 2 else data
            head = struct.pack("!BBQ", 0x80 | opcode, 127, len(payload))
            with sending, contextlib.suppress(OSError):
                self.connection.sendall(head + payload)

        for channel in (0, 1):
            send(channel, struct.pack("<H", port))
        try:
            target = socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError as error:
            send(1, str(error).encode())
            return
        target.settimeout(None)

        def back() -> None:
            with contextlib.suppress(OSError):
                while data := target.recv(1 << 16):
                    send(0, data)
            send(0, b"\x03\xe8", opcode=8)
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=back)
        thread.start()
        with contextlib.closing(target), contextlib.suppress(OSError, struct.error):
            while (frame := self._frame())[0] != 8 and not cluster.away:
                if frame[0] == 2 and frame[1][0] == 0:
                    target.sendall(frame[1][1:])
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        thread.join()

    def _frame(self) -> tuple[int, bytes]:
        first, second = struct.unpack("!BB", self.rfile.read(2))
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", self.rfile.read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self.rfile.read(8))
        mask = self.rfile.read(4)
        data = self.rfile.read(size)
        whole = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        return first & 0x0F, whole.to_bytes(size, "big")


VERSION_FIELDS = (
    *("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion"),
    *("compiler", "platform"),
)
