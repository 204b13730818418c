"""How the tensors of a traced step follow from the examples of a batch.

    flows = Dataflow(batch)
    flows.of(loss).kind            # "reduced": a sum or mean over the examples
    flows.of(x @ tf.transpose(x))  # rows along two axes: pairs of examples

A replica has a part of the global batch. From a value's `Flow` follows whether the values of all
replicas combine into that of one process: sums add up, means have a weighted mean, and one row per
example is as it is. Neither holds of a value for which examples are compared with each other, nor
of a function of their mean, such as its root.

The axis of the examples is followed from operation to operation. Its size is unknown while a step
is traced: a number in the graph is never one of examples.
"""
