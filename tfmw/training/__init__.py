"""One call of fit: what it means, the data's position, and the loop that both drivers share.

Read `loop.py` first: epochs, callbacks, validation, backups, stopping, over a `Driver` that makes
the steps. `arguments.py` is what the user asked for, `session.py` the model, strategy and tasks of
a call, `epoch_iterator.py` the position in the data, `pace.py` the steps of one Python call.

May import: everything below the drivers, and neither of them.
"""
