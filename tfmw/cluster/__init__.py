"""Which cluster is this process part of, as which task, and what its tasks tell each other.

Read `cluster.py` first: the value `Cluster`. `schedulers.py` knows what each scheduler tells its
tasks; `rendezvous.py` has all tasks meet before TensorFlow starts; `group.py` carries small values
between workers during training; `control.py` and `servers.py` do the same for clusters with
parameter servers; `check.py` is `tfmw check`.

May import: `tfmw.keras_compat`, `tfmw.runtime`, `tfmw.errors`. Importing this package loads no
TensorFlow.
"""

from tfmw.cluster.cluster import Cluster

__all__ = ["Cluster"]
