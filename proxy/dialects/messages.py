"""Anthropic Messages: the body to our request, our events to its events. No LiteLLM here."""

from collections.abc import AsyncGenerator
from typing import Any, Final

from proxy.canonical import without_telemetry
from proxy.dialects import fields, sampling, tools
from proxy.dialects.chat import kv_cache_fields
from proxy.dialects.parts import join_text
from proxy.dialects.sse import PING_S, event
from proxy.failures import anthropic_error
from proxy.request import ParsedRequest, Ticket
from shared.errors import RequestError
from shared.wire import Delta, Finished, Prompt, Usage

ROLES: Final = ("system", "user", "assistant")
_FORCED: Final = frozenset(("any", "tool"))
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    _refuse_formats(body)
    shown, deferred, dropped = _tools(body)
    choice = fields.optional_record(body, "tool_choice")
    if not tools.refuse_forced_choice(choice or None, _FORCED):
        shown, deferred = [], []
    limit = sampling.read_max_tokens(body, "max_tokens")
    return ParsedRequest(
        dialect="messages",
        model=str(body.get("model") or ""),
        prompt=Prompt(_messages(body), shown, _template_kwargs(body), deferred),
        sampling=sampling.read_sampling(body, max_tokens=limit, stop="stop_sequences"),
        stream=fields.boolean(body, "stream"),
        body=body,
        dropped_tools=dropped,
    )


def _refuse_formats(body: dict[str, Any]) -> None:
    config = fields.optional_record(body, "output_config")
    for value, param in (
        (config.get("format"), "output_config.format"),
        (body.get("output_format"), "output_format"),
    ):
        if value is not None:
            raise RequestError(
                f"{param} is not supported; ask for JSON in the prompt.",
                code="unsupported_parameter",
                param=param,
            )


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = sampling.template_kwargs(body)
    kind = fields.optional_record(body, "thinking").get("type")
    if kind is None:
        return kwargs
    if kind not in ("enabled", "adaptive", "disabled"):
        fields.refuse("thinking.type", kind, "enabled, adaptive or disabled")
    return {"enable_thinking": kind != "disabled"} | kwargs


def _tools(body: dict[str, Any]) -> tuple[list[Any], list[Any], tuple[str, ...]]:
    """Return the tools that are shown at once, those that are once loaded, and what is dropped."""
    shown: list[Any] = []
    deferred: list[Any] = []
    dropped = []
    for index, value in enumerate(fields.optional_rows(body, "tools")):
        param = f"tools[{index}]"
        row = fields.record(value, param)
        kind = fields.text(row, "type", f"{param}.type")
        if kind in (None, "custom"):
            is_late = fields.boolean(row, "defer_loading")
            tool = tools.function_tool(row, param, schema="input_schema")
            (deferred if is_late else shown).append(tool)
        else:
            dropped.append(kind or "")
    return shown, deferred, tuple(dropped)


def _messages(body: dict[str, Any]) -> list[Any]:
    given = fields.rows(body.get("messages"), "messages")
    if not given:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    messages: list[Any] = []
    if (system := body.get("system")) is not None and (text := _system(system)):
        messages.append({"role": "system", "content": text})
    for index, value in enumerate(given):
        messages += _message(value, f"messages[{index}]")
    return messages


def _system(system: Any) -> str:
    """Return the text of the system prompt; a first block that is telemetry alone is left out."""
    if type(system) is str:
        return without_telemetry(system)
    texts = _texts(system, "system")
    if texts and system[0].get("type") == "text":
        rest = without_telemetry(texts[0])
        texts[:1] = [rest] if rest or not texts[0] else []
    return join_text(texts)


def _message(value: Any, param: str) -> list[Any]:
    """Return the one or more messages of our kind that this one becomes, in its blocks' order."""
    row = fields.record(value, param)
    role = row.get("role")
    if type(role) is not str or role not in ROLES:
        fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
    content = row.get("content")
    where = f"{param}.content"
    if role == "system":
        return [{"role": role, "content": _text(content, where)}]
    if type(content) is str:
        return [{"role": role, "content": content}]
    if type(content) is not list:
        fields.refuse(where, content, "a string or a list of blocks")
    blocks = [fields.record(block, f"{where}[{i}]") for i, block in enumerate(content)]
    return _user(blocks, where) if role == "user" else [_assistant(blocks, where)]


def _user(blocks: list[dict[str, Any]], where: str) -> list[Any]:
    messages: list[Any] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": join_text(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        param = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            flush()
            messages.append(_tool_result(block, param))
        else:
            texts.append(_block_text(block, param))
    flush()
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: dict[str, Any], param: str) -> dict[str, Any]:
    call_id = fields.required_text(block, "tool_use_id", f"{param}.tool_use_id")
    content = block.get("content")
    references: list[str] = []
    if type(content) is list:
        references, content = _split_references(content, f"{param}.content")
    text = "" if content is None else _text(content, f"{param}.content")
    if fields.boolean(block, "is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"  # templates have no other place for it, and the model must know
    message = {"role": "tool", "tool_call_id": call_id, "content": text}
    return message | {"tool_references": references} if references else message


def _split_references(content: list[Any], where: str) -> tuple[list[str], list[Any]]:
    """Return the names of the deferred tools that a result loads, and what else it holds."""
    names: list[str] = []
    others = []
    for index, block in enumerate(content):
        if type(block) is dict and block.get("type") == "tool_reference":
            param = f"{where}[{index}].tool_name"
            names.append(fields.required_text(block, "tool_name", param))
        else:
            others.append(block)
    return names, others


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, signatures, calls = [], [], [], []
    for index, block in enumerate(blocks):
        param = f"{where}[{index}]"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(fields.text(block, "thinking", f"{param}.thinking") or "")
            signatures.append(fields.text(block, "signature", f"{param}.signature"))
        elif kind == "tool_use":
            name = fields.required_text(block, "name", f"{param}.name")
            call_id = fields.required_text(block, "id", f"{param}.id")
            given = block.get("input")
            given = {} if given is None else fields.record(given, f"{param}.input")
            calls.append(tools.tool_call(call_id, name, given))
        elif kind == "redacted_thinking":  # nothing to show: at most a name of what was thought
            signatures.append(fields.text(block, "data", f"{param}.data"))
        else:
            texts.append(_block_text(block, param))
    message: dict[str, Any] = {"role": "assistant", "content": join_text(texts)}
    if any(thoughts):
        message["reasoning_content"] = join_text(thoughts)
    if any(signatures):
        message["signatures"] = [signature for signature in signatures if signature]
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any, param: str) -> str:
    """Return the text of a string or of a list of blocks that are text."""
    if type(content) is str:
        return content
    return join_text(_texts(content, param))


def _texts(content: Any, param: str) -> list[str]:
    if type(content) is not list:
        fields.refuse(param, content, "a string or a list of text blocks")
    texts = []
    for index, block in enumerate(content):
        where = f"{param}[{index}]"
        texts.append(_block_text(fields.record(block, where), where))
    return texts


def _block_text(block: dict[str, Any], param: str) -> str:
    kind = fields.text(block, "type", f"{param}.type") or ""
    if kind == "text":
        found = fields.text(block, "text", f"{param}.text")
        return found if found is not None else fields.refuse(f"{param}.text", None, "a string")
    if kind == "document":
        return _document(block, param)
    if kind == "search_result":
        title = fields.text(block, "title", f"{param}.title") or ""
        return join_text([title, _text(block.get("content"), f"{param}.content")])
    tools.refuse_images(param, kind)
    fields.refuse(f"{param}.type", kind, "a text block here")


def _document(block: dict[str, Any], param: str) -> str:
    source = fields.record(block.get("source"), f"{param}.source")
    if source.get("type") == "text":
        body = fields.required_text(source, "data", f"{param}.source.data")
    elif source.get("type") == "content":
        body = _text(source.get("content"), f"{param}.source.content")
    else:
        kind = source.get("type")
        fields.refuse(f"{param}.source.type", kind, "text or content; this model takes text only")
    title = fields.text(block, "title", f"{param}.title")
    return join_text([title, body]) if title else body


# ---------------------------------------------------------------- our events to its events


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return `usage` as Messages have it: what came from the cache is not in input_tokens."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    return {
        **_input_fields(fresh, usage.cached_tokens),
        "output_tokens": usage.completion_tokens,
        "kv_cache": kv_cache_fields(usage),
    }


def _input_fields(fresh: int, cached: int) -> dict[str, int]:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _ending(finished: Finished) -> dict[str, Any]:
    if finished.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_sequence}
    reason = _STOP_REASONS.get(finished.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _block(channel: str, text: str = "") -> dict[str, Any]:
    if channel == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _delta(channel: str, text: str) -> dict[str, Any]:
    if channel == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _shell(ticket: Ticket) -> dict[str, Any]:
    answer = ticket.answer
    fresh = answer.prompt_tokens - answer.cached_tokens
    return {
        "id": f"msg_{answer.request_id}",
        "type": "message",
        "role": "assistant",
        "model": ticket.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _input_fields(fresh, answer.cached_tokens) | {"output_tokens": 0},
    }


async def whole(ticket: Ticket) -> dict[str, Any]:
    """Return the message once it is complete.

    Raises:
        RequestError: it broke off.
    """
    blocks: list[tuple[str, list[str]]] = []
    while True:
        row = await ticket.answer.next_event()
        if isinstance(row, Finished):
            break
        if isinstance(row, Delta):
            if not blocks or blocks[-1][0] != row.channel:
                blocks.append((row.channel, []))
            blocks[-1][1].append(row.text)
    content = [_block(channel, "".join(texts)) for channel, texts in blocks]
    return (
        _shell(ticket)
        | {"content": content or [_block("content")], "usage": usage_fields(row.usage)}
        | _ending(row)
    )


async def events(ticket: Ticket) -> AsyncGenerator[bytes, None]:
    """Yield the stream of `ticket`; where it breaks off, an error event is its end."""
    yield event("message_start", {"message": _shell(ticket)})
    try:
        async for frame in _content_events(ticket):
            yield frame
    except RequestError as error:
        ticket.failure = error
        yield event("error", {"error": anthropic_error(error)})
    finally:
        ticket.answer.close()


async def _content_events(ticket: Ticket) -> AsyncGenerator[bytes, None]:
    index, channel = -1, ""
    while True:
        row = await ticket.answer.next_event(PING_S)
        if row is None:
            yield event("ping", {})
            continue
        if isinstance(row, Finished):
            break
        if row.channel != channel:
            if index >= 0:
                yield event("content_block_stop", {"index": index})
            index, channel = index + 1, row.channel
            start = {"index": index, "content_block": _block(channel)}
            yield event("content_block_start", start)
            if index == 0:
                yield event("ping", {})
        yield event("content_block_delta", {"index": index, "delta": _delta(channel, row.text)})
    if index < 0:
        index = 0
        yield event("content_block_start", {"index": 0, "content_block": _block("content")})
    yield event("content_block_stop", {"index": index})
    yield event("message_delta", {"delta": _ending(row), "usage": usage_fields(row.usage)})
    yield event("message_stop", {})
