"""Meet the other tasks of a cluster, without TensorFlow: meet.py CONFIG FACTS TIMEOUT_S.

CONFIG is a TF_CONFIG, FACTS what must be the same. Prints {"error": ..., "type": ...}.
"""

import json
import sys

from tfmw.cluster import Cluster, rendezvous
from tfmw.errors import TfmwError

cluster = Cluster.resolve({"TF_CONFIG": sys.argv[1]})
result = {"error": "", "type": ""}
try:
    rendezvous.meet(cluster, json.loads(sys.argv[2]), timeout_s=float(sys.argv[3]))
except TfmwError as error:
    result = {"error": str(error), "type": type(error).__name__}
print(json.dumps(result))
