"""Finding a server is checked here against one that answers as it is told to."""

import dataclasses
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hearth.commands.server import find_or_start as module
from hearth.commands.server.find_or_start import (
    RunningServer,
    _Asker,
    find_or_start,
    names_served,
    with_model,
)
from hearth.shared.errors import StartError
from hearth.shared.settings import Settings, load_settings

pytestmark = pytest.mark.process

KEY = "sk-of-this-server"
LOADED = {
    "id": "local",
    "owned_by": "hearth",
    "context_length": 4_096,
    "architecture": {"input_modalities": ["text", "image"]},
}
UNLOADED = {"id": "other", "owned_by": "hearth"}
CLOUD = {"id": "far", "owned_by": "openai"}


class ToldServer:
    """Answers as a Hearth with a key, three models and one worker; what it tells can be changed."""

    def __init__(self) -> None:
        self.worker: dict[str, Any] = {"state": "ready", "restarts": 0}
        self.rows = {row["id"]: dict(row) for row in (CLOUD, LOADED, UNLOADED)}
        self.settings: Settings  # by which it is found
        self.asked: list[tuple[str, str]] = []  # paths with the keys that came with them

    def answer(self, path: str, key: str) -> tuple[int, dict[str, Any]]:
        self.asked.append((path, key))
        name = path.removeprefix("/v1/models/")
        if path == "/health":
            return 200, {"workers": [self.worker]}
        if key != f"Bearer {KEY}":
            return 401, {"error": {"message": "no key"}}
        if path == "/v1/models":
            return 200, {"data": list(self.rows.values())}
        if path == "/v1/messages/count_tokens":
            self.rows["other"]["context_length"] = 2_048
            return 200, {"input_tokens": 3}
        return (200, self.rows[name]) if name in self.rows else (404, {})


@pytest.fixture
def told() -> Iterator[ToldServer]:
    """A server, and the settings by which it is found."""
    server = ToldServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            key = self.headers.get("authorization", "")
            status, body = server.answer(self.path, key)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        settings = load_settings({"PROXY_API_KEY": KEY}, None)
        server.settings = dataclasses.replace(settings, proxy_port=listening.server_address[1])
        yield server
        listening.shutdown()


def found(settings: Settings, model: str = "") -> RunningServer:
    with find_or_start(settings, model, Console(file=io.StringIO())) as server:
        return server


def test_the_default_is_the_first_local_model_and_its_facts_are_told(
    told: ToldServer,
) -> None:
    url = f"http://127.0.0.1:{told.settings.proxy_port}"
    assert found(told.settings) == RunningServer(url, KEY, "local", 4_096, True, False)
    assert names_served(found(told.settings)) == ["far", "local", "other"]


def test_the_key_is_sent_to_none_that_may_be_anybody(told: ToldServer) -> None:
    found(told.settings)
    keys = {path: key for path, key in told.asked}
    assert keys["/health"] == "" and keys["/v1/models"] == f"Bearer {KEY}"


def test_a_model_that_is_not_loaded_is_loaded_to_tell_its_context(
    told: ToldServer,
) -> None:
    assert found(told.settings, "other").context_tokens == 2_048
    assert [path for path, _ in told.asked].count("/v1/messages/count_tokens") == 1
    assert with_model(found(told.settings), "far").context_tokens is None


def test_what_is_not_served_is_refused_with_what_is(told: ToldServer) -> None:
    with pytest.raises(StartError, match="serves far, local, other, not 'none'") as error:
        found(told.settings, "none")
    assert f"PROXY_PORT={told.settings.proxy_port + 1} " in str(error.value)


def test_another_key_is_asked_for(told: ToldServer) -> None:
    for key in ("", "sk-other"):
        with pytest.raises(StartError, match="answers with 401: it wants another key"):
            found(dataclasses.replace(told.settings, proxy_api_key=key))


def test_a_server_whose_worker_dies_again_and_again_is_not_waited_for(
    told: ToldServer,
) -> None:
    told.worker = {"state": "restarting", "restarts": 3}
    with pytest.raises(StartError, match=r"no worker that is ready \(restarts: 3\)"):
        found(told.settings)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"",
        b"HTTP/1.1 200 " + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        *(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            for body in (
                b'{"workers": "abc"}',
                b'{"workers": [1]}',
                b'{"workers": [{}]}',
                b'{"workers": [{"state": "ready", "restarts": "x"}]}',
                b"[" * 100_000,
            )
        ),
    ],
    ids=lambda answer: answer[-30:].decode(),
)
def test_a_program_that_is_no_hearth_is_taken_for_none(answer: bytes) -> None:
    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        assert _Asker(f"http://127.0.0.1:{listening.getsockname()[1]}", "").workers() is None


@pytest.mark.parametrize(
    ("asked", "source"),
    [("", ""), ("smollm2", ""), ("Pocket", ""), ("mine:latest", ""), ("a/other", "a/other")],
)
def test_the_default_model_is_started_as_the_settings_name_it(
    asked: str, source: str, told: ToldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(told.settings, model_aliases=("mine",))

    def start(_port: int, started: str, _directory: Path) -> None:
        raise StartError(f"source={started}")

    monkeypatch.setattr(module, "ChildServer", start)
    monkeypatch.setattr(module, "fetch_missing", lambda *_: None)
    monkeypatch.setattr(module, "take_port", lambda *_, **__: "")
    monkeypatch.setattr(module._Asker, "workers", lambda _: None)
    with (
        pytest.raises(StartError, match=f"source={source}$"),
        find_or_start(settings, asked, Console(file=io.StringIO())),
    ):
        pass


def test_a_path_is_found_by_the_name_that_a_server_gives_it(
    told: ToldServer, tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    assert found(told.settings, str(tmp_path / "local")).model == "local"
    named = dataclasses.replace(told.settings, model_path="owner/x", proxy_model_id="other")
    assert found(named, "owner/x").model == "other"


def test_one_that_has_lost_the_port_waits_for_the_other_which_names_itself_later(
    told: ToldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the port and the pid file of the one that was faster lies a moment."""
    answers = iter([None, None, *([[{"state": "ready", "restarts": 0}]] * 9)])
    ended = SimpleNamespace(
        port=told.settings.proxy_port,
        exit_status=78,
        directory=told.settings.instance_dir,
        end=lambda: None,
        failure=lambda: StartError("it did not start"),
    )
    monkeypatch.setattr(module, "ChildServer", lambda *_: ended)
    monkeypatch.setattr(module, "fetch_missing", lambda *_: None)
    monkeypatch.setattr(module, "take_port", lambda *_, **__: "")
    monkeypatch.setattr(module._Asker, "workers", lambda _: next(answers))
    assert not found(told.settings).is_ours
