"""Runs a hub on this machine that speaks the routes of huggingface.co which its library asks.

Repositories are dictionaries of files. What a hub or the way to it can do wrong is planted: a file
cut short or altered, an answer that waits, a status, no ranges. Large files are answered by a
redirect to another host name, as the real hub sends to its store.
"""

import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

LARGE_SUFFIX: Final = ".safetensors"
PART_BYTES: Final = 64 * 1024
HELD_S_MAX: Final = 60.0
STORE: Final = "/store/"


@dataclass
class HubRepository:
    """One repository and what is wrong with it. Tests write its fields while it is served."""

    files: dict[str, bytes]
    token: str = ""  # that reading its files takes; "" = none
    is_listed: bool = True  # whether its listing is public
    sent: dict[str, bytes] = field(default_factory=dict)  # what comes instead of a file's bytes
    cut_at: int = 0  # bytes after which each answer with a large file breaks off; 0 = never
    hold_at: int = 0  # bytes after which an answer with a large file waits; 0 = never
    hold: tuple[str, str] = ("", "")  # method and file whose answer waits; the file "" = listing
    statuses: list[int] = field(default_factory=list)  # of the next answers with large files
    # What the listing tells in place of the truth: by file, "" = of the repository.
    lies: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def revision(self) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()


class LocalHub:
    """A hub of some repositories. `served` counts the bytes of each file that were sent."""

    def __init__(self, repositories: Mapping[str, HubRepository]) -> None:
        self.repositories = dict(repositories)
        self.served: Counter[str] = Counter()
        self.ranges: list[str] = []  # of the requests for large files, "" = all of it
        self.tokens_of_store: list[str] = []  # what the store was sent as authorization
        self.reached = threading.Event()  # an answer waits, as planted
        self._server = _HubServer(self)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @contextmanager
    def running(self) -> Iterator["LocalHub"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def environment(self, home: Path) -> dict[str, str]:
        """Return what makes the hub's library ask this hub, and keep what it fetches in `home`."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "10",
        }


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def large_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _HubServer(ThreadingHTTPServer):
    def __init__(self, hub: LocalHub) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is gone; print what else goes wrong."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _HubHandler(BaseHTTPRequestHandler):
    server: _HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(STORE):
            self._store(path.removeprefix(STORE))
            return
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        repository = self.server.hub.repositories.get(name)
        if repository is None or not (repository.is_listed or self._has_token(repository)):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif is_api:
            self._listing(name, repository)
        else:
            self._resolve(name, repository, "/".join(parts[4:]))

    do_HEAD = do_GET = _answer  # http.server's names

    def _has_token(self, repository: HubRepository) -> bool:
        return self.headers.get("authorization") == f"Bearer {repository.token}"

    def _listing(self, name: str, repository: HubRepository) -> None:
        if repository.hold == (self.command, ""):
            self._hold()
        rows = []
        for file, content in sorted(repository.files.items()):
            sized: dict[str, Any] = {"size": len(content)}
            row = {"rfilename": file, "blobId": git_digest(content), **sized}
            if file.endswith(LARGE_SUFFIX):
                row["lfs"] = {"sha256": large_digest(content), "pointerSize": 134, **sized}
            rows.append(row | repository.lies.get(file, {}))
        about = {"id": name, "modelId": name, "sha": repository.revision, "private": False}
        told = {**about, "tags": [], "downloads": 0, "siblings": rows}
        body = json.dumps(told | repository.lies.get("", {})).encode()
        self._send(200, {"Content-Type": "application/json"}, body)

    def _resolve(self, name: str, repository: HubRepository, file: str) -> None:
        if repository.token and not self._has_token(repository):
            self._refuse(401, "RepoNotFound", "Access is restricted")
            return
        if repository.hold == (self.command, file):
            self._hold()
        content = repository.files.get(file)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": repository.revision}
        if file.endswith(LARGE_SUFFIX):
            headers |= {
                "X-Linked-Etag": f'"{large_digest(content)}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"http://localhost:{self.server.hub.port}{STORE}{quote(name)}/{quote(file)}",
            }
            self._send(302, headers, b"")
            return
        body = repository.sent.get(file, content)
        headers |= {"ETag": f'"{git_digest(content)}"'}
        self.server.hub.served[file] += len(body) * (self.command == "GET")
        self._send(200, headers, body)

    def _store(self, path: str) -> None:
        self.server.hub.tokens_of_store.append(self.headers.get("authorization") or "")
        owner, name, file = path.split("/", 2)
        repository = self.server.hub.repositories[f"{owner}/{name}"]
        if repository.statuses:
            self._send(repository.statuses.pop(0), {}, b"")
            return
        content = repository.sent.get(file, repository.files[file])
        start, status = 0, 200
        asked = self.headers.get("range")
        self.server.hub.ranges.append(asked or "")
        headers = {"ETag": f'"{large_digest(content)}"'}
        if asked:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                self._send(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(status, {**headers, "Content-Length": str(len(content) - start)})
        if self.command == "GET":
            self._parts(repository, file, content[start:])

    def _parts(self, repository: HubRepository, file: str, content: bytes) -> None:
        is_last, self.close_connection = self.close_connection, True  # unless all is written
        with suppress(OSError):  # whoever fetched it is dead
            for at in range(0, len(content), PART_BYTES):
                if repository.cut_at and at >= repository.cut_at:
                    return
                if repository.hold_at and at >= repository.hold_at:
                    self.wfile.flush()
                    self._hold()
                    return
                self.wfile.write(content[at : at + PART_BYTES])
                self.server.hub.served[file] += len(content[at : at + PART_BYTES])
            self.close_connection = is_last

    def _hold(self) -> None:
        """Wait until the other side is gone, so that a test can end it here."""
        self.server.hub.reached.set()
        self.connection.settimeout(HELD_S_MAX)
        with suppress(OSError):
            self.connection.recv(1)

    def _refuse(self, status: int, code: str, text: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": text}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
