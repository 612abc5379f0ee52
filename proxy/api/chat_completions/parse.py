"""Parses the body of an OpenAI chat completion into a ParsedRequest."""

import dataclasses
from typing import Any, Final

from hearth.proxy.api.body import (
    field_readers as fields,
    sampling_params,
    thinking_options,
    tool_definitions as tools,
)
from hearth.proxy.api.body.message_content import (
    assistant_texts,
    read_content,
    result_content,
    text_content,
)
from hearth.proxy.request.content_pieces import join, join_text
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints, Prompt

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_ROLE_SHOWN: Final = {"developer": "system", "function": "tool"}  # role -> name in templates
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "n_predict")  # n_predict is llama.cpp's
CHOICES_MAX: Final = 8  # answers to one prompt
PREDICTION_CHARS_MAX: Final = 1_000_000
PREDICTION_PARTS_MAX: Final = 1_000


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field has a value that the API or this server does not allow.
    """
    shown, deferred, dropped = _tools(body)
    messages, left_out = _messages(body)
    template_kwargs, thinking = thinking_options.read(body)
    choices = fields.integer(body, "n", 1, CHOICES_MAX) or 1
    stream_options = fields.optional_object(body, "stream_options")
    limit = sampling_params.read_max_tokens(body, *_LIMITS)
    return ParsedRequest(
        dialect="chat",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            *(messages, shown, template_kwargs, deferred),
            continues=_continues(body, messages[-1]),
            thinking=thinking,
        ),
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit, stop="stop", top_logprobs=_top_logprobs(body)
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        include_usage=fields.boolean(stream_options, "include_usage"),
        left_out=(*dropped, *left_out),
        constraints=_constraints(body, [*shown, *deferred], dropped, thinking.budget),
        choices=choices,
        prediction=_prediction(body, choices),
    )


def _prediction(body: dict[str, Any], choices: int) -> str:
    """Return the text that a client expects its answer to repeat; "" for none.

    Tokens are drafted from this text. It is no part of the prompt.

    Raises:
        RequestError: the text is malformed or too long, or the request wants several `choices`,
            which are decoded together without drafts.
    """
    if body.get("prediction") is None:
        return ""
    prediction = fields.json_object(body["prediction"], "prediction")
    if prediction.get("type") != "content":
        fields.refuse("prediction.type", prediction.get("type"), "'content'")
    if choices > 1:
        fields.refuse("n", choices, "1 together with prediction")
    text = prediction.get("content")
    if type(text) is list and len(text) <= PREDICTION_PARTS_MAX:
        texts = []
        for part, param in fields.json_objects(text, "prediction.content"):
            if part.get("type") != "text":
                fields.refuse(f"{param}.type", part.get("type"), "'text'")
            texts.append(fields.some_text(part, "text", f"{param}.text"))
        text = "".join(texts)
    if type(text) is not str:
        allowed = f"a string or a list of up to {PREDICTION_PARTS_MAX:,} text parts"
        fields.refuse("prediction.content", text, allowed)
    if len(text) > PREDICTION_CHARS_MAX:
        raise RequestError(
            f"prediction has {len(text):,} characters and this server accepts "
            f"{PREDICTION_CHARS_MAX:,}. Remove at least {len(text) - PREDICTION_CHARS_MAX:,}.",
            code="prediction_too_long",
            param="prediction",
        )
    return text


def _continues(body: dict[str, Any], last: dict[str, Any]) -> bool:
    """Return whether the answer continues the `last` message, by vLLM's fields in `body`."""
    if not fields.boolean(body, "continue_final_message"):
        return False
    if fields.boolean(body, "add_generation_prompt"):
        fields.refuse("add_generation_prompt", True, "false with continue_final_message: true")
    if last["role"] != "assistant" or last.get("tool_calls"):
        allowed = "false where the last message is not an assistant's text"
        fields.refuse("continue_final_message", True, allowed)
    return True


def _constraints(
    body: dict[str, Any], offered: list[Any], dropped: tuple[str, ...], budget: int | None
) -> Constraints:
    choice, legacy = body.get("tool_choice"), body.get("function_call")
    if choice is None and legacy is not None:  # function_call is the older field
        choice = {"type": "function", "function": legacy} if type(legacy) is dict else legacy
        if type(legacy) is not dict and legacy not in ("none", "auto"):
            fields.refuse("function_call", legacy, "none, auto or an object with a name")
    names = {tool["function"]["name"]: [tool["function"]["name"]] for tool in offered}
    return dataclasses.replace(
        tools.read_tool_choice(choice, names, dropped),
        **sampling_params.read_format(
            body.get("response_format"), "response_format", "json_schema"
        ),
        parallel_calls=fields.boolean(body, "parallel_tool_calls", default=not is_legacy(body)),
        thinking_budget=budget,
    )


def is_legacy(body: dict[str, Any]) -> bool:
    """Return whether `body` offers only `functions`, the older field for one call per answer."""
    return bool(body.get("functions")) and not body.get("tools")


def custom_names(body: dict[str, Any]) -> frozenset[str]:
    """Return the names of the free-text tools in a checked `body`."""
    return frozenset(
        tool["custom"]["name"] for tool in body.get("tools") or [] if tool.get("type") == "custom"
    )


def _top_logprobs(body: dict[str, Any]) -> int | None:
    count = fields.integer(body, "top_logprobs", 0, sampling_params.TOP_LOGPROBS_MAX)
    if fields.boolean(body, "logprobs"):
        return count or 0
    if count:
        fields.refuse("top_logprobs", count, "a number only together with logprobs: true")
    return None


def _tools(body: dict[str, Any]) -> tuple[list[Any], list[Any], tuple[str, ...]]:
    """Return the tools shown at once, the deferred tools, and the types of the dropped tools."""
    shown: list[Any] = []
    deferred: list[Any] = []
    dropped = []
    for entry, param in fields.json_objects(fields.optional_list(body, "tools"), "tools"):
        kind = fields.text(entry, "type", f"{param}.type")
        if kind == "function" or (kind is None and "function" in entry):
            inner = fields.json_object(entry.get("function"), f"{param}.function")
            is_late = fields.boolean(entry, "defer_loading") or fields.boolean(
                inner, "defer_loading"
            )
            tools.function_tool(inner, param, inner="function")  # only for its checks
            tool = tools.without_server_fields(
                entry | {"type": "function", "function": tools.without_server_fields(inner)}
            )
            (deferred if is_late else shown).append(tool)
        elif kind == "custom":
            inner = fields.json_object(entry.get("custom"), f"{param}.custom")
            shown.append(tools.custom_tool(inner, param))
        elif kind:
            dropped.append(kind)
        else:
            fields.refuse(f"{param}.type", kind, "'function'")
    for entry, param in fields.json_objects(fields.optional_list(body, "functions"), "functions"):
        shown.append(tools.function_tool(entry, param))
    return shown, deferred, tuple(dropped)


def _messages(body: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the messages, and the types of the parts that were left out."""
    raw_messages = fields.json_list(body.get("messages"), "messages")
    if not raw_messages:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    left_out: list[str] = []
    messages = [
        _message(raw_message, f"messages[{index}]", left_out)
        for index, raw_message in enumerate(raw_messages)
    ]
    _name_results(messages)
    return messages, left_out


def _name_results(messages: list[Any]) -> None:
    """Give each tool result without a call id the id of an earlier call, as templates need an id.

    A result that names its function belongs to the first waiting call of that function. Other
    results follow the order of the calls.
    """
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            waiting = list(message.get("tool_calls", ()))
        elif message["role"] == "tool":
            named = [call for call in waiting if call["function"]["name"] == message.get("name")]
            if "tool_call_id" not in message and waiting:
                message["tool_call_id"] = (named or waiting)[0]["id"]
            waiting = [call for call in waiting if call["id"] != message.get("tool_call_id")]


def _message(value: Any, param: str, left_out: list[str]) -> dict[str, Any]:
    raw = fields.json_object(value, param)
    role = raw.get("role")
    if type(role) is not str or role not in ROLES:
        fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
    if role == "assistant":
        return _assistant(raw, param, left_out)
    content = raw.get("content")
    where = f"{param}.content"
    message: dict[str, Any] = {"role": _ROLE_SHOWN.get(role, role)}
    if message["role"] == "tool":
        message["content"] = result_content(content, where, left_out)
        if call_id := fields.text(raw, "tool_call_id", f"{param}.tool_call_id"):
            message["tool_call_id"] = call_id
    elif content is None:  # agents send null for an empty content
        message["content"] = ""
    else:
        read = read_content if role == "user" else text_content
        message["content"] = read(content, where, untyped="text")
    if name := fields.text(raw, "name", f"{param}.name"):
        message["name"] = name
    return message


def _assistant(raw: dict[str, Any], param: str, left_out: list[str]) -> dict[str, Any]:
    calls = _tool_calls(raw, param)
    content, thoughts = raw.get("content"), ""  # null if the message has only calls
    if type(content) is list:
        texts, thinking_texts = assistant_texts(content, f"{param}.content", left_out)
        content, thoughts = join(texts), join_text(thinking_texts)
    else:
        content = "" if content is None else text_content(content, f"{param}.content")
    if raw.get("thinking_blocks") is not None:  # from a cloud model, in LiteLLM's field
        where = f"{param}.thinking_blocks"
        _, thinking_texts = assistant_texts(
            fields.json_list(raw["thinking_blocks"], where), where, left_out
        )
        thoughts = join_text(thinking_texts) or thoughts
    reasoning = fields.text(raw, "reasoning_content", f"{param}.reasoning_content")
    if reasoning is None:
        reasoning = fields.text(raw, "reasoning", f"{param}.reasoning")
    refusal = fields.text(raw, "refusal", f"{param}.refusal") or ""
    message: dict[str, Any] = {"role": "assistant", "content": content or refusal}
    if reasoning := reasoning or thoughts:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(raw: dict[str, Any], param: str) -> list[Any]:
    """Return the calls; a call without an id gets an id made from its path in the body."""
    calls = []
    for call, where in fields.json_objects(raw.get("tool_calls") or [], f"{param}.tool_calls"):
        call_id = fields.text(call, "id", f"{where}.id") or "".join(filter(str.isalnum, where))
        kind = "custom" if call.get("type") == "custom" else "function"
        inner = fields.json_object(call.get(kind), f"{where}.{kind}")
        name = fields.required_text(inner, "name", f"{where}.{kind}.name")
        arguments = (
            _arguments(inner, where)
            if kind == "function"
            else {"input": fields.text(inner, "input", f"{where}.custom.input") or ""}
        )
        calls.append(tools.tool_call(call_id, name, arguments))
    if raw.get("function_call") is not None:
        where = f"{param}.function_call"
        inner = fields.json_object(raw["function_call"], where)
        name = fields.required_text(inner, "name", f"{where}.name")
        calls.append(tools.tool_call("", name, _arguments(inner, where)))
    return calls


def _arguments(inner: dict[str, Any], where: str) -> Any:
    arguments = inner.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        fields.refuse(f"{where}.arguments", arguments, "a string of JSON")
    return {} if arguments is None else arguments
