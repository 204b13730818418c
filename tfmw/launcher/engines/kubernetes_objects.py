"""Objects of a job on Kubernetes as plain JSON, and the reasons that its pods give for a failure.

    tfmw-3fa9c2          a Job of one pod, the controller, which owns everything else
    tfmw-3fa9c2          a Secret with the job's token
    tfmw-3fa9c2-x1y2z    an indexed Job with the tasks of one attempt

Nothing here talks to a cluster. Formats: the Kubernetes API, batch/v1 and core/v1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfmw.errors import PREEMPTED
from tfmw.launcher.failure import describe_status

JOB, ROLE = "tfmw/job", "tfmw/role"
"""Labels of every object: the job's number, and "controller" or "task"."""

TOKEN, POD, ADDRESS = "TFMW_JOB_TOKEN", "TFMW_POD", "TFMW_POD_IP"
"""Environment variables of each pod: the job's token, and the pod's name and IP address."""

CONTROLLER, INDEX = "TFMW_JOB_CONTROLLER", "JOB_COMPLETION_INDEX"
"""Further ones of a task's pod: the controller's IP address, and the completion index."""

CONTAINER = "tfmw"
"""Name of the container that runs tfmw; others of a pod template run beside it."""

Object = dict[str, Any]

_QUEUE = "kueue.x-k8s.io/queue-name"
_KEPT_S = 24 * 3600  # seconds for which a controller's Job is kept once it has ended
_RESTARTS = 6  # failures of a controller's pod after which its Job fails
# Reasons of a waiting container that may pass by themselves; all others are errors.
_STARTING = {"", "ContainerCreating", "PodInitializing", "ErrImagePull"}


def name_of(number: str) -> str:
    """Name of a job's controller and Secret."""
    return f"tfmw-{number}"


def selector(number: str, role: str) -> str:
    """The label selector of a job's objects."""
    return f"{JOB}={number},{ROLE}={role}"


def merged(base: Any, over: Any) -> Any:
    """A pod template with further fields, which take precedence.

    Containers and variables of the same name are one, as in `kubectl apply`.
    """
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        both = {**base, **over}
        return {k: merged(base[k], over[k]) if k in base and k in over else both[k] for k in both}
    if isinstance(base, list) and isinstance(over, list):
        items = {item["name"]: item for item in base}
        for item in over:
            old = items.get(item["name"], {})
            whole = {"value", "valueFrom"} & item.keys()  # a variable has only one of them
            items[item["name"]] = item if whole else merged(old, item)
        return list(items.values())
    return over


def secret(number: str, token: str, job: Object) -> Object:
    """The Secret with the token of a job, which the controller's Job owns."""
    named = {"name": name_of(number), "labels": {JOB: number}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**named, "ownerReferences": [owner(job)]},
        "stringData": {"token": token},
        "immutable": True,
    }


def owner(job: Object) -> Object:
    """The owner reference to a controller's Job, with which objects are deleted."""
    meta = job["metadata"]
    named = {"name": meta["name"], "uid": meta["uid"]}
    return {"apiVersion": "batch/v1", "kind": "Job", **named}


def job(
    number: str,
    role: str,
    template: Any,
    command: Sequence[str],
    *,
    image: str,
    resources: Mapping[str, Any] | None,
    pod: Mapping[str, Any],
    **spec: Any,
) -> Object:
    """A Job whose pods are those of the user's template, with what tfmw needs.

    Args:
        number: number of the job.
        role: "controller" or "task".
        template: the user's template: {"metadata": ..., "spec": ...}.
        command: command of the container `CONTAINER`.
        image: its image.
        resources: its limits and requests, which replace the template's.
        pod: further fields of the pod's spec.
        spec: further fields of the Job's spec.
    """
    sources = {TOKEN: {"secretKeyRef": {"name": name_of(number), "key": "token"}}}
    for variable, path in ((POD, "metadata.name"), (ADDRESS, "status.podIP")):
        sources[variable] = {"fieldRef": {"fieldPath": path}}
    container: Object = {
        "name": CONTAINER,
        "image": image,
        "command": list(command),
        "env": [{"name": name, "valueFrom": source} for name, source in sources.items()],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    labels = {JOB: number, ROLE: role, "app.kubernetes.io/managed-by": "tfmw"}
    needs = {"restartPolicy": "Never", **pod, "containers": [container]}
    made: Object = merged(template, {"metadata": {"labels": labels}, "spec": needs})
    if resources is not None:
        (own,) = (c for c in made["spec"]["containers"] if c["name"] == CONTAINER)
        own["resources"] = resources
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(number), "labels": labels},
        "spec": {**spec, "template": made},
    }


def controller_job(number: str, returns: bool, account: str, **fields: Any) -> Object:
    """The Job of the controller.

    Args:
        number: number of the job.
        returns: whether a lost pod is replaced; the job's folder must outlive it then.
        account: its service account.
        fields: arguments of `job`.
    """
    spec: Object = {"backoffLimit": 0, "ttlSecondsAfterFinished": _KEPT_S}
    if returns:  # neither an eviction nor a controller that has saved everything is a failure
        saved = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED]}
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rules: list[Object] = [{"onPodConditions": [disrupted]}, {"onExitCodes": saved}]
        spec["backoffLimit"] = _RESTARTS
        spec["podFailurePolicy"] = {"rules": [{"action": "Ignore", **rule} for rule in rules]}
    made = job(number, "controller", pod={"serviceAccountName": account}, **fields, **spec)
    # The autoscaler must not move it.
    fixed = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return merged(made, {"spec": {"template": {"metadata": {"annotations": fixed}}}})


def tasks_job(
    number: str, size: tuple[int, int], queue: str, grace_s: int, **fields: Any
) -> Object:
    """The indexed Job of the tasks; the controller adds its name and its owner.

    A failed pod is not replaced, since all tasks restart together.

    Args:
        number: number of the job.
        size: the least and the largest number of tasks.
        queue: local queue of Kueue; "": none.
        grace_s: seconds between SIGTERM and the end of a pod.
        fields: arguments of `job`.
    """
    least, most = size
    spec: Object = {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        "backoffLimitPerIndex": 0,
    }
    pod = {"terminationGracePeriodSeconds": grace_s, "automountServiceAccountToken": False}
    made = job(number, "task", pod=pod, **fields, **spec)
    if queue:
        made["metadata"]["labels"] = {**made["metadata"]["labels"], _QUEUE: queue}
        made["spec"]["suspend"] = True  # Kueue starts it
        if least < most:  # partial admission
            annotation = {"kueue.x-k8s.io/job-min-parallelism": str(least)}
            made["metadata"]["annotations"] = annotation
    return made


# ---- what pods say -------------------------------------------------------------------------------


def index_of(pod: Object) -> int:
    """Completion index of a pod of an indexed Job; -1 for other pods."""
    annotations = pod["metadata"].get("annotations") or {}
    return int(annotations.get("batch.kubernetes.io/job-completion-index", -1))


def is_running(pod: Object) -> bool:
    """Whether the containers of a pod run, and nobody has asked them to end."""
    return _phase(pod) == "Running" and not pod["metadata"].get("deletionTimestamp")


def ended(pod: Object) -> str:
    """Reason why a pod has ended, as a clause; "" if it has not."""
    status = pod.get("status") or {}
    if _phase(pod) not in ("Failed", "Succeeded"):
        return ""
    if status.get("reason"):  # such as "Evicted"
        return _clause(f"its pod has failed ({status['reason']})", status.get("message"))
    states = [c.get("state") or {} for c in status.get("containerStatuses") or ()]
    over: list[Object] = [state["terminated"] for state in states if state.get("terminated")]
    worst = next((state for state in over if state.get("exitCode")), None)
    if taken := disrupted(pod):
        return taken
    if worst is None:
        return "its pod has ended"
    if worst.get("reason") == "OOMKilled":
        return "its container was killed at its limit of memory (OOMKilled): raise the limit"
    code = int(worst["exitCode"])
    how = describe_status(128 - code if code > 128 else code)  # a signal, as a shell reports it
    last = (worst.get("message") or "").strip().splitlines()
    return _clause(f"its container has ended: {how}", last[-1] if last else "")


def disrupted(pod: Object) -> str:
    """Reason why Kubernetes takes a pod away, as a clause; "" if it does not."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            why = condition.get("message") or condition.get("reason")
            return _clause("its pod was taken away", why)
    return ""


def blocked(pod: Object, events: Sequence[str] = ()) -> tuple[str, bool]:
    """The reason why a pod does not run yet, as a clause, and whether it is an error.

    Args:
        pod: the pod.
        events: messages of the pod's events, such as the text of a failed pull.
    """
    if _phase(pod) != "Pending":
        return "", False
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _clause("no node has room for a pod", condition.get("message")), False
    kinds = ("initContainerStatuses", "containerStatuses")
    for container in (c for kind in kinds for c in status.get(kind) or ()):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in _STARTING:
            pulls = [text for text in events if "pull image" in text]
            why = (pulls or [waiting.get("message") or ""])[-1]
            return _clause(f"a pod cannot start ({waiting['reason']})", why), True
    return "a pod is starting", False


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def _clause(text: str, why: str | None) -> str:
    return f"{text}: {' '.join(why.split()).rstrip('.')}" if why else text
