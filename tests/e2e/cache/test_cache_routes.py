"""Each dialect's usage and the cache routes say what was kept of a prompt; some leave no trace."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.servers.audited_server import GENERATE, body_of
from tests.helpers.servers.server import Server

CHAT = "/v1/chat/completions"
KEY = "k"
TEXT = "You are careful. " + "Read what you are given twice. " * 60
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
in_each_dialect = pytest.mark.parametrize("path", GENERATE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(LOG_PROMPTS="true", PREFILL_CHUNK="128", PROXY_API_KEY=KEY) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client with the key, before an empty cache."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        assert client.delete("/v1/cache").status_code == 200
        yield client


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the usage of an answer, or the last one that a stream tells."""
    data = [line for line in answer.raise_for_status().text.splitlines() if line[:7] == "data: {"]
    rows = [json.loads(line[6:]) for line in data] or [answer.json()]
    told = [row.get("usage") or row.get("response", {}).get("usage") for row in rows]
    return dict([usage for usage in told if usage][-1])


def ask(
    http: httpx.Client, path: str, text: str = TEXT, stream: bool = False, **more: Any
) -> dict[str, Any]:
    """Return the usage of a greedy answer to `text`."""
    if stream and path.endswith("completions"):
        more["stream_options"] = {"include_usage": True}
    return usage_of(
        http.post(path, json=body_of(path, text, 4, temperature=0, stream=stream) | more)
    )


def size_and_cached(usage: dict[str, Any]) -> tuple[int, int]:
    """Return how long the prompt was and how much of it was kept, in any dialect's words."""
    if "cache_read_input_tokens" in usage:
        cached = int(usage["cache_read_input_tokens"])
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached
    name = "prompt_tokens" if "prompt_tokens" in usage else "input_tokens"
    return usage[name], usage[f"{name}_details"]["cached_tokens"]


@STREAMED
@in_each_dialect
def test_every_dialect_tells_what_was_kept(http: httpx.Client, path: str, stream: bool) -> None:
    first, second = (ask(http, path, stream=stream) for _ in range(2))
    (cold_size, cold_cached), (size, cached) = map(size_and_cached, (first, second))
    assert cold_size == size and cold_cached == 0 and 0.9 * size < cached < size
    cold, warm = first["kv_cache"], second["kv_cache"]
    assert all(row.pop("ttft_ms") >= 0 for row in (cold, warm))
    nothing = {"cache_hit": False, "prefix_length": 0, "prefilled": size, "source": "none"}
    lengths = ("canonical_length", "matched_length")
    told = {"divergence": None, "idle_tokens": 0}
    assert cold == {**nothing, **dict.fromkeys(lengths, 0), **told, "match": "miss"}
    found = {"cache_hit": True, "prefix_length": cached, "prefilled": size - cached}
    assert warm.pop("source") in ("slot", "ram")
    assert cached <= warm.pop("matched_length") <= size and warm.pop("canonical_length") == cached
    assert warm == {**found, **told, "match": "exact"}


def test_a_prompt_sent_again_is_kept_and_shown_until_it_is_deleted(http: httpx.Client) -> None:
    size, _ = size_and_cached(ask(http, CHAT))
    assert size_and_cached(ask(http, CHAT))[1] > 0.9 * size
    told = http.get("/v1/cache").json()
    (row,) = told["workers"]
    assert (told["object"], row["worker"]) == ("cache", 0)
    assert row["bytes"] + row["slots_bytes"] > 0
    assert max(entry["tokens"] for entry in row["entries"]) > 0.9 * size
    (emptied,) = http.delete("/v1/cache").json()["workers"]
    assert (emptied["bytes"], emptied["entries"]) == (0, [])
    assert size_and_cached(ask(http, CHAT)) == (size, 0)


def test_a_connection_dropped_at_40_percent_of_a_prefill_loses_nothing(
    server: Server, http: httpx.Client
) -> None:
    text = "".join(f"{n} tell me what this line says, and the next one too. " for n in range(230))
    payload = json.dumps(body_of(CHAT, text, 2, temperature=0)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {KEY}\r\n"
    )
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    reached = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode() + payload)
        while reached < 1600:
            (row,) = http.get("/v1/cache").json()["workers"]
            reached = max((slot["tokens"] for slot in row["slots"]), default=0)
    answer = http.post(CHAT, content=payload, headers={"content-type": "application/json"})
    size, cached = size_and_cached(usage_of(answer))
    assert size > reached + 1_000, "the connection was dropped amid the prefill"
    assert cached >= reached


def test_the_ids_of_a_prompt_are_told_under_the_answers_request_id(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=body_of(CHAT, TEXT, 4))
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"chatcmpl-{request_id}"
    told = http.get(f"/v1/cache/prompts/{request_id}").json()
    assert told["request_id"] == request_id
    assert len(told["ids"]) == size_and_cached(usage_of(answer))[0]
    assert all(type(token) is int for token in told["ids"])
    missing = http.get("/v1/cache/prompts/no-such-request")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


# ---------------------------------------------------------------- requests that leave no trace


def state(server: Server, http: httpx.Client) -> dict[str, Any]:
    """Return all that is kept, but for how long ago it was used, once nothing is being done."""
    server.wait_until_idle()
    states = [_state(server, http)]
    for _ in range(100):  # as long as idle time's work goes on
        time.sleep(0.2)
        states.append(_state(server, http))
        if len(states) > 5 and all(row == states[-1] for row in states[-5:]):
            return states[-1]
    raise AssertionError(f"the cache does not come to rest: {states[-2:]}")


def _state(server: Server, http: httpx.Client) -> dict[str, Any]:
    (cache,) = http.get("/v1/cache").json()["workers"]
    for row in cache["entries"]:
        del row["age_s"], row["idle_s"]
    for name in ("memory_bytes", "process_bytes", "beside_arrays_bytes"):
        del cache[name]  # of the whole process, Python's objects too
    cache["entries"].sort(key=lambda row: int(row["line"]))  # told by their idle times
    rows = http.get("/v1/sessions").json()["sessions"]
    files = [path for path in (server.run_dir / "kv").rglob("*") if path.is_file()]
    return {
        "cache": cache,
        "sessions": [(row["session"], row["turns"], row["lines"]) for row in rows],
        "files": {str(path): path.stat().st_size for path in files},
    }


@in_each_dialect
def test_a_request_apart_reads_nothing_and_leaves_nothing_streaming_or_not(
    server: Server, http: httpx.Client, path: str
) -> None:
    ask(http, path, use_kv_cache=True)
    before = state(server, http)
    assert before["cache"]["extents"] and before["cache"]["slots"] and before["files"]
    for stream in (False, True):
        for text in (TEXT, f"{TEXT} Or of something else."):
            row = ask(http, path, text, stream, use_kv_cache=False)["kv_cache"]
            assert (row["cache_hit"], row["prefix_length"], row["source"]) == (False, 0, "none")
            assert row["prefilled"] > 100
        assert state(server, http) == before
    assert ask(http, path, stream=True, use_kv_cache=True)["kv_cache"]["prefix_length"] > 100


@in_each_dialect
def test_a_use_kv_cache_that_is_no_boolean_is_a_400_that_names_it(
    http: httpx.Client, path: str
) -> None:
    refused = http.post(path, json=body_of(path, "Hi.", use_kv_cache="no"))
    assert refused.status_code == 400 and "use_kv_cache" in refused.json()["error"]["message"]


# ---------------------------------------------------------------- prompts read beforehand


@in_each_dialect
def test_what_was_prefilled_is_there_for_the_real_request(http: httpx.Client, path: str) -> None:
    query = "?dialect=messages" if path == "/v1/messages" else ""
    answer = http.post(f"/v1/cache/prefill{query}", json=body_of(path, TEXT, temperature=0))
    told = answer.raise_for_status().json()
    assert told["object"] == "cache.prefill" and told["pinned"] is False
    assert (told["cached_tokens"], told["source"]) == (0, "none")
    assert 100 < told["prefilled_tokens"] < told["prompt_tokens"]
    row = ask(http, path)["kv_cache"]
    assert row["prefix_length"] == told["prefilled_tokens"]
    assert row["source"] in ("slot", "ram")


def test_a_pin_is_listed_until_it_is_given_up(http: httpx.Client) -> None:
    told = http.post("/v1/cache/prefill", json=body_of(CHAT, TEXT, pin=True)).json()
    assert told["pinned"] is True
    ((row,),) = [worker["pins"] for worker in http.get("/v1/cache").json()["workers"]]
    assert (row["id"], row["tokens"]) == (told["id"], told["prefilled_tokens"])
    path = f"/v1/cache/pins/{told['id']}"
    assert [http.delete(path).status_code for _ in range(2)] == [200, 404]
    assert http.get("/v1/cache").json()["workers"][0]["pins"] == []
