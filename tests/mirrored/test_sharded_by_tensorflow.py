"""The update, sharded over replicas by tf.distribute's collectives, as GPUs do: on CPU devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.cluster import ONE_THREAD, run_cluster

pytestmark = pytest.mark.process

# As in test_sharded_update.py; all add gradients as without sharing, so whole variables, too.
OF_WORKERS = ["Adam | on", "Lamb | off", "sparse"]
ROUNDED = "global_clipnorm | on"


def shared_by(*names: str, **settings: Any) -> Any:
    workers = settings.pop("WORKERS")
    env = {**ONE_THREAD, "TFMW_NO_INIT": "1", **settings}  # the program makes devices before
    return run_cluster("sharded_update.py", *names, workers=workers, env=env, timeout_s=600)


@pytest.fixture(scope="module")
def two_workers() -> Any:
    return shared_by(*OF_WORKERS, ROUNDED, WORKERS=2, COLLECTIVES="grpc")


@pytest.fixture(scope="module")
def two_devices() -> Any:
    return shared_by("interrupted", WORKERS=1, DEVICES="2")


def assert_same(run: Any, name: str, replicas: int) -> tuple[Any, Any]:
    """(what each replica updated, what they shared), the same on all workers."""
    assert len({(task[name][1]["weights"], task[name][1]["state"]) for task in run}) == 1
    plain, shared = run[0][name]
    assert shared["update"] == f"sharded over {replicas} replicas"
    assert (shared["weights"], shared["state"]) == (plain["weights"], plain["state"])
    assert shared.get("seen") == plain.get("seen")
    return plain, shared


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_WORKERS)
def test_two_workers_share_it_to_the_last_bit(two_workers: Any, name: str) -> None:
    assert two_workers[0]["ring"] == "NoneType"
    assert_same(two_workers, name, replicas=2)


@pytest.mark.nightly
def test_a_norm_of_all_gradients_is_summed_over_replicas(two_workers: Any) -> None:
    plain, shared = two_workers[0][ROUNDED]
    assert shared["update"] == "sharded over 2 replicas"
    for ours, wanted in zip(shared["values"], plain["values"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_two_devices_of_a_process_share_it_to_the_last_bit(two_devices: Any) -> None:
    # The process has all parts, so nothing is lost by an exception in a step.
    assert_same(two_devices, "interrupted", replicas=2)


@pytest.mark.nightly
def test_each_device_holds_its_part_of_the_slots_alone(two_devices: Any) -> None:
    plain, shared = two_devices[0]["interrupted"]
    assert plain["held"] == [shared["slots"], shared["slots"]]
    whole, *parts, originals = shared["held"]
    assert whole == originals == 0
    assert sum(parts) == shared["slots"]
    assert max(parts) - min(parts) < 10  # of each slot of each pack at most one element


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_with_two_devices_each_share_it_to_the_last_bit(workers: int) -> None:
    names = ["constraint", "sparse", "between steps", "16 bits"]
    run = shared_by(*names, WORKERS=workers, COLLECTIVES="grpc", DEVICES="2")
    for name in names:
        assert_same(run, name, replicas=2 * workers)


@pytest.mark.nightly
def test_three_workers_share_all_kinds_of_optimizers_to_the_last_bit() -> None:
    names = ["AdamW | on", "Nadam | off", "clipnorm | on", "Adafactor | off", "loss scaling | on"]
    names += ["average of weights | off", "accumulated gradients | on", "compiled model"]
    run = shared_by(*names, WORKERS=3, COLLECTIVES="grpc")
    for name in names:
        assert_same(run, name, replicas=3)
