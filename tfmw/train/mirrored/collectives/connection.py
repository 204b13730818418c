"""The ring of a cluster's workers, with two levels on several machines."""

from __future__ import annotations

import functools
import os

import tensorflow as tf

from tfmw.cluster import coordination, membership
from tfmw.cluster.group import Group
from tfmw.cluster.membership import JoinedCluster
from tfmw.compat.connected_strategy import ConnectedStrategy
from tfmw.errors import TfmwError
from tfmw.train.mirrored.collectives import hierarchy, listener, ring
from tfmw.train.mirrored.collectives.all_reduce import AllReduce, RingBroken
from tfmw.train.mirrored.collectives.hierarchy import HIERARCHY

_ring: AllReduce | None = None  # a process joins once, and has one ring


def ring_of(strategy: tf.distribute.Strategy) -> AllReduce | None:
    """The ring over which `strategy` sums gradients; None if TensorFlow sums them."""
    joined = membership.joined()
    if joined is None or strategy is not joined.made:
        return None
    ring = joined_ring(joined)
    if ring is not None:
        ring.timeout_s = joined.options.timeout_seconds
    return ring


def joined_ring(joined: JoinedCluster) -> AllReduce | None:
    """The ring of a cluster; None if TensorFlow sums gradients.

    All tasks must call this; the first call connects them.
    """
    global _ring
    if not isinstance(joined.strategy, ConnectedStrategy):
        return None
    if _ring is None:
        _ring = connected = _connect(joined)  # a second ring ends with the call that created it
        joined.positions.append(lambda: None if connected.broken else connected.exchanges)
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


def _connect(joined: JoinedCluster) -> AllReduce:
    group = Group.of_cluster(joined.cluster)
    machine = None if os.environ.get(HIERARCHY) == "0" else listener.machine()
    key = membership.training_key(group.from_chief)
    join = functools.partial(
        ring.connect,
        group.rank,
        joined.hosts,
        key,
        group.from_all,
        timeout_s=joined.options.timeout_seconds,
    )
    machines = [None if m is None else tuple(m) for m in group.from_all(machine)]
    try:
        connected = hierarchy.connect(group.rank, machines, join)
    except RingBroken as e:
        raise TfmwError(
            f"workers cannot sum gradients: {e}. Let workers connect to each other on any TCP "
            'port, or choose collectives="grpc", which needs the ports of the tasks only.'
        ) from e
    coordination.current().at_failure.append(lambda error: connected.close())
    return connected
