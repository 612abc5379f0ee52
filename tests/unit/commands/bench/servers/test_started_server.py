"""A started server is ready when it has answered, is metered, and leaves no process behind."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hearth.commands.bench.server import Memory, Meter, Server
from hearth.commands.bench.servers import started_server
from hearth.commands.bench.servers.started_server import ServerStartError, started
from hearth.commands.replay.player import replay
from hearth.commands.replay.traces import CHAT_PATH, Captured

pytestmark = pytest.mark.process

# Speaks just enough: it "reads" ten tokens a word in two layers, and notes that as a meter does.
FAKE = """
import json, os, signal, struct, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

mode, port = sys.argv[1], int(sys.argv[2])
if mode == "ends":
    print("ValueError: no such model in", os.environ["HOME"]); sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
counts = [0, 0]
page = os.path.join(os.environ["METER_DIR"], f"{os.getpid()}-1")

def note():
    if mode != "unmetered":
        open(page, "wb").write(struct.pack("<5Q", 8, 2, 64, *counts))

def end(*_):
    if mode != "stubborn":
        child.kill()
        os._exit(0)

signal.signal(signal.SIGTERM, end)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def say(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        told = {"status": "Healthy", "data": [{"id": "served"}]}
        self.say(200, json.dumps(told).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if mode == "hangs":
            print("TypeError: no such argument", flush=True)
            time.sleep(600)
        if mode == "refuses":
            return self.say(500, b"RuntimeError: no kernel")
        words = sum(len(each["content"].split()) for each in body["messages"])
        counts[0] += 2 * 10 * words
        counts[1] += 2
        note()
        usage = {"prompt_tokens": 10 * words, "completion_tokens": 1}
        events = [{"choices": [{"index": 0, "delta": {"content": body["model"]},
                                "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(each)}\\n\\n" for each in events) + "data: [DONE]\\n\\n"
        self.say(200, text.encode(), "text/event-stream")

note()
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "home").mkdir()
    (tmp_path / "model").mkdir()
    return tmp_path / "home"


def fake(home: Path, mode: str = "plain") -> Server:
    return Server("fake", (sys.executable, str(home.parent / "fake.py"), mode, "{port}"), extra={})


async def read_meter(home: Path, words: int, mode: str = "plain") -> list[Meter | None]:
    """Return the meter before and after a prompt of `words` words."""
    server = fake(home, mode)
    async with started(server, home.parent / "model", home, Memory.DEFAULT, 50) as running:
        before = running.meter()
        body = {"messages": [{"role": "user", "content": "word " * words}]}
        asked = Captured("t", "chat", CHAT_PATH, {}, body, "", 0.0, 0.0)
        rows, _ = await replay([asked], running.target)
        assert rows[0].outcome.reading.text == ["served"], "the first model that it lists"
        assert running.is_metered == (mode != "unmetered") and running.start_s > 0
        return [before, running.meter()]


def test_a_server_is_metered_in_tokens_in_each_of_its_starts(home: Path) -> None:
    for _ in range(2):
        before, after = asyncio.run(read_meter(home, 7))
        assert before is not None and after is not None
        assert after.read_tokens - before.read_tokens == 70
        assert after.forwards - before.forwards == 1
    assert oct((home / "server.log").stat().st_mode)[-3:] == "600"


def test_a_server_that_counts_nothing_is_not_metered(home: Path) -> None:
    assert asyncio.run(read_meter(home, 7, "unmetered")) == [None, None]


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_process_outlives_its_block(home: Path, is_killed: bool) -> None:
    async def run() -> list[int]:
        server = fake(home)
        async with started(server, home.parent / "model", home, Memory.DEFAULT, 50) as running:
            pids = running.pids()
            assert len(pids) == 2, "the one in a session of its own too"
            if is_killed:
                await running.kill()
                assert running.pids() == []
        return pids

    assert not [pid for pid in asyncio.run(run()) if is_alive(pid)]


def test_a_stubborn_server_and_what_a_dead_one_left_are_killed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started_server, "STOP_WAIT_S_MAX", 0.2)
    monkeypatch.setattr(started_server, "KILL_WAIT_S_MAX", 5.0)

    async def run(is_dead: bool) -> list[int]:
        server = fake(home, "stubborn")
        async with started(server, home.parent / "model", home, Memory.DEFAULT, 50) as running:
            pids = running.pids()
            if is_dead:
                os.kill(pids[0], signal.SIGKILL)
        return pids

    for is_dead in (False, True):
        assert not [pid for pid in asyncio.run(run(is_dead)) if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Say whether `pid` still runs a second from now at most."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("ends", "ValueError: no such model in {dir}\n\nServerStartError: it has ended"),
        ("refuses", "it does not answer: 500 RuntimeError: no kernel"),
    ],
)
def test_a_server_that_does_not_start_says_why(home: Path, mode: str, reason: str) -> None:
    with pytest.raises(ServerStartError) as caught:
        asyncio.run(read_meter(home, 1, mode))
    assert str(caught.value).endswith(reason) and str(home) not in str(caught.value)


def test_a_server_that_fails_without_a_word_is_not_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started_server, "ANSWER_WAIT_S_MAX", 0.3)
    with pytest.raises(ServerStartError) as caught:
        asyncio.run(read_meter(home, 1, "hangs"))
    assert "TypeError: no such argument" in str(caught.value)


def test_a_server_that_is_not_installed_says_so(home: Path) -> None:
    async def run() -> None:
        server = replace(fake(home), command=("no-such-program-of-hearth",))
        async with started(server, home.parent / "model", home, Memory.DEFAULT, 50):
            raise AssertionError("it runs")

    with pytest.raises(ServerStartError, match="fake is not on this machine"):
        asyncio.run(run())


def test_a_server_by_url_is_asked_and_left_alone(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server("mine", url="http://127.0.0.1:1", model="m")
        async with started(server, tmp_path, tmp_path, Memory.DEFAULT, 50) as running:
            assert running.target.base_url == server.url and running.target.model == "m"
            assert (running.meter(), running.pids()) == (None, [])
            await running.kill()

    asyncio.run(run())
    assert not list(tmp_path.iterdir())
