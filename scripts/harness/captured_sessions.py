"""Plays captured agent sessions, with the captured answers as the model's output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hearth.commands.replay.traces import Captured, load_trace
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions.echoed_turn_match import turn_content
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk

PARSE = {
    "chat": DIALECTS["chat"].parse,
    "messages": DIALECTS["messages"].parse,
    "responses": DIALECTS["responses"].parse,
}
_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Exchange:
    """One captured request and its answer, in our terms."""

    row: Captured
    prompt: Prompt
    parts: AnswerParts
    call_ids: tuple[str, ...]
    signature: str

    @property
    def ids(self) -> list[str]:
        """The ids that the server made for the answer, in the order in which it makes them."""
        return [self.signature or "unused", *self.call_ids]


def load(path: Path, limit: int = 0) -> list[Exchange]:
    """Return the first `limit` (0 = all) requests of a trace that were answered."""
    return exchanges(load_trace(path, limit))


def exchanges(rows: Sequence[Captured]) -> list[Exchange]:
    """Return those of the requests that were answered."""
    return [_exchange(row) for row in rows if row.response]


def prompt_of(row: Captured, body: dict[str, Any] | None = None) -> Prompt:
    """Return what the proxy makes of a captured request, but for the names."""
    body = row.body if body is None else body
    prompt = PARSE[row.dialect](body).prompt
    headers = {name.lower(): value for name, value in row.headers.items()}
    # The clients got blanks around what was said that our model does not write.
    said = [_trimmed(message) for message in prompt.messages]
    return replace(prompt, messages=said, speaker=session_of(headers, body, ""))


def _trimmed(message: dict[str, Any]) -> dict[str, Any]:
    names = ("content", "reasoning_content") if message["role"] == "assistant" else ()
    return message | {name: message[name].strip() for name in names if message.get(name)}


def _exchange(row: Captured) -> Exchange:
    message = _message(row.dialect, row.response)
    said = turn_content(message)
    calls = tuple(ToolCall(*call) for call in said.calls)
    return Exchange(
        row,
        prompt_of(row),
        AnswerParts(said.reasoning.strip(), said.content.strip(), calls),
        tuple(call["id"] for call in message.get("tool_calls") or ()),
        (message.get("signatures") or [""])[0],
    )


def _message(dialect: str, answer: Any) -> dict[str, Any]:
    """Return a captured answer as the message that its dialect reads in an echo of it."""
    match dialect:
        case "responses":
            body: dict[str, Any] = {"input": [_QUESTION, *answer["output"]]}
        case "messages":
            turn = {"role": "assistant", "content": answer["content"]}
            body = {"messages": [_QUESTION, turn], "max_tokens": 1}
        case _:
            choice = answer if "message" in answer else answer["choices"][0]
            body = {"messages": [_QUESTION, choice["message"]]}
    return dict(PARSE[dialect](body).prompt.messages[-1])


def play(desk: Desk, session: Sequence[Exchange]) -> None:
    """Have the model answer a captured session as captured, one request after the other."""
    for exchange in session:
        desk.ids.wanted = exchange.ids
        desk.ask(desk.named(exchange.prompt), exchange.parts)


def recite(desk: Desk, exchange: Exchange) -> Request:
    """Tell the desk's sessions that a captured request was answered as captured; no KV is made."""
    desk.ids.wanted = exchange.ids
    request = desk.request(desk.named(exchange.prompt))
    desk.pretend(request, exchange.parts)
    return request
