"""A stand-in for the Hugging Face Hub on localhost: for downloads, commits and loading models."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants


class Hub:
    """Repositories with their commits, and a log of all requests."""

    def __init__(self) -> None:
        self.refs: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.log: list[str] = []
        self.messages: list[str] = []
        self.before_commit: Any = None
        self.url = ""

    def commit(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds files to a branch and returns the new commit."""
        parent = self.refs.setdefault(repo, {}).get(branch, "")
        content = {**self.commits.get(parent, {}), **files}
        sha = hashlib.sha1(repr((repo, parent, sorted(content.items()))).encode()).hexdigest()
        self.commits[sha], self.refs[repo][branch] = content, sha
        return sha

    def text(self, repo: str, file: str, branch: str = "main") -> str:
        return self.commits[self.refs[repo][branch]][file].decode()

    def asked(self, *parts: str) -> list[str]:
        """Requests so far whose line holds all parts."""
        return [line for line in self.log if all(part in line for part in parts)]


class _Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, what: str, **headers: str) -> None:
        self.answer(404, {"error": what}, X_Error_Code=what, X_Error_Message=what, **headers)

    def handle_request(self) -> None:
        hub: Hub = self.server.hub
        path = urlsplit(self.path).path
        hub.log.append(f"{self.command} {unquote(path)}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            self.api("/".join(parts[2:4]), parts[4:], body)
        elif path == "/api/repos/create":
            data = json.loads(body)
            repo = f"{data.get('organization') or 'me'}/{data['name']}"
            status = 409 if repo in hub.refs else 200
            if status == 200:
                hub.commit(repo, {".gitattributes": b""})
            self.answer(status, {"url": f"{hub.url}/{repo}", "error": "exists"})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif len(parts) >= 5 and parts[2] == "resolve":
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.missing("RepoNotFound")

    do_GET = do_HEAD = do_POST = handle_request

    def sha(self, repo: str, revision: str) -> str | None:
        hub: Hub = self.server.hub
        if repo not in hub.refs:
            self.missing("RepoNotFound")
            return None
        sha = hub.refs[repo].get(revision, revision)
        if sha in hub.commits:
            return sha
        self.missing("RevisionNotFound")
        return None

    def resolve(self, repo: str, revision: str, file: str) -> None:
        sha = self.sha(repo, revision)
        if sha is None:
            return
        content = self.server.hub.commits[sha].get(file)
        if content is None:
            self.missing("EntryNotFound", X_Repo_Commit=sha)
        else:
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(200, content, X_Repo_Commit=sha, ETag=etag, X_Linked_Etag=etag)

    def api(self, repo: str, rest: list[str], body: bytes) -> None:
        hub: Hub = self.server.hub
        what, revision = (rest + ["", ""])[:2]
        if what == "branch":
            known = revision in hub.refs[repo]
            hub.refs[repo].setdefault(revision, hub.refs[repo]["main"])
            self.answer(409 if known else 200, {"error": "exists"})
            return
        sha = self.sha(repo, revision or "main")
        if sha is None:
            return
        if what in ("", "revision"):
            self.answer(200, {"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in hub.commits[sha]]})
        elif what == "preupload":
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer(200, {"files": files})
        elif what == "commit":
            if hub.before_commit:
                hub.before_commit()
            lines = [json.loads(line) for line in body.splitlines()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            if header.get("parentCommit") not in (None, hub.refs[repo][revision]):
                self.answer(412, {"error": "A commit has happened since."})
                return
            files = [line["value"] for line in lines if line["key"] == "file"]
            hub.messages.append(header["summary"])
            branch = "refs/pr/1" if "create_pr=1" in self.path else revision
            if branch != revision:
                hub.refs[repo][branch] = sha
            new = hub.commit(repo, {file["path"]: base64.b64decode(file["content"]) for file in files}, branch)
            url = f"{hub.url}/{repo}"
            self.answer(
                200, {"commitUrl": f"{url}/commit/{new}", "commitOid": new, "pullRequestUrl": f"{url}/discussions/1"}
            )
        else:
            self.missing("NotFound")


@contextmanager
def running() -> Iterator[Hub]:
    """A Hub that listens on a free port of localhost."""
    hub, server = Hub(), ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = hub  # type: ignore[attr-defined]
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, offline: bool = False) -> None:
    """Points huggingface_hub at an address and a cache, as `HF_ENDPOINT`, `HF_HUB_CACHE` and `HF_HUB_OFFLINE` do."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # or the log has requests that nobody here makes
    close_session()
