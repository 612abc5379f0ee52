"""Judges from the bytes that a client received whether an HTTP exchange ended well-formed.

An end is well-formed where the bytes are exactly one HTTP answer, and its body is a whole answer or
an error in the caller's dialect. A stream is whole where it has its terminator, once and last.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
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
_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding"))
_BLOCK: Final = re.compile("content_block_start (content_block_delta )*content_block_stop ")
# What an answer comes in; h11 tells something else where more is needed, or the answer is whole.
_PARTS: Final = (h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage)
# Whatever an answer says is in these, in each dialect.
_SAID: Final = frozenset(
    (
        *("reasoning_content", "content", "thinking", "text"),
        *("name", "arguments", "partial_json"),
    )
)

Row = dict[str, Any]
Reply = tuple[int, dict[bytes, bytes], bytes]  # status, headers, body
Told = tuple[Row | None, Any]  # the error that ended a stream, or where the stream says something


class Malformed(Exception):
    """The bytes are not one well-formed answer; the text says why."""


@dataclass(frozen=True, slots=True)
class End:
    """How one request ended. `said` is a streamed answer's thinking, text and calls."""

    kind: Kind
    detail: str = ""
    said: str = ""


def judge(dialect: str, is_stream: bool, raw: bytes) -> End:
    """Return the end that `raw` is: all that came on a connection, which has ended.

    With `dialect` "" the body only has to be whole.
    """
    try:
        reply = reply_of(raw, may_end_by_close=not dialect) if raw else None
        if reply is None:
            return End("cut", f"after {len(raw)} bytes")
        return _refusal(dialect, reply) if reply[0] != 200 else _answer(dialect, is_stream, reply)
    except (Malformed, LookupError, TypeError, AttributeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}; got {raw[-300:]!r}"
        return End("malformed", told[:DETAIL_CHARS_MAX])


def reply_of(raw: bytes, *, may_end_by_close: bool = False) -> Reply | None:
    """Return the one HTTP answer in `raw`, taken from its framing; None where it is not whole.

    Of one that ends with its connection nobody can tell whether it is whole; it is none of ours.

    Raises:
        Malformed: these bytes are none, or more than one.
    """
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    for received in (raw, b"") if may_end_by_close else (raw,):
        connection.receive_data(received)
    try:
        came = list(takewhile(lambda it: isinstance(it, _PARTS), iter(connection.next_event, None)))
    except h11.RemoteProtocolError as error:
        raise Malformed(f"no HTTP: {error}") from None
    heads, rest = [it for it in came if isinstance(it, h11.Response)], connection.trailing_data[0]
    is_whole = bool(came) and isinstance(came[-1], h11.EndOfMessage)
    _demand(
        {
            "nothing tells where the answer ends": may_end_by_close
            or not any(_FRAMING.isdisjoint(dict(head.headers)) for head in heads),
            f"more after the end: {rest[:80]!r}": not (is_whole and rest),
        }
    )
    if not is_whole:
        return None
    parts = (it.data for it in came if isinstance(it, h11.Data))
    return heads[0].status_code, dict(heads[0].headers), b"".join(parts)


def _demand(rules: Mapping[str, object]) -> None:
    """Raise Malformed by the text of the first rule that does not hold."""
    for told, holds in rules.items():
        if not holds:
            raise Malformed(told)


# ---------------------------------------------------------------- errors


def _refusal(dialect: str, reply: Reply) -> End:
    status, headers, body = reply
    if dialect:
        row = json.loads(body)
        _demand(
            {
                "no Anthropic error": dialect != "messages" or row["type"] == "error",
                "a 503 without Retry-After": status != 503 or b"retry-after" in headers,
                **_error_rules(row["error"]),
            }
        )
    kinds: dict[int, Kind] = {500: "bug", 503: "busy"}
    kind = kinds.get(status, "refused" if status < 500 else "failed")
    return End(kind, f"{status} {body[:DETAIL_CHARS_MAX].decode('utf-8', 'replace')}")


def _error_rules(error: Row) -> dict[str, object]:
    return {
        "an error without a text": isinstance(error["message"], str) and error["message"],
        "an error without a type": isinstance(error.get("type", error.get("code")), str),
    }


# ---------------------------------------------------------------- answers


def _answer(dialect: str, is_stream: bool, reply: Reply) -> End:
    _, headers, body = reply
    if not is_stream:
        _demand(
            {"an answer that is not whole": not dialect or _is_whole(dialect, json.loads(body))}
        )
        return End("answered")
    is_stream_type = headers[b"content-type"].startswith(b"text/event-stream")
    _demand({"a stream that is no text/event-stream": is_stream_type})
    error, says = _STREAMS[dialect](list(events(body)))
    if error is None:
        return End("answered", said="".join(_said(says)))
    _demand(_error_rules(error))
    kind: Kind = "bug" if "its log says" in error["message"] else "failed"
    return End(kind, json.dumps(error)[:DETAIL_CHARS_MAX])


def _said(part: Any) -> Iterator[str]:
    """Yield the thinking, texts and calls in a part of an answer, in their order."""
    rows = (
        part.items()
        if isinstance(part, dict)
        else enumerate(part if isinstance(part, list) else ())
    )
    for name, inner in rows:
        yield from [inner] if name in _SAID and isinstance(inner, str) else _said(inner)


def _is_whole(dialect: str, row: Row) -> bool:
    match dialect:
        case "messages":
            return bool(row["type"] == "message" and row["stop_reason"])
        case "responses":
            return row["status"] in ("completed", "incomplete")
    return bool(row["choices"]) and all(choice["finish_reason"] for choice in row["choices"])


def events(body: bytes) -> Iterator[Any]:
    """Yield the data of all events of a stream, as JSON or "[DONE]".

    Raises:
        Malformed: the body is not events through and through.
    """
    text = body.decode("utf-8")
    _demand({"the last event is not whole": text.endswith("\n\n")})
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue  # a comment: a client that has finished sending is asked by it
        named = [line[6:].strip() for line in lines if line.startswith("event:")]
        data = [line[5:].strip() for line in lines if line.startswith("data:")]
        is_event = len(data) == 1 and len(named) <= 1 and len(named) + 1 == len(lines)
        _demand({f"no event: {block[:80]!r}": is_event})
        row: Any = data[0] if data[0] == _DONE else json.loads(data[0])
        _demand({f"event {named} carries another type": not named or row["type"] == named[0]})
        yield row


def _chat_stream(rows: Sequence[Any]) -> Told:
    """Chat completions: chunks, a finish reason for each choice, [DONE]. An error is the last."""
    is_done = rows[-1] == _DONE
    chunks = rows[:-1] if is_done else rows
    _demand({"more than one [DONE]": _DONE not in chunks})
    if errors := [row["error"] for row in chunks if "error" in row]:
        _demand({"an error that is not the end": len(errors) == 1 and "error" in chunks[-1]})
        return errors[0], None
    choices = [choice for row in chunks for choice in row["choices"]]
    finished = [choice["index"] for choice in choices if choice.get("finish_reason")]
    _demand(
        {
            "no [DONE] at the end": is_done,
            f"finish reasons of choices {finished}": finished
            and sorted(finished) == sorted({choice["index"] for choice in choices}),
        }
    )
    return None, choices


def _messages_stream(rows: Sequence[Row]) -> Told:
    """Messages: message_start, blocks that are opened and closed, message_stop."""
    kinds = [row["type"] for row in rows]
    if "error" in kinds:
        _demand({"an error that is not the end": kinds.index("error") == len(kinds) - 1})
        return rows[-1]["error"], None
    blocks = {
        at: "".join(f"{row['type']} " for row in rows if row.get("index") == at)
        for at in {row["index"] for row in rows if "index" in row}
    }
    _demand(
        {
            f"events {kinds}": (kinds[0], kinds[-1]) == ("message_start", "message_stop"),
            "two in one": kinds.count("message_start") + kinds.count("message_stop") == 2,
            "no stop reason": any(
                row["delta"]["stop_reason"] for row in rows if row["type"] == "message_delta"
            ),
            f"blocks {blocks}": all(map(_BLOCK.fullmatch, blocks.values())),
        }
    )
    return None, [[row.get("content_block"), row.get("delta")] for row in rows]


def _responses_stream(rows: Sequence[Row]) -> Told:
    """Responses: numbered events from response.created to the one that closes it."""
    kinds = [row["type"] for row in rows]
    ends = [
        kind
        for kind in kinds
        if kind in ("response.completed", "response.incomplete", "response.failed")
    ]
    numbers = [row["sequence_number"] for row in rows]
    _demand(
        {
            f"a response from {kinds[0]!r}": kinds[0] == "response.created",
            f"a response to {kinds[-1]!r}, ends {ends}": ends == [kinds[-1]],
            f"events that are numbered {numbers}": numbers == list(range(len(rows))),
        }
    )
    response: Row = rows[-1]["response"]
    if response["status"] == "failed":
        return response["error"], None
    _demand({f"a response that is {response['status']!r}": _is_whole("responses", response)})
    return None, response["output"]


_STREAMS: Final[dict[str, Callable[[Sequence[Any]], Told]]] = {
    "chat": _chat_stream,
    "completions": _chat_stream,
    "messages": _messages_stream,
    "responses": _responses_stream,
}
