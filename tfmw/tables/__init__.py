"""Tables: variables that are divided over parameter servers, and made there.

    create_on_servers(partition, servers=2)             # for all later variables of this process
    model = keras.Sequential([keras.layers.Embedding(10**9, 64), ...])
    is_table(model.layers[0].embeddings)                # True: a handle, without rows

Read `table.py` first: the handle that the Keras variable holds, and its shards. `shards.py` looks
up rows of shards, from any process, and those of several tables at once. `creation.py` decides
which variables become tables, and fills them on their servers; `joined.py` has the variables there,
which small tables share. `files.py` has tables in checkpoints, those of SavedModels too;
`row_files.py` has the files in which a SavedModel may look rows up instead.

May import: `tfmw.compat`, `tfmw.storage`, `tfmw.errors`.
"""
