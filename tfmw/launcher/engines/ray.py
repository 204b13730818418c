"""Jobs on a Ray cluster: `tfmw.fit(..., workers=8, on="ray")`.

The controller is a detached actor on the caller's node, so a job outlives the caller. Each task is
an actor in the job's placement group. The call is in the object store: a node gets it once, for any
number of tasks. It belongs to the controller's actor, and is released with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfmw.cluster import addresses
from tfmw.errors import UsageError
from tfmw.launcher.call import Payload
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.agent import run_task
from tfmw.launcher.engines.controller import Controller
from tfmw.launcher.engines.engine import Contact, Engine, JobSpec, Layout, Tasks, library
from tfmw.launcher.engines.job import DistantJob

NAMESPACE = "tfmw"
"""Ray's namespace of the actors that control jobs; the jobs' tasks have no names."""

_KEEP_S = 24 * 3600.0
"""Seconds for which the result of a job that has ended can be fetched."""

# time after which a job with workers=(2, 8) that finds no room tries with fewer workers
_FEWER_S = 10.0

_READ = 4 << 20  # bytes of a file in one call
_REPLY_S = 10.0  # time for a controller to reply
_HEAD_S = 20.0  # time that Ray's head may be unreachable; after 60 s Ray ends the process
_LOOK_EVERY_S = 2.0  # interval between two questions for nodes that are drained


@dataclasses.dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster.

    Args:
        max_restarts: how often `tfmw.fit` restarts all tasks from the newest backup.
        address: address of the cluster, as in `ray.init`; by default RAY_ADDRESS, or the cluster of
            this machine, or a new one on this machine. A Ray that is already initialized is used.
        resources: requirements of each task: "CPU" (1), "GPU", "memory" in bytes, and custom ones.
        gpus_per_worker: the same as "GPU" in `resources`.
        strategy: placement of the tasks: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        runtime_env: environment of the actors, as in `ray.init`.
    """

    address: str | None = None
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpus_per_worker: float = 0
    strategy: str = "SPREAD"
    runtime_env: Mapping[str, Any] | None = None

    name = "ray"

    def submit(self, spec: JobSpec, payload: Payload) -> RayJob:
        ray = self._connect()
        number = secrets.token_hex(4)
        here = ray.get_runtime_context().get_node_id()
        actor = (
            ray.remote(_ControllerActor)
            .options(
                name=number,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=8,
                runtime_env=dict(self.runtime_env) if self.runtime_env else None,
                # Ray does not always heed soft affinity just after a node has joined. A controller
                # on another node than its caller's would be one more machine that may be lost.
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    here, soft=False
                ),
            )
            .remote()
        )
        try:
            # Readers of arrays in the object store do not copy them. The large arrays of the call
            # are put there directly from the caller's memory.
            parts = [ray.put(np.frombuffer(part, np.uint8)) for part in payload]
            ray.get(actor.begin.remote(spec, parts, self))
            return RayJob(self, number, ray, actor)
        except BaseException:
            ray.kill(actor)
            raise

    def attach(self, number: str) -> RayJob:
        ray = self._connect(start=False)
        try:
            actor = ray.get_actor(number, namespace=NAMESPACE)
        except ValueError as error:
            raise self.unknown_job(number, "on this Ray cluster") from error
        return RayJob(self, number, ray, actor)

    def numbers(self) -> list[str]:
        found = self._connect(start=False).util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in found if actor["namespace"] == NAMESPACE]

    def where(self, number: str) -> str:
        ray, url = self._connect(), ""
        with contextlib.suppress(AttributeError):  # another version of Ray may have another name
            url = ray._private.worker.get_dashboard_url()
        at = f", dashboard at http://{url}" if url else ""
        address = ray.get_runtime_context().gcs_address
        return f"job ray:{number} on the Ray cluster at {address}{at}"

    def needs(self) -> dict[str, float]:
        """The resources of each task."""
        needs = {"CPU": 1, "GPU": self.gpus_per_worker, **self.resources}
        return {name: float(amount) for name, amount in needs.items() if amount}

    def _connect(self, start: bool = True) -> Any:
        """Connects to Ray; `start`: starts a new cluster of this machine if there is none."""
        ray = library("ray")
        if not ray.is_initialized():
            address = self.address or (None if start else "auto")
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
            except getattr(ray.exceptions, "AuthenticationError", ()) as error:
                raise UsageError(f"the Ray cluster refuses this process: {error}") from error
            except ConnectionError as error:
                raise UsageError(
                    f"no Ray cluster was reached ({str(error).splitlines()[0]}): start one, name "
                    "it by RAY_ADDRESS or address=, or give this process the cluster's token."
                ) from error
        return ray


class RayJob(DistantJob):
    """A job whose controller is an actor, usable in any process of the cluster.

    A lost call, as on a busy node, does not mean that the job is lost. Ray then reports the actor
    as unavailable, by a subclass of the error of a dead one. Without its head Ray does not reply at
    all, and ends this process after a minute.
    """

    def __init__(self, engine: Ray, number: str, ray: Any, actor: Any) -> None:
        super().__init__(engine, number)
        self._ray, self._actor = ray, actor
        self._head = ray.get_runtime_context().gcs_address  # "host:port"
        self._head_gone_since: float | None = None

    def read(self, name: str, offset: int = 0) -> bytes:
        def ask() -> bytes:
            found = bytearray()
            while True:
                piece = self._call("read", name, offset + len(found))
                found += piece
                if len(piece) < _READ:  # another call could read a file that has been replaced
                    return bytes(found)

        return self._asked(ask) or b""

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._asked(lambda: self._call("write", name, bytes(data)))

    def _state(self) -> str:
        # The controller may reply for a while without Ray's head.
        return "lost" if self._gone() else ""

    def _kill(self) -> None:
        """Ends the job: its tasks and its placement group belong to the actor."""
        self._ray.kill(self._actor)

    def forget(self) -> None:
        if self._asked(lambda: self._call("remove")) is not None:
            self._kill()

    def _call(self, method: str, *args: Any) -> Any:
        """Result of a method of the actor. Raises OSError: it has died, or does not reply."""
        errors = self._ray.exceptions
        try:
            call = getattr(self._actor, method).remote(*args)
            return self._ray.get(call, timeout=_REPLY_S)
        except (errors.ActorUnavailableError, errors.GetTimeoutError) as error:
            raise TimeoutError(_reason(error)) from error
        except errors.RayActorError as error:
            self.why = f"its controller on the cluster was lost: {_reason(error)}"
            raise ConnectionError(self.why) from error

    def _gone(self) -> bool:
        now = time.monotonic()
        try:
            if not self.why:
                socket.create_connection(addresses.split(self._head), timeout=_REPLY_S).close()
                self._head_gone_since = None
        except OSError as error:
            self._head_gone_since = self._head_gone_since or now
            if now - self._head_gone_since > _HEAD_S:
                self.why = (
                    f"Ray's head at {self._head} has not been reachable for {_HEAD_S:g} s "
                    f"({error.strerror or error}), and without it Ray ends all tasks, and soon "
                    "this process: start the cluster and the job again; a fit with a backup_dir "
                    "resumes"
                )
        return bool(self.why)


def _reason(error: Exception) -> str:
    """The line of Ray's message that has the reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # Format: "The actor died ...:", lines such as "\tclass_name: ...", then the reason.
    told = [line for line in lines[1:] if not line.startswith("\t")]
    return (told or lines or [type(error).__name__])[0].strip()


class _ControllerActor:
    """An actor that controls one job, and lets others read its files."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tfmw-job-"))

    def begin(self, spec: JobSpec, payload: list[Any], engine: Ray) -> None:
        """Starts the controller."""
        import ray

        # The actor puts the payload again, as objects that it owns outlive the caller's process.
        tasks = RayTasks(engine, [ray.put(ray.get(part)) for part in payload])

        def control() -> None:
            Controller(spec, tasks, self._folder).run()
            time.sleep(_KEEP_S)
            self.remove()
            os._exit(0)

        threading.Thread(target=control, daemon=True).start()

    def read(self, name: str, offset: int) -> bytes:
        return own_files.read(self._folder, name, offset, _READ)

    def write(self, name: str, data: bytes) -> None:
        own_files.write(self._folder / name, data)

    def remove(self) -> None:
        """Removes the job's files."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _TaskActor:
    """An actor that runs one task."""

    def run(self, contact: Contact, rank: int, payload: list[Any]) -> None:
        """Runs the task, until it has ended."""
        import ray

        run_task(
            contact,
            rank,
            lambda: [memoryview(part) for part in ray.get(payload)],
            host=ray.util.get_node_ip_address(),
        )


@dataclasses.dataclass(eq=False)
class RayTasks(Tasks):
    """Actors in a placement group."""

    engine: Ray
    payload: list[Any]  # references to the parts of the packed call in the object store

    def __post_init__(self) -> None:
        self._ray = library("ray")
        self._group: Any = None
        self._wanted = 0
        self._since = self._look_at = 0.0
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def hosts(self) -> tuple[str, ...]:
        return (self._ray.util.get_node_ip_address(),)

    def available(self, least: int, most: int) -> int:
        if self._group is None:
            self._ask(max(least, self.room(most)))
        if self._group.wait(timeout_seconds=0.5):
            return self._wanted
        if self._wanted > least and time.monotonic() - self._since > _FEWER_S:
            self.close()
            self._ask(self._wanted - 1)
        return 0

    def room(self, most: int) -> int:
        """Counts the tasks for which all live nodes have resources, used or not."""
        need, draining = self.engine.needs(), self._draining()
        nodes = [node for node in self._ray.nodes() if node["NodeID"] not in draining]
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        fits = (min(int(node.get(name, 0) // n) for name, n in need.items()) for node in alive)
        return min(most, sum(fits)) if need else most

    def start(self, layout: Layout, contact: Contact) -> None:
        need, actor = self.engine.needs(), self._ray.remote(_TaskActor)
        in_group = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        needs = {
            "num_cpus": need.pop("CPU", 0),
            "num_gpus": need.pop("GPU", 0),
            "memory": need.pop("memory", None),
            "resources": need,
        }
        for rank in range(len(layout)):
            place = in_group(self._group, placement_group_bundle_index=rank)
            self._actors.append(actor.options(**needs, scheduling_strategy=place).remote())
            self._runs.append(self._actors[-1].run.remote(contact, rank, self.payload))

    def lost(self) -> dict[int, str]:
        found = {}
        done, _ = self._ray.wait(self._runs, num_returns=max(1, len(self._runs)), timeout=0)
        for run in done:
            try:
                self._ray.get(run)
                why = "its actor has ended"
            except self._ray.exceptions.ActorUnavailableError:
                continue  # the actor may be alive: its connection decides
            except Exception as error:
                why = f"its actor was lost: {_reason(error)}"
            found[self._runs.index(run)] = why
        return found

    def notices(self) -> dict[int, str]:
        if self._group is None or time.monotonic() < self._look_at:
            return {}
        self._look_at, ends = time.monotonic() + _LOOK_EVERY_S, self._draining()
        if not ends:
            return {}
        table = self._ray.util.placement_group_table(self._group)
        return {
            rank: "its node is drained" + (f" within {s:.0f} s" if (s := ends[node]) else "")
            for rank, node in table["bundles_to_node_id"].items()
            if node in ends
        }

    def _draining(self) -> dict[str, float]:
        """Nodes that are drained: {id: seconds that are left; 0: unknown}."""
        try:
            found = self._ray._private.state.state.get_draining_nodes()
        except AttributeError:  # another version of Ray may have another name
            return {}
        return {node: max(0.0, at / 1000 - time.time()) for node, at in found.items()}

    def end(self) -> None:
        self._ray.wait(self._runs, num_returns=max(1, len(self._runs)), timeout=2)
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._runs = [], []
        self.close()  # the next attempt may get other nodes

    def close(self) -> None:
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None

    def _ask(self, count: int) -> None:
        self._wanted, self._since = count, time.monotonic()
        self._group = self._ray.util.placement_group(
            [self.engine.needs()] * count, strategy=self.engine.strategy
        )
