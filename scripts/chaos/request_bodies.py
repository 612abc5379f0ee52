"""Makes the bodies of a chaos run: conversations in every dialect, and malformed requests."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scripts.pocket.conversation_tokens import messages_of
from scripts.pocket.conversations import talk

Body = dict[str, Any]

PATHS: Final = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
LENGTHS: Final = {"responses": "max_output_tokens"}  # others call it max_tokens
TALKING: Final = ("chat", "messages", "responses")
ANSWER_TOKENS: Final = 64
# A call that the limit cuts off is compared with nothing: a whole answer has its whole members, a
# stream its text so far. No call of a conversation's own is as long as this.
PAGE_TOKENS: Final = 192
LONG_TOKENS: Final = 600
BODY_BYTES_MAX: Final = 64 * 1024 * 1024  # what the server accepts
DEEP: Final = 5_000


@dataclass(frozen=True, slots=True)
class Page:
    """A request whose answer is known: the turns of a conversation up to one of the model's."""

    dialect: str
    body: Body


def pages(rng: random.Random, talks: int) -> list[Page]:
    """Return the pages of `talks` conversations, in dialects one after the other.

    Some bring a document of a few hundred tokens, half of them tools; each page but a
    conversation's first goes on from the page before it.
    """
    found = []
    for number in range(talks):
        made = talk(rng, moves=4, sentences=(0, 40, 120)[number % 3], tools_max=4 * (number % 2))
        messages, tools = messages_of(made)
        messages = _with_ids(messages)
        dialect = TALKING[number % len(TALKING)]
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                body = body_of(dialect, messages[:place], tools)
                body[LENGTHS.get(dialect, "max_tokens")] = PAGE_TOKENS
                found.append(Page(dialect, body))
    return found


def _with_ids(messages: Sequence[Body]) -> list[Body]:
    """Return `messages` as a client writes them: calls with ids and arguments as text."""
    rows: list[Body] = []
    waiting: list[str] = []  # calls without a result yet
    count = 0
    for message in messages:
        row = dict(message)
        if row["role"] == "tool":
            row["tool_call_id"] = waiting.pop(0)
        for call in (calls := row.pop("tool_calls", [])):
            function = call["function"]
            waiting.append(f"call_{count}")
            arguments = json.dumps(function["arguments"])
            told = {"name": function["name"], "arguments": arguments}
            row.setdefault("tool_calls", []).append(call | {"id": waiting[-1], "function": told})
            count += 1
        rows.append(row | ({"content": None} if calls else {}))
    return rows


def body_of(dialect: str, messages: Sequence[Body], tools: Sequence[Body] = ()) -> Body:
    """Return a greedy request of `dialect` for the answer to `messages`, given as chat has them."""
    body: Body = {"model": "pocket", "temperature": 0, "stream": False}
    body[LENGTHS.get(dialect, "max_tokens")] = ANSWER_TOKENS
    if dialect == "completions":
        return body | {"prompt": messages[-1]["content"]}
    if dialect == "chat":
        return body | {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
    functions = [tool["function"] for tool in tools]
    if dialect == "messages":
        system = [row["content"] for row in messages if row["role"] == "system"]
        body |= {"system": system[0]} if system else {}
        body["messages"] = list(_as_messages(messages))
        named = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions
        ]
    else:
        body |= {"input": list(_as_items(messages)), "store": False}
        named = [{"type": "function", "strict": False, **function} for function in functions]
    return body | ({"tools": named} if named else {})


def _as_messages(messages: Sequence[Body]) -> Iterator[Body]:
    """Yield `messages` in Anthropic's shape; the results of one turn's calls are one message."""
    results: list[Body] = []
    for row in messages:
        if row["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": row["tool_call_id"]}
            results.append(result | {"content": row["content"]})
            continue
        if results:
            yield {"role": "user", "content": results}
            results = []
        if row["role"] == "assistant" and row.get("tool_calls"):
            yield {"role": "assistant", "content": [_tool_use(call) for call in row["tool_calls"]]}
        elif row["role"] != "system":
            yield {"role": row["role"], "content": row["content"]}
    if results:
        yield {"role": "user", "content": results}


def _tool_use(call: Body) -> Body:
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _as_items(messages: Sequence[Body]) -> Iterator[Body]:
    for row in messages:
        if row["role"] == "tool":
            result = {"type": "function_call_output", "call_id": row["tool_call_id"]}
            yield result | {"output": row["content"]}
        elif row.get("tool_calls"):
            for call in row["tool_calls"]:
                yield {"type": "function_call", "call_id": call["id"], **call["function"]}
        else:
            yield {"role": row["role"], "content": row["content"]}


def fresh(rng: random.Random, dialect: str, words: int = 60) -> Body:
    """Return a request that no other shares more than its template with."""
    told = " ".join(rng.choice(_WORDS) for _ in range(words))
    text = f"Note {rng.randrange(1 << 40)}: {told}. What did I say?"
    return body_of(dialect, [{"role": "user", "content": text}]) | {
        LENGTHS.get(dialect, "max_tokens"): rng.randrange(16, ANSWER_TOKENS)
    }


def long(rng: random.Random, dialect: str) -> Body:
    """Return a streamed request that is answered for seconds: pocket rambles on what is no talk."""
    body = fresh(rng, dialect, 400) | {"stream": True}
    body[LENGTHS.get(dialect, "max_tokens")] = LONG_TOKENS
    return body


def bulky(rng: random.Random) -> Body:
    """Return a streamed request whose answer is some 2 kB a token: more than sockets buffer."""
    return long(rng, "chat") | {"logprobs": True, "top_logprobs": 20, "n": 2}


_WORDS: Final = (
    *("the", "copper", "river", "keeps", "a", "slow", "clock", "over", "seven", "painted"),
    *("doors", "while", "nobody", "counts", "paper", "birds", "under", "cold", "lamps", "and"),
    *("every", "quiet", "engine", "answers", "with", "salt", "maps", "or", "letters", "home"),
)


# ---------------------------------------------------------------- what is no request


def malformed() -> Iterator[tuple[str, str, bytes]]:
    """Yield (what is wrong, dialect, body) for bodies that must be refused, in all dialects."""
    for dialect in PATHS:
        field = {"responses": "input", "completions": "prompt"}.get(dialect, "messages")
        good = body_of(dialect, [{"role": "user", "content": "x"}])
        length = LENGTHS.get(dialect, "max_tokens")
        wrong: dict[str, Body] = {
            "another model": {"model": "telepathy"},
            "the content is a number": {field: 7},
            "the content is an object": {field: {"a": 1}},
            "there is no content": {field: None},
            "minus one tokens": {length: -1},
            "tokens in words": {length: "many"},
            "a huge length": {length: 10**40},
            "a hot temperature": {"temperature": 10**400},
            "a temperature in words": {"temperature": "hot"},
            "stream is a list": {"stream": []},
        }
        if dialect != "completions":
            wrong |= {"tools are no list": {"tools": 7}, "a tool is no object": {"tools": [7]}}
        for name, change in wrong.items():
            yield name, dialect, json.dumps(good | change).encode()
        whole = json.dumps(good).encode()
        deep = b"[" * DEEP + b"]" * DEEP
        yield "not JSON", dialect, b"{" + whole
        yield "cut off", dialect, whole[:-1]
        yield "empty", dialect, b""
        yield "a list", dialect, b"[" + whole + b"]"
        yield "not UTF-8", dialect, whole.replace(b'"x"', b'"\xff\xfe"')
        yield "deep nesting", dialect, whole[:-1] + b', "%s": %s}' % (field.encode(), deep)
        yield "NaN", dialect, whole[:-1] + b', "temperature": NaN}'
        yield "UTF-16", dialect, json.dumps(good).encode("utf-16")


def odd() -> Iterator[tuple[str, str, bytes]]:
    """Yield (what is odd, dialect, body) for bodies that may be answered or refused."""
    for dialect in PATHS:
        good = body_of(dialect, [{"role": "user", "content": "lone \ud800 and \udc00"}])
        yield "lone surrogates", dialect, json.dumps(good).encode()
        plain = body_of(dialect, [{"role": "user", "content": "x"}])
        whole = json.dumps(plain).encode()
        yield "a huge integer", dialect, whole[:-1] + b', "metadata": %s}' % (b"9" * 4_000)
        yield "a key twice", dialect, whole[:-1] + b', "stream": false}'
        many = body_of(dialect, [{"role": "user", "content": "\x00\u202e\ufffe" * 500}])
        yield "control characters", dialect, json.dumps(many).encode()


def garbage(port: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, bytes) for what is no HTTP request, or one with an odd head."""
    host = b"Host: 127.0.0.1:%d\r\nConnection: close\r\n" % port
    post = b"POST /v1/chat/completions HTTP/1.1\r\n"
    json_type = b"Content-Type: application/json\r\n"
    yield "noise", bytes(range(256)) * 8 + b"\r\n\r\n"
    yield "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n"
    yield "another version", b"GET / HTTP/9.9\r\n" + host + b"\r\n"
    yield "no version", b"GET /\r\n\r\n"
    yield "no Host", b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
    yield (
        "another Host",
        b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    )
    yield "two lengths", post + host + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabc"
    yield "a length below 0", post + host + b"Content-Length: -3\r\n\r\nabc"
    yield "a length in words", post + host + b"Content-Length: three\r\n\r\nabc"
    yield "an unknown coding", post + host + b"Transfer-Encoding: zip\r\n\r\nabc"
    yield "a chunk in words", post + host + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\nabc\r\n"
    yield "a NUL in a header", b"GET /v1/models HTTP/1.1\r\n" + host + b"X-A: a\x00b\r\n\r\n"
    yield "a header without a colon", b"GET /v1/models HTTP/1.1\r\n" + host + b"garbage\r\n\r\n"
    yield "a long header", b"GET /v1/models HTTP/1.1\r\n" + host + b"X-A: " + b"a" * 200_000
    rows = b"".join(b"X-%d: 1\r\n" % number for number in range(200))
    yield "many headers", b"GET /v1/models HTTP/1.1\r\n" + host + rows + b"\r\n"
    yield "an unknown method", b"BREW /v1/models HTTP/1.1\r\n" + host + b"\r\n"
    yield (
        "compressed",
        post + host + json_type + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    )
    yield "an unknown path", b"GET /../../etc/passwd HTTP/1.1\r\n" + host + b"\r\n"
    yield (
        "a websocket",
        (
            b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            b"Sec-WebSocket-Version: 13\r\n\r\n" % port
        ),
    )
