"""Rows looked up in files, with the variables of a table in this process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw.tables import row_files, shards
from tfmw.tables.row_files import RowFiles
from tfmw.tables.shards import VariableShard


def table_of(values: tf.Tensor, bounds: list[int]) -> Any:
    """A substitute for `tables.Table`, of shards between these rows, all on one server."""
    shards = [
        VariableShard(tf.Variable(values[a:b]), 0, a, b) for a, b in itertools.pairwise(bounds)
    ]
    row_bytes = values[0].numpy().nbytes
    return SimpleNamespace(
        shape=values.shape, dtype=values.dtype, row_bytes=row_bytes, shards=shards
    )


def looked_up(files: RowFiles, folder: Path, ids: Any) -> np.ndarray:
    found = files.look_up("table", tf.constant(str(folder)), tf.constant(ids, tf.int64))
    rows: np.ndarray = tf.cast(found, tf.float64).numpy()
    return rows


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(shards, "server", lambda number: "/CPU:0")
    monkeypatch.setattr(row_files, "FILE_BYTES", 1 << 16)


@pytest.fixture
def written(tmp_path):
    """Files of a float32 [5000, 16] table, 64 rows in a record: (files, their folder, values)."""
    values = tf.random.stateless_normal([5000, 16], [1, 2])
    files = RowFiles({"table": table_of(values, [0, 2001, 5000])})
    files.write(str(tmp_path))
    return files, tmp_path, values.numpy()


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16, tf.float64])
@pytest.mark.parametrize(
    ("shape", "bounds"),
    [
        ([7, 3], [0, 3, 7]),  # fewer rows than a record has
        ([3000, 2, 5], [0, 1111, 3000]),
        ([100, 3000], [0, 100]),  # rows larger than a record
    ],
)
def test_rows_are_those_of_the_table(tmp_path, dtype, shape, bounds):
    values = tf.cast(tf.random.stateless_normal(shape, [3, 4]), dtype)
    files = RowFiles({"table": table_of(values, bounds)})
    files.write(str(tmp_path))
    ids = [*range(0, shape[0], max(1, shape[0] // 200)), shape[0] - 1, 0, 0]
    expected = tf.cast(tf.gather(values, ids), tf.float64).numpy()
    np.testing.assert_array_equal(looked_up(files, tmp_path, ids), expected)
    assert looked_up(files, tmp_path, np.zeros(0)).shape == (0, *shape[1:])


def test_two_tables_have_files_of_their_own(tmp_path):
    values = [tf.fill([500, 8], float(n)) for n in range(2)]
    both = {"other": table_of(values[0], [0, 500]), "table": table_of(values[1], [0, 500])}
    files = RowFiles(both)
    files.write(str(tmp_path))
    assert set(looked_up(files, tmp_path, [0, 250, 499]).ravel()) == {1.0}


def test_description_finds_rows_without_tfmw(written):
    """The description in docs/howto/export.md, followed with plain TensorFlow."""
    files, folder, values = written
    described = json.loads(json.dumps(files.as_json()))["table"]
    assert (described["shape"], described["dtype"]) == ([5000, 16], "float32")
    found = []
    for name, start, stop in described["files"]:
        records = tf.data.TFRecordDataset(str(folder / name))
        rows = [tf.io.parse_tensor(record, described["dtype"]) for record in records]
        assert all(len(each) == described["rows_per_record"] for each in rows)
        found.append(tf.concat(rows, 0)[: stop - start])
    np.testing.assert_array_equal(tf.concat(found, 0), values)


@pytest.mark.parametrize("wrong", [-1, 5000])
def test_ids_out_of_the_table_are_refused(written, wrong):
    files, folder, _ = written
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ids of table .* below 5000.*") as e:
        looked_up(files, folder, [0, wrong])
    assert str(wrong) in str(e.value)


@pytest.mark.parametrize("length", [0, 4200, 8000])
def test_files_that_end_too_early_are_found(written, length):
    files, folder, _ = written
    path = folder / "rows-00000.tfrecord"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(tf.errors.OpError, match=r"that files of table are whole|truncated record"):
        looked_up(files, folder, [500])


def test_damaged_rows_are_found_by_their_checksum(written):
    files, folder, values = written
    path = folder / "rows-00000.tfrecord"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1  # of the first record
    path.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match="corrupted record"):
        looked_up(files, folder, [500, 5])
    np.testing.assert_array_equal(looked_up(files, folder, [500]), values[500:501])


def test_missing_file_is_named(written):
    files, folder, _ = written
    (folder / "rows-00000.tfrecord").unlink()
    with pytest.raises(tf.errors.NotFoundError, match=r"rows-00000\.tfrecord"):
        looked_up(files, folder, [500])
