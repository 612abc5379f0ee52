"""Judges from the bytes that a client received whether an HTTP exchange ended well-formed.

An end is well-formed where the bytes are exactly one HTTP answer, and its body is a whole answer or
an error in the caller's dialect. A stream is whole where it has its terminator, once and last.
"""

import json
from collections.abc import Callable, Sequence
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
KINDS: Final[tuple[Kind, ...]] = Kind.__args__  # type: ignore[attr-defined]
DETAIL_CHARS_MAX: Final = 200
_DONE: Final = "[DONE]"
_RESPONSE_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")

Row = dict[str, Any]


class Malformed(Exception):
    """The bytes are not one well-formed answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a model said, whatever the dialect: comparable."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()  # name, arguments as sorted JSON


@dataclass(frozen=True, slots=True)
class End:
    """How one request ended."""

    kind: Kind
    detail: str = ""
    said: Said | None = None  # of what was answered


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
    except (Malformed, KeyError, TypeError, AttributeError, ValueError) as error:
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
    status, headers, body = 0, {}, bytearray()
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            raise Malformed(f"no HTTP: {error}") from None
        if event is h11.NEED_DATA:
            return None
        if isinstance(event, h11.Response):
            status, headers = event.status_code, dict(event.headers)
            is_delimited = not {b"content-length", b"transfer-encoding"}.isdisjoint(headers)
            if not (is_delimited or may_end_by_close):
                raise Malformed("nothing tells where the answer ends")
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
    if connection.trailing_data[0]:
        raise Malformed(f"more after the end: {connection.trailing_data[0][:80]!r}")
    return Reply(status, headers, bytes(body))


# ---------------------------------------------------------------- errors


def _refusal(dialect: str, reply: Reply) -> End:
    detail = f"{reply.status} {reply.body[:DETAIL_CHARS_MAX].decode('utf-8', 'replace')}"
    if dialect:
        row = json.loads(reply.body)
        if dialect == "messages" and row["type"] != "error":
            raise Malformed("no Anthropic error")
        _check_error(row["error"])
    if reply.status == 500:
        return End("bug", detail)
    if reply.status == 503:
        if dialect and b"retry-after" not in reply.headers:
            raise Malformed("a 503 without Retry-After")
        return End("busy", detail)
    return End("refused" if reply.status < 500 else "failed", detail)


def _check_error(error: Row) -> None:
    if not isinstance(error["message"], str) or not error["message"]:
        raise Malformed("an error without a text")
    if not isinstance(error.get("type", error.get("code")), str):
        raise Malformed("an error without a type")


# ---------------------------------------------------------------- answers


def _answer(dialect: str, is_stream: bool, reply: Reply) -> End:
    if not dialect:
        return End("answered")
    if not is_stream:
        said_whole = _WHOLE[dialect](json.loads(reply.body))
        return End("answered", said=said_whole)
    if not reply.headers[b"content-type"].startswith(b"text/event-stream"):
        raise Malformed("a stream that is no text/event-stream")
    rows = events(reply.body)
    error, said = _STREAMS[dialect](rows)
    if error is None:
        return End("answered", said=said)
    _check_error(error)
    kind: Kind = "bug" if "its log says" in error["message"] else "failed"
    return End(kind, json.dumps(error)[:DETAIL_CHARS_MAX])


def events(body: bytes) -> list[Any]:
    """Return the data of all events of a stream, as JSON or "[DONE]".

    Raises:
        Malformed: the body is not events through and through.
    """
    text = body.decode("utf-8")
    if not text.endswith("\n\n"):
        raise Malformed("the last event is not whole")
    found = []
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue  # a comment: a client that has finished sending is asked by it
        named = [line[6:].strip() for line in lines if line.startswith("event:")]
        data = [line[5:].strip() for line in lines if line.startswith("data:")]
        if len(data) != 1 or len(named) > 1 or len(named) + 1 != len(lines):
            raise Malformed(f"no event: {block[:80]!r}")
        row: Any = data[0] if data[0] == _DONE else json.loads(data[0])
        if named and row["type"] != named[0]:
            raise Malformed(f"event {named[0]!r} carries {row['type']!r}")
        found.append(row)
    return found


Told = tuple[Row | None, Said | None]  # the error that ended a stream, or what was said


def _chat_stream(rows: Sequence[Any]) -> Told:
    """Chat completions: chunks, one finish reason, [DONE]."""
    if rows[-1] != _DONE or rows.count(_DONE) != 1:
        if isinstance(rows[-1], dict) and "error" in rows[-1] and _DONE not in rows:
            return _only_last_error(rows), None
        raise Malformed("no [DONE] at the end, or more than one")
    rows = rows[:-1]
    if rows and "error" in rows[-1]:
        return _only_last_error(rows), None
    choices = [choice for row in rows for choice in row["choices"]]
    finished = [choice["index"] for choice in choices if choice.get("finish_reason")]
    if sorted(finished) != sorted({choice["index"] for choice in choices}) or not finished:
        raise Malformed(f"finish reasons of choices {finished}")
    return None, _chat_said([choice for choice in choices if choice["index"] == 0])


def _only_last_error(rows: Sequence[Row]) -> Row:
    if any("error" in row for row in rows[:-1]):
        raise Malformed("more than one error")
    error: Row = rows[-1]["error"]
    return error


def _chat_said(choices: Sequence[Row]) -> Said:
    text, calls = [], dict[int, tuple[str, str]]()
    for choice in choices:
        delta = choice.get("delta") or {}
        text.append(delta.get("content") or choice.get("text") or "")
        for call in delta.get("tool_calls") or ():
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            name += function.get("name") or ""
            calls[call["index"]] = (name, arguments + (function.get("arguments") or ""))
    return Said("".join(text), tuple((name, _sorted(given)) for name, given in calls.values()))


def _messages_stream(rows: Sequence[Row]) -> Told:
    """Messages: message_start, blocks that are opened and closed, message_stop."""
    kinds = [row["type"] for row in rows]
    if kinds[-1] == "error" and kinds.count("error") == 1:
        error: Row = rows[-1]["error"]
        return error, None
    if kinds[0] != "message_start" or kinds[-1] != "message_stop":
        raise Malformed(f"a message from {kinds[0]!r} to {kinds[-1]!r}")
    if kinds.count("message_start") != 1 or kinds.count("message_stop") != 1:
        raise Malformed("two messages in one")
    if "error" in kinds or not any(
        row["type"] == "message_delta" and row["delta"]["stop_reason"] for row in rows
    ):
        raise Malformed("an error amid a message, or no stop reason")
    blocks = dict[int, Row]()
    for row in rows:
        if row["type"] == "content_block_start":
            blocks[row["index"]] = {"json": "", "text": "", **row["content_block"], "open": True}
        elif row["type"] == "content_block_stop":
            blocks[row["index"]].pop("open")
        elif row["type"] == "content_block_delta":
            block, delta = blocks[row["index"]], row["delta"]
            block["text"] += delta.get("text", "") if "open" in block else None
            block["json"] += delta.get("partial_json", "")
    if any("open" in block for block in blocks.values()):
        raise Malformed("a block that is not closed")
    return None, _blocks_said([row | {"input": row["json"] or "{}"} for row in blocks.values()])


def _blocks_said(blocks: Sequence[Row]) -> Said:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return Said(text, tuple((call["name"], _sorted(call["input"])) for call in calls))


def _responses_stream(rows: Sequence[Row]) -> Told:
    """Responses: numbered events from response.created to the one that closes it."""
    kinds = [row["type"] for row in rows]
    ends = [kind for kind in kinds if kind in _RESPONSE_ENDS]
    if kinds[0] != "response.created" or len(ends) != 1 or kinds[-1] not in _RESPONSE_ENDS:
        raise Malformed(f"a response from {kinds[0]!r} to {kinds[-1]!r}, ends {ends}")
    if [row["sequence_number"] for row in rows] != list(range(len(rows))):
        raise Malformed("events that are not numbered one after the other")
    response: Row = rows[-1]["response"]
    if response["status"] == "failed":
        return response["error"], None
    return None, _response_said(response)


def _response_said(response: Row) -> Said:
    if response["status"] not in ("completed", "incomplete"):
        raise Malformed(f"a response that is {response['status']!r}")
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    text = "".join(part["text"] for part in parts if part["type"] == "output_text")
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return Said(text, tuple((call["name"], _sorted(call["arguments"])) for call in calls))


def _chat_whole(row: Row) -> Said:
    choice = row["choices"][0]
    if not choice["finish_reason"]:
        raise Malformed("no finish reason")
    delta = dict(choice.get("message") or {"content": choice.get("text")})
    calls = delta.get("tool_calls") or ()
    delta["tool_calls"] = [call | {"index": number} for number, call in enumerate(calls)]
    return _chat_said([{"delta": delta}])


def _messages_whole(row: Row) -> Said:
    if row["type"] != "message" or not row["stop_reason"]:
        raise Malformed("no message")
    return _blocks_said(row["content"])


def _sorted(arguments: Any) -> str:
    """Return a call's arguments so that equal ones are equal; those cut off by a limit as {}."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = {}
    return json.dumps(value, sort_keys=True)


_STREAMS: Final[dict[str, Callable[[Sequence[Any]], Told]]] = {
    "chat": _chat_stream,
    "completions": _chat_stream,
    "messages": _messages_stream,
    "responses": _responses_stream,
}
_WHOLE: Final[dict[str, Callable[[Row], Said]]] = {
    "chat": _chat_whole,
    "completions": _chat_whole,
    "messages": _messages_whole,
    "responses": _response_said,
}
