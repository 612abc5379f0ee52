"""Refuses prompts with so many parts that rendering them would take too long.

The limits are far above what agents send, and hold for every dialect and endpoint.
"""

from collections.abc import Iterator
from typing import Any, Final

from hearth.proxy.http.strict_json import json_values, value_count
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints, Prompt

MESSAGES_MAX: Final = 20_000
PARTS_MAX: Final = 20_000  # parts of content in all messages together
TOOLS_MAX: Final = 10_000
TOOL_VALUES_MAX: Final = 200_000  # JSON values in all tools together, and in an answer's schema
OPTION_VALUES_MAX: Final = 1_000  # JSON values in chat_template_kwargs
CALL_VALUES_MAX: Final = 500_000  # JSON values in the arguments of all calls together


def check_body(body: dict[str, Any]) -> None:
    """Check the limits on a raw body, before a dialect parses it.

    Raises:
        RequestError: the body exceeds a limit.
    """
    for name in ("messages", "input"):
        _check_count(body.get(name), name, MESSAGES_MAX, "messages")
    for name in ("tools", "functions"):
        _check_count(body.get(name), name, TOOLS_MAX, "tools")
    tools = [tool for name in ("tools", "functions") for tool in _objects(body.get(name))]
    _check_values(_values_in(tools), "tools", TOOL_VALUES_MAX)
    options = _values_in(body.get("chat_template_kwargs"))
    _check_values(options, "chat_template_kwargs", OPTION_VALUES_MAX)
    texts = list(_argument_texts(body))
    if sum(text.count(",") + text.count("{") + text.count("[") for text in texts) > CALL_VALUES_MAX:
        encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
        _check_values(sum(map(json_values, encoded)), _CALLS, CALL_VALUES_MAX)


def check_prompt(prompt: Prompt, constraints: Constraints) -> None:
    """Check the limits on a parsed prompt, as one message of a body may become several.

    Raises:
        RequestError: the prompt exceeds a limit.
    """
    _check_count(prompt.messages, "messages", MESSAGES_MAX, "messages")
    contents = [
        message["content"] for message in prompt.messages if type(message["content"]) is list
    ]
    _check_count([part for content in contents for part in content], "messages", PARTS_MAX, "parts")
    tools = [*prompt.tools, *prompt.deferred]
    _check_count(tools, "tools", TOOLS_MAX, "tools")
    _check_values(_values_in(tools), "tools", TOOL_VALUES_MAX)
    _check_values(_values_in(prompt.template_kwargs), "chat_template_kwargs", OPTION_VALUES_MAX)
    _check_values(_values_in(constraints.schema), "The schema of the answer", TOOL_VALUES_MAX)
    calls = [call for message in prompt.messages for call in message.get("tool_calls") or ()]
    arguments = [call["function"]["arguments"] for call in calls]
    texts = (text.encode("utf-8", "surrogatepass") for text in arguments if type(text) is str)
    _check_values(_values_in(arguments) + sum(map(json_values, texts)), _CALLS, CALL_VALUES_MAX)


_CALLS: Final = "The arguments of all tool calls"


def _argument_texts(body: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments of the calls in an OpenAI body, which are JSON inside strings."""
    for item in (*_objects(body.get("messages")), *_objects(body.get("input"))):
        for call in (item, item.get("function_call"), *_objects(item.get("tool_calls"))):
            for holder in (call, call.get("function")) if type(call) is dict else ():
                text = holder.get("arguments") if type(holder) is dict else None
                if type(text) is str:
                    yield text


def _values_in(value: Any) -> int:
    """Return how many JSON values a list or an object contains; 0 for any other value."""
    return value_count(value) - 1


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if type(item) is dict] if type(value) is list else []


def _check_count(value: Any, param: str, limit: int, kind: str) -> None:
    if type(value) is list and len(value) > limit:
        raise RequestError(
            f"{param} is a list of {len(value):,} and this server accepts {limit:,} {kind}. "
            f"Remove at least {len(value) - limit:,}.",
            code=f"too_many_{kind}",
            param=param,
        )


def _check_values(count: int, what: str, limit: int) -> None:
    if count > limit:
        verb = "have" if what in ("tools", _CALLS) else "has"
        raise RequestError(
            f"{what} {verb} {count:,} JSON values and this server accepts {limit:,}. "
            f"Remove at least {count - limit:,}.",
            code="too_many_values",
            param=what if what in ("tools", "chat_template_kwargs") else None,
        )
