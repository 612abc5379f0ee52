"""The whole server under attack: what it listens to, opens, writes and logs, and for whom.

One server for all: umask 000, LOG_LEVEL=debug, two keys, and an audit of every file that the proxy
or the worker opens.
"""

import http.client
import json
import os
import re
import signal
import socket
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.cases import cases
from tests.helpers.servers.audited_server import GENERATE, KEPT, MINE, PROXY, THEIRS, ask, body_of
from tests.helpers.servers.server import Server, until

CANARY = "cAnArY-7731"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(
        MODEL_PATH=str(fixture_dir("qwen3")),
        PROXY_MODEL_ID="local",
        PROXY_API_KEYS=f"{MINE}, {THEIRS}",
        LOG_LEVEL="debug",
    )
    audit_log = server.run_dir.with_name(server.run_dir.name + ".audit")
    server.environment["AUDIT_LOG"] = str(audit_log)
    server.start("-c", PROXY)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.__exit__()
        audit_log.unlink(missing_ok=True)


# ---------------------------------------------------------------- who reaches it


def test_nothing_but_loopback_listens_by_default(server: Server) -> None:
    assert server.process is not None
    proxy = psutil.Process(server.process.pid)
    everyone = [proxy, *proxy.children(recursive=True)]
    assert not any(MINE in " ".join(process.cmdline()) for process in everyone)
    listening = {
        row.laddr
        for process in everyone
        for row in process.net_connections("inet")
        if row.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", server.port)}


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.nip.io", "localhost.evil.example", "[::2]", "0.0.0.0"]
)
def test_dns_rebinding_a_page_under_another_name_is_refused(server: Server, host: str) -> None:
    for path in ("/health", "/dashboard", "/dashboard/events"):
        status, answer = ask(server, "GET", path, key=None, Host=host)
        assert status == 403 and b"ALLOWED_HOSTS" in answer
    for path in ("/v1/models", "/v1/cache", "/v1/doctor", "/v1/messages"):
        assert ask(server, "GET", path, key=None, Host=host)[0] == 401


@pytest.mark.parametrize("path", [*GENERATE, "/v1/cache/prefill"])
def test_a_foreign_page_cannot_make_the_model_compute(server: Server, path: str) -> None:
    body = body_of(path if path in GENERATE else "/v1/messages", "from a page")
    for more in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
        status, answer = ask(server, "POST", path, body, Content_Type="text/plain", **more)
        assert status == 403 and b"CORS_ORIGINS" in answer


# ---------------------------------------------------------------- what it takes for HTTP


def said_to(server: Server, sent: bytes) -> bytes:
    """Return all that comes back for `sent`."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as client:
        client.sendall(sent)
        with client.makefile("rb") as file:
            return file.read()


def post_of(server: Server, path: str, body: Any, *more: str) -> bytes:
    payload = json.dumps(body).encode()
    rows = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        f"Authorization: Bearer {MINE}",
    ]
    rows += [f"Content-Length: {len(payload)}", *more, "", ""]
    return "\r\n".join(rows).encode() + payload


@pytest.mark.parametrize("path", sorted(GENERATE))
def test_smuggling_a_request_behind_another_is_a_400_and_it_is_not_served(
    server: Server, path: str
) -> None:
    hidden = post_of(server, path, body_of(path, "hidden"), "Connection: close")
    answer = said_to(
        server, post_of(server, path, {}, "Transfer-Encoding: chunked") + b"0\r\n\r\n" + hidden
    )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request") and answer.count(b"HTTP/1.1 ") == 1
    row = json.loads(body)
    assert (row.get("type") == "error") is (path == "/v1/messages")
    assert "Transfer-Encoding" in row["error"]["message"]


# ---------------------------------------------------------------- what another key sees


def test_another_keys_stored_response_is_not_there_whatever_header_comes_with_it(
    server: Server,
) -> None:
    status, answer = ask(server, "POST", "/v1/responses", body_of("/v1/responses", "a secret"))
    assert status == 200
    path = f"/v1/responses/{json.loads(answer)['id']}"
    assert ask(server, "GET", path)[0] == 200
    assert ask(server, "GET", path, x_api_key="none")[0] == 200, "the accepted key is what counts"
    for more in ({}, {"x_api_key": "none"}, {"x_api_key": MINE + "x"}):
        assert ask(server, "GET", path, key=THEIRS, **more)[0] == 404
        assert ask(server, "DELETE", path, key=THEIRS, **more)[0] == 404
        body = body_of("/v1/responses", "go on", previous_response_id=json.loads(answer)["id"])
        assert ask(server, "POST", "/v1/responses", body, key=THEIRS, **more)[0] == 404


# ---------------------------------------------------------------- what it opens and leaves

PLANTED = "pLaNtEd"
PLACES = (
    *("{path}", "file://{path}", "file:{path}", "../../../../../..{path}", "..\\..{path}"),
    *("{path}\x00.png", "%2e%2e/%2e%2e{path}", "~/../../{path}", "http://127.0.0.1:1/{path}"),
)


def filled(value: Any, **words: str) -> Any:
    """Return `value` with these words replaced wherever they stand, in names too."""
    text = json.dumps(value)
    for word, meant in words.items():
        text = text.replace(word, json.dumps(meant)[1:-1])
    return json.loads(text)


def bodies_of(table: str, **words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, body) of each row of the table for each of its paths, filled with `words`."""
    for case in cases(table):
        row = filled(case.values[0], **words)
        for path in row.get("paths", GENERATE):
            fields = filled(row.get("fields", {}), PROMPT=GENERATE[path])
            goes_to = "/v1/cache/prefill" if row.get("prefill") else path
            yield goes_to, body_of(path, row.get("text", words.get("CANARY", "hi"))) | fields


@pytest.mark.parametrize("place", PLACES)
def test_no_path_from_a_request_is_ever_opened(server: Server, place: str, tmp_path: Path) -> None:
    secret = tmp_path / PLANTED / "secret.png"
    secret.parent.mkdir()
    secret.write_text(f"{PLANTED} content")
    named = place.format(path=secret)
    for path, body in bodies_of("server/path_bodies.yaml", PLACE=named):
        status, answer = ask(server, "POST", path, body)
        assert status < 500, (path, body, answer)
        assert b"pLaNtEd content" not in answer
    quoted = named.replace("\x00", "%00").replace("\\", "%5C").replace("%2e", "%252e")
    for path in ("/v1/responses/", "/v1/models/", "/v1/sessions/", "/v1/cache/prompts/", "/"):
        status, answer = ask(server, "GET", path + quoted)
        is_session = path == "/v1/sessions/" and status == 200  # one may be called so
        assert is_session or status in (400, 403, 404, 405), (path, status)
        assert b"pLaNtEd content" not in answer
    opened = Path(server.environment["AUDIT_LOG"]).read_text()
    assert "safetensors" in opened or "config.json" in opened, "the audit sees nothing"
    assert PLANTED not in opened


def test_sessions_with_strange_names_write_no_file_anywhere_else(server: Server) -> None:
    name = f"../../../../tmp/{uuid.uuid4().hex}"
    body = body_of("/v1/chat/completions", "hi", session_id=name)
    assert ask(server, "POST", "/v1/chat/completions", body)[0] == 200
    server.wait_until_idle()
    opened = Path(server.environment["AUDIT_LOG"]).read_text()
    assert name not in opened
    rows = [path for path in server.run_dir.rglob("cache-session-*")]
    assert rows and all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in rows)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_library_is_loaded_that_another_user_could_have_planted(server: Server) -> None:
    """MLX compiles kernels into the temporary directory, under names that anybody can know."""
    ask(server, "POST", "/v1/messages", body_of("/v1/messages", "hi"))
    maps = Path(f"/proc/{server.worker()['pid']}/maps").read_text().splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if line.endswith(".so")}
    kernels = {path for path in loaded if path.parts[-4] == "mlx" and path.parts[-2] == "cpu"}
    assert kernels, loaded
    for path in kernels:  # <temporary directory>/mlx/<version>/cpu/<name>
        assert stat.S_IMODE(path.parents[3].stat().st_mode) == 0o700, path


# ---------------------------------------------------------------- what it logs


def requests_that_tell(canary: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, body) with the canary in all that a prompt is made of, right and wrong."""
    chat, messages = "/v1/chat/completions", "/v1/messages"
    yield from bodies_of("server/canary_bodies.yaml", CANARY=canary)
    for path in GENERATE:
        yield "/v1/cache/prefill", body_of(path, canary, pin=True)
        yield path, body_of(path, f"{canary} " * 150_000)
        yield path, f'{{"model": "local", "{canary}": '.encode()
        yield path, f'["{canary}"]'.encode()
    for edit in ("", "edited ", "edited again "):  # what broke a session's prefix is explained
        asked = {"role": "user", "content": f"{edit}{canary} " * 200}
        told = [asked, {"role": "assistant", "content": canary}, {"role": "user", "content": "on"}]
        yield chat, body_of(chat, "x", messages=told, session_id="edited")
    for case in cases("server/canary_schemas.yaml"):
        schema = filled(case.values[0], CANARY=canary)
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield chat, body_of(chat, canary, response_format=wanted)
        bad: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        yield chat, body_of(chat, canary, tools=bad, tool_choice="required")
        bad = [{"name": "f", "input_schema": schema}]
        yield messages, body_of(messages, canary, tools=bad, tool_choice={"type": "any"})


def test_no_prompt_tool_output_or_key_is_in_any_log_whatever_goes_wrong(server: Server) -> None:
    statuses = set()
    for path, body in requests_that_tell(CANARY):
        status, answer = ask(server, "POST", path, body)
        assert status < 500, (path, body, answer)
        statuses.add(status)
    assert statuses >= {200, 400}
    ask(server, "POST", "/v1/messages", body_of("/v1/messages", "x"), key=f"sk-{CANARY}")
    ask(server, "POST", "/v1/messages?key=" + CANARY, b"{", x_api_key=CANARY, Cookie=CANARY)
    kill_the_worker_amid(CANARY, server)
    server.wait_until_idle()
    written = {
        path: path.read_text(errors="replace")
        for path in server.run_dir.rglob("*")
        if path.is_file()
    }
    assert "refused" in written[server.log] and len(written) > 2
    assert "lost request=" in written[server.log], "no broken prefix was told of"
    for place, text in written.items():
        is_kept = KEPT & set(place.parts)  # turns and responses are, on purpose; keys are not
        for secret in (MINE, THEIRS) if is_kept else (CANARY, MINE, THEIRS):
            found = [line for line in text.splitlines() if secret in line]
            assert not found, (place, found[:3])


BOMBS = ("((a{100}){100}){100}", "(.{1,500}a){500}", "^((a{100}){100}){100}$")


@pytest.mark.parametrize("way", cases("server/schema_bombs.yaml"))
def test_a_schema_bomb_is_a_400_in_each_dialect_and_ends_no_other_request(
    server: Server, way: dict[str, Any]
) -> None:
    """What cannot be known before the answer may be answered; what fails is a 400 that says why."""
    worker, path = server.worker()["pid"], way["path"]
    for pattern in BOMBS:
        body = body_of(path, "a") | filled(way["fields"], PATTERN=pattern)
        status, answer = ask(server, "POST", path, body)
        if pattern != BOMBS[0] or status != 200:
            assert status == 400 and pattern in answer.decode() and b"repeats a part" in answer
        assert ask(server, "POST", path, body_of(path, "Hi"))[0] == 200
    assert server.worker()["pid"] == worker


def kill_the_worker_amid(text: str, server: Server) -> None:
    pid = server.worker()["pid"]
    config = json.loads((fixture_dir("qwen3") / "config.json").read_text())
    endless = {str(token): -100 for token in config["eos_token_id"]}
    body = body_of("/v1/chat/completions", text, stream=True, max_tokens=4000, logit_bias=endless)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {MINE}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    answer.readline()
    os.kill(pid, signal.SIGKILL)
    assert b"worker" in answer.read()
    connection.close()
    until(lambda: server.worker()["pid"] not in (pid, None))
    server.wait_until_ready()


# ---------------------------------------------------------------- what one body may cost


def many(path: str) -> list[tuple[dict[str, Any], bytes]]:
    """Return what makes a body of `path` one of endless parts, and what its refusal says."""
    properties: dict[str, Any] = {f"p{n}": {} for n in range(200_000)}
    function = {"name": "f", "parameters": {"properties": properties}, "input_schema": properties}
    row = {"role": "user", "content": "x"}
    return [
        ({GENERATE[path]: [row] * 20_001}, b"20,001 and this server accepts 20,000"),
        ({"tools": [{"type": "function"}] * 10_001}, b"10,001 and this server accepts 10,000"),
        ({"tools": [function | {"type": "function", "function": function}]}, b"Remove at least"),
        (
            {"chat_template_kwargs": {f"k{n}": n for n in range(1_001)}},
            b"1,001 JSON values and this server accepts 1,000. Remove at least 1.",
        ),
    ]


@pytest.mark.parametrize("path", sorted(GENERATE.keys() - {"/v1/completions"}))
def test_bodies_of_endless_parts_are_refused_and_the_next_is_served(
    server: Server, path: str
) -> None:
    pid = server.worker()["pid"]
    for more, words in many(path):
        status, answer = ask(server, "POST", path, body_of(path, "x") | more)
        assert status == 400 and words in answer, answer[:200]
    assert ask(server, "POST", path, body_of(path, "Hi"))[0] == 200
    assert server.worker()["pid"] == pid
