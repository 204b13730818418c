"""Objects in a bucket: conditional writes, uploads in parts, reads of ranges.

    bucket = Bucket("s3://bucket/run7")               # gs://bucket/run7, az://container/run7
    version = bucket.replace("record", b"1", None)    # a new object
    version = bucket.replace("record", b"2", version) # None: another process has replaced it
    bucket.read("record")                             # (b"2", version); None: no such object
    bucket.upload("/tmp/tensors.data", "step_12/tensors.data")
    bucket.read_range("step_12/tensors.data", 0, 100)

It uses obstore, the binding of Rust's object_store: one interface and one wheel for S3 (AWS, MinIO,
R2, Ceph), GCS and Azure, with the conditional writes of each. The extra `tfmw[cloud]` installs it,
and the first Bucket imports it. Credentials are looked up as the stores' own clients do: AWS_*
variables, boto3's profiles if boto3 is installed, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_*
variables, and the identity of the machine. No error repeats them: a store's response is reduced to
its code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError

SCHEMES = ("s3://", "gs://", "az://")
CHUNK = 8 << 20
"""Bytes of one request for a part of a large object."""

Version = Any
"""Identity of the content of an object; that of a bucket is {"e_tag": ..., "version": ...}."""

_PARALLEL = 8  # number of concurrent requests for parts of a file
_RETRY_S = 60.0  # seconds in which a request is repeated, after 500, 503 or a lost connection
_QUICK_S = 3.0  # the same, for requests whose result is needed at once
_ANSWER_S, _QUICK_ANSWER_S = 30.0, 2.0  # for one response, and for one that is needed at once
_NO_BUCKET = "NoSuchBucket|ContainerNotFound"
_SAID = (
    r"status code: (\d{3}[ \w]*)",
    r"<Code>(\w+)</Code>",
    r"HttpError \{\s*kind: (\w+)",  # such as Connect, Request, Timeout, Interrupted
    r'kind: \w+,\s*(?:message|error): "([^"]+)"',  # of the operating system
)
_ADVICE = (
    # an address that gives a cloud's machine its credentials
    (r"169\.254\.", "no credentials were found: set the variables that the store's client reads"),
    (f"{_NO_BUCKET}|status code: 404", "there is no such bucket: create it, or check its name"),
    (
        "AuthorizationHeaderMalformed|PermanentRedirect|without LOCATION",
        "the bucket is in another region: set AWS_REGION to that",
    ),
    ("RequestTimeTooSkewed", "the clock of this machine differs from the store's: set it"),
    (
        "status code: 40[13]",
        "access is denied: give this process credentials that may read, write, list and delete "
        "there",
    ),
    ("status code: ", "the store refuses"),
    ("", "the store does not respond, or not completely"),
)
"""(pattern of a store's error, what is wrong and what to do); the first match counts."""


def is_bucket(path: str) -> bool:
    """Whether a path is a URL of an object store that tfmw reads and writes."""
    return path.startswith(SCHEMES)


class Bucket:
    """The objects whose names begin with a URL's path.

    Args:
        url: "s3://bucket/run7", "gs://bucket/run7" or "az://container/run7".
        quick: whether requests fail after seconds, because the result is needed at once.

    Raises:
        UsageError: obstore is not installed, or the URL or a variable is malformed.
    """

    def __init__(self, url: str, quick: bool = False):
        self.url = url.rstrip("/")
        self._api, self._store = _opened(self.url, quick)

    def read(self, name: str) -> tuple[bytes, Version] | None:
        """An object's content and version; None if it does not exist."""
        with self._errors("read", name):
            try:
                found = self._api.get(self._store, name)
                return bytes(found.bytes()), _version(found.meta)
            except FileNotFoundError as error:
                if re.search(_NO_BUCKET, str(error)):
                    raise
                return None

    def replace(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Writes an object; returns its new version, or None if another process was first.

        Args:
            version: the version that is replaced; None if there is no object yet.
        """
        refused = self._api.exceptions.AlreadyExistsError, self._api.exceptions.PreconditionError
        with self._errors("written", name):
            try:
                return _version(self._api.put(self._store, name, data, mode=version or "create"))
            except refused:
                # A request whose response was lost is repeated, and finds its own content.
                found = self.read(name)
                return found[1] if found is not None and found[0] == data else None

    def upload(self, path: str, name: str) -> None:
        """Writes a local file as an object; a large one in parts, several at a time."""
        with self._errors("written", name), open(path, "rb") as file:
            self._api.put(self._store, name, file, chunk_size=CHUNK, max_concurrency=_PARALLEL)

    def read_range(self, name: str, begin: int, end: int, etag: str | None = None) -> bytes | None:
        """A range of bytes of an object; None if it is gone, shorter, or its ETag another one."""
        if begin == end:
            return b""
        options: dict[str, Any] = {"range": (begin, end)}
        if etag is not None:  # lists of Azure have no quotes
            options["if_match"] = etag if '"' in etag else f'"{etag}"'
        changed = self._api.exceptions.PreconditionError, FileNotFoundError
        with self._errors("read", name):
            try:
                data = bytes(self._api.get(self._store, name, options=options).bytes())
            except changed:
                return None
        return data if len(data) == end - begin else None

    def names(self, folder: str = "") -> dict[str, tuple[int, str]]:
        """(bytes, ETag) of the objects in a folder and the folders in it, by name."""
        with self._errors("listed", folder):
            found = self._api.list(self._store, folder or None)
            return {one["path"]: (one["size"], one["e_tag"]) for part in found for one in part}

    def files(self) -> dict[str, tuple[int, str]]:
        """(bytes, ETag) of the objects that are in none of the folders, by name."""
        with self._errors("listed", ""):
            found = self._api.list_with_delimiter(self._store)["objects"]
            return {one["path"]: (one["size"], one["e_tag"]) for one in found}

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; missing ones are no error."""
        for name in names:
            with self._errors("removed", name), contextlib.suppress(FileNotFoundError):
                self._api.delete(self._store, name)

    @contextlib.contextmanager
    def _errors(self, done: str, name: str) -> Iterator[None]:
        """Converts errors of the store to an OSError of one sentence."""
        kinds = (self._api.exceptions.BaseError, FileNotFoundError, PermissionError)
        try:
            yield
        except kinds as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of a local file
            place = f"{self.url}/{name}".rstrip("/")
            # `from None`: the store's text has requests and whole responses
            raise OSError(f"{place} cannot be {done}: {_reason(error)}") from None


def upload(source: str | os.PathLike[str], url: str) -> None:
    """Copies a local file, or all files of a directory, into a bucket.

    Callbacks and exports write local files. This copies them afterwards:

        tfmw.storage.upload("build/model", "s3://bucket/model")

    Args:
        source: a file or a directory.
        url: where it will be: "s3://bucket/model", "gs://bucket/model", "az://container/model".
            Objects of the same names are replaced, others stay.

    Raises:
        UsageError: `url` is in no bucket, or obstore is not installed.
        OSError: a file cannot be read or written.
    """
    if not is_bucket(url):
        raise UsageError(
            f"received {url!r}; expected a URL that begins with s3://, gs:// or az://."
        )
    parent, _, name = url.rstrip("/").rpartition("/")
    if os.path.isfile(source):
        Bucket(parent).upload(os.fspath(source), name)
        return
    bucket = Bucket(url)
    paths = [path for path in sorted(Path(source).rglob("*")) if path.is_file()]
    if not paths:
        raise OSError(f"{os.fspath(source)} has no files")
    for path in paths:
        bucket.upload(str(path), path.relative_to(source).as_posix())


def refuse_writing(url: Any, what: str, schemes: tuple[str, ...] = ()) -> None:
    """Raises UsageError for a URL at which files cannot be written.

    Args:
        url: a value of any type; other values than URLs pass, and "file://".
        what: is written there, for the message: "export".
        schemes: further kinds of URLs that pass.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else ""
    if isinstance(text, str) and "://" in text and not text.startswith(("file://", *schemes)):
        raise UsageError(
            f"no {what} can be written to {text!r}: write to a local path, and copy that with "
            "tfmw.storage.upload afterwards."
        )


def _opened(url: str, quick: bool) -> tuple[Any, Any]:
    """(the module obstore, its store for a URL)."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UsageError(
            f"{url} is in a bucket, which needs the package obstore: pip install '.[cloud]' in a "
            "clone of tfmw."
        ) from error
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=_QUICK_ANSWER_S),
            "timeout": timedelta(seconds=_QUICK_ANSWER_S if quick else _ANSWER_S),
            "allow_http": True,  # if a variable names such an endpoint
        },
        "retry_config": {
            "max_retries": 10,
            "retry_timeout": timedelta(seconds=_QUICK_S if quick else _RETRY_S),
        },
    }
    try:
        if (
            url.startswith("s3://")
            and "AWS_ACCESS_KEY_ID" not in os.environ
            and importlib.util.find_spec("boto3")
        ):
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider

            session = boto3.Session()
            if session.get_credentials() is not None:
                options["credential_provider"] = Boto3CredentialProvider(session)
        return obstore, obstore.store.from_url(url, **options)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened: {str(error).splitlines()[0]}.") from None


def _version(meta: Any) -> Version:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def _reason(error: Exception) -> str:
    """Reason of a store's error in words, with its status and its code."""
    text = str(error)
    advice = next(advice for pattern, advice in _ADVICE if re.search(pattern, text))
    said = ", ".join(match[1].strip() for each in _SAID if (match := re.search(each, text)))
    return f"{advice}{said and f' ({said})'}"
