"""The digits that ship with tfmw: TFDS reads the content of the file, in every process."""

from __future__ import annotations

import collections
import errno
import fcntl
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

import tfmw.data.datasets.digits
from tests.helpers.backup_points import lacking
from tfmw import datasets

FILE = Path(tfmw.data.datasets.digits.__file__).with_name("digits.csv.gz")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    datasets.load("tfmw_digits", "train", data_dir=path)
    return path


def read(split, data_dir):
    examples = tfds.as_numpy(datasets.load("tfmw_digits", split, data_dir=data_dir))
    return {int(e["id"]): (e["image"], int(e["label"])) for e in examples}


def test_every_image_is_that_of_the_file(data_dir):
    rows = np.loadtxt(FILE, delimiter=",", dtype=np.uint8)
    found = read("train+test", data_dir)
    assert len(rows) == 1797
    assert sorted(found) == list(range(1797))
    for number, row in enumerate(rows):
        image, label = found[number]
        assert image.shape == (8, 8, 1)
        assert image.dtype == np.uint8
        np.testing.assert_array_equal(image.ravel(), row[:64])
        assert label == row[64]


def test_splits_share_no_image_and_hold_every_digit(data_dir):
    train, test = read("train", data_dir), read("test", data_dir)
    assert (len(train), len(test)) == (1437, 360)
    assert not train.keys() & test.keys()
    counts = collections.Counter(label for _, label in test.values())
    assert sorted(counts) == list(range(10))
    assert min(counts.values()) >= 25


def test_tfds_reads_it_by_name_from_several_files(data_dir):
    train = tfds.load("tfmw_digits", split="train", data_dir=data_dir, as_supervised=True)
    image, label = next(iter(tfds.as_numpy(train)))
    assert image.shape == (8, 8, 1)
    assert 0 <= label <= 9
    info = tfds.builder("tfmw_digits", data_dir=data_dir).info
    assert {name: split.num_shards for name, split in info.splits.items()} == {
        "train": 4,
        "test": 4,
    }
    assert (info.splits["train"].num_examples, info.splits["test"].num_examples) == (1437, 360)


# Reads with plain tfds.load, and goes nowhere near the network.
READER = """
import json, sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(refuse)
import tensorflow_datasets as tfds
import tfmw.data.datasets.digits
print("ready", flush=True)
sys.stdin.readline()
read = tfds.load("tfmw_digits", split="train")
print(json.dumps([int(e["id"]) for e in tfds.as_numpy(read)]))
"""


@pytest.mark.nightly
@pytest.mark.process
def test_processes_that_start_together_prepare_it_once_and_read_the_same(tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    environ = {"TFDS_DATA_DIR": str(tmp_path), "TMPDIR": str(temporary)}
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER],
            env={**os.environ, **environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        outputs = []
        for reader in readers:
            assert reader.stdout
            assert reader.stdout.readline() == "ready\n"
        for reader in readers:
            assert reader.stdin
            reader.stdin.write("go\n")
            reader.stdin.flush()
        for reader in readers:
            out, err = reader.communicate(timeout=600)
            assert reader.returncode == 0, err
            outputs.append(json.loads(out))
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert len(outputs[0]) == 1437
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
    versions = [p.name for p in (tmp_path / "tfmw_digits").iterdir() if p.is_dir()]
    assert versions == ["1.0.0"]
    assert list(temporary.iterdir()) == []


def test_weights_do_not_depend_on_who_has_prepared_the_data(tmp_path):
    before = random.getstate()  # Keras draws the seeds of initial weights from it
    datasets.load("tfmw_digits", "train", data_dir=tmp_path)
    assert random.getstate() == before
    tfmw.data.datasets.digits.TfmwDigits(data_dir=tmp_path / "by TFDS").download_and_prepare()
    assert random.getstate() == before


def test_lock_is_released_with_its_process(tmp_path):
    held = tmp_path / "1.0.0"
    with datasets.one_process_at_a_time(held):
        assert _try_lock(held) == "held"
    assert _try_lock(held) == "free"


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    for number in (errno.ENOLCK, errno.ENOSYS):
        monkeypatch.setattr(fcntl, "lockf", lacking(number))
        with datasets.one_process_at_a_time(tmp_path / "1.0.0"):
            pass
    monkeypatch.setattr(fcntl, "lockf", lacking(errno.EIO))
    with pytest.raises(OSError, match="Input"), datasets.one_process_at_a_time(tmp_path / "1.0.0"):
        pass


def _try_lock(path):
    program = (
        "import fcntl, sys\n"
        "try: fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')\n"
        "except BlockingIOError: print('held')\n"
    )
    command = [sys.executable, "-c", program, f"{path}.lock"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_data_dir_is_the_users_cache(tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    own = Path("tfmw", "datasets")
    assert datasets.default_data_dir({"HOME": str(home)}) == home / ".cache" / own
    assert (home / ".cache" / own).is_dir()
    both = {"HOME": str(home), "XDG_CACHE_HOME": str(cache)}
    assert datasets.default_data_dir(both) == cache / own
    explicit = {**both, "TFDS_DATA_DIR": str(tmp_path / "mine")}
    assert datasets.default_data_dir(explicit) == tmp_path / "mine"


# No process may write in /proc, not even that of root.
@pytest.mark.parametrize("home", [None, "", "/proc/nowhere", "relative"])
def test_data_dir_without_a_writable_home_is_a_private_temporary_one(tmp_path, home):
    environ = {"TMPDIR": str(tmp_path)} | ({} if home is None else {"HOME": home})
    path = datasets.default_data_dir(environ)
    assert path == tmp_path / f"tfmw-{os.getuid()}" / "datasets"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert datasets.default_data_dir(environ) == path


def test_a_temporary_directory_that_others_may_write_is_not_used(tmp_path):
    taken = tmp_path / f"tfmw-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    path = datasets.default_data_dir({"TMPDIR": str(tmp_path)})
    assert taken not in path.parents
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_attribution_and_licence_ship_with_the_data():
    text = FILE.with_name("ATTRIBUTION.md").read_text()
    for needed in ("Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0"):
        assert needed in text
        assert needed in str(tfmw.data.datasets.digits.TfmwDigits.__doc__)
