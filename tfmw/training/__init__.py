"""One call of fit: its arguments, the position in the data, and the loop of both drivers.

Read `loop.py` first: epochs, callbacks, validation, backups, stopping, over a `Driver` that runs
the steps. `arguments.py` has the arguments of a call, `fit_context.py` its model, strategy and
tasks, `epoch_iterator.py` the position in the data, `pace.py` the number of steps of one Python
call.

May import: everything below the drivers, and neither of them.
"""
