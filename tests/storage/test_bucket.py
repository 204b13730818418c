"""Objects in a local S3 whose requests are lost, delayed, cut and refused."""

from __future__ import annotations

import io
import logging
import sys

import pytest

import tfmw
from tests.helpers.buckets import CREDENTIALS, s3
from tests.helpers.cluster import run_command
from tfmw.data.bucket_files import BucketFile
from tfmw.errors import UsageError
from tfmw.storage import bucket as bucket_module
from tfmw.storage.bucket import CHUNK, Bucket, refuse_writing


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, s3(patch) as found:
        yield found


@pytest.fixture(params=["s3", "gs"])
def bucket(server, request):
    server.fault = lambda number, method, key: None
    return Bucket(f"{request.param}://bucket/{request.node.name}")


def test_names_may_contain_anything(server):
    bucket = Bucket(f"{server.url}/run 7/ä%20[x]/")
    bucket.replace("a b/ü?*.[1]%", b"1", None)
    assert {name: size for name, (size, _) in bucket.names().items()} == {"a b/ü?*.[1]%": 1}
    assert bucket.names("a b").keys() == {"a b/ü?*.[1]%"}
    assert bucket.read("a b/ü?*.[1]%")[0] == b"1"  # type: ignore[index]
    bucket.remove(["a b/ü?*.[1]%", "another"])
    assert bucket.names() == {}
    assert bucket.read("a b/ü?*.[1]%") is None


@pytest.mark.parametrize("action", [500, 503, "lost", "applied", "truncated"])
def test_requests_that_fail_twice_are_repeated(bucket, server, action):
    failing = [0]

    def fault(number, method, key):
        failing[0] += 1
        return action if failing[0] <= 2 else None

    def twice():
        failing[0], server.fault = 0, fault

    bucket.replace("a", b"0123456789" * 100, None)
    twice()
    assert bucket.read("a")[0] == b"0123456789" * 100
    twice()
    assert bucket.read_range("a", 3, 7) == b"3456"
    twice()
    version = bucket.replace("b", b"1", None)
    assert version is not None
    twice()
    version = bucket.replace("b", b"2", version)
    assert version is not None
    server.fault = lambda number, method, key: None
    assert bucket.read("b") == (b"2", version)


def test_only_one_of_two_writers_replaces_a_version(bucket):
    version = bucket.replace("a", b"1", None)
    assert bucket.replace("a", b"2", None) is None
    assert bucket.replace("a", b"2", version) is not None
    assert bucket.replace("a", b"3", version) is None
    assert bucket.read("a")[0] == b"2"


def test_large_files_travel_in_parts(bucket, tmp_path, server):
    data = bytes(range(251)) * ((2 * CHUNK + 12345) // 251)
    (tmp_path / "data").write_bytes(data)
    (tmp_path / "empty").write_bytes(b"")

    server.requests.clear()
    server.fault = lambda number, method, key: 503 if number % 3 == 0 else None
    bucket.upload(str(tmp_path / "data"), "data")
    bucket.upload(str(tmp_path / "empty"), "empty")
    for name in ("data", "empty"):
        BucketFile(f"{bucket.url}/{name}").copy_to(str(tmp_path / f"{name} copy"))
    assert (tmp_path / "data copy").read_bytes() == data
    assert (tmp_path / "empty copy").read_bytes() == b""
    key = f"{bucket.url.partition('://bucket/')[2]}/data"
    assert server.requests.count(f"GET {key}") >= 3
    assert not [name for name in bucket.names() if name not in ("data", "empty")]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (400, "is in another region: set AWS_REGION to that (400 Bad Request, Authorization"),
        (401, "the clock of this machine differs from the store's: set it (401 Unauthorized, Req"),
        (403, "list and delete there (403 Forbidden, AccessDenied)"),
        (404, "there is no such bucket: create it, or check its name (404 Not Found, SlowDown)"),
        (500, "the store refuses (500 Internal Server Error, SlowDown)"),
        ("lost", "the store does not respond, or not completely (Request)"),
    ],
)
def test_errors_are_one_sentence_without_credentials(server, monkeypatch, caplog, fault, expected):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(bucket_module, "_QUICK_S", 0.5)
    bucket = Bucket(f"{server.url}/errors", quick=True)
    server.fault = lambda number, method, key: fault
    calls = [
        lambda: bucket.replace("a", b"", None),
        lambda: bucket.names(),
    ]
    for call in calls:
        with pytest.raises(OSError, match=r"^s3://bucket/errors.* cannot be [a-z]+: ") as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).count(": ") <= 3
        assert error.value.__cause__ is None
        shown = f"{error.value}\n{caplog.text}"
        assert not [secret for secret in CREDENTIALS.values() if secret in shown]


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("http://127.0.0.1:9", "(Connect, Connection refused)"),
        ("http://no-such-host.invalid", "(Connect, failed to lookup address information: "),
    ],
)
def test_a_store_that_cannot_be_reached_is_named(server, monkeypatch, endpoint, reason):
    monkeypatch.setattr(bucket_module, "_QUICK_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(OSError, match=r"^s3://bucket/errors/a cannot be read: ") as error:
        Bucket("s3://bucket/errors", quick=True).read("a")
    assert f"the store does not respond, or not completely {reason}" in str(error.value)


def test_a_bucket_that_does_not_exist_is_named(server):
    server.fault = lambda number, method, key: None
    bucket = Bucket("s3://another/run7")
    for call in (lambda: bucket.read("a"), lambda: bucket.replace("a", b"", None), bucket.names):
        with pytest.raises(OSError, match=r"s3://another/run7.* there is no such bucket: create"):
            call()


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        UsageError, match=r"s3://bucket/run7 is in a bucket.* pip install '.\[cloud\]' in"
    ):
        Bucket("s3://bucket/run7")


def test_a_malformed_url_is_named(server):
    with pytest.raises(UsageError, match="s3: cannot be opened"):
        Bucket("s3://")


@pytest.mark.process
def test_import_tfmw_does_not_import_obstore():
    """Asks a process that has imported all public names of tfmw."""
    program = "import sys, tfmw.train.calls; sys.exit('obstore' in sys.modules)"
    assert run_command("python", "-c", program) == (0, "")


def test_profiles_of_boto3_are_read(server, monkeypatch, tmp_path):
    server.fault = lambda number, method, key: None
    lines = ["[default]", *(f"{name.lower()} = {value}" for name, value in CREDENTIALS.items())]
    (tmp_path / "credentials").write_text("\n".join(lines))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    bucket = Bucket(f"{server.url}/profile")
    bucket.replace("a", b"1", None)
    assert bucket.read("a")[0] == b"1"  # type: ignore[index]


def test_upload_copies_a_file_or_a_directory(server, tmp_path):
    server.fault = lambda number, method, key: None
    (tmp_path / "model" / "variables").mkdir(parents=True)
    for name in ("saved_model.pb", "variables/data [0]%"):
        (tmp_path / "model" / name).write_text(name)
    tfmw.storage.upload(tmp_path / "model", f"{server.url}/uploads/model/")
    tfmw.storage.upload(str(tmp_path / "model" / "saved_model.pb"), f"{server.url}/uploads/alone")
    bucket = Bucket(f"{server.url}/uploads")
    found = {name: bucket.read(name)[0].decode() for name in bucket.names()}  # type: ignore[index]
    assert found == {
        "alone": "saved_model.pb",
        "model/saved_model.pb": "saved_model.pb",
        "model/variables/data [0]%": "variables/data [0]%",
    }
    with pytest.raises(OSError, match="nothing has no files"):
        tfmw.storage.upload(tmp_path / "nothing", f"{server.url}/uploads/model")
    with pytest.raises(UsageError, match="expected a URL that begins with s3://, gs:// or az://"):
        tfmw.storage.upload(tmp_path / "model", str(tmp_path / "copy"))


@pytest.mark.parametrize("url", ["s3://b/a", "az://b/a", "gs://b/a", "ram://a", "hdfs://host/a"])
def test_what_writes_local_files_only_names_what_copies_them(url):
    with pytest.raises(UsageError, match=r"no export can be written to .*tfmw.storage.upload"):
        refuse_writing(url, "export")


def test_local_paths_and_what_tensorflow_writes_pass():
    for path in ("/a/b", "a", "file:///a", None, 3, b"a", io.BytesIO()):
        refuse_writing(path, "export")
    refuse_writing("gs://bucket/a", "log_dir of TensorBoard", ("gs://",))
