"""Everything that Keras exports, on two replicas beside one process.

`python -m tests.keras_compat.survey` tries each loss, metric, optimizer and
layer in a model drawn by Hypothesis, and writes the results into `docs/explain/examples.md`.

* `contexts`: draws of Hypothesis: batch sizes, weights, reductions, masks, how data are passed.
* `feeding`: the data and the first layers of a model in a context.
* `catalogue`: one item for each exported class, and how it is put into a model.
* `trial`: trains one item both ways, and says how the results differ.
* `report`: the table.
"""
