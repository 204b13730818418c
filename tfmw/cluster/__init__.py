"""Which cluster is this process part of, as which task, and how its tasks meet and agree.

Read `cluster.py` first: the value `Cluster`.

* `tf_config`, `schedulers`: where its description comes from; `addresses`: "host:port".
* `joining`: `tfmw.init`; `membership`: what this process has joined, and how it leaves.
* `rendezvous`: all workers meet and compare, before TensorFlow starts.
* `control`, `servers`: the same for parameter servers and their coordinator.
* `group`: small values between workers during training.
* `check`: `tfmw check`.

May import: `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`. Importing this package loads no
TensorFlow.
"""

from tfmw.cluster.cluster import Cluster

__all__ = ["Cluster"]
