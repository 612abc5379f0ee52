"""Turns the body of an OpenAI chat completion into our request."""

import dataclasses
from typing import Any, Final

from hearth.proxy.api.body import (
    field_readers as fields,
    sampling_params,
    thinking_options,
    tool_definitions as tools,
)
from hearth.proxy.api.body.message_content import (
    read_content,
    result_content,
    said_texts,
    text_content,
)
from hearth.proxy.request.content_pieces import join, join_text
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints, Prompt

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_ROLE_SHOWN: Final = {"developer": "system", "function": "tool"}  # as chat templates know them
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "n_predict")  # the last is llama.cpp's
CHOICES_MAX: Final = 8  # answers to one request
PREDICTION_CHARS_MAX: Final = 1_000_000
PREDICTION_PARTS_MAX: Final = 1_000


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    shown, deferred, dropped = _tools(body)
    rows, left_out = _messages(body)
    template_kwargs, thinking = thinking_options.read(body)
    choices = fields.integer(body, "n", 1, CHOICES_MAX) or 1
    stream_options = fields.optional_record(body, "stream_options")
    limit = sampling_params.read_max_tokens(body, *_LIMITS)
    return ParsedRequest(
        dialect="chat",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            *(rows, shown, template_kwargs, deferred),
            continues=_continues(body, rows[-1]),
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
    """Return the text that a client expects its answer to repeat; "" where there is none.

    It is there to draft from and says nothing to the model: the prompt is the same without it.

    Raises:
        RequestError: it is not what the API allows, too long, or there are several `choices`:
            they are decoded together, and nothing is drafted for them.
    """
    if body.get("prediction") is None:
        return ""
    given = fields.record(body["prediction"], "prediction")
    if given.get("type") != "content":
        fields.refuse("prediction.type", given.get("type"), "'content'")
    if choices > 1:
        fields.refuse("n", choices, "1 together with prediction")
    text = given.get("content")
    if type(text) is list and len(text) <= PREDICTION_PARTS_MAX:
        texts = []
        for part, param in fields.records(text, "prediction.content"):
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
    """Return whether the answer is the rest of the `last` message, in the words of vLLM."""
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
    if choice is None and legacy is not None:  # which says it in the words before tools
        choice = {"type": "function", "function": legacy} if type(legacy) is dict else legacy
        if type(legacy) is not dict and legacy not in ("none", "auto"):
            fields.refuse("function_call", legacy, "none, auto or an object with a name")
    names = {tool["function"]["name"]: [tool["function"]["name"]] for tool in offered}
    return dataclasses.replace(
        tools.openai_choice(choice, names, dropped),
        **sampling_params.read_format(
            body.get("response_format"), "response_format", "json_schema"
        ),
        parallel_calls=fields.boolean(body, "parallel_tool_calls", default=not is_legacy(body)),
        thinking_budget=budget,
    )


def is_legacy(body: dict[str, Any]) -> bool:
    """Return whether `body` offers functions of the API before tools: one call an answer."""
    return bool(body.get("functions")) and not body.get("tools")


def custom_names(body: dict[str, Any]) -> frozenset[str]:
    """Return the names of the tools of a parsed `body` that take free text."""
    return frozenset(
        row["custom"]["name"] for row in body.get("tools") or [] if row.get("type") == "custom"
    )


def _top_logprobs(body: dict[str, Any]) -> int | None:
    count = fields.integer(body, "top_logprobs", 0, sampling_params.TOP_LOGPROBS_MAX)
    if fields.boolean(body, "logprobs"):
        return count or 0
    if count:
        fields.refuse("top_logprobs", count, "a number only together with logprobs: true")
    return None


def _tools(body: dict[str, Any]) -> tuple[list[Any], list[Any], tuple[str, ...]]:
    """Return the tools that are shown at once, those that are once loaded, and what is dropped."""
    shown: list[Any] = []
    deferred: list[Any] = []
    dropped = []
    for row, param in fields.records(fields.optional_rows(body, "tools"), "tools"):
        kind = fields.text(row, "type", f"{param}.type")
        if kind == "function" or (kind is None and "function" in row):
            inner = fields.record(row.get("function"), f"{param}.function")
            is_late = fields.boolean(row, "defer_loading") or fields.boolean(inner, "defer_loading")
            tools.function_tool(inner, param, inner="function")  # refuses what is wrong
            tool = tools.as_sent(row | {"type": "function", "function": tools.as_sent(inner)})
            (deferred if is_late else shown).append(tool)
        elif kind == "custom":
            inner = fields.record(row.get("custom"), f"{param}.custom")
            shown.append(tools.custom_tool(inner, param))
        elif kind:
            dropped.append(kind)
        else:
            fields.refuse(f"{param}.type", kind, "'function'")
    for row, param in fields.records(fields.optional_rows(body, "functions"), "functions"):
        shown.append(tools.function_tool(row, param))
    return shown, deferred, tuple(dropped)


def _messages(body: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the messages, and the types of parts that no text model reads."""
    given = fields.rows(body.get("messages"), "messages")
    if not given:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    left_out: list[str] = []
    rows = [_message(value, f"messages[{index}]", left_out) for index, value in enumerate(given)]
    _name_results(rows)
    return rows, left_out


def _name_results(rows: list[Any]) -> None:
    """Give results without an id those of the calls before them: templates want one.

    One that names its function is of the first call of that, others are in the calls' order.
    """
    waiting: list[dict[str, Any]] = []
    for row in rows:
        if row["role"] == "assistant":
            waiting = list(row.get("tool_calls", ()))
        elif row["role"] == "tool":
            named = [call for call in waiting if call["function"]["name"] == row.get("name")]
            if "tool_call_id" not in row and waiting:
                row["tool_call_id"] = (named or waiting)[0]["id"]
            waiting = [call for call in waiting if call["id"] != row.get("tool_call_id")]


def _message(value: Any, param: str, left_out: list[str]) -> dict[str, Any]:
    row = fields.record(value, param)
    role = row.get("role")
    if type(role) is not str or role not in ROLES:
        fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
    if role == "assistant":
        return _assistant(row, param, left_out)
    content = row.get("content")
    where = f"{param}.content"
    message: dict[str, Any] = {"role": _ROLE_SHOWN.get(role, role)}
    if message["role"] == "tool":
        message["content"] = result_content(content, where, left_out)
        if call_id := fields.text(row, "tool_call_id", f"{param}.tool_call_id"):
            message["tool_call_id"] = call_id
    elif content is None:  # agents send it where there is nothing to say
        message["content"] = ""
    else:
        read = read_content if role == "user" else text_content
        message["content"] = read(content, where, untyped="text")
    if name := fields.text(row, "name", f"{param}.name"):
        message["name"] = name
    return message


def _assistant(row: dict[str, Any], param: str, left_out: list[str]) -> dict[str, Any]:
    calls = _tool_calls(row, param)
    content, thoughts = row.get("content"), ""  # null where it only called
    if type(content) is list:
        texts, told = said_texts(content, f"{param}.content", left_out)
        content, thoughts = join(texts), join_text(told)
    else:
        content = "" if content is None else text_content(content, f"{param}.content")
    if row.get("thinking_blocks") is not None:  # of a cloud model, as LiteLLM tells them
        where = f"{param}.thinking_blocks"
        _, told = said_texts(fields.rows(row["thinking_blocks"], where), where, left_out)
        thoughts = join_text(told) or thoughts
    reasoning = fields.text(row, "reasoning_content", f"{param}.reasoning_content")
    if reasoning is None:
        reasoning = fields.text(row, "reasoning", f"{param}.reasoning")
    refusal = fields.text(row, "refusal", f"{param}.refusal") or ""
    message: dict[str, Any] = {"role": "assistant", "content": content or refusal}
    if reasoning := reasoning or thoughts:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(row: dict[str, Any], param: str) -> list[Any]:
    """Return the calls; one without an id gets that of its place, which no other has."""
    calls = []
    for call, where in fields.records(row.get("tool_calls") or [], f"{param}.tool_calls"):
        call_id = fields.text(call, "id", f"{where}.id") or "".join(filter(str.isalnum, where))
        kind = "custom" if call.get("type") == "custom" else "function"
        inner = fields.record(call.get(kind), f"{where}.{kind}")
        name = fields.required_text(inner, "name", f"{where}.{kind}.name")
        given = (
            _arguments(inner, where)
            if kind == "function"
            else {"input": fields.text(inner, "input", f"{where}.custom.input") or ""}
        )
        calls.append(tools.tool_call(call_id, name, given))
    if row.get("function_call") is not None:
        where = f"{param}.function_call"
        inner = fields.record(row["function_call"], where)
        name = fields.required_text(inner, "name", f"{where}.name")
        calls.append(tools.tool_call("", name, _arguments(inner, where)))
    return calls


def _arguments(inner: dict[str, Any], where: str) -> Any:
    arguments = inner.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        fields.refuse(f"{where}.arguments", arguments, "a string of JSON")
    return {} if arguments is None else arguments
