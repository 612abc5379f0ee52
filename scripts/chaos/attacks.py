"""Holds the attacks of a chaos run, which clients alone make; what is owed them is a refusal."""

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Final

from scripts.chaos.clients import GOOD, Manner, head
from scripts.chaos.judge_replies import Kind
from scripts.chaos.request_bodies import PATHS, Body, body_of, fresh
from scripts.chaos.scene import Scene
from scripts.chaos.smuggled_requests import HIDDEN, SMUGGLED

REFUSED: Final = frozenset[Kind](("refused",))
SCHEMA_ENDS: Final = frozenset[Kind](("answered", "refused"))
LEFT: Final = frozenset[Kind](("left", "refused"))
# A connection without a key is answered, refused, or closed for another.
STRANGER: Final = frozenset[Kind](("answered", "refused", "left", "cut"))
HELLO: Final = [{"role": "user", "content": "Hello"}]

POISONS: Final = ("raise", "sigkill", "sigsegv")
POISON_TIMES: Final = 10  # that a client sends it
DEATHS_MAX: Final = 2  # that one prompt may cause
READY_S_MAX: Final = 60.0

BOMBS: Final = (
    "((a{100}){100}){100}",
    "(.{1,500}a){500}",
    "(((a{1,50}){1,50}){1,50}){1,50}",
    "(a|b|ab|ba){2000}",
    "([a-z]{1,200}-){200}[0-9]{1000}",
    "(\\w+\\s?){1,300}(\\d{1,99}){99}",
)
CONNECTIONS: Final = 1_105  # more than there are places
CONNECTING_S: Final = 2.0  # over which they are opened
CONNECTED_S: Final = 4.0
KEYED: Final = 5  # requests with a key beside them
MESSAGES: Final = 600_001
OPTIONS: Final = 1_990_000  # of a chat template
PROPERTIES: Final = 900_000  # of a tool
TOOLS: Final = 10_001
IMPATIENT: Final = 4
IMPATIENT_S: Final = 1.0


async def poison_prompts(scene: Scene) -> None:
    """A client sends a prompt that ends its worker, again and again."""
    how = scene.rng.choice(POISONS)
    body = fresh(scene.rng, "chat", 120)
    body["messages"][0]["content"] += f" poison-{how}-prefill!"
    scene.server.look()
    before, kind = len(scene.server.seen), ""
    for _ in range(POISON_TIMES):
        kind = (await scene.client.ask("chat", body, allowed=GOOD | REFUSED)).kind
        await scene.server.until_ready(READY_S_MAX)
    deaths = len(scene.server.seen) - before
    if deaths > DEATHS_MAX:
        scene.ledger.miss(f"a poison prompt ({how}), sent {POISON_TIMES} times: {deaths} deaths")
    if kind != "refused":
        scene.ledger.miss(f"a poison prompt ({how}) is {kind} at last")


async def poison_schemas(scene: Scene) -> None:
    """Patterns that take a grammar long to build; none may end a worker."""
    before = len(scene.server.look()), len(scene.server.seen)
    for pattern in BOMBS:
        for each in (pattern, f"^{pattern}$"):  # anywhere in the text, and the whole of it
            await scene.client.ask("chat", _schema_body(each), allowed=SCHEMA_ENDS)
    if (len(scene.server.look()), len(scene.server.seen)) != before:
        scene.ledger.miss("a schema ended a worker")


def _schema_body(pattern: str) -> Body:
    properties = {"a": {"type": "string", "pattern": pattern}}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    told = {"name": "bomb", "strict": True, "schema": schema}
    body = body_of("chat", HELLO) | {"max_tokens": 60}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    return body | {"response_format": {"type": "json_schema", "json_schema": told}}


async def huge_bodies(scene: Scene) -> None:
    """Bodies within 64 MB that would take seconds to render; then clients that do not wait."""
    for dialect, body in huge():
        await scene.client.ask(dialect, body, allowed=REFUSED)
    dialect, body = huge()[0]
    manner = Manner(leaves_s=IMPATIENT_S)
    asked = (scene.client.ask(dialect, body, manner, LEFT) for _ in range(IMPATIENT))
    await asyncio.gather(*asked)


@functools.cache
def huge() -> tuple[tuple[str, bytes], ...]:
    """Return (dialect, body) of each: made once, for it takes seconds."""
    return tuple(_huge())


def _huge() -> Iterator[tuple[str, bytes]]:
    options = b",".join(b'"%d":1' % number for number in range(OPTIONS))
    yield "chat", _with(body_of("chat", HELLO), b'"chat_template_kwargs":{%b}' % options)
    rows = b",".join([b'{"role":"user","content":"x"}'] * MESSAGES)
    for dialect, name in (
        ("chat", b"messages"),
        ("messages", b"messages"),
        ("responses", b"input"),
    ):
        body = body_of(dialect, HELLO)
        del body[name.decode()]
        yield dialect, _with(body, b'"%b":[%b]' % (name, rows))
    fields = b",".join(b'"%d":{}' % number for number in range(PROPERTIES))
    tool = b'{"type":"function","function":{"name":"%b","parameters":{"properties":{%b}}}}'
    yield "chat", _with(body_of("chat", HELLO), b'"tools":[%b]' % (tool % (b"f", fields)))
    tools = b",".join(tool % (b"f%d" % number, b"") for number in range(TOOLS))
    yield "chat", _with(body_of("chat", HELLO), b'"tools":[%b]' % tools)


def _with(body: Body, field: bytes) -> bytes:
    return json.dumps(body).encode()[:-1] + b"," + field + b"}"


async def connection_flood(scene: Scene) -> None:
    """More connections without a key than there are places; a client with one is served."""
    host = b"Host: 127.0.0.1:%d\r\n\r\n" % scene.server.port
    heads = (b"GET /v1/models HTTP/1.1\r\n" + host, b"GET /health HTTP/1.1\r\n" + host, b"GET")
    manner = Manner(leaves_s=CONNECTED_S)

    async def stranger(number: int) -> None:
        await asyncio.sleep(CONNECTING_S * number / CONNECTIONS)
        await scene.client.send("", heads[number % len(heads)], manner, STRANGER)

    async def keyed() -> None:
        for _ in range(KEYED):
            await asyncio.sleep(CONNECTED_S / KEYED)
            body = body_of("chat", HELLO) | {"max_tokens": 2}
            end = await scene.client.ask("chat", body, allowed=GOOD)
            if end.kind != "answered":
                scene.ledger.miss(f"a client with a key amid a flood: {end.kind} {end.detail}")

    await asyncio.gather(keyed(), *(stranger(number) for number in range(CONNECTIONS)))


async def half_closing(scene: Scene) -> None:
    """Clients that end their side behind the request, and wait for the whole answer."""
    manner = Manner(half_closes=True)
    for dialect in PATHS:
        for is_stream in (False, True):
            body = fresh(scene.rng, dialect) | {"stream": is_stream}
            await scene.client.ask(dialect, body, manner, GOOD)


async def smuggling(scene: Scene) -> None:
    """Requests that hide another: each is refused, once, and the other is not served."""
    for sent in SMUGGLED.values():
        await scene.client.send("chat", sent + HIDDEN, allowed=REFUSED)
    hidden = head(scene.server.port, "chat", 2) + b"{}"
    for name in ("a length and a coding", "an end of LF", "two equal lengths"):
        await scene.client.send("chat", SMUGGLED[name] + hidden, allowed=REFUSED)
