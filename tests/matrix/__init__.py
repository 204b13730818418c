"""The equivalence matrix: what users train with (rows) on several replicas (columns).

Every cell is compared with one process that runs stock `model.fit` on the same global batches.

    rows/           one entry per thing that users train with, see `row.row`
    row.py          what an entry says, and how one is run
    columns.py      runs all rows in one launch per column
    test_matrix.py  one assertion per cell
"""
