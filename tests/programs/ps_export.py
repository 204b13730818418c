"""Exports a table of 307 MB, whole and sharded: ps_export.py DIRECTORY."""

import sys

import keras

import tfmw

tfmw.init()
tfmw.strategies.parameter_server(min_shard_bytes=64 << 20)
table = keras.layers.Embedding(1_200_000, 64, keras.initializers.RandomUniform(seed=1))
model = keras.Sequential([keras.Input((), dtype="int64"), table, keras.layers.Dense(4)])
for tables in ("whole", "sharded"):
    tfmw.export(model, f"{sys.argv[1]}/{tables}", tables=tables)
