"""Jobs on Kubernetes: `tfmw.submit(train, workers=8, on=tfmw.engines.Kubernetes(image="..."))`.

The controller is a Job of one pod, which owns the job's Secret and the indexed Job of each
attempt's tasks. Deleting it ends the job. Other processes and the tasks read and write the
controller's files over a connection that proves the token of the Secret: tasks to the address of
its pod, others through a port that the API server forwards. The call needs no object of the
cluster.

The state of pods is polled, not watched, so late or repeated events do not exist. An API server
that does not reply has lost nothing.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfmw.errors import PREEMPTED, TfmwError, UsageError
from tfmw.launcher.call import Payload
from tfmw.launcher.engines import folder, folder_server, submit
from tfmw.launcher.engines import kubernetes_objects as objects
from tfmw.launcher.engines.agent import PAYLOAD
from tfmw.launcher.engines.engine import Engine, JobSpec
from tfmw.launcher.engines.job import DistantJob
from tfmw.launcher.engines.kubernetes_api import Api, Pods, Unreachable
from tfmw.launcher.engines.kubernetes_objects import Object
from tfmw.launcher.engines.kubernetes_tasks import TASKS, port_of

IMAGE = "TFMW_IMAGE"
"""Environment variable with the default of `Kubernetes.image`."""

_MODULE = "tfmw.launcher.engines.kubernetes_tasks"

_OLDEST = (1, 29)  # the first that has backoffLimitPerIndex without an option of its own
_TELL_FIRST_S, _TELL_EVERY_S = 10.0, 60.0  # times of lines about a controller that waits
_RETRY_S = 0.5
_GONE = "its controller is gone: "
_SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}}  # resources of a controller
_FIXED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}  # it must not be moved
_KEPT_S = 24 * 3600  # seconds for which a controller's Job is kept once it has ended
_RESTARTS = 6  # failures of a controller's pod after which its Job fails


@dataclasses.dataclass(frozen=True)
class Kubernetes(Engine):
    """A Kubernetes cluster of version 1.29 or later: that of the pod, or of the kubeconfig.

    Args:
        max_restarts: how often `tfmw.fit` restarts all tasks from the newest backup.
        image: image of the pods, which has Python and tfmw; by default TFMW_IMAGE.
        namespace: namespace of the job; by default the context's, or the pod's.
        context: context of the kubeconfig; by default the current one.
        resources: requests of each task, such as {"cpu": 4, "memory": "16Gi"}; all but "cpu" are
            also its limits.
        gpus_per_worker: GPUs of each task: "nvidia.com/gpu" in `resources`.
        queue: local queue of Kueue for the tasks.
        service_account: service account of the controller, which may manage Jobs and list pods.
        pod_template: further fields of all pods, {"metadata": ..., "spec": ...}, or the path of a
            YAML file with them: volumes, tolerations, node selectors, pull secrets. The container
            of tfmw is called "tfmw".
        directory: directory on a volume of the template that outlives pods, for the files of jobs.
            With it a lost controller comes back, and the job continues.
        grace_s: seconds between SIGTERM and the end of a pod, for the tasks to save their state.
        python: the interpreter in the image.
    """

    image: str = ""
    namespace: str = ""
    context: str = ""
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gpus_per_worker: int = 0
    queue: str = ""
    service_account: str = "tfmw"
    pod_template: Mapping[str, Any] | str | os.PathLike[str] = dataclasses.field(
        default_factory=dict
    )
    directory: str = ""
    grace_s: int = 120
    python: str = "python"

    name = "kubernetes"

    @property
    def leave_s(self) -> float:
        return self.grace_s

    def submit(self, spec: JobSpec, payload: Payload) -> KubernetesJob:
        api, number = self.api(), secrets.token_hex(4)
        controller, tasks = self._jobs(number, *spec.tasks)
        job = KubernetesJob(self, number, api, spec.token.encode())
        owner = api.create("Jobs", controller)
        try:
            api.create("Secrets", objects.secret(number, spec.token, owner))
            job.wait_started()
            job.begin(spec, payload, tasks)
        except BaseException:
            job.forget()
            raise
        return job

    def attach(self, number: str) -> KubernetesJob:
        api, name = self.api(), objects.name_of(number)
        # A Job is created before its Secret, and outlives it for a moment.
        secret = api.get("Secrets", name)
        if secret is None or api.get("Jobs", name) is None:
            raise self.unknown_job(number, f"in the namespace {api.namespace}")
        return KubernetesJob(self, number, api, base64.b64decode(secret["data"]["token"]))

    def numbers(self) -> list[str]:
        jobs = self.api().listed("Jobs", f"{objects.ROLE}=controller")
        return [job["metadata"]["labels"][objects.JOB] for job in jobs]

    def where(self, number: str) -> str:
        return f"Job {objects.name_of(number)} in the namespace {self.api().namespace}"

    def api(self) -> Api:
        """The API of the cluster. Raises UsageError."""
        return Api.connected(self.context, self.namespace)

    def _jobs(self, number: str, least: int, most: int) -> tuple[Object, Object]:
        """The Jobs of the controller, and of `most` tasks, which gets its name and owner later."""
        template = self._template()
        containers = template.get("spec", {}).get("containers", [])
        own: Object = next((c for c in containers if c.get("name") == objects.CONTAINER), {})
        image = self.image or own.get("image") or os.environ.get(IMAGE, "")
        if not image:
            raise UsageError(
                "on='kubernetes' needs an image that has tfmw: pass it as "
                f"tfmw.engines.Kubernetes(image='...'), or set {IMAGE}."
            )
        run = [self.python, "-m", _MODULE]
        place = [self.directory] if self.directory else []
        controller = objects.job(
            number,
            "controller",
            template,
            {"image": image, "command": [*run, "control", number, *place], "resources": _SMALL},
            {
                "metadata": {"annotations": _FIXED},
                "spec": {"serviceAccountName": self.service_account},
            },
            {"ttlSecondsAfterFinished": _KEPT_S, **self._replaced()},
        )
        tasks = objects.job(
            number,
            "task",
            template,
            {"image": image, "command": [*run, "task", number], **self._resources()},
            {
                "spec": {
                    "terminationGracePeriodSeconds": self.grace_s,
                    "automountServiceAccountToken": False,
                }
            },
            {
                "completionMode": "Indexed",
                "completions": most,
                "parallelism": most,
                "backoffLimitPerIndex": 0,  # all tasks restart together, in another Job
            },
        )
        if self.queue:  # Kueue starts the Job, with fewer pods if it says that they are enough
            fewer = {"kueue.x-k8s.io/job-min-parallelism": str(least)} if least < most else {}
            about = {"labels": {"kueue.x-k8s.io/queue-name": self.queue}, "annotations": fewer}
            tasks = objects.merged(tasks, {"metadata": about, "spec": {"suspend": True}})
        return controller, tasks

    def _replaced(self) -> Object:
        """Fields of a Job whose lost pod is replaced, if the files of the job outlive it."""
        if not self.directory:
            return {"backoffLimit": 0}
        # Neither an eviction nor a controller that has saved everything is a failure.
        saved = {"containerName": objects.CONTAINER, "operator": "In", "values": [PREEMPTED]}
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rules: list[Object] = [{"onPodConditions": [disrupted]}, {"onExitCodes": saved}]
        ignored = [{"action": "Ignore", **rule} for rule in rules]
        return {"backoffLimit": _RESTARTS, "podFailurePolicy": {"rules": ignored}}

    def _resources(self) -> Object:
        """Fields of a container for the resources of a task; without any the template's count."""
        needs = dict(self.resources)
        if self.gpus_per_worker:
            needs["nvidia.com/gpu"] = self.gpus_per_worker
        requests = {name: str(value) for name, value in needs.items()}
        limits = {name: value for name, value in requests.items() if name != "cpu"}
        return {"resources": {"requests": requests, "limits": limits}} if requests else {}

    def _template(self) -> Object:
        if isinstance(self.pod_template, Mapping):
            return dict(self.pod_template)
        import yaml  # a dependency of the package kubernetes

        try:
            found = yaml.safe_load(Path(self.pod_template).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"pod_template={str(self.pod_template)!r}: {error}.") from error
        if not isinstance(found, dict):
            raise UsageError(
                f"received pod_template={str(self.pod_template)!r}, a file without fields: "
                "expected YAML with metadata: and spec: of a pod."
            )
        return found


class KubernetesJob(DistantJob):
    """A job, for a process that can reach the API server."""

    def __init__(self, engine: Kubernetes, number: str, api: Api, token: bytes) -> None:
        super().__init__(engine, number)
        self._api, self._name = api, objects.name_of(number)
        self._files = folder_server.FolderClient(token, self._dial)

    def read(self, name: str, offset: int = 0) -> bytes:
        return bytes(self._asked(lambda: self._files.read(name, offset)) or b"")

    def _state(self) -> str:
        try:
            job = self._api.get("Jobs", self._name)
            pod = self._pod() if job is not None else None
        except Unreachable:
            return ""
        if job is None:
            self.why = f"its Job {self._name} in {self._api.namespace} was deleted"
            return "lost"
        if over := objects.condition(job, "Complete", "Failed"):
            why = pod and objects.ended(pod)
            self.why = f"{_GONE}{why or over.get('message') or 'it ended'}"
            return "lost"
        return "running" if pod is not None and objects.is_running(pod) else "queued"

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._asked(lambda: self._files.write(name, None, data))

    def _kill(self) -> None:
        self._api.delete("Jobs", self._name)

    def forget(self) -> None:
        self._kill()

    # ---- submission ------------------------------------------------------------------------------

    def wait_started(self) -> None:
        """Waits until the controller's pod runs, and prints what it waits for.

        Raises:
            UsageError: it has ended, or has had an error for a while.
        """
        pods, tell_at = Pods(self._api, self._name), time.monotonic() + _TELL_FIRST_S
        while not pods.running:
            with contextlib.suppress(Unreachable):
                pods.look()
            if pods.problems or self._state() == "lost":
                gone = self.why.removeprefix(_GONE)
                why = next(iter(pods.problems.values()), gone)
                raise UsageError(f"the controller of the job cannot start: {why}.")
            if time.monotonic() > tell_at:
                tell_at = time.monotonic() + _TELL_EVERY_S
                print(f"tfmw: {self._name} waits: {pods.why}", file=sys.stderr, flush=True)
            time.sleep(_RETRY_S)

    def begin(self, spec: JobSpec, payload: Payload, tasks: Object) -> None:
        """Sends the job to its controller, which then runs it.

        Raises:
            UsageError: the controller was lost.
        """

        def send() -> None:
            self._files.write(TASKS, None, json.dumps(tasks).encode())
            self._files.upload(PAYLOAD, payload)
            self._files.write(folder.SPEC, None, pickle.dumps(spec))

        if self._asked(send) is None:
            why = self.why or "its pod does not run"
            raise UsageError(f"the call could not be sent to the job's controller: {why}.")

    # ---- connection ------------------------------------------------------------------------------

    def _dial(self) -> socket.socket:
        pod = self._pod()
        if pod is None or not objects.is_running(pod):
            raise ConnectionError("the controller's pod does not run")
        return self._api.forwarded(pod["metadata"]["name"], port_of(self._number))

    def _pod(self) -> Object | None:
        """The newest pod of the controller."""
        pods = self._api.listed("pods", f"job-name={self._name}")
        return pods[-1] if pods else None


def check(engine: Engine) -> int:
    """Tests a cluster by a job of one task, and prints the first problem; `tfmw check`.

    Returns:
        The exit status.
    """
    assert isinstance(engine, Kubernetes)
    try:
        api = engine.api()
        print(f"checking Kubernetes, namespace {api.namespace}", flush=True)
        version = ".".join(map(str, api.version()))
        if api.version() < _OLDEST:
            raise TfmwError(f"Kubernetes has version {version}: expected 1.29 or later")
        submit.launch(int, workers=1, on=engine, env={"TFMW_NO_INIT": "1"})
    except TfmwError as error:
        print(f"failed: {error}", flush=True)
        return 1
    print(f"ok: version {version}, rights, image and versions; all is well", flush=True)
    return 0
