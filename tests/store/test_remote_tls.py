"""The remote tier over TLS, with certificates of a CA of its own."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from servers import forwarding
from vlcache_hf.store import RemoteStore

pytest.importorskip("redis", reason="redis-py is not installed")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")

G, A = "a" * 64, "1" * 64
PATIENT = 30.0  # no test waits for it
PASSWORD = "s3cret%2Fw"


@dataclass
class Pki:
    """A CA, a certificate of it for `localhost`, and a CA that has signed nothing."""

    ca: Path
    certificate: Path
    key: Path
    stranger: Path


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl("req", "-x509", *new_key, *files, "-subj", f"/CN={name}", "-days", "3650", *usage)
    openssl("req", "-new", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "server.ext").write_text("subjectAltName=DNS:localhost\nauthorityKeyIdentifier=keyid\n")
    signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "3650", "-extfile", "server.ext")
    openssl("x509", "-req", "-in", "server.csr", *signed_by, "-out", "server.pem")
    return Pki(*(folder / name for name in ("ca.pem", "server.pem", "server.key", "stranger.pem")))


@pytest.fixture(scope="module")
def protected(start_server):
    return start_server("--requirepass", "s3cret/w")


class Front:
    """TLS in front of a server: what the first byte of each connection was, and how many got through."""

    def __init__(self, fake, pki, server):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(pki.certificate, pki.key)
        self.first: list[bytes] = []
        self.through = 0
        self.fake = fake(self._behave)
        self.port = int(self.fake.url.rpartition(":")[2])
        self._forward = forwarding(lambda: self._count(server.port), self.context)

    def _behave(self, fake, connection):
        self.first.append(connection.recv(1, socket.MSG_PEEK))
        self._forward(fake, connection)

    def _count(self, port):
        self.through += 1
        return port

    def store(self, options="", host="localhost", scheme="rediss", password=PASSWORD):
        return RemoteStore(f"{scheme}://:{password}@{host}:{self.port}/0{options}", PATIENT)


@pytest.fixture
def front(fake, pki, protected):
    return Front(fake, pki, protected)


def put(store):
    big = torch.arange(1_500_000, dtype=torch.float32).reshape(-1, 10)
    return store.put("kv", G, A, {"k": big, "v": torch.ones(5, 3)}, {"x": "y"})


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_a_certificate_of_the_ca_in_the_url_is_trusted(front, pki, scheme):
    store = front.store(f"?ssl_ca_certs={pki.ca}", scheme=scheme)
    store.clear()
    assert put(store) == 6_000_060
    entry = front.store(f"?ssl_ca_certs={pki.ca}").get("kv", G, A)
    assert entry.rows("k", 149_999, 150_000).tolist() == [[float(n) for n in range(1_499_990, 1_500_000)]]
    assert store.faults == 0 and store.state == "closed" and front.through == 2
    assert set(front.first) == {b"\x16"}  # a handshake


@pytest.mark.parametrize("case", ["no ca", "another ca", "another host", "a file that is missing"])
def test_a_certificate_that_cannot_be_trusted_is_a_miss(front, pki, case, caplog):
    caplog.set_level(logging.DEBUG)
    store = {
        "no ca": lambda: front.store(),
        "another ca": lambda: front.store(f"?ssl_ca_certs={pki.stranger}"),
        "another host": lambda: front.store(f"?ssl_ca_certs={pki.ca}", host="127.0.0.1"),
        "a file that is missing": lambda: front.store(f"?ssl_ca_certs={pki.ca}.not"),
    }[case]()
    for _ in range(3):
        assert store.get("kv", G, A) is None and store.names("kv", G) == []
    assert put(store) == 0
    assert store.faults == 1 and store.state == "open"
    assert caplog.text.count("going on without") == 1 and "s3cret" not in caplog.text
    # no second try without TLS, and nothing of ours behind it
    assert front.through == 0 and set(front.first) <= {b"\x16", b""}


def test_the_host_name_is_checked_whatever_the_version_of_redis_py(front, pki):
    assert front.store()._links.get()._settings["ssl_check_hostname"] is True
    assert front.store("?ssl_check_hostname=false")._links.get()._settings["ssl_check_hostname"] is False
    named_otherwise = front.store(f"?ssl_ca_certs={pki.ca}&ssl_check_hostname=false", host="127.0.0.1")
    assert put(named_otherwise) == 6_000_060
    assert put(front.store("?ssl_cert_reqs=none", host="127.0.0.1")) == 6_000_060


def test_the_password_is_needed_and_used(front, pki, caplog):
    caplog.set_level(logging.DEBUG)
    store = front.store(f"?ssl_ca_certs={pki.ca}", password="wrong-pass")
    assert store.get("kv", G, A) is None and store.faults == 1 and front.through == 1
    assert "wrong-pass" not in caplog.text and "AuthenticationError" in caplog.text


def test_a_client_certificate(front, pki):
    front.context.verify_mode = ssl.CERT_REQUIRED
    front.context.load_verify_locations(pki.ca)
    trust = f"?ssl_ca_certs={pki.ca}"
    assert put(front.store(trust)) == 0
    assert put(front.store(f"{trust}&ssl_certfile={pki.certificate}&ssl_keyfile={pki.key}")) == 6_000_060


def test_connections_that_were_closed_do_not_count(front, pki):
    store = front.store(f"?ssl_ca_certs={pki.ca}")
    put(store)
    entry = store.get("kv", G, A)
    for connection in front.fake.connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)  # without the farewell of TLS
        except OSError:
            pass
    assert entry.rows("v", 0, 5).eq(1).all() and store.faults == 0 and front.through == 2


def test_plain_talk_to_a_server_that_wants_tls_is_a_miss(front):
    store = front.store(scheme="redis", host="127.0.0.1")
    assert store.get("kv", G, A) is None and store.faults == 1 and front.through == 0
