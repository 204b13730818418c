"""Dependence of a traced step's tensors on the examples of a batch.

    flows = Dataflow(batch)
    flows.of(loss).kind            # "reduced": a sum or mean over the examples
    flows.of(x @ tf.transpose(x))  # rows along two axes: pairs of examples

A replica has a shard of the global batch. A value's `Flow` determines whether the values of all
replicas combine into that of one process. Sums add up, means have a weighted mean, and one row per
example stays as it is. A value that compares examples with each other cannot be combined, nor can a
nonlinear function of their mean, such as its root.

The axis of the examples is followed from operation to operation. Its size is unknown while a step
is traced, so no constant in the graph is a number of examples.
"""
