"""Backups with tables: slices that servers have written, read by them and by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmw.checkpoint.store import Backup, BackupStore, Damaged, verify
from tfmw.errors import TfmwError

TABLE: np.ndarray = np.arange(12, dtype=np.float32).reshape(6, 2)
WEIGHTS: np.ndarray = np.ones(3, np.float32)


class Files:
    """As `tables.TableFiles`, without servers."""

    layout = {"table": [[0, 4], [4, 6]]}  # noqa: RUF012

    def write(self, directory: str, must_be_finite: Any = ()) -> list[str]:
        del must_be_finite
        prefixes = []
        for number, (start, stop) in enumerate(self.layout["table"]):
            prefixes.append(f"{directory}/server_{number}")
            tf.raw_ops.SaveV2(
                prefix=prefixes[-1],
                tensor_names=["table"],
                shape_and_slices=[f"6 2 {start},{stop - start}:-"],
                tensors=[TABLE[start:stop]],
            )
        return prefixes


@pytest.fixture
def backup(tmp_path: Path) -> Backup:
    store = BackupStore(tmp_path / "backups")
    store.write(1, {"w": WEIGHTS}, {"n": 1}, table_files=Files())  # type: ignore[arg-type]
    found = store.newest()
    assert found is not None
    return found


def test_table_is_read_whole_where_there_are_no_servers(backup: Backup) -> None:
    found = backup.tensors()
    assert sorted(found) == ["table", "w"]
    np.testing.assert_array_equal(found["table"], TABLE)
    np.testing.assert_array_equal(found["w"], WEIGHTS)
    assert verify(backup.path) == []


def test_server_that_cannot_read_is_named_and_no_backup_is_called_damaged(backup: Backup) -> None:
    """This process has no server: reading on one fails, as after its end or without its disk."""
    with pytest.raises(TfmwError, match=r"parameter server 0 cannot read .* coordinator can") as e:
        backup.tensors(servers=1)
    assert not isinstance(e.value, Damaged)


@pytest.mark.parametrize("servers", [0, 1])
def test_damaged_rows_are_found(backup: Backup, servers: int) -> None:
    (file,) = Path(backup.path).glob("tensors.data-00001-of-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match="damaged"):
        backup.tensors(servers)


def test_missing_slice_is_found(backup: Backup) -> None:
    backup._layout["table"] = [[0, 4]]
    with pytest.raises(Damaged, match="are not all of its"):
        backup.tensors()
