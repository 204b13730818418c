"""Keras's own tests, run through tfmw: what Keras promises, tfmw keeps.

    make test-keras                        everything
    make test-keras SAMPLE=400             as CI does: other tests for each commit
    make test-keras SAMPLE=400 SEED=a1b2   the same tests again, by the seed that was printed

Keras's source distribution holds its tests. Those of callbacks, layers, models, optimizers, losses,
metrics, saving and trainers are taken from it, in the installed version, and run against the
installed Keras with `Model.fit`, `evaluate` and `predict` replaced by tfmw's on two replicas (two
virtual CPUs). A test that fails then is run again with Keras's own methods. Where it passes there,
tfmw is to blame.

* `__main__.py`: fetches, runs, compares, says.
* `plugin.py`: the pytest plugin that replaces the methods, and draws the sample.
* `known_failures.toml`: the tests that fail with tfmw only, each with the reason. A failure that is
  not there fails the run, and so does a test that is there and passes.

All of it lands in `build/keras_suite`: the tests, the libraries that they import, and what became
of each test (`tfmw.json`), with the errors.
"""
