"""Two keys and one disk: what one key's clients left before a restart is not there for the other's.

Everything runs under umask 000, and every file that is left is looked at.
"""

import json
import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.audited_server import GENERATE, KEPT, MINE, THEIRS, ask, body_of
from tests.helpers.servers.server import Server

THIRD = "sk-canary-third"
SECRET = "sEcReT-word "
WORDS = SECRET + " ".join(f"word{number}" for number in range(300))
KEPT_MIN = 250  # tokens of WORDS that must come back, where any may


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(
        MODEL_PATH=str(fixture_dir("qwen3")),
        PROXY_MODEL_ID="local",
        PROXY_API_KEYS=f"{MINE}, {THEIRS}, {THIRD}",
    )
    start(made)
    yield made
    made.__exit__()


def start(server: Server) -> None:
    before = os.umask(0)
    try:
        server.start()
    finally:
        os.umask(before)
    server.wait_until_ready()


def told(server: Server, method: str, path: str, key: str, body: Any = None) -> Any:
    status, answer = ask(server, method, path, body, key)
    assert status == 200, answer
    return json.loads(answer)


def kept(server: Server, path: str, key: str, text: Any) -> tuple[int, str]:
    """Return how many tokens of a prompt were kept, and where, as the client is told."""
    body = body_of(path, text, session_id="one name")
    row = told(server, "POST", path, key, body)["usage"]["kv_cache"]
    return int(row["prefix_length"]), str(row["source"])


def lines(server: Server, key: str) -> int:
    rows = told(server, "GET", "/v1/cache", key)["workers"]
    return sum(len(row["entries"]) for row in rows)


def check_files(server: Server) -> None:
    """All is this user's alone; text stands only where it is kept on purpose, keys nowhere."""
    files = list(server.run_dir.rglob("*"))
    assert {".log", ".safetensors"} <= {path.suffix for path in files}
    digests = [sha256(key.encode()).hexdigest()[:16] for key in (MINE, THEIRS, THIRD)]
    for path in files:
        mode = path.lstat().st_mode
        if path != server.log:  # the test's own, of this server's stderr
            wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
            assert stat.S_IMODE(mode) == wanted, (path, oct(mode))
        if not stat.S_ISREG(mode):
            continue
        content = path.read_bytes()
        for secret in (MINE, THEIRS, THIRD):
            assert secret.encode() not in content, path
        if KEPT & set(path.parts):
            assert not any(digest.encode() in content for digest in digests), path
        else:
            assert SECRET.strip().encode() not in content, path


def test_another_key_gets_nothing_from_ram_nor_from_disk_that_this_one_left_before_a_restart(
    server: Server,
) -> None:
    for path in GENERATE:
        text = f"{path} {WORDS}"
        kept(server, path, MINE, text)
        assert kept(server, path, MINE, text)[0] > KEPT_MIN
        assert kept(server, path, THEIRS, text) == (0, "none"), "in RAM"
    path = "/v1/responses"
    response = f"{path}/{told(server, 'POST', path, MINE, body_of(path, 'keep this'))['id']}"
    assert lines(server, MINE) > 0 and lines(server, THIRD) == 0
    server.wait_until_idle()
    server.stop()
    check_files(server)
    start(server)
    for path in GENERATE:
        text = f"{path} {WORDS}"
        assert kept(server, path, THIRD, text) == (0, "none"), "on disk"
        count, source = kept(server, path, MINE, text)
        assert count > KEPT_MIN and source == "ssd", "the control: it is there for its own key"
    statuses = [ask(server, "GET", response, key=key)[0] for key in (MINE, THIRD)]
    assert statuses == [200, 404], "a stored response outlives the restart too, for its own key"
    assert ask(server, "GET", "/v1/sessions/one%20name", key=THIRD)[0] == 200
    sessions = told(server, "GET", "/v1/sessions", THIRD)["sessions"]
    assert [row["session"] for row in sessions] == ["one name"], "that it has opened itself"
    check_files(server)
    running = {path.suffix for path in server.run_dir.rglob("*")}
    assert {".sock", ".json"} <= running, "these were looked at too"


def test_another_keys_words_cannot_be_guessed_in_a_list_of_prompts(server: Server) -> None:
    """A completion may ask for several prompts at once: each is its key's, not the first alone."""
    path = "/v1/completions"
    kept(server, path, MINE, ["x", WORDS])
    assert kept(server, path, MINE, ["y", WORDS])[0] > KEPT_MIN
    assert kept(server, path, THEIRS, ["z", WORDS]) == (0, "none")
