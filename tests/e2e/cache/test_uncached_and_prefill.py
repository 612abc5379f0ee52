"""By the official SDKs: requests that leave no trace, and prompts read before they are asked."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.helpers.servers.server import Server

SYSTEM = "You are careful. " + "Read what you are given twice. " * 30
SHORT: dict[str, Any] = {"model": "local", "temperature": 0}
Ask = Callable[[Server, str, bool, dict[str, Any]], Any]  # the SDK's usage object of an answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(PREFILL_CHUNK="128") as running:
        yield running


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": f"{SYSTEM} {text}"}]


def chat(server: Server, text: str, stream: bool, more: dict[str, Any]) -> Any:
    with server.openai() as client:
        ask: Any = client.chat.completions.create
        asked = {"messages": said(text), "max_tokens": 8, "extra_body": more} | SHORT
        if not stream:
            return ask(**asked).usage
        options = {"include_usage": True}
        return [row.usage for row in ask(stream=True, stream_options=options, **asked)][-1]


def completions(server: Server, text: str, stream: bool, more: dict[str, Any]) -> Any:
    with server.openai() as client:
        ask: Any = client.completions.create
        asked = {"prompt": f"{SYSTEM} {text}", "max_tokens": 8, "extra_body": more} | SHORT
        if not stream:
            return ask(**asked).usage
        options = {"include_usage": True}
        return [row.usage for row in ask(stream=True, stream_options=options, **asked)][-1]


def messages(server: Server, text: str, stream: bool, more: dict[str, Any]) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        ask: Any = client.messages.create
        asked = {"model": "local", "messages": said(text), "max_tokens": 8}
        asked["extra_body"] = {"temperature": 0} | more
        if not stream:
            return ask(**asked).usage
        return [row.usage for row in ask(stream=True, **asked) if row.type == "message_delta"][-1]


def responses(server: Server, text: str, stream: bool, more: dict[str, Any]) -> Any:
    with server.openai() as client:
        ask: Any = client.responses.create
        asked = {"input": f"{SYSTEM} {text}", "max_output_tokens": 16, "extra_body": more} | SHORT
        if not stream:
            return ask(**asked).usage
        ends = ("response.completed", "response.incomplete")
        return [row.response.usage for row in ask(stream=True, **asked) if row.type in ends][-1]


SDKS: list[Ask] = [chat, completions, messages, responses]


def kept(usage: Any) -> dict[str, Any]:
    """Return what the usage says of the cache."""
    row: dict[str, Any] = usage.model_extra["kv_cache"]
    return row


def state(server: Server) -> dict[str, Any]:
    """Return all that is kept, but for how long ago it was used, once nothing is being done."""
    server.wait_until_idle()
    states = [_state(server)]
    for _ in range(100):  # as long as idle time's work goes on
        time.sleep(0.2)
        states.append(_state(server))
        if len(states) > 5 and all(row == states[-1] for row in states[-5:]):
            return states[-1]
    raise AssertionError(f"the cache does not come to rest: {states[-2:]}")


def _state(server: Server) -> dict[str, Any]:
    (cache,) = server.get("/v1/cache")["workers"]
    for row in cache["entries"]:
        del row["age_s"], row["idle_s"]
    for name in ("memory_bytes", "process_bytes", "beside_arrays_bytes"):
        del cache[name]  # of the whole process, Python's objects too
    cache["entries"].sort(key=lambda row: int(row["line"]))  # told by their idle times
    rows = server.get("/v1/sessions")["sessions"]
    sessions = [(row["session"], row["turns"], row["lines"]) for row in rows]
    directory = server.run_dir / "kv"
    files = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file()
    }
    return {"cache": cache, "sessions": sessions, "files": files}


@pytest.mark.parametrize("ask", SDKS)
def test_a_request_apart_reads_nothing_and_leaves_nothing_streaming_or_not(
    server: Server, ask: Ask
) -> None:
    text = f"Tell me about {ask.__name__}."
    kept_request = {"use_kv_cache": True}
    ask(server, text, False, kept_request)
    before = state(server)
    assert before["cache"]["extents"] and before["cache"]["slots"] and before["files"]
    for stream in (False, True):
        for question in (text, f"{text} Or of something else."):
            row = kept(ask(server, question, stream, {"use_kv_cache": False}))
            assert (row["cache_hit"], row["prefix_length"], row["source"]) == (False, 0, "none")
            assert row["prefilled"] > 100
        now = state(server)
        changed = {name: now["cache"][name] for name in now["cache"] if now != before}
        assert now == before, [
            (name, before["cache"][name], row)
            for name, row in changed.items()
            if before["cache"][name] != row
        ]
    assert kept(ask(server, text, True, kept_request))["prefix_length"] > 100, "the control"


@pytest.mark.parametrize("ask", SDKS)
def test_a_use_kv_cache_that_is_no_boolean_is_a_400_that_names_it(server: Server, ask: Ask) -> None:
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="use_kv_cache"):
        ask(server, "Hi.", False, {"use_kv_cache": "no"})


BODIES: dict[str, tuple[str, dict[str, Any], Ask]] = {
    "chat": ("", {"messages": said("A")}, chat),
    "completions": ("", {"prompt": f"{SYSTEM} A"}, completions),
    "messages": ("?dialect=messages", {"messages": said("A"), "max_tokens": 8}, messages),
    "responses": ("", {"input": f"{SYSTEM} A"}, responses),
}


@pytest.mark.parametrize("dialect", BODIES)
def test_what_was_prefilled_is_there_for_the_real_request(server: Server, dialect: str) -> None:
    query, body, ask = BODIES[dialect]
    server.forget()
    answer = httpx.post(f"{server.url}/v1/cache/prefill{query}", json=SHORT | body, timeout=60)
    told = answer.raise_for_status().json()
    assert told["object"] == "cache.prefill" and told["pinned"] is False
    assert (told["cached_tokens"], told["source"]) == (0, "none")
    assert 100 < told["prefilled_tokens"] < told["prompt_tokens"]
    row = kept(ask(server, "A", False, {}))
    assert row["prefix_length"] == told["prefilled_tokens"]
    assert row["source"] in ("slot", "ram")


def test_a_pin_is_listed_until_it_is_given_up(server: Server) -> None:
    server.forget()
    body = SHORT | {"messages": said("Pin this."), "pin": True}
    told = httpx.post(f"{server.url}/v1/cache/prefill", json=body, timeout=60).json()
    assert told["pinned"] is True
    ((row,),) = [worker["pins"] for worker in server.get("/v1/cache")["workers"]]
    assert (row["id"], row["tokens"]) == (told["id"], told["prefilled_tokens"])
    path = f"{server.url}/v1/cache/pins/{told['id']}"
    assert [httpx.delete(path).status_code for _ in range(2)] == [200, 404]
    assert server.get("/v1/cache")["workers"][0]["pins"] == []
