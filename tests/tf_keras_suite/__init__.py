"""The tests of legacy Keras's own support of tf.distribute, on Keras 3 and tfmw.

    make test-keras SUITE=tf-keras                          downloads them
    make test-keras SUITE=tf-keras SOURCES=~/tf-keras    from a checkout instead

`aliases.py` gives their imports the names of Keras 3. `plugin.py` turns their strategies into
tfmw's, on two virtual devices and on two processes, and hands `fit`, `evaluate` and `predict` on.
`__main__.py` runs them, runs again with stock Keras what has failed, and compares with
`known_failures.toml`: a test that fails with stock Keras too needs something that Keras 3 lacks.
"""
