"""Training, evaluation and prediction: the calls of users, the loop, the drivers, state on disk.

Read `calls.py` first: `fit`, `evaluate`, `predict`; then `plan.py`, which chooses the parts of a
training, and `loop.py`: epochs, callbacks, validation, backups, stopping, over a `Driver` that runs
the steps. `arguments.py` has the arguments of a call, and `fit_context.py` its model, strategy and
tasks. `epoch_iterator.py` has the position in the data, and `pace.py` the number of steps of one
Python call. `on_workers.py` trains on new processes.

`mirrored/` and `parameter_server/` are the two drivers; `local_sgd/` is a layer over the first.
`checkpoint/` has backups, `saved_model.py` exports, `strategies.py` creates a strategy of
tf.distribute, and `callbacks/` runs callbacks on many workers.

May import: every other package except `tfmw.cli`.
"""
