"""The ring of a strategy's workers, with two levels on several machines, connected at first use."""

from __future__ import annotations

import functools
import logging
import os

import tensorflow as tf

from tfmw.cluster import membership
from tfmw.cluster.group import Group
from tfmw.cluster.membership import JoinedCluster
from tfmw.errors import UsageError
from tfmw.train.mirrored.collectives import hierarchy, listener, ring
from tfmw.train.mirrored.collectives.all_reduce import AllReduce, RingBroken
from tfmw.train.mirrored.collectives.hierarchy import HIERARCHY

logger = logging.getLogger("tfmw")

# A process joins once, and has one ring.
_ring: AllReduce | None = None
_connected_once = False


def ring_of(strategy: tf.distribute.Strategy) -> AllReduce | None:
    """The ring over which `strategy` sums gradients; None if TensorFlow sums them.

    Workers of one CPU replica each have a ring, unless `init` was called with other collectives.
    All tasks must call this; the first call connects them.

    Raises:
        UsageError: `init` had collectives="tfmw", but there can be no ring.
    """
    global _ring, _connected_once
    joined = membership.joined()
    if joined is None or strategy is not joined.strategy:
        return None
    if joined.collectives not in ("auto", "tfmw"):
        return None
    if not _connected_once:
        _connected_once = True
        _ring = connected = _connect(joined)
        if connected is not None:  # a second ring ends with the call that created it
            joined.positions.append(lambda: None if connected.broken else connected.exchanges)
    if _ring is not None:
        _ring.timeout_s = joined.options.timeout_seconds
    return _ring


def another_ring(strategy: tf.distribute.Strategy) -> AllReduce | None:
    """A second ring between the same workers, for collectives during those of the first one.

    Returns None if TensorFlow sums their gradients. All tasks must call it; the caller closes the
    ring.
    """
    joined = membership.joined()
    if joined is None or ring_of(strategy) is None:
        return None
    return _connect(joined)


def _connect(joined: JoinedCluster) -> AllReduce | None:
    group = Group.of(joined.strategy)
    devices = joined.strategy.extended.worker_devices
    required = joined.collectives == "tfmw"
    if not all(group.from_all(len(devices) == 1 and "CPU" in devices[0].upper())):
        if required:
            raise UsageError(
                'collectives="tfmw" needs workers of one CPU device each, and a worker here has '
                'other devices: use "auto".'
            )
        return None
    machine = None if os.environ.get(HIERARCHY) == "0" else listener.machine()
    key = membership.training_key(group.from_chief)
    join = functools.partial(
        ring.connect,
        group.rank,
        joined.hosts,
        key,
        group.from_all,
        probe_peer=group.require_peer,
        timeout_s=joined.options.timeout_seconds,
    )
    machines = [None if m is None else tuple(m) for m in group.from_all(machine)]
    try:
        connected = hierarchy.connect(group.rank, machines, join)
    except RingBroken as e:
        if required:
            raise UsageError(
                f'collectives="tfmw" needs a connection to each neighbour: {e}. Let workers '
                'connect to each other on any TCP port, or use "auto".'
            ) from e
        if group.is_chief:
            logger.warning(
                "gradients travel over TensorFlow's gRPC, which takes longer: %s. Let workers "
                "connect to each other on any TCP port, or accept it with collectives='ring'.",
                e,
            )
        return None
    joined.at_failure.append(connected.close)
    return connected
