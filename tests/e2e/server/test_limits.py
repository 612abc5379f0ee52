"""Prompts and answers at the limits of the context, in every dialect, through a real worker."""

from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.helpers.servers.audited_server import GENERATE, body_of
from tests.helpers.servers.server import Server

CONTEXT: Final = 256  # MAX_KV_SIZE, of prompt and answer together
WORD: Final = " a"


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with Server(MAX_KV_SIZE=str(CONTEXT)) as running:
        yield running


def ask(server: Server, path: str, words: int, limit: int = 4, **more: Any) -> httpx.Response:
    body = body_of(path, WORD * words, limit, temperature=0, **more)
    return httpx.post(server.url + path, json=body, timeout=60)


def spent(path: str, reply: httpx.Response) -> tuple[int, int]:
    """Return how many tokens the prompt and the answer were."""
    usage = reply.raise_for_status().json()["usage"]
    if path == "/v1/messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    prompt, answer = ("input", "output") if path == "/v1/responses" else ("prompt", "completion")
    return usage[f"{prompt}_tokens"], usage[f"{answer}_tokens"]


@pytest.mark.parametrize("path", GENERATE)
def test_the_longest_prompt_has_one_token_of_answer_and_one_more_is_refused(
    small: Server, path: str
) -> None:
    few, more = (spent(path, ask(small, path, words))[0] for words in (10, 20))
    assert more == few + 10, "a word is a token"
    longest = 10 + CONTEXT - 1 - few
    assert spent(path, ask(small, path, longest)) == (CONTEXT - 1, 1)
    for stream in (False, True):
        reply = ask(small, path, longest + 1, stream=stream)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert f"{CONTEXT} tokens" in error["message"]
        assert "Remove at least 1 token" in error["message"]
