"""OpenAI chat completions: the body to our request, our events to its fields. No LiteLLM here."""

from typing import Any, Final

from proxy.dialects import fields, sampling, tools
from proxy.dialects.parts import content_text
from proxy.request import ParsedRequest
from shared.errors import RequestError
from shared.wire import Prompt, TokenLogprob, Usage

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_ROLE_SHOWN: Final = {"developer": "system", "function": "tool"}  # as chat templates know them
_FORCED: Final = frozenset(("required", "function", "custom", "allowed_tools"))
_LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    fields.integer(body, "n", 1, 1)
    _refuse_formats(body)
    shown, deferred, dropped = _tools(body)
    if not tools.refuse_forced_choice(body.get("tool_choice"), _FORCED):
        shown, deferred = [], []
    stream_options = fields.optional_record(body, "stream_options")
    limit = sampling.read_max_tokens(body, "max_completion_tokens", "max_tokens")
    return ParsedRequest(
        dialect="chat",
        model=str(body.get("model") or ""),
        prompt=Prompt(_messages(body), shown, sampling.template_kwargs(body), deferred),
        sampling=sampling.read_sampling(
            body, max_tokens=limit, stop="stop", top_logprobs=_top_logprobs(body)
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        include_usage=fields.boolean(stream_options, "include_usage"),
        dropped_tools=dropped,
    )


def _refuse_formats(body: dict[str, Any]) -> None:
    kind = fields.optional_record(body, "response_format").get("type", "text")
    if kind != "text":
        raise RequestError(
            f"response_format {kind!r:.40} is not supported; allowed is 'text'. Ask for JSON in "
            "the prompt.",
            code="unsupported_parameter",
            param="response_format",
        )


def _top_logprobs(body: dict[str, Any]) -> int | None:
    count = fields.integer(body, "top_logprobs", 0, sampling.TOP_LOGPROBS_MAX)
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
    for index, value in enumerate(fields.optional_rows(body, "tools")):
        param = f"tools[{index}]"
        row = fields.record(value, param)
        kind = fields.text(row, "type", f"{param}.type")
        if kind == "function" or (kind is None and "function" in row):
            inner = fields.record(row.get("function"), f"{param}.function")
            is_late = fields.boolean(row, "defer_loading") or fields.boolean(inner, "defer_loading")
            tool = tools.function_tool(inner, param, inner="function")
            (deferred if is_late else shown).append(tool)
        elif kind == "custom":
            inner = fields.record(row.get("custom"), f"{param}.custom")
            shown.append(tools.custom_tool(inner, param))
        elif kind:
            dropped.append(kind)
        else:
            fields.refuse(f"{param}.type", kind, "'function'")
    for index, value in enumerate(fields.optional_rows(body, "functions")):
        param = f"functions[{index}]"
        shown.append(tools.function_tool(fields.record(value, param), param))
    return shown, deferred, tuple(dropped)


def _messages(body: dict[str, Any]) -> list[Any]:
    given = fields.rows(body.get("messages"), "messages")
    if not given:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    return [_message(value, f"messages[{index}]") for index, value in enumerate(given)]


def _message(value: Any, param: str) -> dict[str, Any]:
    row = fields.record(value, param)
    role = row.get("role")
    if type(role) is not str or role not in ROLES:
        fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
    if role == "assistant":
        return _assistant(row, param)
    message = {
        "role": _ROLE_SHOWN.get(role, role),
        "content": _content(row, param),
    }
    if role == "tool":
        message["tool_call_id"] = fields.required_text(row, "tool_call_id", f"{param}.tool_call_id")
    if name := fields.text(row, "name", f"{param}.name"):
        message["name"] = name
    return message


def _assistant(row: dict[str, Any], param: str) -> dict[str, Any]:
    calls = _tool_calls(row, param)
    content = _content(row, param) if row.get("content") is not None else ""
    reasoning = fields.text(row, "reasoning_content", f"{param}.reasoning_content")
    if reasoning is None:
        reasoning = fields.text(row, "reasoning", f"{param}.reasoning")
    if row.get("content") is None and not calls and not reasoning and not row.get("refusal"):
        fields.refuse(f"{param}.content", None, "a string or a list of parts")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if refusal := fields.text(row, "refusal", f"{param}.refusal"):
        message["content"] = content or refusal
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(row: dict[str, Any], param: str) -> list[Any]:
    given = row.get("tool_calls")
    calls = []
    for index, value in enumerate(fields.rows(given, f"{param}.tool_calls") if given else []):
        where = f"{param}.tool_calls[{index}]"
        call = fields.record(value, where)
        call_id = fields.text(call, "id", f"{where}.id") or ""
        kind = "custom" if call.get("type") == "custom" else "function"
        inner = fields.record(call.get(kind), f"{where}.{kind}")
        name = fields.required_text(inner, "name", f"{where}.{kind}.name")
        if kind == "custom":
            free = fields.text(inner, "input", f"{where}.custom.input") or ""
            calls.append(tools.tool_call(call_id, name, {"input": free}))
        else:
            calls.append(tools.tool_call(call_id, name, _arguments(inner, where)))
    if row.get("function_call") is not None:
        where = f"{param}.function_call"
        inner = fields.record(row["function_call"], where)
        name = fields.required_text(inner, "name", f"{where}.name")
        calls.append(tools.tool_call("", name, _arguments(inner, where)))
    return calls


def _arguments(inner: dict[str, Any], where: str) -> Any:
    arguments = inner.get("arguments")
    if arguments is None:
        return {}
    if type(arguments) not in (str, dict):
        fields.refuse(f"{where}.arguments", arguments, "a string of JSON")
    return arguments


def _content(row: dict[str, Any], param: str) -> str:
    return content_text(row.get("content"), f"{param}.content", untyped="text")


# ---------------------------------------------------------------- our events to its fields


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return `usage` as chat completions have it, with our `kv_cache` beside it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "kv_cache": kv_cache_fields(usage),
    }


def kv_cache_fields(usage: Usage) -> dict[str, Any]:
    return {
        "cache_hit": usage.cached_tokens > 0,
        "prefix_length": usage.cached_tokens,
        "prefilled": usage.prefilled_tokens,
        "source": usage.source,
        "divergence": usage.divergence,
    }


def logprob_fields(rows: list[TokenLogprob]) -> dict[str, Any]:
    """Return `logprobs` of a choice for the tokens in `rows`."""
    return {
        "content": [
            {
                "token": row.token,
                "bytes": list(row.token_bytes),
                "logprob": max(row.logprob, _LOGPROB_MIN),
                "top_logprobs": [
                    {"token": text, "bytes": list(octets), "logprob": max(logprob, _LOGPROB_MIN)}
                    for _, text, octets, logprob in row.top
                ],
            }
            for row in rows
        ],
        "refusal": None,
    }
