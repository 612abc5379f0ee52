"""Prompts and answers at the limits of the context, in every dialect, through a real worker."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server

CONTEXT: Final = 256  # MAX_KV_SIZE, of prompt and answer together
WORD: Final = " a"


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    fixture = str(fixture_dir("qwen3"))
    made = Server(MODEL_PATH=fixture, PROXY_MODEL_ID="local", MAX_KV_SIZE=str(CONTEXT))
    with made as running:
        yield running


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


# Path -> its body for a text, and what it calls its limit.
DIALECTS: Final[dict[str, tuple[Callable[[str], dict[str, Any]], str]]] = {
    "/v1/chat/completions": (user, "max_completion_tokens"),
    "/v1/completions": (lambda text: {"prompt": text}, "max_tokens"),
    "/v1/responses": (lambda text: {"input": text}, "max_output_tokens"),
    "/v1/messages": (user, "max_tokens"),
}
every_dialect = pytest.mark.parametrize("path", DIALECTS)


def ask(server: Server, path: str, text: str, limit: Any = 4, **more: Any) -> httpx.Response:
    make, name = DIALECTS[path]
    body = {"model": "local", "temperature": 0, **make(text), name: limit, **more}
    return httpx.post(server.url + path, json=body, timeout=60)


def spent(path: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens the prompt and the answer were."""
    usage = answer["usage"]
    if path == "/v1/messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    if path == "/v1/responses":
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def ending(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/messages":
        return str(answer["stop_reason"])
    if path == "/v1/responses":
        return str((answer["incomplete_details"] or {}).get("reason"))
    return str(answer["choices"][0]["finish_reason"])


def words_that_fill(server: Server, path: str) -> int:
    """Return how many words make the longest prompt that is accepted: it leaves one token."""
    few = spent(path, ask(server, path, WORD * 10).json())[0]
    more = spent(path, ask(server, path, WORD * 20).json())[0]
    assert more == few + 10, "a word is a token"
    return 10 + CONTEXT - 1 - few


def is_too_long(path: str, reply: httpx.Response) -> None:
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert f"{CONTEXT} tokens" in error["message"]
    assert "Remove at least 1 token" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long")
    else:
        assert (error["type"], error["code"]) == (
            "invalid_request_error",
            "context_length_exceeded",
        )


@every_dialect
def test_the_longest_prompt_has_one_token_of_answer_and_one_more_is_refused(
    small: Server, path: str
) -> None:
    count = words_that_fill(small, path)
    answer = ask(small, path, WORD * count).raise_for_status().json()
    assert spent(path, answer) == (CONTEXT - 1, 1)
    for stream in (False, True):
        is_too_long(path, ask(small, path, WORD * (count + 1), stream=stream))


@every_dialect
@pytest.mark.parametrize("limit", [CONTEXT, 100_000, 2**31 - 1])
def test_an_answer_past_what_is_left_ends_there_as_one_that_was_cut_off(
    small: Server, path: str, limit: int
) -> None:
    """As agents ask: for 64,000 tokens, whatever the context. The fixture talks without an end."""
    reply = ask(small, path, WORD * 100, limit)
    answer = reply.raise_for_status().json()
    prompt, completion = spent(path, answer)
    if ending(path, answer) in ("stop", "end_turn", "None"):
        assert prompt + completion <= CONTEXT
        return
    assert ending(path, answer) in ("length", "max_tokens", "max_output_tokens")
    assert prompt + completion == CONTEXT


@every_dialect
@pytest.mark.parametrize("limit", [0, -3, 2**63, 1.5, "9", True, [4]])
def test_a_limit_that_is_none_is_refused_by_its_name(
    small: Server, path: str, limit: object
) -> None:
    reply = ask(small, path, "Hi.", limit)
    if limit == 0 and path in ("/v1/completions", "/v1/messages"):
        assert spent(path, reply.raise_for_status().json())[1] == 0, "it only reads the prompt"
        return
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert DIALECTS[path][1] in error["message"]
    if path != "/v1/messages":
        assert error["param"] == DIALECTS[path][1]
