"""Print the cluster that this process is part of, as JSON, and leave."""

import json

from tfmw.cluster import Cluster

print(json.dumps(Cluster.resolve().as_tf_config()), flush=True)
