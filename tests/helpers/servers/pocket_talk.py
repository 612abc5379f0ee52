"""Leads conversations with the pocket model, which reads a fact and is asked for it later."""

from typing import Any, Final

import httpx

from tests.helpers.servers.server import Server

MODEL: Final = "pocket"
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

Message = dict[str, Any]


class Talk:
    """A conversation over HTTP. `cached` and `prefilled` are those of its last request."""

    def __init__(self, server: Server, thinks: bool = False, date: str = "2026-11-22") -> None:
        self._server = server
        self._thinks = thinks
        self.messages: list[Message] = [{"role": "system", "content": SYSTEM.format(date)}]
        self.tools: list[Message] = []
        self.cached = self.prefilled = 0
        self.source = ""
        self.thought = ""

    def branch(self) -> "Talk":
        """Return another conversation that begins as this one does."""
        other = Talk(self._server, self._thinks)
        other.messages, other.tools = list(self.messages), self.tools
        return other

    def say(self, text: str, keeps_thinking: bool = True) -> str:
        return self.send({"role": "user", "content": text}, keeps_thinking)["content"] or ""

    def send(self, message: Message, keeps_thinking: bool = True) -> Message:
        self.messages.append(message)
        body = {
            "model": MODEL,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": 200,
            "enable_thinking": self._thinks,
        } | ({"tools": self.tools} if self.tools else {})
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            told = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        usage = told["usage"]
        self.cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.prefilled = usage["prompt_tokens"] - self.cached
        self.source = usage["kv_cache"]["source"]
        answer: Message = told["choices"][0]["message"]
        self.thought = answer.get("reasoning_content") or ""
        kept = {"role": "assistant", "content": answer["content"]}
        if answer.get("tool_calls"):
            kept["tool_calls"] = answer["tool_calls"]
        if keeps_thinking and self.thought:
            kept["reasoning_content"] = self.thought
        self.messages.append(kept)
        return kept
