"""OpenAI Responses: the body to our request. Its events are in responses_events."""

from typing import Any, Final

from proxy.dialects import fields, sampling, tools
from proxy.dialects.parts import content_text, join_text
from proxy.request import ParsedRequest
from shared.errors import RequestError
from shared.wire import Prompt

ROLES: Final = ("system", "developer", "user", "assistant")
_FORCED: Final = frozenset(("required", "function", "custom", "allowed_tools"))


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    _refuse_unsupported(body)
    shown, deferred, dropped = _tools(body)
    if not tools.refuse_forced_choice(body.get("tool_choice"), _FORCED):
        shown, deferred = [], []
    limit = sampling.read_max_tokens(body, "max_output_tokens")
    return ParsedRequest(
        dialect="responses",
        model=str(body.get("model") or ""),
        prompt=Prompt(_messages(body), shown, sampling.template_kwargs(body), deferred),
        sampling=sampling.read_sampling(body, max_tokens=limit, stop="stop"),
        stream=fields.boolean(body, "stream"),
        body=body,
        dropped_tools=dropped,
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise RequestError(
                f"{name} is not supported: this server keeps no conversations. Send the whole "
                "conversation in input.",
                code="unsupported_parameter",
                param=name,
            )
    if fields.boolean(body, "background"):
        fields.refuse("background", True, "false")
    for name in ("reasoning", "metadata"):  # the answer repeats them
        fields.optional_record(body, name)
    wanted = fields.optional_record(body, "text").get("format")
    kind = "text" if wanted is None else fields.record(wanted, "text.format").get("type")
    if kind != "text":
        fields.refuse("text.format.type", kind, "'text'; ask for JSON in the input")


def _tools(body: dict[str, Any]) -> tuple[list[Any], list[Any], tuple[str, ...]]:
    """Return the tools that are shown at once, those that are once loaded, and what is dropped."""
    shown: list[Any] = []
    deferred: list[Any] = []
    dropped = []
    for index, value in enumerate(fields.optional_rows(body, "tools")):
        param = f"tools[{index}]"
        row = fields.record(value, param)
        kind = fields.required_text(row, "type", f"{param}.type")
        if kind == "function":
            is_late = fields.boolean(row, "defer_loading")
            (deferred if is_late else shown).append(tools.function_tool(row, param))
        elif kind == "custom":
            shown.append(tools.custom_tool(row, param))
        else:
            dropped.append(kind)
    return shown, deferred, tuple(dropped)


def _messages(body: dict[str, Any]) -> list[Any]:
    messages: list[Any] = []
    if instructions := fields.text(body, "instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if type(given) is str:
        given = [{"role": "user", "content": given}] if given else []
    reader = _Items(messages)
    count = 0
    for index, value in enumerate(fields.rows(given, "input")):
        reader.read(fields.record(value, f"input[{index}]"), f"input[{index}]")
        count += 1
    reader.flush_reasoning()
    if not count:
        raise RequestError(
            "input is empty; send at least one item.", code="empty_messages", param="input"
        )
    return messages


class _Items:
    """Turns input items into messages: what one assistant turn said and called becomes one."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages
        self._reasoning: list[str] = []
        self._signatures: list[str] = []  # of reasoning, read or only encrypted

    def read(self, item: dict[str, Any], param: str) -> None:
        kind = fields.text(item, "type", f"{param}.type") or "message"
        if kind == "message":
            self._message(item, param)
        elif kind == "reasoning":
            self._reasoning += _reasoning_texts(item, param)
            if sealed := fields.text(item, "encrypted_content", f"{param}.encrypted_content"):
                self._signatures.append(sealed)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, param, free_text=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self.flush_reasoning()
            call_id = fields.required_text(item, "call_id", f"{param}.call_id")
            content = content_text(item.get("output"), f"{param}.output")
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            allowed = "message, reasoning, function_call, function_call_output and custom tools'"
            fields.refuse(f"{param}.type", kind, allowed)

    def _message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if type(role) is not str or role not in ROLES:
            fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
        content = content_text(item.get("content"), f"{param}.content")
        if role == "assistant":
            self._messages.append(self._with_reasoning({"role": role, "content": content}))
            return
        self.flush_reasoning()
        self._messages.append(
            {"role": "system" if role == "developer" else role, "content": content}
        )

    def _call(self, item: dict[str, Any], param: str, *, free_text: bool) -> None:
        name = fields.required_text(item, "name", f"{param}.name")
        call_id = fields.required_text(item, "call_id", f"{param}.call_id")
        given = fields.text(item, "input" if free_text else "arguments", f"{param}.arguments")
        arguments: Any = {"input": given or ""} if free_text else given or ""
        call = tools.tool_call(call_id, name, arguments)
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and not self._reasoning:
            last.setdefault("tool_calls", []).append(call)
            self._with_reasoning(last)
            return
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        self._messages.append(self._with_reasoning(message))

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._reasoning:
            message["reasoning_content"] = join_text(self._reasoning)
            self._reasoning = []
        if self._signatures:
            message["signatures"] = message.get("signatures", []) + self._signatures
            self._signatures = []
        return message

    def flush_reasoning(self) -> None:
        """Keep reasoning that nothing of its turn follows: a turn that was cut off.

        What is only encrypted goes: there is nothing of such a turn to show.
        """
        if self._reasoning:
            self._messages.append(self._with_reasoning({"role": "assistant", "content": ""}))
        self._signatures = []


def _reasoning_texts(item: dict[str, Any], param: str) -> list[str]:
    """Return the reasoning itself, else its summary; one that is only encrypted has neither."""
    for name in ("content", "summary"):
        given = item.get(name)
        parts = fields.rows(given, f"{param}.{name}") if given is not None else []
        texts = []
        for index, value in enumerate(parts):
            where = f"{param}.{name}[{index}]"
            texts.append(fields.text(fields.record(value, where), "text", f"{where}.text") or "")
        if any(texts):
            return texts
    return []
