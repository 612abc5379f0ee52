"""Commands against a server that is none of ours: redirects, endless answers, odd types."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest

from hearth.commands import diff_turns, inspect_cache, probe_agent, probe_cache, stream_client, why
from hearth.commands.chat.answer_stream import Turn, ask
from hearth.commands.server.find_or_start import RunningServer, names_served, with_model
from hearth.commands.server_client import run
from hearth.shared.errors import StartError

pytestmark = pytest.mark.process
SENT_BYTES_MAX: Final = 32 << 20
KEY: Final = "sk-of-this-server"


class Hostile:
    """Answers each request as `says` has it; `asked` are the requests that came, with headers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sent = 0
        self.status, self.location, self.body = 200, "", b""
        self.is_endless = False
        hostile = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                hostile.asked.append(f"{self.path} {self.headers}")
                self.send_response(hostile.status)
                self.send_header("content-type", "application/json")
                if hostile.location:
                    self.send_header("location", hostile.location + self.path)
                if not hostile.is_endless:
                    self.send_header("content-length", str(len(hostile.body)))
                self.end_headers()
                self.wfile.write(hostile.body)
                with contextlib.suppress(OSError):  # it was hung up on
                    while hostile.is_endless and hostile.sent < SENT_BYTES_MAX:
                        hostile.sent += self.wfile.write(b" " * 65_536)
                self.close_connection = True

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def servers() -> Iterator[tuple[Hostile, Hostile]]:
    pair = Hostile(), Hostile()
    for each in pair:
        threading.Thread(target=each.server.serve_forever, args=(0.01,), daemon=True).start()
    yield pair
    for each in pair:
        each.server.shutdown()
        each.server.server_close()


def probe(module: Any, name: str, *given: str) -> Callable[[str], object]:
    def command(url: str) -> object:
        options = module.options_of([*given])
        options.base_url, options.key = url, KEY
        return run(getattr(module, name)(options))

    return command


def running(url: str) -> RunningServer:
    return RunningServer(url, KEY, "m", None, False, False)


def chat(url: str) -> str:
    turn = Turn(began_at=time.monotonic())
    asyncio.run(ask(running(url), {"model": "m", "messages": []}, "s", turn))
    return turn.error


COMMANDS: dict[str, Callable[[str], object]] = {
    "probe-cache": probe(probe_cache, "probe_session"),
    "probe-agent": probe(probe_agent, "agent_probe"),
    "cache": probe(inspect_cache, "inspect_cache"),
    "why": probe(why, "why", "abc"),
    "diff": probe(diff_turns, "diff_turns", "--session", "abc"),
    "run": chat,
    "run: models": lambda url: names_served(running(url)),
    "run: model": lambda url: with_model(running(url), "m"),
}
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


def told(command: Callable[[str], object], url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a user reads of a command that fails; a traceback is raised."""
    try:
        given = command(url)
    except StartError as error:
        given = str(error)
    assert given in (2, None) or (isinstance(given, str) and given), given
    return f"{given} {capsys.readouterr().err}"


@pytest.mark.parametrize("status", [301, 302, 307])
@each_command
def test_a_redirect_is_not_followed_with_the_key(
    servers: tuple[Hostile, Hostile],
    command: Callable[[str], object],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, elsewhere = servers
    first.status, first.location = status, elsewhere.url
    told(command, first.url, capsys)
    assert first.asked and elsewhere.asked == []


@pytest.mark.parametrize("status", [200, 500])
@each_command
def test_an_answer_without_an_end_is_not_read_to_it(
    servers: tuple[Hostile, Hostile],
    command: Callable[[str], object],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("STREAM_BYTES_MAX", "BODY_BYTES_MAX"):
        monkeypatch.setattr(stream_client, name, 50_000)
    first, _ = servers
    first.is_endless, first.status = True, status
    assert len(told(command, first.url, capsys)) < 3_000
    assert first.sent < SENT_BYTES_MAX


@pytest.mark.parametrize(
    "body",
    [
        *([], 5, None, "x", {}, {"data": 5}, {"data": [5]}, {"data": [{"id": 5}]}),
        {"workers": 5, "data": [{"id": "m", "architecture": 5}], "sessions": 5, "lines": 5},
        {"workers": [5], "data": [{"id": "m"}], "sessions": [5], "lines": [5], "requests": 5},
        {"workers": [{"cache": 5}], "data": [{"id": "m"}], "sessions": [{}], "lines": [{}]},
        {"data": [{"id": "m", "owned_by": [], "architecture": {"input_modalities": 5}}]},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
@each_command
def test_an_answer_of_odd_types_is_told_in_a_line(
    servers: tuple[Hostile, Hostile],
    command: Callable[[str], object],
    body: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _ = servers
    first.body = json.dumps(body).encode()
    with contextlib.suppress(StartError):
        command(first.url)
    assert "Traceback" not in capsys.readouterr().err
