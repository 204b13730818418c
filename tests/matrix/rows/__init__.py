"""All rows of the matrix; importing this registers them in `tests.matrix.row.ROWS`."""

from tests.matrix.rows import (
    applications,
    data,
    embeddings,
    execution,
    features,
    hash_tables,
    increments,
    layers,
    losses,
    models,
    optimizers,
    steps,
)

__all__ = [
    "applications",
    "data",
    "embeddings",
    "execution",
    "features",
    "hash_tables",
    "increments",
    "layers",
    "losses",
    "models",
    "optimizers",
    "steps",
]
