"""Keras's own tests, run through tfmw: tfmw keeps the promises of Keras.

    make test-keras                        everything
    make test-keras SAMPLE=400             as CI does: other tests for each commit
    make test-keras SAMPLE=400 SEED=a1b2   the same tests again, by the seed that was printed

Keras's source distribution, in the installed version, holds its tests. The suite takes those of
callbacks, distributions, layers, models, optimizers, losses, metrics, saving and trainers, and runs
them against the installed Keras. tfmw's methods replace `Model.fit`, `evaluate` and `predict`
there, on two replicas (two virtual CPUs). A test that fails is run again with Keras's own methods.
If it passes with them, tfmw is to blame.

* `__main__.py`: fetches, runs, compares, says.
* `plugin.py`: the pytest plugin that replaces the methods, and draws the sample.
* `known_failures.toml`: the tests that fail with tfmw only, each with the reason. A failure that is
  not there fails the run, and so does a test that is there and passes.

`build/keras_suite` gets the tests, the libraries that they import, and the outcome of each test
(`tfmw.json`), with the errors.
"""
