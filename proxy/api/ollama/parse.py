"""Turns the body of Ollama's /api/chat or /api/generate into our request.

Each becomes the body of a chat completion, which is then read as any other: so a conversation is
the same prompt, and finds the same KV, whichever of the two APIs it comes by.
"""

import contextlib
import dataclasses
import re
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields, sampling_params
from hearth.proxy.api.body.field_readers import Body
from hearth.proxy.api.body.message_content import ends_open
from hearth.proxy.api.chat_completions.parse import parse as parse_chat_completion
from hearth.proxy.request.content_pieces import text_of
from hearth.proxy.request.parsed_request import Dialect, ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

CHAT: Final[Dialect] = "ollama_chat"
GENERATE: Final[Dialect] = "ollama_generate"

# Options that mean here what they mean there. Others (num_ctx, num_gpu, mirostat ...) are about
# loading a model or samplers that are not here, and are passed over as Ollama passes over them.
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
_DURATION: Final = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)?)+")
_DATA: Final = "data:"
_IMAGE: Final = "data:image/png;base64,"  # its first bytes tell what kind it is


def parse_chat(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in a body of /api/chat.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    given = fields.rows(body.get("messages"), "messages")
    rows = [_message(value, f"messages[{index}]") for index, value in enumerate(given)]
    parsed = _parsed(CHAT, body, rows)
    for index, row in enumerate(parsed.prompt.messages):
        _name_images(row, f"messages[{index}].images")
        row.pop("name", None)  # of a result's tool, which its call has
    prompt = dataclasses.replace(parsed.prompt, continues=ends_open(parsed.prompt.messages))
    return dataclasses.replace(parsed, prompt=prompt)


def parse_generate(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in a body of /api/generate. Raises: RequestError."""
    for name, remedy in _UNSUPPORTED.items():
        if body.get(name):
            raise RequestError(
                f"{name} is not supported: {remedy}", code="unsupported_parameter", param=name
            )
    prompt = fields.text(body, "prompt") or ""
    if fields.boolean(body, "raw"):
        return _raw(body, prompt)
    rows = messages_of(body.get("context"))
    if system := fields.text(body, "system"):
        others = [row for row in rows if row["role"] != "system"]
        rows = [{"role": "system", "content": system}, *others]
    asked = {"role": "user", "content": _content(body, prompt, "images")}
    parsed = _parsed(GENERATE, body, [*rows, asked])
    _name_images(parsed.prompt.messages[-1], "images")
    return parsed


def is_question(dialect: Dialect, body: Body) -> bool:
    """Return whether `body` asks for an answer; else it has the model loaded, or unloaded."""
    asking = ("messages",) if dialect == CHAT else ("prompt", "images")
    return any(body.get(name) for name in asking)


def unloads(body: Body) -> bool:
    """Return whether the model is to be unloaded once the request is answered: keep_alive is 0.

    Raises:
        RequestError: it is no duration.
    """
    value = body.get("keep_alive")
    if value is None:
        return False
    if type(value) in (int, float):
        return bool(value == 0)
    if type(value) is not str or not _DURATION.fullmatch(value):
        fields.refuse("keep_alive", value, "seconds, or a duration such as '5m', '0' or '-1'")
    return re.search("[1-9]", value) is None


_UNSUPPORTED: Final = {
    "suffix": "text is only continued here. Leave it out, or ask by /api/chat for what stands "
    "between two texts.",
    "template": "the model's own template is always used. Send the text as it is with raw: true.",
}


def _parsed(dialect: Dialect, body: dict[str, Any], messages: list[Any]) -> ParsedRequest:
    logprobs = fields.boolean(body, "logprobs")
    options, shape = _options(body), body.get("format")
    if type(shape) is dict:
        shape = {"type": "json_schema", "json_schema": {"schema": shape}}
    elif shape == "json":
        shape = {"type": "json_object"}
    elif shape not in (None, ""):
        fields.refuse("format", shape, "'json' or a JSON schema")
    chat = {
        **options,
        "model": body.get("model"),
        "messages": messages,
        "tools": body.get("tools") if dialect == CHAT else None,
        "response_format": shape or None,
        "think": body.get("think"),
        "stream": fields.boolean(body, "stream", default=True),
        "logprobs": logprobs,
        "top_logprobs": body.get("top_logprobs") if logprobs else None,
    }
    return dataclasses.replace(parse_chat_completion(chat), dialect=dialect, body=body)


def _raw(body: dict[str, Any], prompt: str) -> ParsedRequest:
    """Return the request whose prompt goes to the model as it is."""
    for name in ("images", "format", "context"):
        if body.get(name):
            fields.refuse(name, body[name], "nothing together with raw: true")
    top = fields.integer(body, "top_logprobs", 0, sampling_params.TOP_LOGPROBS_MAX) or 0
    options = _options(body)
    return ParsedRequest(
        dialect=GENERATE,
        model=str(body.get("model") or ""),
        prompt=Prompt([], text=prompt),
        sampling=sampling_params.read_sampling(
            options,
            max_tokens=sampling_params.read_max_tokens(options, "max_tokens"),
            stop="stop",
            top_logprobs=top if fields.boolean(body, "logprobs") else None,
        ),
        stream=fields.boolean(body, "stream", default=True),
        body=body,
    )


def _options(body: Body) -> dict[str, Any]:
    """Return the options as the sampling fields of the other dialects."""
    given = fields.optional_record(body, "options")
    found = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    limit = fields.integer(given, "num_predict", -sampling_params.TOKENS_MAX, 2**63 - 1)
    return found if limit is None or limit <= 0 else {**found, "max_tokens": limit}


# ---------------------------------------------------------------- messages


def _message(value: Any, param: str) -> dict[str, Any]:
    row = fields.record(value, param)
    role = row.get("role")
    calls = fields.records(row.get("tool_calls") or [], f"{param}.tool_calls")
    return {
        "role": role.lower() if type(role) is str else role,
        "content": _content(row, row.get("content"), f"{param}.images"),
        "reasoning_content": fields.text(row, "thinking", f"{param}.thinking"),
        "tool_calls": [call | {"type": "function"} for call, _ in calls],
        "tool_call_id": fields.text(row, "tool_call_id", f"{param}.tool_call_id"),
        "name": fields.text(row, "tool_name", f"{param}.tool_name"),
    }


def _content(row: Body, content: Any, param: str) -> Any:
    """Return `content` behind the images of its message, where Ollama has them."""
    images = fields.rows(row["images"], param) if row.get("images") else []
    if not images:
        return content
    shown = []
    for index, value in enumerate(images):
        if type(value) is not str or not value:
            fields.refuse(f"{param}[{index}]", value, "the image in base64")
        url = value if value.startswith(_DATA) else _IMAGE + value
        shown.append({"type": "image_url", "image_url": {"url": url}})
    return [*shown, {"type": "text", "text": content}] if content else shown


def _name_images(message: dict[str, Any], param: str) -> None:
    """Have refusals name the images of a parsed message by their places in Ollama's body."""
    parts = message["content"] if type(message["content"]) is list else []
    for index, part in enumerate(part for part in parts if part["type"] == "image"):
        part["param"] = f"{param}[{index}]"


# ---------------------------------------------------------------- the context of /api/generate
#
# Ollama's `context` is token ids, which only the worker knows. Clients take it for what it is
# called, an encoding of the conversation: here it is the JSON of the messages, three bytes a
# number, which clients send back.

CONTEXT_BYTES_MAX: Final = 256 * 1024  # of JSON: encoding it takes the event loop some ms
_NUMBER_BYTES: Final = 3  # which every client can hold in a number
_SPOKEN: Final = ("system", "user", "assistant")


def context_of(messages: list[Any], answer: str) -> list[int]:
    """Return the encoding of `messages` and the answer to them; [] where they are too long.

    Images are left out.
    """
    rows = [[row["role"], text_of(row["content"])] for row in messages]
    octets = orjson.dumps([*rows, ["assistant", answer]])
    if len(octets) > CONTEXT_BYTES_MAX:
        return []
    octets += b" " * (-len(octets) % _NUMBER_BYTES)
    starts = range(0, len(octets), _NUMBER_BYTES)
    return [int.from_bytes(octets[start : start + _NUMBER_BYTES], "big") for start in starts]


def messages_of(context: Any) -> list[dict[str, Any]]:
    """Return the messages in a `context` of ours; none where there is none.

    Raises:
        RequestError: it is another server's.
    """
    if not context:
        return []
    numbers = fields.rows(context, "context")
    if len(numbers) * _NUMBER_BYTES <= CONTEXT_BYTES_MAX + _NUMBER_BYTES:
        with contextlib.suppress(AttributeError, OverflowError, TypeError, ValueError):
            octets = b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers)
            messages = [{"role": role, "content": text} for role, text in orjson.loads(octets)]
            if all(row["role"] in _SPOKEN and type(row["content"]) is str for row in messages):
                return messages
    raise RequestError(
        "context is not what this server has answered: it holds a conversation, not the tokens of "
        "a model. Leave it out, or send the messages to /api/chat.",
        code="invalid_context",
        param="context",
    )
