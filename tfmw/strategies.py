"""Strategies of tf.distribute, from the cluster that this process has joined.

May import: `tfmw.train.strategies`.
"""

from tfmw.train.strategies import (
    choose,
    current_strategy,
    init,
    mirrored,
    multi_worker_mirrored,
    parameter_server,
    servers_of,
)

__all__ = [
    "choose",
    "current_strategy",
    "init",
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
    "servers_of",
]
