"""The cluster and task of this process; tasks connect, compare and exchange values.

Read `cluster.py` first: the value `Cluster`.

* `tf_config`, `schedulers`: the sources of its description; `addresses`: "host:port".
* `joining`: `tfmw.init`; `membership`: the cluster that this process has joined, and leaving it.
* `rendezvous`: workers connect and compare before TensorFlow starts; `handshake`: the protocol.
* `servers`: the same for parameter servers and their coordinator.
* `group`: small values between workers during training; `wire`: arrays, over connections.
* `check`: `tfmw check`.

May import: `tfmw.compat`, `tfmw.observe`, `tfmw.storage`, `tfmw.errors`. Importing this package
loads no TensorFlow.
"""

from tfmw.cluster.cluster import Cluster

__all__ = ["Cluster"]
