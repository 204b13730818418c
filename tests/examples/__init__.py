"""The examples of keras.io by their own code: Keras in one process, tfmw on two workers.

    make test-keras SUITE=examples                       all of them; downloads what is not there
    make test-keras SUITE=examples EXAMPLES="vae mixup"      some
    make test-keras SUITE=examples SOURCES=~/keras-core  from a folder instead

The repository holds no copy of an example. `examples.toml` has its path in a public repository, at
a commit, and the edits that make it small: made data, few steps. `stand_ins.py` does the same for
all of them: small data sets, two epochs, dropout and noise without chance, float64. Each example
runs as it is, and with `model.fit(` written as `tfmw.fit(model, ` on two workers. Logs of every
`fit`, results of `evaluate` and `predict`, and the weights are compared.

* `__main__.py`: fetches, edits, runs, compares, says. Ends with 1 where an example differs and no
  warning says so, where one differs otherwise than its entry says, and where one fails.
* `program.py`: one run of one example in a process.

The result of each is in `build/examples`.
"""
