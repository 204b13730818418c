"""Local SGD and DiLoCo (experimental): replicas exchange weights every few steps.

    tfmw.fit(model, data, sync=tfmw.LocalSGD(every=50))
    tfmw.fit(model, data, sync=tfmw.DiLoCo(every=50))

Each replica makes `every` steps with the model's own optimizer. The outer gradient is the mean over
replicas of (last common weights - own weights). An outer optimizer updates the common weights with
it (Douillard et al., DiLoCo, arXiv 2311.08105). Fragments of the weights may be exchanged in turns,
while steps continue (Streaming DiLoCo, arXiv 2501.18512).

The package is a layer over the mirrored driver: `rounds.py` has the methods of its `EachStep`. Only
`fit` imports this package, and a call without `sync` runs none of its code.
"""
