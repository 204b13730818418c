"""A real etcd that asks for TLS and a user."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.certificates import certificate
from tests.helpers.etcd import etcd
from tfmw.errors import UsageError
from tfmw.launcher.hosts.lease import lease_of
from tfmw.storage import fence
from tfmw.storage.etcd import Client, hosts_of, key_of, with_key


def test_parts_of_a_url() -> None:
    url = "etcds://h0:2379,h1:2379/tfmw/run7/"
    assert (hosts_of(url), key_of(url)) == ("h0:2379,h1:2379", "tfmw/run7")
    assert with_key(url, "a/b") == "etcds://h0:2379,h1:2379/a/b"
    assert key_of("etcd://h0:2379") == "tfmw"


def test_tls_and_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert = certificate(tmp_path, "127.0.0.1")
    monkeypatch.setenv("ETCDCTL_CACERT", str(cert))
    with etcd(tmp_path, certificate=cert) as (endpoint, _):
        url = f"etcds://{endpoint}/run7"
        root = Client(url)
        for method, request in [
            ("auth/user/add", {"name": "root", "password": "a:b"}),
            ("auth/role/add", {"name": "root"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/enable", {}),
        ]:
            root._call(method, request)
        with pytest.raises(OSError, match="user name is empty"):
            Client(url).get("key")
        monkeypatch.setenv("ETCDCTL_USER", "root:a:b")
        client = Client(url)
        assert client.create("key", "value")
        client._token = "one that has expired"
        assert client.get("key") == "value"
        # What a run uses: the lock, and in the tasks the record beside it.
        lease = lease_of(url, 0)
        assert lease.acquire()
        assert lease.fence == f"etcds://{endpoint}/run7/record"
        client.create("run7/record", '{"attempt": 3, "run": "r"}')
        assert fence.recorded(lease.fence) == 3
        lease.release()
        monkeypatch.setenv("ETCDCTL_USER", "root:wrong")
        with pytest.raises(OSError, match="authentication failed"):
            Client(url).get("key")
        monkeypatch.delenv("ETCDCTL_CACERT")
        with pytest.raises(OSError, match="certificate verify failed"):
            Client(url).get("key")
        with pytest.raises(OSError, match="etcd at"):
            Client(url.replace("etcds", "etcd")).get("key")


def test_certificates_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCDCTL_CACERT", "/nowhere")
    with pytest.raises(UsageError, match="certificates for --rendezvous etcds://h0:2379"):
        lease_of("etcds://h0:2379", 0)
