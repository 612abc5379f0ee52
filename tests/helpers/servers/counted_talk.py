"""Leads conversations over HTTP, counts what each answer reads, and asks again without a cache."""

from copy import deepcopy
from typing import Any, Final

import httpx
import pytest

from tests.helpers.servers.server import WAIT_S_MAX, Server

SYSTEM: Final = "You are a helpful assistant.\nToday's date is {}."

# Long enough to be cut in several places, and of nothing that anybody asks for.
NOTES: Final = "Some notes:\n" + "\n".join(
    f"In {month} the {thing} was {kind}, as {name} said."
    for month, thing, kind, name in (
        ("January", "harbor", "quiet", "Anna"),
        ("February", "meadow", "dusty", "Boris"),
        ("March", "tunnel", "narrow", "Clara"),
        ("April", "castle", "ancient", "David"),
        ("May", "bridge", "rusty", "Elena"),
        ("June", "garden", "bright", "Felix"),
        ("July", "station", "silent", "Greta"),
        ("August", "valley", "warm", "Hugo"),
    )
)
FACT: Final = "The code of the north gate is {}."
ASK: Final = "What is the code of the north gate?"
LOGPROB_ERROR_MAX: Final = 0.001  # of prompts that are cut into chunks elsewhere

Message = dict[str, Any]


class Talk:
    """A greedy conversation. `cached` and `prefilled` are those of its last answer."""

    def __init__(
        self,
        server: Server,
        thinks: bool = False,
        date: str = "2026-11-22",
        tokens_max: int = 24,
    ) -> None:
        self._server = server
        self._fields = {
            "model": server.environment["PROXY_MODEL_ID"],
            "temperature": 0,
            "max_tokens": tokens_max,
            "enable_thinking": thinks,
            "logprobs": True,
        }
        self.messages: list[Message] = [{"role": "system", "content": SYSTEM.format(date)}]
        self.told: list[tuple[dict[str, Any], Any]] = []  # each request and what it was answered
        self.cached = self.prefilled = 0
        self.source = ""
        self.thought = ""

    def branch(self) -> "Talk":
        """Return another conversation that begins as this one does."""
        other = Talk(self._server)
        other._fields, other.messages = self._fields, deepcopy(self.messages)
        return other

    def body(self, text: str) -> dict[str, Any]:
        """Return the request that says `text` next."""
        return self._fields | {"messages": [*self.messages, {"role": "user", "content": text}]}

    def say(self, text: str, keeps_thinking: bool = True) -> str:
        """Return the answer; thinking is sent back with the next request if it is kept."""
        body = self.body(text)
        told = self._asked(body)
        self.told.append((body, told))
        usage = told["usage"]
        self.cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.prefilled = usage["prompt_tokens"] - self.cached
        self.source = usage["kv_cache"]["source"]
        answer = told["choices"][0]["message"]
        said: str = answer["content"] or ""
        self.thought = answer.get("reasoning_content") or ""
        kept = {"role": "assistant", "content": said}
        if keeps_thinking and self.thought:
            kept["reasoning_content"] = self.thought
        self.messages += [{"role": "user", "content": text}, kept]
        return said

    def assert_as_cold(self) -> None:
        """Assert that an emptied cache gives each answer too, from the same prompt.

        With random weights one row of KV that is not the prompt's changes all log probabilities.
        The turns that were sampled are known on: only their KV is computed anew.
        """
        for body, warm in self.told:
            self._server.forget()
            cold = self._asked(body)
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert cold["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"]
            (tokens, logprobs), (warm_tokens, warm_logprobs) = map(_sampled, (cold, warm))
            assert warm_tokens == tokens
            assert warm_logprobs == pytest.approx(logprobs, abs=LOGPROB_ERROR_MAX)

    def _asked(self, body: dict[str, Any]) -> Any:
        with httpx.Client(base_url=self._server.url, timeout=WAIT_S_MAX) as client:
            return client.post("/v1/chat/completions", json=body).raise_for_status().json()


def _sampled(told: Any) -> tuple[list[bytes], list[float]]:
    """Return the bytes of each token of an answer, and its log probability."""
    rows = told["choices"][0]["logprobs"]["content"]
    return [bytes(row["bytes"]) for row in rows], [row["logprob"] for row in rows]
