"""The ring of a cluster's workers, with two levels on several machines."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import tensorflow as tf

from tfmw.cluster import coordination, group, leaving, membership
from tfmw.cluster.group import Group
from tfmw.cluster.membership import JoinedCluster
from tfmw.compat.connected_strategy import ConnectedStrategy
from tfmw.errors import TfmwError
from tfmw.observe.progress import blocking_call
from tfmw.train.mirrored.collectives import hierarchy, listener, ring
from tfmw.train.mirrored.collectives.all_reduce import AllReduce, RingBroken
from tfmw.train.mirrored.collectives.hierarchy import HIERARCHY

# A process joins once, and has one ring, whose methods are in traced steps.
_ring: AllReduce | None = None
_connected = False


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

    All tasks must call this; the first call connects them, and the first one after the loss of one.
    """
    global _ring, _connected
    if not isinstance(joined.strategy, ConnectedStrategy):
        return None
    if not _connected:
        # a second ring ends with the call that created it
        _ring = connected = _connect(joined, _ring)
        _connected = True
        joined.positions.append(lambda: None if connected.broken else connected.exchanges)
    return _ring


def is_unconnected(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy sums gradients over a ring which no call has connected yet."""
    return isinstance(strategy, ConnectedStrategy) and _ring is None


def rejoin(made: Sequence[group.Made]) -> None:
    """Meets the other workers again, after the loss of one; the next use connects the ring.

    Args:
        made: the calls of `Group` that a new worker makes until it is where this one is.
    """
    global _connected
    joined = membership.joined()
    assert joined is not None
    with blocking_call("the wait for a new worker"):
        coordination.current().close()
        if _ring is not None:
            _ring.close()
        _connected = False
        joined.positions.clear()
        leaving.begin_again()
        joined.rejoin()
        group.repeat(made, Group.of_cluster(joined.cluster))


def another_ring(strategy: tf.distribute.Strategy) -> AllReduce | None:
    """A second ring between the same workers, for collectives during those of the first one.

    Returns None if TensorFlow sums their gradients. All tasks must call it; the caller closes the
    ring.
    """
    joined = membership.joined()
    if joined is None or ring_of(strategy) is None:
        return None
    return _connect(joined)


def _connect(joined: JoinedCluster, before: AllReduce | None = None) -> AllReduce:
    """Connects a new ring, or anew the one of `before`."""
    workers = Group.of_cluster(joined.cluster)
    machine = None if os.environ.get(HIERARCHY) == "0" else listener.machine()
    key = membership.training_key(workers.from_chief)
    join = functools.partial(
        ring.connect,
        workers.rank,
        joined.hosts,
        key,
        workers.from_all,
        timeout_s=joined.options.timeout_seconds,
    )
    machines = [None if m is None else tuple(m) for m in workers.from_all(machine)]
    try:
        new = hierarchy.connect(workers.rank, machines, join)
    except RingBroken as e:
        raise TfmwError(
            f"workers cannot sum gradients: {e}. Let workers connect to each other on any TCP "
            'port, or choose collectives="grpc", which needs the ports of the tasks only.'
        ) from e
    coordination.current().at_failure.append(lambda error: new.close())
    if before is None:
        return new
    before.continue_over(new)
    return before
