"""Downloads at the first start of a script: one task makes each, and the others wait."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.helpers.events import Server, running_server
from tfmw.compat import downloads

NUMBERS = bytes(range(256)) * (1 << 17)  # takes longer than a look at the file


def _archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("a.txt", "b.txt"):
            tar.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@pytest.fixture
def server() -> Iterator[Server]:
    bodies = {"numbers": NUMBERS, "files": _archive()}
    with running_server(bodies, halfway={"numbers": ("half", "asked")}) as running:
        yield running


@pytest.fixture
def found(run_cluster: Any, server: Server, tmp_path: Path) -> Any:
    """The results of both tasks, of one kind."""

    def of(kind: str, *options: str) -> Any:
        arguments = ["first_downloads.py", server.address, str(tmp_path), kind]
        first, second = run_cluster(*arguments, options=options)
        return first["found"], second["found"]

    return of


@pytest.mark.process
def test_a_file_is_downloaded_once_and_nobody_reads_a_part(found, server):
    digest = hashlib.sha256(NUMBERS).hexdigest()
    assert found("numbers") == (digest, digest)
    assert server.counts["numbers"] == 1


@pytest.mark.process
def test_an_archive_is_extracted_once_for_each_call_of_the_script(found, server):
    """The second call of the script extracts again, as in one process."""
    first, second = found("archive")
    assert first == [["a.txt", "b.txt"]] * 2
    assert second == [["b.txt"]] * 2, "worker 1 has extracted what worker 0 is reading"
    assert server.counts["files"] == 1


@pytest.mark.process
def test_a_dataset_of_tfds_is_prepared_once(found, server):
    # Tasks that import TFDS themselves; others have it from the process that they are copied from.
    first, second = found("dataset", "--standby", "off")
    assert first[0] == sum(range(40))
    assert first == second, "Python's random numbers do not depend on who has prepared it"
    assert server.counts["preparation"] == 1


@pytest.mark.process
def test_a_model_of_kagglehub_is_downloaded_once(found, server):
    assert found("model") == ("weights of a model",) * 2
    assert server.counts["preparation"] == 1


# ---- in this process ---------------------------------------------------------------------------


@pytest.fixture
def get_file(monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path) -> Any:
    """A call of the `get_file` of tasks; the argument is the number of the attempt."""
    retrieve = keras.utils.get_file.__globals__["urlretrieve"]
    monkeypatch.setitem(keras.utils.get_file.__globals__, "urlretrieve", downloads._whole(retrieve))
    shared = downloads._once_in_an_attempt(keras.utils.get_file)
    monkeypatch.setenv("TFMW_RUN_ID", "7f")

    def call(attempt: int, **arguments: Any) -> Path:
        monkeypatch.setenv("TFMW_ATTEMPT", str(attempt))
        monkeypatch.setattr(downloads, "_calls", collections.Counter())  # those of a new process
        return Path(shared(cache_dir=str(tmp_path), **arguments))

    return call


def test_the_next_attempt_extracts_again(get_file, server):
    archive = {"fname": "files.tar", "origin": f"{server.address}/files", "extract": True}
    folder = get_file(0, **archive)
    (folder / "a.txt").unlink()
    assert get_file(0, **archive) == folder
    assert not (folder / "a.txt").exists()
    assert get_file(1, **archive) == folder
    assert (folder / "a.txt").exists()


def test_a_killed_task_leaves_no_part_of_a_download(get_file, server, tmp_path):
    server.add("asked")

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        assert not (tmp_path / "datasets" / "numbers").exists()
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(Killed):
            get_file(0, origin=f"{server.address}/numbers")
    assert get_file(1, origin=f"{server.address}/numbers").read_bytes() == NUMBERS


def test_a_damaged_record_of_a_lock_is_no_record(get_file, server, tmp_path):
    server.add("asked")
    for damaged in ("", "{", "[]", json.dumps([1, 2, 3])):
        for lock in tmp_path.glob(".tfmw_*.lock"):
            lock.write_text(damaged)
        assert get_file(0, origin=f"{server.address}/numbers").read_bytes() == NUMBERS
