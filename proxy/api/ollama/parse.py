"""Parses the body of Ollama's /api/chat or /api/generate into a ParsedRequest.

The body is translated to the body of a chat completion and parsed as one. So a conversation gives
the same prompt, and finds the same KV, through either API.
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

# Options with the same meaning here as in Ollama. Others (num_ctx, num_gpu, mirostat ...) are about
# loading a model, or about samplers that this server lacks. They are ignored, as Ollama ignores
# options that it does not know.
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
_DURATION: Final = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)?)+")
_DATA: Final = "data:"
_IMAGE: Final = "data:image/png;base64,"  # for all formats, as only the bytes decide


def parse_chat(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in a body of /api/chat.

    Raises:
        RequestError: a field has a value that the API or this server does not allow.
    """
    raw_messages = fields.json_list(body.get("messages"), "messages")
    messages = [
        _message(raw_message, f"messages[{index}]")
        for index, raw_message in enumerate(raw_messages)
    ]
    parsed = _parsed(CHAT, body, messages)
    for index, message in enumerate(parsed.prompt.messages):
        _name_images(message, f"messages[{index}].images")
        message.pop("name", None)  # the tool's name, which the call has already
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
    messages = messages_of(body.get("context"))
    if system := fields.text(body, "system"):
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]
    question = {"role": "user", "content": _content(body, prompt, "images")}
    parsed = _parsed(GENERATE, body, [*messages, question])
    _name_images(parsed.prompt.messages[-1], "images")
    return parsed


def asks_for_answer(dialect: Dialect, body: Body) -> bool:
    """Return whether `body` asks for an answer; otherwise it loads or unloads the model."""
    names = ("messages",) if dialect == CHAT else ("prompt", "images")
    return any(body.get(name) for name in names)


def asks_to_unload(body: Body) -> bool:
    """Return whether `keep_alive` is 0, which unloads the model once the request is answered.

    Raises:
        RequestError: `keep_alive` is not a duration.
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
    options, answer_format = _options(body), body.get("format")
    if type(answer_format) is dict:
        answer_format = {"type": "json_schema", "json_schema": {"schema": answer_format}}
    elif answer_format == "json":
        answer_format = {"type": "json_object"}
    elif answer_format not in (None, ""):
        fields.refuse("format", answer_format, "'json' or a JSON schema")
    chat = {
        **options,
        "model": body.get("model"),
        "messages": messages,
        "tools": body.get("tools") if dialect == CHAT else None,
        "response_format": answer_format or None,
        "think": body.get("think"),
        "stream": fields.boolean(body, "stream", default=True),
        "logprobs": logprobs,
        "top_logprobs": body.get("top_logprobs") if logprobs else None,
    }
    return dataclasses.replace(parse_chat_completion(chat), dialect=dialect, body=body)


def _raw(body: dict[str, Any], prompt: str) -> ParsedRequest:
    """Return the request for a `prompt` that the model gets without a template."""
    for name in ("images", "format", "context"):
        if body.get(name):
            fields.refuse(name, body[name], "nothing together with raw: true")
    top_logprobs = fields.integer(body, "top_logprobs", 0, sampling_params.TOP_LOGPROBS_MAX) or 0
    options = _options(body)
    return ParsedRequest(
        dialect=GENERATE,
        model=str(body.get("model") or ""),
        prompt=Prompt([], text=prompt),
        sampling=sampling_params.read_sampling(
            options,
            max_tokens=sampling_params.read_max_tokens(options, "max_tokens"),
            stop="stop",
            top_logprobs=top_logprobs if fields.boolean(body, "logprobs") else None,
        ),
        stream=fields.boolean(body, "stream", default=True),
        body=body,
    )


def _options(body: Body) -> dict[str, Any]:
    """Return the options as the sampling fields of a chat completion."""
    options = fields.optional_object(body, "options")
    sampling = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    limit = fields.integer(options, "num_predict", -sampling_params.TOKENS_MAX, 2**63 - 1)
    return sampling if limit is None or limit <= 0 else {**sampling, "max_tokens": limit}


# ---------------------------------------------------------------- messages


def _message(value: Any, param: str) -> dict[str, Any]:
    raw = fields.json_object(value, param)
    role = raw.get("role")
    calls = fields.json_objects(raw.get("tool_calls") or [], f"{param}.tool_calls")
    return {
        "role": role.lower() if type(role) is str else role,
        "content": _content(raw, raw.get("content"), f"{param}.images"),
        "reasoning_content": fields.text(raw, "thinking", f"{param}.thinking"),
        "tool_calls": [call | {"type": "function"} for call, _ in calls],
        "tool_call_id": fields.text(raw, "tool_call_id", f"{param}.tool_call_id"),
        "name": fields.text(raw, "tool_name", f"{param}.tool_name"),
    }


def _content(holder: Body, content: Any, param: str) -> Any:
    """Return the images of a message and then its `content`, as in Ollama."""
    images = fields.json_list(holder["images"], param) if holder.get("images") else []
    if not images:
        return content
    parts = []
    for index, value in enumerate(images):
        if type(value) is not str or not value:
            fields.refuse(f"{param}[{index}]", value, "the image in base64")
        url = value if value.startswith(_DATA) else _IMAGE + value
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": content}] if content else parts


def _name_images(message: dict[str, Any], param: str) -> None:
    """Give a parsed message's images their paths in Ollama's body, for error texts."""
    parts = message["content"] if type(message["content"]) is list else []
    for index, part in enumerate(part for part in parts if part["type"] == "image"):
        part["param"] = f"{param}[{index}]"


# ---------------------------------------------------------------- the context of /api/generate
#
# Ollama's `context` is a list of token ids, which only the worker knows. Clients treat it as an
# opaque encoding of the conversation and send it back. Here it encodes the JSON of the messages,
# three bytes in each number.

CONTEXT_BYTES_MAX: Final = 256 * 1024  # longest JSON, which blocks the event loop for some ms
_NUMBER_BYTES: Final = 3  # bytes per number, so that the number is exact in every client
_SPOKEN: Final = ("system", "user", "assistant")


def context_of(messages: list[Any], answer: str) -> list[int]:
    """Return the encoding of the texts of `messages` and of `answer`; [] if they are too long."""
    texts = [[message["role"], text_of(message["content"])] for message in messages]
    encoded = orjson.dumps([*texts, ["assistant", answer]])
    if len(encoded) > CONTEXT_BYTES_MAX:
        return []
    encoded += b" " * (-len(encoded) % _NUMBER_BYTES)
    starts = range(0, len(encoded), _NUMBER_BYTES)
    return [int.from_bytes(encoded[start : start + _NUMBER_BYTES], "big") for start in starts]


def messages_of(context: Any) -> list[dict[str, Any]]:
    """Return the messages in a `context` that this server encoded; [] for no context.

    Raises:
        RequestError: `context` comes from another server.
    """
    if not context:
        return []
    numbers = fields.json_list(context, "context")
    if len(numbers) * _NUMBER_BYTES <= CONTEXT_BYTES_MAX + _NUMBER_BYTES:
        with contextlib.suppress(AttributeError, OverflowError, TypeError, ValueError):
            encoded = b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers)
            messages = [{"role": role, "content": text} for role, text in orjson.loads(encoded)]
            if all(
                message["role"] in _SPOKEN and type(message["content"]) is str
                for message in messages
            ):
                return messages
    raise RequestError(
        "context is not what this server has answered: it holds a conversation, not the tokens of "
        "a model. Leave it out, or send the messages to /api/chat.",
        code="invalid_context",
        param="context",
    )
