"""Servers of the bench get nothing of the user, are measured by defaults, and leave no process."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers import started_server
from hearth.commands.bench.servers.known_servers import SERVERS, server_of_url
from hearth.commands.bench.servers.server_environment import environment_of, placeholders
from hearth.commands.bench.servers.started_server import started
from hearth.shared.errors import StartError

pytestmark = pytest.mark.process

USERS = {
    "PATH": "/bin",
    "HOME": "/Users/ann",
    "CACHE_EXACT": "true",
    "APC_ENABLED": "0",
    "RAPID_MLX_API_KEY": "secret",
    "OPENAI_API_KEY": "secret",
    "HF_TOKEN": "secret",
    "LANG": "C.UTF-8",
    "PYTHONPATH": "/mine",
}


def given(tmp_path: Path) -> dict[str, str]:
    return placeholders(tmp_path / "qwen", 4567, tmp_path / "home", 50)


@pytest.mark.parametrize("name", [name for name, each in SERVERS.items() if not each.url])
def test_nothing_of_the_users_settings_and_keys_comes_to_a_server(
    name: str, tmp_path: Path
) -> None:
    made = environment_of(SERVERS[name], Memory.DEFAULT, given(tmp_path), USERS)
    assert "secret" not in made.values() and not set(made) & {"HF_TOKEN", "CACHE_EXACT"}
    assert {made["HF_HUB_OFFLINE"], made["DO_NOT_TRACK"]} == {"1"}
    assert made["RAPID_MLX_DISABLE_VERSION_CHECK"] == "1", "else it asks GitHub at each start"
    assert made["HOME"] == str(tmp_path / "home") and made["PATH"] == "/bin"
    meter, *others = made["PYTHONPATH"].split(os.pathsep)
    assert (Path(meter) / "sitecustomize.py").exists()
    assert others == (["/mine"] if name == HEARTH else [])
    assert made.get("APC_ENABLED") == ("1" if name == "mlx_vlm" else None)


# ---------------------------------------------------------------- which are measured


def test_a_url_may_name_a_model_and_no_key() -> None:
    assert server_of_url("mine=http://a:1#m").model == "m"
    with pytest.raises(StartError, match="a name or a key in it"):
        server_of_url("mine=http://me:secret@a:1")


# Speaks just enough, and has a child in a session of its own, which it leaves behind.
FAKE = """
import json, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

mode, port = sys.argv[1], int(sys.argv[2])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def say(self, body, kind):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        told = {"status": "Healthy", "data": [{"id": "served"}]}
        self.say(json.dumps(told).encode(), "application/json")
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        usage = {"prompt_tokens": 10, "completion_tokens": 1}
        events = [{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]},
                  {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(each)}\\n\\n" for each in events) + "data: [DONE]\\n\\n"
        self.say(text.encode(), "text/event-stream")

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize("how", ["ends", "is killed", "is stubborn"])
async def test_no_process_outlives_its_block(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started_server, "STOP_WAIT_S_MAX", 0.2)
    (tmp_path / "fake.py").write_text(FAKE)
    command = (sys.executable, str(tmp_path / "fake.py"), how.split()[-1], "{port}")
    server = Server("fake", command, extra={})

    async with started(server, tmp_path, tmp_path, Memory.DEFAULT, 50) as running:
        processes = [psutil.Process(pid) for pid in running.pids()]
        assert len(processes) == 2, "the one in a session of its own too"
        if how == "is killed":
            await running.kill()
            assert running.pids() == []
    assert psutil.wait_procs(processes, timeout=5)[1] == []


async def test_a_server_by_url_is_asked_and_left_alone(tmp_path: Path) -> None:
    server = Server("mine", url="http://127.0.0.1:1", model="m")
    async with started(server, tmp_path, tmp_path, Memory.DEFAULT, 50) as running:
        assert running.target.base_url == server.url and running.target.model == "m"
        assert (running.meter(), running.pids()) == (None, [])
        await running.kill()
    assert not list(tmp_path.iterdir())
