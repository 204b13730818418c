"""The equivalence matrix: models and data (rows) on several kinds of replicas (columns).

Every cell is compared with one process that runs stock `model.fit` on the same global batches.

    rows/           one entry per model, method or kind of data, see `row.row`
    row.py          the fields of an entry, and the code that runs it
    columns.py      runs all rows in one launch per column
    test_matrix.py  one assertion per cell
"""
