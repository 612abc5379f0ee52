"""Reads captured agent sessions and makes the bodies that a replay sends.

A body stays as the client sent it but for model, length, temperature and streaming; `with_live`
puts in what this server answered, `as_chat` turns any dialect into chat completions.
"""

import copy
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.proxy.api.messages.parse import parse as parse_messages
from hearth.proxy.api.responses.parse import parse as parse_responses
from hearth.shared.paths import PROJECT_DIR

Body = dict[str, Any]

EXCERPTS_DIR: Final = PROJECT_DIR / "tests" / "data" / "traces"
# Whole sessions are too large for the repository: they may lie beside the checkout.
WHOLE_DIR: Final = PROJECT_DIR.parent / "shared" / "traces"
TRACES_DIR: Final = WHOLE_DIR if WHOLE_DIR.is_dir() else EXCERPTS_DIR

DIALECTS = {  # the end of a path -> how it is spoken
    "/chat/completions": "chat",
    "/messages": "messages",
    "/responses": "responses",
}
CHAT_PATH = "/v1/chat/completions"
CLOCK_S = 1e-3  # times of a capture are this exact
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_DEFAULT_LENGTH = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
_PARSE = {"messages": parse_messages, "responses": parse_responses}


@dataclass(frozen=True, slots=True)
class Captured:
    """One request of a session. Times are the capture's own clock."""

    trace: str
    dialect: str  # of DIALECTS
    path: str  # with its query
    headers: Mapping[str, str]
    body: Body
    said: str  # the text of what the scripted model answered
    began_s: float
    ended_s: float
    response: Any = None  # what the scripted model answered, assembled


@dataclass(frozen=True, slots=True)
class Spoken:
    """What this server answered."""

    text: str
    reasoning: str


# (captured text, assistant texts before it) -> what this server said in its place
Answers = dict[tuple[str, int], Spoken]


def load_trace(path: Path, limit: int = 0) -> list[Captured]:
    """Return the first `limit` (0 = all) requests that ask for a generation, in captured order."""
    content = path.read_bytes()
    if path.suffix == ".xz":
        content = lzma.decompress(content)
    name = path.name.removesuffix(".xz").removesuffix(".jsonl")
    lines = [line for line in content.split(b"\n") if line]
    rows = [_captured(name, row) for row in map(json.loads, lines) if _dialect(row)]
    return rows[:limit] if limit else rows


def _dialect(row: dict[str, Any]) -> str:
    if row["method"] != "POST":
        return ""
    return next((kind for end, kind in DIALECTS.items() if row["path"].endswith(end)), "")


def _captured(trace: str, row: dict[str, Any]) -> Captured:
    dialect = _dialect(row)
    return Captured(
        trace=trace,
        dialect=dialect,
        path=row["path"] + ("?" + row["query"] if row.get("query") else ""),
        headers=row["headers"],
        body=row["body"],
        said=_said(dialect, row.get("response")),
        began_s=row["t"],
        ended_s=row["t_end"],
        response=row.get("response"),
    )


def _said(dialect: str, response: Any) -> str:
    """Return the text of a captured answer; empty where it had none."""
    if not isinstance(response, dict):
        return ""
    if dialect == "chat":
        choice = response if "message" in response else (response.get("choices") or [{}])[0]
        content = (choice.get("message") or {}).get("content")
        return content if isinstance(content, str) else ""
    if dialect == "messages":
        return _texts(response.get("content"))
    said = [item for item in response.get("output") or () if item.get("type") == "message"]
    return _texts(said[0].get("content")) if said else ""


def _texts(parts: Any) -> str:
    rows = parts if isinstance(parts, list) else ()
    return "".join(part.get("text") or "" for part in rows if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "output_text")


def waits_for(rows: Sequence[Captured], is_serial: bool) -> list[list[int]]:
    """Return for each request which earlier ones must have ended before it is sent.

    Those that had ended when it began; all, where `is_serial` or another session begins.
    """
    waits = []
    for number, row in enumerate(rows):
        waits.append(
            [
                earlier
                for earlier in range(number)
                if is_serial
                or rows[earlier].trace != row.trace
                or rows[earlier].ended_s <= row.began_s + CLOCK_S
            ]
        )
    return waits


def request_body(row: Captured, model: str, tokens_max: int) -> Body:
    """Return a copy of the captured body: streamed, greedy, and at most `tokens_max` long."""
    body = copy.deepcopy(row.body)
    body |= {"model": model, "temperature": 0, "stream": True}
    for name in (*_LENGTHS, _DEFAULT_LENGTH[row.dialect]):
        if name in body or name == _DEFAULT_LENGTH[row.dialect]:
            body[name] = tokens_max
    if row.dialect == "chat":
        body["stream_options"] = {"include_usage": True}
    return body


# ---------------------------------------------------------------- live answers


def answer_key(row: Captured) -> tuple[str, int] | None:
    """Return where later requests of the session show this one's answer; None without a text."""
    if not row.said:
        return None
    return row.said, sum(1 for _ in _assistant_turns(row.dialect, row.body))


def with_live(dialect: str, body: Body, answers: Answers) -> Body:
    """Replace each captured assistant text by what this server said there, where it did."""
    put = {"chat": _put_chat, "messages": _put_messages, "responses": _put_responses}[dialect]
    for number, (turn, text) in enumerate(list(_assistant_turns(dialect, body))):
        spoken = answers.get((text, number))
        if text and spoken is not None:
            put(body, turn, spoken)
    return body


def _assistant_turns(dialect: str, body: Body) -> Iterator[tuple[Body, str]]:
    """Yield what the assistant said in `body` with its text, which may be empty."""
    turns = body.get("input" if dialect == "responses" else "messages")
    for turn in turns if isinstance(turns, list) else ():
        if turn.get("role") == "assistant":
            content = turn.get("content")
            yield turn, content if isinstance(content, str) else _texts(content)


def _put_chat(_: Body, turn: Body, spoken: Spoken) -> None:
    turn["content"] = spoken.text
    for name in ("reasoning", "reasoning_content"):
        turn.pop(name, None)
    if spoken.reasoning:
        turn["reasoning_content"] = spoken.reasoning


def _put_messages(_: Body, turn: Body, spoken: Spoken) -> None:
    content = turn["content"]
    others = [] if isinstance(content, str) else [p for p in content if p["type"] == "tool_use"]
    thinking = {"type": "thinking", "thinking": spoken.reasoning, "signature": ""}
    said = [thinking] if spoken.reasoning else []
    if spoken.text:  # an empty block is refused
        said.append({"type": "text", "text": spoken.text})
    turn["content"] = said + others


def _put_responses(body: Body, turn: Body, spoken: Spoken) -> None:
    items = body["input"]
    place = next(number for number, item in enumerate(items) if item is turn)
    if place and items[place - 1].get("type") == "reasoning":
        place -= 1
        del items[place]
    if spoken.reasoning:
        thought = {"type": "reasoning_text", "text": spoken.reasoning}
        items.insert(place, {"type": "reasoning", "summary": [], "content": [thought]})
    turn["content"] = [{"type": "output_text", "text": spoken.text}]


# ---------------------------------------------------------------- another dialect


def as_chat(dialect: str, body: Body) -> Body:
    """Return `body` as chat completions, with the messages and tools that Hearth reads in it.

    Raises:
        RequestError: Hearth refuses it; there is nothing to compare then.
    """
    if dialect == "chat":
        return body
    parsed = _PARSE[dialect](body)
    chat: Body = {
        "model": body["model"],
        "messages": [_as_sent(message) for message in parsed.prompt.messages],
        "tools": parsed.prompt.tools or None,
        "max_tokens": parsed.sampling.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat |= parsed.prompt.thinking.options
    switch = {name: chat[name] for name in ("enable_thinking",) if name in chat}
    if kwargs := switch | parsed.prompt.template_kwargs:  # where other servers look for it
        chat["chat_template_kwargs"] = kwargs
    return chat


def _as_sent(message: Body) -> Body:
    """Return a message with the arguments of its calls as text: so chat completions have them."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call_as_sent(call) for call in calls]} if calls else message


def _call_as_sent(call: Body) -> Body:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
