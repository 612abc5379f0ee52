"""Judges from the bytes that a client received whether an HTTP exchange ended well-formed.

An end is well-formed where the bytes are exactly one HTTP answer, and its body is a whole answer or
an error in the caller's dialect. A stream is whole where it has its terminator, once and last.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import h11

Kind = Literal[
    "answered",  # 200, whole
    "refused",  # 4xx in the dialect
    "busy",  # 503 in the dialect, with Retry-After
    "failed",  # a stream that ended with its error event, or another 5xx in the dialect
    "left",  # the client went away by itself
    "cut",  # the connection ended before the answer did
    "hung",  # no end in the time there was
    "bug",  # a 500: the server says that it is wrong
    "malformed",  # anything else
    "wrong",  # whole, and not what a cold cache answers
]
DETAIL_CHARS_MAX: Final = 200
_DONE: Final = "[DONE]"
_RESPONSE_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")

Row = dict[str, Any]
Told = tuple[Row | None, str]  # the error that ended a stream, or the text and calls that it said


class Malformed(Exception):
    """The bytes are not one well-formed answer; the text says why."""


@dataclass(frozen=True, slots=True)
class End:
    """How one request ended. `said` is a streamed answer's thinking, text and calls."""

    kind: Kind
    detail: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer, taken from its framing."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


def judge(dialect: str, is_stream: bool, raw: bytes) -> End:
    """Return the end that `raw` is: all that came on a connection, which has ended.

    With `dialect` "" the body only has to be whole.
    """
    try:
        reply = reply_of(raw, may_end_by_close=not dialect)
        if reply is None:
            return End("cut", f"after {len(raw)} bytes")
        if reply.status != 200:
            return _refusal(dialect, reply)
        return _answer(dialect, is_stream, reply)
    except (Malformed, LookupError, TypeError, AttributeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}; got {raw[-300:]!r}"
        return End("malformed", told[:DETAIL_CHARS_MAX])


def reply_of(raw: bytes, *, may_end_by_close: bool = False) -> Reply | None:
    """Return the one HTTP answer in `raw`; None where it is not there as a whole.

    Of one that ends with its connection nobody can tell whether it is whole; it is none of ours.

    Raises:
        Malformed: these bytes are none, or more than one.
    """
    if not raw:
        return None
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(raw)
    if may_end_by_close:
        connection.receive_data(b"")
    status, headers, body = 0, dict[bytes, bytes](), bytearray()
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                status, headers = event.status_code, dict(event.headers)
                is_delimited = not {b"content-length", b"transfer-encoding"}.isdisjoint(headers)
                _demand(is_delimited or may_end_by_close, "nothing tells where the answer ends")
            elif isinstance(event, h11.Data):
                body += event.data
    except h11.RemoteProtocolError as error:
        raise Malformed(f"no HTTP: {error}") from None
    rest = connection.trailing_data[0]
    _demand(not rest, f"more after the end: {rest[:80]!r}")
    return Reply(status, headers, bytes(body))


def _demand(holds: object, else_told: str) -> None:
    if not holds:
        raise Malformed(else_told)


# ---------------------------------------------------------------- errors


def _refusal(dialect: str, reply: Reply) -> End:
    detail = f"{reply.status} {reply.body[:DETAIL_CHARS_MAX].decode('utf-8', 'replace')}"
    if dialect:
        row = json.loads(reply.body)
        _demand(dialect != "messages" or row["type"] == "error", "no Anthropic error")
        _check_error(row["error"])
    if reply.status == 500:
        return End("bug", detail)
    if reply.status == 503:
        _demand(not dialect or b"retry-after" in reply.headers, "a 503 without Retry-After")
        return End("busy", detail)
    return End("refused" if reply.status < 500 else "failed", detail)


def _check_error(error: Row) -> None:
    message, kind = error["message"], error.get("type", error.get("code"))
    _demand(isinstance(message, str) and message, "an error without a text")
    _demand(isinstance(kind, str), "an error without a type")


# ---------------------------------------------------------------- answers


def _answer(dialect: str, is_stream: bool, reply: Reply) -> End:
    if not dialect:
        return End("answered")
    if not is_stream:
        _demand(_is_whole(dialect, json.loads(reply.body)), "an answer that is not whole")
        return End("answered")
    is_stream_type = reply.headers[b"content-type"].startswith(b"text/event-stream")
    _demand(is_stream_type, "a stream that is no text/event-stream")
    error, said = _STREAMS[dialect](list(events(reply.body)))
    if error is None:
        return End("answered", said=said)
    _check_error(error)
    kind: Kind = "bug" if "its log says" in error["message"] else "failed"
    return End(kind, json.dumps(error)[:DETAIL_CHARS_MAX])


def _is_whole(dialect: str, row: Row) -> bool:
    if dialect == "messages":
        return bool(row["type"] == "message" and row["stop_reason"])
    if dialect == "responses":
        return row["status"] in ("completed", "incomplete")
    return bool(row["choices"]) and all(choice["finish_reason"] for choice in row["choices"])


def events(body: bytes) -> Iterator[Any]:
    """Yield the data of all events of a stream, as JSON or "[DONE]".

    Raises:
        Malformed: the body is not events through and through.
    """
    text = body.decode("utf-8")
    _demand(text.endswith("\n\n"), "the last event is not whole")
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue  # a comment: a client that has finished sending is asked by it
        named = [line[6:].strip() for line in lines if line.startswith("event:")]
        data = [line[5:].strip() for line in lines if line.startswith("data:")]
        is_event = len(data) == 1 and len(named) <= 1 and len(named) + 1 == len(lines)
        _demand(is_event, f"no event: {block[:80]!r}")
        row: Any = data[0] if data[0] == _DONE else json.loads(data[0])
        _demand(not named or row["type"] == named[0], f"event {named} carries another type")
        yield row


def _chat_stream(rows: Sequence[Any]) -> Told:
    """Chat completions: chunks, a finish reason for each choice, [DONE]. An error is the last."""
    is_done = rows[-1] == _DONE
    chunks = rows[:-1] if is_done else rows
    _demand(_DONE not in chunks, "more than one [DONE]")
    if errors := [row["error"] for row in chunks if "error" in row]:
        _demand(len(errors) == 1 and "error" in chunks[-1], "an error that is not the end")
        return errors[0], ""
    _demand(is_done, "no [DONE] at the end")
    choices = [choice for row in chunks for choice in row["choices"]]
    finished = [choice["index"] for choice in choices if choice.get("finish_reason")]
    is_each = finished and sorted(finished) == sorted({choice["index"] for choice in choices})
    _demand(is_each, f"finish reasons of choices {finished}")
    first = [choice for choice in choices if choice["index"] == 0]
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in first]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    texts = ("reasoning_content", "content")
    said = [delta.get(name) or "" for delta in deltas for name in texts]
    said += [call.get(name) or "" for call in calls for name in ("name", "arguments")]
    return None, "".join(said)


def _messages_stream(rows: Sequence[Row]) -> Told:
    """Messages: message_start, blocks that are opened and closed, message_stop."""
    kinds = [row["type"] for row in rows]
    if "error" in kinds:
        _demand(kinds.index("error") == len(kinds) - 1, "an error that is not the end")
        return rows[-1]["error"], ""
    _demand((kinds[0], kinds[-1]) == ("message_start", "message_stop"), f"events {kinds}")
    _demand(kinds.count("message_start") + kinds.count("message_stop") == 2, "two in one")
    reasons = [row["delta"]["stop_reason"] for row in rows if row["type"] == "message_delta"]
    _demand(any(reasons), "no stop reason")
    opened, said = set[int](), list[str]()
    for row in rows:
        if row["type"] == "content_block_start":
            opened.add(row["index"])
            said.append(row["content_block"].get("name", ""))
        elif row["type"] == "content_block_stop":
            opened.remove(row["index"])
        elif row["type"] == "content_block_delta":
            _demand(row["index"] in opened, "a delta of a block that is not open")
            texts = ("thinking", "text", "partial_json")
            said += [row["delta"].get(name, "") for name in texts]
    _demand(not opened, "a block that is not closed")
    return None, "".join(said)


def _responses_stream(rows: Sequence[Row]) -> Told:
    """Responses: numbered events from response.created to the one that closes it."""
    kinds = [row["type"] for row in rows]
    ends = [kind for kind in kinds if kind in _RESPONSE_ENDS]
    is_framed = kinds[0] == "response.created" and ends == [kinds[-1]]
    _demand(is_framed, f"a response from {kinds[0]!r} to {kinds[-1]!r}, ends {ends}")
    is_numbered = [row["sequence_number"] for row in rows] == list(range(len(rows)))
    _demand(is_numbered, "events that are not numbered one after the other")
    response: Row = rows[-1]["response"]
    if response["status"] == "failed":
        return response["error"], ""
    _demand(_is_whole("responses", response), f"a response that is {response['status']!r}")
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    said = [part.get("text", "") for part in parts]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return None, "".join([*said, *(call["name"] + call["arguments"] for call in calls)])


_STREAMS: Final[dict[str, Callable[[Sequence[Any]], Told]]] = {
    "chat": _chat_stream,
    "completions": _chat_stream,
    "messages": _messages_stream,
    "responses": _responses_stream,
}
