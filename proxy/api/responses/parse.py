"""Parses the body of an OpenAI Responses request into a ParsedRequest."""

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
    readable_texts,
    result_content,
    text_content,
)
from hearth.proxy.api.responses.tools import LOADING, SEARCH, ResponsesTools, responses_tools_of
from hearth.proxy.request.content_pieces import MessageContent, join, join_text
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.our_ids import is_our_signature
from hearth.shared.wire_messages import Prompt

LOGPROBS: Final = "message.output_text.logprobs"  # value in `include`
ROLES: Final = ("system", "developer", "user", "assistant")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
_NOTHING_FOUND: Final = "No tools were found."


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`; its input already includes the previous response.

    Raises:
        RequestError: a field has a value that the API or this server does not allow.
    """
    _refuse_unsupported(body)
    request_tools = responses_tools_of(body)
    reader = _InputItemReader(request_tools)
    if instructions := fields.text(body, "instructions"):
        reader.messages.append({"role": "system", "content": instructions})
    items = input_items(body)
    for item, param in fields.json_objects(items, "input"):
        reader.read(item, param)
    reader.flush_reasoning()
    if not items:
        raise RequestError(
            "input is empty; send at least one item.", code="empty_messages", param="input"
        )
    template_kwargs, thinking = thinking_options.read(body)
    limit = sampling_params.read_max_tokens(body, "max_output_tokens")
    top_logprobs = fields.integer(body, "top_logprobs", 0, sampling_params.TOP_LOGPROBS_MAX) or 0
    wants_logprobs = LOGPROBS in fields.optional_list(body, "include")
    return ParsedRequest(
        dialect="responses",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            *(reader.messages, request_tools.shown, template_kwargs, request_tools.deferred),
            thinking=thinking,
        ),
        sampling=sampling_params.read_sampling(
            body,
            max_tokens=limit,
            stop="stop",
            top_logprobs=top_logprobs if wants_logprobs else None,
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        left_out=(*request_tools.dropped, *reader.left_out),
        constraints=dataclasses.replace(
            tools.read_tool_choice(
                body.get("tool_choice"), request_tools.choosable, request_tools.dropped
            ),
            **sampling_params.read_format(
                fields.optional_object(body, "text").get("format"), "text.format"
            ),
            parallel_calls=fields.boolean(body, "parallel_tool_calls", default=True),
            thinking_budget=thinking.budget,
        ),
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    if body.get("conversation") is not None:
        raise RequestError(
            "conversation is not supported; name the last response in previous_response_id, or "
            "send the whole conversation in input.",
            code="unsupported_parameter",
            param="conversation",
        )
    if fields.boolean(body, "background"):
        raise RequestError(
            "background is not supported: a response is made while its client waits. Leave it out, "
            "or send false.",
            code="unsupported_parameter",
            param="background",
        )
    for name in ("reasoning", "metadata"):  # checked here, as the response repeats them
        fields.optional_object(body, name)


def input_items(body: dict[str, Any]) -> list[Any]:
    """Return the input as a list of items; a string becomes a user's message.

    Raises:
        RequestError: the input is neither a string nor a list.
    """
    items = body.get("input")
    if type(items) is str:
        return [{"type": "message", "role": "user", "content": items}] if items else []
    if type(items) is not list:
        fields.refuse("input", items, "a string or a list of items")
    return items


# ---------------------------------------------------------------- input items


class _InputItemReader:
    """Turns input items into messages; the items of one assistant turn become one message."""

    def __init__(self, request_tools: ResponsesTools) -> None:
        self.messages: list[Any] = []
        self.left_out: list[str] = []  # types of the items that were left out
        self._request_tools = request_tools
        self._reasoning: list[str] = []
        self._signatures: list[str] = []  # signatures of reasoning, with or without a readable text

    def read(self, item: dict[str, Any], param: str) -> None:
        """Read the next item.

        Raises:
            RequestError: the item is malformed, or has content that no model here can read.
        """
        kind = fields.text(item, "type", f"{param}.type") or "message"
        if kind == "message":
            self._message(item, param)
        elif kind == "reasoning":
            self._thought(item, param)
        elif kind == "function_call":
            arguments = fields.text(item, "arguments", f"{param}.arguments") or ""
            self._call(item, param, self._name(item, param), arguments)
        elif kind == "custom_tool_call":
            given = fields.text(item, "input", f"{param}.input")
            self._call(item, param, self._name(item, param), {tools.FREE_TEXT: given or ""})
        elif kind == "tool_search_call" and item.get(
            "call_id"
        ):  # a search without a call id ran on the server
            given = item.get("arguments")
            self._call(item, param, SEARCH, given if type(given) is dict else {})
        elif kind in _OUTPUTS:
            result = result_content(item.get("output"), f"{param}.output", self.left_out)
            self._tool(item, param, result)
        elif kind in LOADING:
            self._loaded(item, param)
        elif kind == "item_reference":
            fields.refuse(f"{param}.type", kind, "the item itself: nothing is kept to refer to")
        else:
            self._foreign(item, kind)

    # ---------------------------------------------------------------- messages

    def _message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if type(role) is not str or role not in ROLES:
            fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
        content = item.get("content")
        where = f"{param}.content"
        if (
            role == "assistant" and type(content) is list
        ):  # another server may have made it, with any parts
            texts, thoughts = assistant_texts(content, where, self.left_out)
            self._reasoning += thoughts
            content = join(texts)
        else:
            read = read_content if role == "user" else text_content
            content = "" if content is None else read(content, where)
        if role == "assistant":
            self._said(content)
        else:
            self._asked("user" if role == "user" else "system", content)

    def _asked(self, role: str, content: MessageContent) -> None:
        self.flush_reasoning()
        self.messages.append({"role": role, "content": content})

    def _said(self, text: MessageContent) -> None:
        self.messages.append(self._with_reasoning({"role": "assistant", "content": text}))

    def _thought(self, item: dict[str, Any], param: str) -> None:
        """Read a reasoning item; readable reasoning of another model joins the history too."""
        texts = _reasoning_texts(item, param)
        self._reasoning += texts
        if signature := fields.text(item, "encrypted_content", f"{param}.encrypted_content"):
            self._signatures.append(signature)
            if not texts and not is_our_signature(signature):
                self.left_out.append("reasoning")

    def _foreign(self, item: dict[str, Any], kind: str) -> None:
        """Keep the text of an item that another server made."""
        self.left_out.append(kind)
        texts = readable_texts(item)
        if texts and kind == "agent_message":  # from another agent to this agent
            self._asked("user", join_text(texts))
        elif texts:
            self._said(join_text(texts))

    # ---------------------------------------------------------------- calls and their results

    def _name(self, item: dict[str, Any], param: str) -> str:
        name = fields.required_text(item, "name", f"{param}.name")
        namespace = fields.text(item, "namespace", f"{param}.namespace") or ""
        return self._request_tools.shown_name(name, namespace)

    def _call(self, item: dict[str, Any], param: str, name: str, arguments: Any) -> None:
        call_id = fields.required_text(item, "call_id", f"{param}.call_id")
        call = tools.tool_call(call_id, name, arguments)
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        last.setdefault("tool_calls", []).append(call)
        self._with_reasoning(last)

    def _tool(
        self, item: dict[str, Any], param: str, content: MessageContent, *loaded: str
    ) -> None:
        self.flush_reasoning()
        call_id = fields.required_text(item, "call_id", f"{param}.call_id")
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        self.messages.append(message | {"tool_references": list(loaded)} if loaded else message)

    def _loaded(self, item: dict[str, Any], param: str) -> None:
        """Read the tools that an item loads; the model sees them at the item's position."""
        where = f"{param}.tools"
        loaded_tools = fields.optional_list(item, "tools", where)
        names = self._request_tools.add(loaded_tools, where, late=True)
        if item.get("call_id"):
            self._tool(item, param, "" if names else _NOTHING_FOUND, *names)
        elif names:
            self._asked("system", "")
            self.messages[-1]["tool_references"] = names

    # ---------------------------------------------------------------- reasoning

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._reasoning:
            message["reasoning_content"] = join_text(self._reasoning)
            self._reasoning = []
        if self._signatures:
            message["signatures"] = message.get("signatures", []) + self._signatures
            self._signatures = []
        return message

    def flush_reasoning(self) -> None:
        """Add waiting reasoning as a message of its own, for a turn that was cut off after it.

        Reasoning that is only encrypted is dropped, as it has no text to show.
        """
        if self._reasoning:
            self.messages.append(self._with_reasoning({"role": "assistant", "content": ""}))
        self._signatures = []


def _reasoning_texts(item: dict[str, Any], param: str) -> list[str]:
    """Return the reasoning texts, or else the summary; [] if the item is only encrypted."""
    for name in ("content", "summary"):
        raw_parts = item.get(name)
        parts = fields.json_objects([] if raw_parts is None else raw_parts, f"{param}.{name}")
        texts = [fields.text(part, "text", f"{where}.text") or "" for part, where in parts]
        if any(texts):
            return texts
    return []
