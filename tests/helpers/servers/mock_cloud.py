"""Serves OpenAI's and Anthropic's APIs from scripts, as strict about bodies as the real ones are.

Fields are those of the providers' own SDKs; what was signed, sealed or named is taken back only
from whom it was given to, and only as it was. Every request is recorded with its raw body. It runs
in a thread of the test's process with an event loop of its own, and takes two paths more: to
/callbacks a user's logging tool posts, and what lies below /307/ (any status) is redirected.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import struct
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from aiohttp import web
from anthropic.types import (
    ContentBlockParam,
    message_count_tokens_params as counted,
    message_create_params as messages,
)
from anthropic.types.beta import BetaContentBlockParam, message_create_params as beta
from openai.types import completion_create_params as completions, embedding_create_params as vectors
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from pydantic import ConfigDict, TypeAdapter, ValidationError

KEY: Final = "sk-mock-cloud-key"
START_S_MAX: Final = 60.0
FLUSH_S: Final = 0.1
BYTES_PER_TOKEN: Final = 4
PATHS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
}
COUNT_PATH: Final = "/v1/messages/count_tokens"
# Where an answer breaks off or stays: before its head, behind the head, or amid its text.
Place = Literal["before the head", "behind the head", "amid the text"]
Row = dict[str, Any]


# ---------------------------------------------------------------- what a test has it say


@dataclass(frozen=True)
class CloudError:
    """An error in the shape of either provider."""

    status: int
    message: str
    code: str | None = None
    kind: str = "invalid_request_error"  # Anthropic's `type`
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, dialect: str) -> Row:
        if dialect == "messages":
            told = {"type": self.kind, "message": self.message}
            return {"type": "error", "error": told, "request_id": "req_mock"}
        return {"error": {"message": self.message, "type": self.kind, "code": self.code}}


@dataclass(frozen=True)
class CloudCall:
    """One call of a tool that the model writes."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CloudAnswer:
    """What the mock says to one request."""

    text: str = "Hello from the cloud."
    thinking: str = ""
    redacted: str = ""  # thinking that Anthropic shows to nobody
    calls: tuple[CloudCall, ...] = ()
    error: CloudError | None = None
    error_place: Place = "before the head"
    drops: Place | None = None  # the connection is closed there
    hangs: Place | None = None  # nothing comes from there on, until the client leaves


HELLO: Final = CloudAnswer()
INVALID: Final = CloudError(400, "Invalid value for 'temperature': must be at most 2.")
CONTEXT_LENGTH: Final = CloudError(
    400,
    "This model's maximum context length is 128000 tokens. However, your messages resulted in "
    "200123 tokens. Please reduce the length of the messages.",
    "context_length_exceeded",
)
PROMPT_TOO_LONG: Final = CloudError(400, "prompt is too long: 200123 tokens > 200000 maximum")
CONTENT_POLICY: Final = CloudError(
    400,
    "Your request was rejected as a result of our safety system. Your prompt may contain text "
    "that is not allowed by our safety system.",
    "content_policy_violation",
)
FORBIDDEN: Final = CloudError(
    403, "You are not allowed to sample from this model", None, "permission_error"
)
RATE_LIMIT: Final = CloudError(
    429,
    "Rate limit reached for requests per min (RPM): Limit 3, Used 3. Please try again in 20s.",
    "rate_limit_exceeded",
    "rate_limit_error",
    {"retry-after": "20"},
)
SERVER_ERROR: Final = CloudError(
    500,
    "The server had an error while processing your request. Sorry about that!",
    None,
    "api_error",
)
OVERLOADED: Final = CloudError(529, "Overloaded", None, "overloaded_error")


def no_model(name: str) -> CloudError:
    text = f"The model `{name}` does not exist or you do not have access to it."
    return CloudError(404, text, "model_not_found", "not_found_error")


# ---------------------------------------------------------------- what it remembers


@dataclass(frozen=True)
class CloudUsage:
    """The tokens of one answer."""

    prompt: int
    cached: int
    completion: int


@dataclass
class CloudMemory:
    """What one account has been given. Owner: the mock's event loop."""

    key: bytes = field(default_factory=lambda: os.urandom(32))
    items: dict[str, tuple[bool, str | None]] = field(default_factory=dict)  # is stored; needs
    responses: dict[str, list[Row]] = field(default_factory=dict)  # input and output
    prefixes: set[bytes] = field(default_factory=set)

    def sealed(self, text: str) -> str:
        """Return `text` in a shell that only this account opens, and only unchanged."""
        mac = hmac.digest(self.key, text.encode(), "sha256")
        return base64.b64encode(mac + text.encode()).decode()

    def opened(self, blob: object) -> str | None:
        """Return what `sealed` was given, or None for a foreign or changed blob."""
        try:
            raw = base64.b64decode(str(blob), validate=True)
        except ValueError:
            return None
        expected = hmac.digest(self.key, raw[32:], "sha256")
        return raw[32:].decode() if hmac.compare_digest(raw[:32], expected) else None

    def usage(self, model: str, units: Iterable[Any], answer: CloudAnswer) -> CloudUsage:
        """Count a request of `units` (tools, system, each message) and remember its prefixes.

        The cached tokens are those of the longest beginning that `model` has read before.
        """
        digest = hashlib.sha256(model.encode())
        prompt = cached = 0
        for unit in units:
            text = json.dumps(_without(unit, {"cache_control"}), sort_keys=True)  # no part of it
            digest.update(text.encode() + b"\n")
            is_known = cached == prompt and digest.digest() in self.prefixes
            prompt += _tokens(text)
            cached = prompt if is_known else cached
            self.prefixes.add(digest.digest())
        written = answer.text + "".join(json.dumps(dict(call.arguments)) for call in answer.calls)
        return CloudUsage(prompt, cached, _tokens(written) + _tokens(answer.thinking))


def _tokens(text: str) -> int:
    return 1 + len(text.encode()) // BYTES_PER_TOKEN


def _new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


# ---------------------------------------------------------------- bodies


class RefusedBody(Exception):
    """A body that the real service would not take."""

    def __init__(self, error: CloudError) -> None:
        super().__init__(error.message)
        self.error = error


def _require(is_held: object, why: str) -> None:
    if not is_held:
        raise RefusedBody(CloudError(400, why))


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what refuses each field, at any depth, that the SDK's type does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a type that says itself that it takes more
        return TypeAdapter(list[kind], config=ConfigDict(extra="forbid"))


_TYPES: Final = {
    "chat": _adapter(chat.CompletionCreateParamsBase),
    "completions": _adapter(completions.CompletionCreateParamsBase),
    "embeddings": _adapter(vectors.EmbeddingCreateParams),
    "responses": _adapter(responses.ResponseCreateParamsBase),
    "messages": _adapter(messages.MessageCreateParamsBase),
    "beta": _adapter(beta.MessageCreateParamsBase),
    "count": _adapter(counted.MessageCountTokensParams),
    "block": _adapter(ContentBlockParam),
    "beta block": _adapter(BetaContentBlockParam),
}
# Taken by the services, though the SDKs' types do not have them.
_UNTYPED: Final = {"stream", "temperature", "top_p", "top_k"}


def _check_type(kind: str, value: Any) -> None:
    try:
        _walk(_TYPES[kind].validate_python([value]))
    except ValidationError as error:
        rows = error.errors()
        near = Counter(row["loc"][:-1] for row in rows)  # of a union, what it is most like
        row = min(rows, key=lambda row: (near[row["loc"][:-1]], -len(row["loc"])))
        place = ".".join(str(part) for part in row["loc"][1:] if len(str(part)) < 50)
        raise RefusedBody(CloudError(400, f"{place}: {row['msg']}: {row['input']}")) from None


def _walk(value: Any) -> None:
    """Read the iterables in `value`, which are validated as they are read."""
    if not isinstance(value, str) and isinstance(value, Iterable):
        for each in value.values() if isinstance(value, Mapping) else value:
            _walk(each)


def _without(value: Any, names: Set[str]) -> Any:
    """Return `value` without fields that are null or have one of these names, at any depth."""
    if isinstance(value, dict):
        kept = ((k, each) for k, each in value.items() if k not in names and each is not None)
        return {k: _without(each, names) for k, each in kept}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


def _blocks(row: Row) -> list[Row]:
    content = row["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def check_body(dialect: str, body: Row, memory: CloudMemory, *, is_beta: bool = False) -> None:
    """Raises: RefusedBody: the service of `dialect` would not take `body`."""
    if dialect in ("messages", "count"):
        kept = {name: each for name, each in body.items() if name not in _UNTYPED}
        _check_type("beta" if is_beta and dialect == "messages" else dialect, kept)
        _check_messages(body, memory, "beta block" if is_beta else "block")
        return
    if dialect == "responses":
        given = body.get("input")
        rows = [{"role": "user", "content": given}] if isinstance(given, str) else given
        _require(rows, "Missing required parameter: 'input'.")
        named = [_named(row) for row in rows or ()]
        tools = [{"strict": None} | tool for tool in body.get("tools") or ()]
        known = {name: each for name, each in body.items() if name != "stream"}
        _check_type(dialect, known | {"input": _without(named, set()), "tools": tools})
        _check_items(body, rows or [], memory)
        return
    known = {name: each for name, each in body.items() if name != "stream"}
    if dialect == "chat":
        rows = body.get("messages") or []
        _require(rows, "Missing required parameter: 'messages'.")
        known["messages"] = _without(rows, {"annotations", "index"})
        _check_chat(body)
    _check_type(dialect, known)


def _named(row: Row) -> Row:
    """Return an item with what the SDK's type requires, and one without an id need not have."""
    if row.get("type") == "reasoning":
        return {"id": "rs_"} | row
    if row.get("role") != "assistant" or not isinstance(row.get("content"), list):
        return row
    parts = [{"annotations": []} | part for part in row["content"]]
    return {"type": "message", "id": "msg_", "status": "completed"} | row | {"content": parts}


def _check_chat(body: Row) -> None:
    """Each call has its result right behind, and each result its call before."""
    waiting: set[str] = set()
    for row in [*body["messages"], {"role": "end", "content": ""}]:
        if row["role"] == "tool":
            _require(row["tool_call_id"] in waiting, "'tool' must be a response to 'tool_calls'.")
            waiting.discard(row["tool_call_id"])
            continue
        _require(not waiting, f"tool_call_ids did not have response messages: {waiting}")
        waiting = {call["id"] for call in row.get("tool_calls") or []}
        is_said = row.get("content") is not None or row.get("tool_calls") or row.get("refusal")
        _require(is_said, "Invalid value for 'content': expected a string, got null.")
    _require(body.get("stream") or not body.get("stream_options"), "'stream_options' needs stream.")


def _check_messages(body: Row, memory: CloudMemory, block_type: str) -> None:
    rows = body["messages"]
    _require(rows and rows[0]["role"] == "user", "messages: the first is of the user")
    for row in rows:
        _require(row["content"] or row is rows[-1], "all messages must have non-empty content")
        for block in _blocks(row):
            _check_block(block, memory, block_type)
    _check_thinking(body)
    for row, after in zip(rows, [*rows[1:], {"content": []}], strict=True):
        asked = {block["id"] for block in _blocks(row) if block["type"] == "tool_use"}
        told = {block["tool_use_id"] for block in _blocks(after) if block["type"] == "tool_result"}
        _require(asked == told, f"`tool_use` without `tool_result` or back: {asked ^ told}")
    marks = len(re.findall(r'"cache_control": \{', json.dumps(body)))
    _require(marks <= 4, f"A maximum of 4 blocks with cache_control, found {marks}.")


def _check_block(block: Row, memory: CloudMemory, block_type: str) -> None:
    _check_type(block_type, block)
    kind = block["type"]
    if kind == "text":
        _require(block["text"].strip(), "text content blocks must contain non-whitespace text")
    if kind == "thinking":
        is_signed = memory.opened(block["signature"]) == block["thinking"]
        _require(is_signed, "Invalid `signature` in `thinking` block")
    if kind == "redacted_thinking":
        _require(memory.opened(block["data"]) is not None, "Invalid `data` in `redacted_thinking`")
    if kind == "tool_use":
        _require(re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]), "tool_use.id: should match pattern")


def _check_thinking(body: Row) -> None:
    """A turn that has called tools and goes on begins with its thinking, where that is enabled."""
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        edits = (body.get("context_management") or {}).get("edits") or ()
        _require(not edits or thinking, "clear_thinking needs `thinking`")
        return
    budget = thinking["budget_tokens"]
    _require(1024 <= budget < body.get("max_tokens", budget + 1), "thinking.enabled.budget_tokens")
    _require(body.get("temperature", 1) == 1, "`temperature` may only be set to 1 with thinking")
    said = [number for number, row in enumerate(body["messages"]) if row["role"] == "assistant"]
    after = body["messages"][said[-1] + 1 :][:1] if said else []
    if any(block["type"] == "tool_result" for row in after for block in _blocks(row)):
        first = _blocks(body["messages"][said[-1]])[0]["type"]
        _require(first in ("thinking", "redacted_thinking"), "a turn must start with thinking")


def _check_items(body: Row, rows: list[Row], memory: CloudMemory) -> None:
    """Items of the service are its own, in their pairs, and with the reasoning that they need."""
    previous = body.get("previous_response_id")
    _require(previous is None or previous in memory.responses, f"'{previous}' not found.")
    waiting = {row["call_id"] for row in memory.responses.get(str(previous), ()) if _is_call(row)}
    seen = {row.get("id") for row in rows if row.get("type") == "reasoning"}
    for number, row in enumerate(rows):
        kind, name = row.get("type", "message"), row.get("id")
        is_clients = kind.endswith("_output") or (kind == "message" and row["role"] != "assistant")
        if name is not None and not is_clients:  # clients name what they say themselves
            is_stored, needs = memory.items.get(name, (False, None))
            has_content = "encrypted_content" in row or kind not in ("reasoning", "item_reference")
            if name not in memory.items or not (is_stored or has_content):
                raise RefusedBody(CloudError(404, f"Item with id '{name}' not found."))
            _require(needs is None or needs in seen, f"'{name}' without its required 'reasoning'")
        if kind == "reasoning":
            blob, after = row.get("encrypted_content"), rows[number + 1 :][:1]
            _require(blob is None or memory.opened(blob), "The encrypted content is not verified.")
            _require(blob or name, "Missing required parameter: 'id'.")
            led = [next_row.get("role") == "assistant" or _is_call(next_row) for next_row in after]
            _require(any(led), "'reasoning' was provided without its required following item.")
        if _is_call(row):
            waiting.add(row["call_id"])
        elif kind.endswith("_output"):
            _require(row["call_id"] in waiting, "No tool call found for function call output")
            waiting.discard(row["call_id"])
    _require(not waiting, f"No tool output found for function call {waiting}.")


def _is_call(row: Row) -> bool:
    return str(row.get("type")).endswith("_call")


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Reply:
    """One answer in both forms; the request says which is sent."""

    whole: Row
    events: list[bytes]
    usage: CloudUsage


def _pieces(text: str) -> list[str]:
    """Return `text` in words, each with the white space behind it."""
    return re.findall(r"\S+\s*|\s+", text)


def _data(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _event(value: Row) -> bytes:
    return f"event: {value['type']}\n".encode() + _data(value)


def _chat_usage(usage: CloudUsage) -> Row:
    total = usage.prompt + usage.completion
    told = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
    details = {"cached_tokens": usage.cached}
    return {**told, "total_tokens": total, "prompt_tokens_details": details}


def _streamed(
    body: Row, base: Row, usage: CloudUsage, choices: Iterable[Row], finish: str
) -> list[bytes]:
    events = [_data({**base, "choices": [{"index": 0, **row}]}) for row in choices]
    last = {"index": 0, "delta": {}, "text": "", "finish_reason": finish}
    events.append(_data({**base, "choices": [last]}))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(_data({**base, "choices": [], "usage": _chat_usage(usage)}))
    return [*events, b"data: [DONE]\n\n"]


def _chat(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], [body.get("tools"), *body["messages"]], answer)
    base = {"id": _new_id("chatcmpl-"), "created": int(time.time()), "model": body["model"]}
    calls: list[Row] = [
        {"id": _new_id("call_"), "type": "function"}
        | {"function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
        for call in answer.calls
    ]
    message: Row = {"role": "assistant", "content": answer.text or None, "refusal": None}
    message |= {"annotations": [], **({"tool_calls": calls} if calls else {})}
    deltas: list[Row] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in _pieces(answer.text)]
    for at, call in enumerate(calls):
        pieces = _pieces(call["function"]["arguments"])
        bare = {"name": call["function"]["name"], "arguments": ""}
        deltas.append({"tool_calls": [call | {"index": at, "function": bare}]})
        tails = [{"index": at, "function": {"arguments": piece}} for piece in pieces]
        deltas += [{"tool_calls": [tail]} for tail in tails]
    finish = "tool_calls" if calls else "stop"
    choice: Row = {"index": 0, "message": message, "finish_reason": finish}
    if body.get("logprobs"):
        row: Row = {"logprob": -0.5, "bytes": None, "top_logprobs": []}
        choice["logprobs"] = {"content": [{"token": each, **row} for each in _pieces(answer.text)]}
    whole = {**base, "object": "chat.completion", "choices": [choice], "usage": _chat_usage(usage)}
    base |= {"object": "chat.completion.chunk"}
    choices = ({"delta": delta, "finish_reason": None} for delta in deltas)
    return Reply(whole, _streamed(body, base, usage, choices, finish), usage)


def _completions(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], [body["prompt"]], answer)
    base = {"id": _new_id("cmpl-"), "object": "text_completion", "model": body["model"]}
    base["created"] = int(time.time())
    choice = {"index": 0, "text": answer.text, "finish_reason": "stop", "logprobs": None}
    choices = [{"text": piece, "finish_reason": None} for piece in _pieces(answer.text)]
    whole = {**base, "choices": [choice], "usage": _chat_usage(usage)}
    return Reply(whole, _streamed(body, base, usage, choices, "stop"), usage)


def embedding(text: str) -> list[float]:
    """Return a vector that is the same for the same text; its numbers are exact in float32."""
    return [byte / 256 for byte in hashlib.shake_128(text.encode()).digest(8)]


def _embeddings(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    given = body["input"]
    texts = [given] if isinstance(given, str) else given
    rows: list[Any] = [embedding(text) for text in texts]
    if body.get("encoding_format") == "base64":
        rows = [base64.b64encode(struct.pack("<8f", *row)).decode() for row in rows]
    told = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(rows)]
    usage = {"prompt_tokens": sum(map(_tokens, texts)), "total_tokens": sum(map(_tokens, texts))}
    whole = {"object": "list", "data": told, "model": body["model"], "usage": usage}
    return Reply(whole, [], CloudUsage(usage["prompt_tokens"], 0, 0))


def _units(body: Row) -> list[Any]:
    return [body.get("tools"), body.get("system"), *body["messages"]]


def _messages(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    usage = memory.usage(body["model"], _units(body), answer)
    if "cache_control" not in json.dumps(body):  # nothing is kept unasked
        usage = CloudUsage(usage.prompt, 0, usage.completion)
    blocks: list[Row] = []
    if answer.thinking:
        signature = memory.sealed(answer.thinking)
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": signature})
    if answer.redacted:
        blocks.append({"type": "redacted_thinking", "data": memory.sealed(answer.redacted)})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    head = {"type": "tool_use"}
    blocks += [
        {**head, "id": _new_id("toolu_01"), "name": call.name, "input": dict(call.arguments)}
        for call in answer.calls
    ]
    told = {"input_tokens": usage.prompt - usage.cached, "cache_read_input_tokens": usage.cached}
    told |= {"cache_creation_input_tokens": 0, "output_tokens": usage.completion}
    stop = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    whole: Row = {"id": _new_id("msg_01"), "type": "message", "role": "assistant"}
    whole |= {"model": body["model"], "content": blocks, **stop, "usage": told}
    begun = {**whole, "content": [], "stop_reason": None}
    rows: list[Row] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        empty: dict[str, Row] = {"text": {"text": ""}, "tool_use": {"input": {}}}
        empty["thinking"] = {"thinking": "", "signature": ""}
        opened = {**block, **empty.get(block["type"], {})}
        rows.append({"type": "content_block_start", "index": index, "content_block": opened})
        deltas = ({"index": index, "delta": delta} for delta in _deltas(block))
        rows += [{"type": "content_block_delta", **delta} for delta in deltas]
        rows.append({"type": "content_block_stop", "index": index})
    rows += [{"type": "message_delta", "delta": stop, "usage": told}, {"type": "message_stop"}]
    return Reply(whole, list(map(_event, rows)), usage)


def _deltas(block: Row) -> Iterator[Row]:
    for name in ("thinking", "text", "input"):
        if (told := block.get(name)) is not None:
            kind, field_name = ("input_json", "partial_json") if name == "input" else (name, name)
            for piece in _pieces(json.dumps(told) if name == "input" else told):
                yield {"type": f"{kind}_delta", field_name: piece}
    if "signature" in block:
        yield {"type": "signature_delta", "signature": block["signature"]}


def _responses(body: Row, answer: CloudAnswer, memory: CloudMemory) -> Reply:
    given = body["input"]
    rows = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = [*memory.responses.get(body.get("previous_response_id") or "", ()), *rows]
    bare = [{k: v for k, v in row.items() if k not in ("id", "status", "type")} for row in items]
    units = [body.get("instructions"), body.get("tools"), *bare]
    usage = memory.usage(body["model"], units, answer)
    output = _output(body, answer, memory)
    is_stored = body.get("store") is not False
    needs = next((item["id"] for item in output if item["type"] == "reasoning"), None)
    for item in output:
        memory.items[item["id"]] = (is_stored, None if item["type"] == "reasoning" else needs)
    told = {"input_tokens": usage.prompt, "output_tokens": usage.completion}
    told["total_tokens"] = usage.prompt + usage.completion
    details = {"input_tokens_details": {"cached_tokens": usage.cached}}
    details["output_tokens_details"] = {"reasoning_tokens": _tokens(answer.thinking)}
    whole: Row = {"id": _new_id("resp_"), "object": "response", "created_at": int(time.time())}
    whole |= {"model": body["model"], "status": "completed", "error": None, "output": output}
    whole |= {"incomplete_details": None, "instructions": None, "metadata": {}, "tools": []}
    whole |= {"parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto"}
    whole |= {"previous_response_id": body.get("previous_response_id"), "store": is_stored}
    whole |= {"usage": {**told, **details}}
    if is_stored:
        memory.responses[whole["id"]] = [*items, *output]
    begun = {"response": {**whole, "status": "in_progress", "output": [], "usage": None}}
    events = [{"type": f"response.{name}", **begun} for name in ("created", "in_progress")]
    for at, item in enumerate(output):
        events += _item_events(at, item)
    events.append({"type": "response.completed", "response": whole})
    numbered = [row | {"sequence_number": number} for number, row in enumerate(events)]
    return Reply(whole, list(map(_event, numbered)), usage)


def _output(body: Row, answer: CloudAnswer, memory: CloudMemory) -> list[Row]:
    items: list[Row] = []
    if answer.thinking:
        summary = [{"type": "summary_text", "text": answer.thinking}]
        items.append({"type": "reasoning", "id": _new_id("rs_"), "summary": summary})
        if "reasoning.encrypted_content" in (body.get("include") or ()):
            items[-1]["encrypted_content"] = memory.sealed(answer.thinking)
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": _new_id("msg_"), "status": "completed"}
        items.append({**head, "role": "assistant", "content": [part]})
    for call in answer.calls:
        told = {"call_id": _new_id("call_"), "name": call.name, "status": "completed"}
        text = json.dumps(dict(call.arguments))
        items.append({"type": "function_call", "id": _new_id("fc_"), **told, "arguments": text})
    return items


def _item_events(at: int, item: Row) -> Iterator[Row]:
    place = {"output_index": at, "item_id": item["id"]}
    begun = {"content": [], "summary": [], "arguments": ""}
    added = {name: begun.get(name, each) for name, each in item.items()}
    yield {"type": "response.output_item.added", "output_index": at, "item": added}
    if item["type"] == "function_call":
        name, text, part = "function_call_arguments", item["arguments"], None
    elif item["type"] == "reasoning":
        name, part = "reasoning_summary", item["summary"][0]
        text, place["summary_index"] = part["text"], 0
    else:
        name, part = "content", item["content"][0]
        text, place["content_index"] = part["text"], 0
    kind = {"content": "output_text", "reasoning_summary": "reasoning_summary_text"}.get(name, name)
    if part is not None:
        yield {"type": f"response.{name}_part.added", **place, "part": {**part, "text": ""}}
    for piece in _pieces(text):
        yield {"type": f"response.{kind}.delta", **place, "delta": piece, "logprobs": []}
    yield {"type": f"response.{kind}.done", **place, "text": text, "arguments": text}
    if part is not None:
        yield {"type": f"response.{name}_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}


_REPLIES: Final = {
    "chat": _chat,
    "completions": _completions,
    "embeddings": _embeddings,
    "messages": _messages,
    "responses": _responses,
}


# ---------------------------------------------------------------- the server


@dataclass
class CloudRequest:
    """One request as it came. Owner: the mock's event loop; a test reads it."""

    path: str
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    status: int = 0
    left_at: float | None = None  # the client closed before the answer's end
    is_answered: bool = False
    usage: CloudUsage = CloudUsage(0, 0, 0)

    @property
    def json(self) -> Row:
        return dict(json.loads(self.body))

    @property
    def model(self) -> str:
        return str(self.json.get("model"))


class MockCloud:
    """One cloud account; use as a context manager.

    The answer to a request is the first of `queue`, or what `rule` says, or that of its model in
    `answers`, or HELLO.
    """

    def __init__(self, redirects_to: str = "") -> None:
        self.redirects_to = redirects_to
        self.requests: list[CloudRequest] = []
        self.queue: list[CloudAnswer] = []
        self.answers: dict[str, CloudAnswer] = {}
        self.rule: Callable[[CloudRequest], CloudAnswer | None] | None = None
        self.memory = CloudMemory()
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="mock cloud", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_S_MAX)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S_MAX)
        assert not self._thread.is_alive()

    # ------------------------------------------------------------ for tests

    def say(self, *answers: CloudAnswer) -> None:
        """Have the next requests answered so, one after another."""
        self.queue.extend(answers)

    def forget(self) -> None:
        """Drop all records and scripts; what was given out stays known."""
        self.requests.clear()
        self.queue.clear()
        self.answers.clear()
        self.rule = None

    def generations(self) -> list[CloudRequest]:
        return [request for request in self.requests if request.path in PATHS]

    def rows(self) -> list[Any]:
        """Return what was posted to /callbacks; LiteLLM loses rows of before it reads an answer."""
        found = [each for each in self.requests if each.path == "/callbacks" and each.is_answered]
        return [row for each in found for row in json.loads(each.body)]

    def until(self, condition: Callable[[], Any], wait_s: float = 10.0) -> Any:
        deadline = time.monotonic() + wait_s
        while not (found := condition()):
            assert time.monotonic() < deadline, [vars(request) for request in self.requests]
            time.sleep(0.01)
        return found

    # ------------------------------------------------------------ the server

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        record = CloudRequest(request.path, request.query_string, headers, await request.read())
        self.requests.append(record)
        try:
            response = await self._routed(request, record)
            record.status = response.status
            await response.prepare(request)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            record.left_at = time.monotonic()
            raise
        record.is_answered = True
        return response

    async def _routed(self, request: web.Request, record: CloudRequest) -> web.StreamResponse:
        if record.path == "/callbacks":
            return web.Response()
        if re.match(r"/30\d/", record.path):
            headers = {"location": self.redirects_to + record.path}
            return web.Response(status=int(record.path[1:4]), headers=headers)
        is_beta = "anthropic-beta" in record.headers
        dialect = "messages" if "anthropic-version" in record.headers else "chat"
        dialect = PATHS.get(record.path, dialect)
        try:
            self._check_key(record)
            if record.path == COUNT_PATH:
                check_body("count", record.json, self.memory, is_beta=is_beta)
                count = CloudMemory().usage("", _units(record.json), HELLO).prompt
                return web.json_response({"input_tokens": count})
            if record.path not in PATHS or request.method != "POST":
                raise RefusedBody(CloudError(404, f"Not found: {record.path}"))
            check_body(dialect, record.json, self.memory, is_beta=is_beta)
            return await self._sent(request, record, dialect)
        except RefusedBody as refusal:
            error = refusal.error
        body = error.body(dialect)
        return web.json_response(body, status=error.status, headers=dict(error.headers))

    def _check_key(self, record: CloudRequest) -> None:
        given = record.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or record.headers.get("x-api-key", "")
        if given != KEY:  # which is repeated, as OpenAI does in part
            text = f"Incorrect API key provided: {given}. Find yours at https://example.com."
            raise RefusedBody(CloudError(401, text, "invalid_api_key", "authentication_error"))

    def _next_answer(self, record: CloudRequest) -> CloudAnswer:
        if self.queue:
            return self.queue.pop(0)
        ruled = self.rule(record) if self.rule is not None else None
        return ruled or self.answers.get(record.model, HELLO)

    async def _sent(
        self, request: web.Request, record: CloudRequest, dialect: str
    ) -> web.StreamResponse:
        """Send an answer as its script says, with every way of breaking off."""
        answer, body = self._next_answer(record), record.json
        await _break_off(request, answer, "before the head")
        if answer.error is not None and answer.error_place == "before the head":
            raise RefusedBody(answer.error)
        reply = _REPLIES[dialect](body, answer, self.memory)
        record.usage = reply.usage
        content = json.dumps(reply.whole).encode()
        half = len(content) // 2
        events = reply.events if body.get("stream") else [content[:half], content[half:]]
        kind = "text/event-stream; charset=utf-8" if body.get("stream") else "application/json"
        response = web.StreamResponse(headers={"content-type": kind, "x-request-id": "req_mock"})
        if not body.get("stream"):
            response.content_length = len(content)
        await response.prepare(request)
        await _break_off(request, answer, "behind the head")
        for number, event in enumerate(events):
            if number == len(events) // 2:
                await _break_off(request, answer, "amid the text")
                if answer.error is not None:
                    await response.write(_error_event(dialect, answer.error))
                    break
            await response.write(event)
        return response


def _error_event(dialect: str, error: CloudError) -> bytes:
    if dialect == "responses":
        told = {"type": "error", "sequence_number": 99, "code": error.code, "param": None}
        return _event(told | {"message": error.message})
    return (_event if dialect == "messages" else _data)(error.body(dialect))


async def _break_off(request: web.Request, answer: CloudAnswer, place: Place) -> None:
    """Close the connection here, or stay until the client leaves, where the script says so."""
    if answer.hangs == place:
        await asyncio.Event().wait()
    if answer.drops == place:
        if place != "before the head":
            await asyncio.sleep(FLUSH_S)  # what was written is to arrive
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("dropped, as the script says")
