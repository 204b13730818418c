"""The objects of a job on Kubernetes, and what is read from its pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tfmw.cluster import sockets
from tfmw.engines import Kubernetes
from tfmw.errors import UsageError
from tfmw.launcher.engines import kubernetes_api
from tfmw.launcher.engines import kubernetes_objects as objects
from tfmw.launcher.engines.agent import CONTACT
from tfmw.launcher.engines.kubernetes_api import Pods
from tfmw.launcher.engines.kubernetes_tasks import TASKS, KubernetesTasks

VERSION = kubernetes_validate.latest_version()
TEMPLATE = {
    "metadata": {"labels": {"team": "vision"}},
    "spec": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "runs"}}],
        "containers": [
            {
                "name": "tfmw",
                "image": "registry/train:7",
                "env": [{"name": "TFMW_JOB_TOKEN", "value": "wrong"}, {"name": "A", "value": "b"}],
                "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
                "resources": {"limits": {"nvidia.com/gpu": "8"}},
            },
            {"name": "proxy", "image": "proxy:1"},
        ],
    },
}


def jobs(workers: tuple[int, int] = (4, 4), **settings: Any) -> tuple[Any, Any]:
    """The Jobs of the controller and the tasks, as they are created."""
    controller, tasks = Kubernetes(**settings)._jobs("3fa9c2", *workers)
    return controller, objects.merged(tasks, {"metadata": {"name": "tfmw-3fa9c2-x"}})


def container(job: Any) -> Any:
    return next(c for c in job["spec"]["template"]["spec"]["containers"] if c["name"] == "tfmw")


@pytest.mark.parametrize("directory", ["", "/shared/jobs"])
@pytest.mark.parametrize("queue", ["", "team"])
def test_jobs_are_valid_and_keep_what_the_template_has(queue: str, directory: str) -> None:
    settings = {"resources": {"cpu": 4, "memory": "16Gi"}, "gpus_per_worker": 1}
    both = jobs((2, 8), queue=queue, directory=directory, pod_template=TEMPLATE, **settings)
    created = objects.merged(both[0], {"metadata": {"uid": "1"}})
    for job in (*both, objects.secret("3fa9c2", "token", created)):
        kubernetes_validate.validate(job, VERSION, strict=True)
    for job in both:
        pod = job["spec"]["template"]
        assert pod["metadata"]["labels"]["team"] == "vision"
        assert pod["spec"]["nodeSelector"] == {"pool": "gpu"}
        assert [c["name"] for c in pod["spec"]["containers"]] == ["tfmw", "proxy"]
        assert container(job)["image"] == "registry/train:7"
        assert container(job)["volumeMounts"][0]["mountPath"] == "/shared"
        env = {variable["name"]: variable for variable in container(job)["env"]}
        assert env["A"]["value"] == "b"
        secret = env["TFMW_JOB_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "tfmw-3fa9c2", "key": "token"}
    controller, tasks = both
    memory_and_gpu = {"memory": "16Gi", "nvidia.com/gpu": "1"}
    assert container(tasks)["resources"]["limits"] == memory_and_gpu
    assert container(tasks)["resources"]["requests"] == {"cpu": "4", **memory_and_gpu}
    assert "limits" not in container(controller)["resources"], "a controller needs no GPU"
    assert tasks["spec"]["completions"] == tasks["spec"]["parallelism"] == 8
    assert tasks["spec"].get("suspend", False) == bool(queue)
    assert controller["spec"]["backoffLimit"] == (6 if directory else 0)


def test_token_in_the_value_of_a_template_is_replaced_whole() -> None:
    """A variable with both a value and a source would be refused."""
    _, tasks = jobs(pod_template=TEMPLATE)
    (token,) = (v for v in container(tasks)["env"] if v["name"] == "TFMW_JOB_TOKEN")
    assert "value" not in token


def test_template_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(TEMPLATE))
    assert jobs(pod_template=path) == jobs(pod_template=TEMPLATE)
    path.write_text("nothing")
    with pytest.raises(UsageError, match=r"expected YAML with metadata: and spec: of a pod"):
        jobs(pod_template=path)
    with pytest.raises(UsageError, match=r"pod_template='.*absent.yaml': .*No such file"):
        jobs(pod_template=tmp_path / "absent.yaml")


def pod(phase: str, *, index: int = -1, uid: str = "", conditions: Any = (), **status: Any) -> Any:
    return {
        "metadata": {
            "name": f"p{index}",
            "uid": uid,
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "status": {"phase": phase, "conditions": list(conditions), **status},
    }


def container_in(**state: Any) -> list[Any]:
    return [{"name": "tfmw", "state": state}]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
            "its pod has failed (Evicted): The node was low on resource: memory",
        ),
        (
            pod(
                "Failed",
                containerStatuses=container_in(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            ),
            "its container was killed at its limit of memory (OOMKilled): raise the limit",
        ),
        (
            pod(
                "Failed",
                containerStatuses=container_in(
                    terminated={"exitCode": 1, "message": "Traceback:\nNo module named tfmw\n"}
                ),
            ),
            "its container has ended: exit status 1: No module named tfmw",
        ),
        (
            pod("Failed", containerStatuses=container_in(terminated={"exitCode": 143})),
            "its container has ended: SIGTERM",
        ),
        (
            pod(
                "Failed",
                conditions=[
                    {"type": "DisruptionTarget", "status": "True", "reason": "Preempted"},
                ],
                containerStatuses=container_in(terminated={"exitCode": 143}),
            ),
            "its pod was taken away: Preempted",
        ),
        (pod("Succeeded"), "its pod has ended"),
        (pod("Running"), ""),
        ({"metadata": {"name": "p"}}, ""),
    ],
)
def test_reason_of_a_pod_that_has_ended(status: Any, expected: str) -> None:
    assert objects.ended(status).partition(" (")[0] == expected.partition(" (")[0]
    assert objects.ended(status).startswith(expected.rstrip(")"))


@pytest.mark.parametrize(
    ("state", "events", "expected"),
    [
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no GPU."}
                ]
            },
            [],
            ("no node has room for a pod: 0/3 nodes: no GPU", False),
        ),
        (
            {"containerStatuses": container_in(waiting={"reason": "ContainerCreating"})},
            [],
            ("a pod is starting", False),
        ),
        (
            {"containerStatuses": container_in(waiting={"reason": "ErrImagePull"})},
            [],
            ("a pod is starting", False),
        ),
        (
            {"containerStatuses": container_in(waiting={"reason": "ImagePullBackOff"})},
            ['Failed to pull image "x": not found', "Error: ImagePullBackOff"],
            ('a pod cannot start (ImagePullBackOff): Failed to pull image "x": not found', True),
        ),
        (
            {
                "initContainerStatuses": container_in(
                    waiting={"reason": "CreateContainerConfigError", "message": "no Secret"}
                )
            },
            [],
            ("a pod cannot start (CreateContainerConfigError): no Secret", True),
        ),
    ],
)
def test_reason_of_a_pod_that_waits(state: Any, events: Any, expected: tuple[str, bool]) -> None:
    assert objects.blocked(pod("Pending", **state), events) == expected
    assert objects.blocked(pod("Running", **state), events) == ("", False)


def test_api_server_that_does_not_answer_a_forward_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_REPLY_S", 0.2)
    with sockets.listen("127.0.0.1") as listener:  # it accepts connections, and is silent
        server = {"server": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        named = {"cluster": "test", "user": "test"}
        config = {
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": named}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        with pytest.raises(TimeoutError, match=r"no port of p0 is forwarded within 0\.2 s"):
            kubernetes_api.Api.connected().forwarded("p0", 20_000)


class Listed:
    """An API whose lists are those of the test."""

    def __init__(self) -> None:
        self.now: list[Any] = []
        self.about: dict[str, list[str]] = {}

    def listed(self, kind: str, selector: str) -> list[Any]:
        return self.now

    def events(self, name: str) -> list[str]:
        return self.about.get(name, [])


def test_pods_of_a_job_from_one_list_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Listed()
    pods = Pods(api, "job")  # type: ignore[arg-type]
    api.about["job"] = ["exceeded quota: gpus"]
    pods.look()
    assert pods.why == "its pods have not been created: exceeded quota: gpus"
    pulls = {"containerStatuses": container_in(waiting={"reason": "ImagePullBackOff"})}
    api.about["p1"] = ["Failed to pull image: no such host"]
    api.now = [pod("Running", index=0, uid="a"), pod("Pending", index=1, uid="b", **pulls)]
    pods.look()
    assert (pods.running, pods.problems) == ([0], {}), "a registry may come back"
    assert pods.why == "a pod cannot start (ImagePullBackOff): Failed to pull image: no such host"
    monkeypatch.setattr(kubernetes_api, "_BLOCKED_S", -1.0)
    pods.look()
    assert pods.problems == {1: pods.why}
    # Nothing has started: Kueue may have suspended the Job, and its pods come again.
    api.now = [pod("Running", index=1, uid="c")]
    pods.look()
    assert (pods.running, pods.problems, pods.why) == ([1], {}, "")
    api.now.append(pod("Running", index=0, uid="d"))
    pods.look()
    pods.started = True
    taken = {"type": "DisruptionTarget", "status": "True", "message": "drained"}
    api.now = [
        pod("Running", index=0, uid="e"),
        pod("Running", index=1, uid="c", conditions=[taken]),
    ]
    pods.look()
    assert (pods.running, pods.problems) == ([1], {0: "its pod was deleted"}), "not its successor"
    api.now = []
    pods.look()
    assert pods.problems == {0: "its pod was deleted", 1: "its pod was taken away: drained"}


def test_pods_do_not_get_the_contact_of_a_controller_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next controller has its files, and another port: pods wait for its own contact."""
    monkeypatch.setattr(kubernetes_api.Api, "connected", lambda **_: Listed())
    for name in (TASKS, CONTACT):
        (tmp_path / name).write_text("{}")
    KubernetesTasks(tmp_path, "3fa9c2", returns=True)
    assert not (tmp_path / CONTACT).exists()
