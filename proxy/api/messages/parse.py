"""Parses the body of an Anthropic Messages request into a ParsedRequest."""

import dataclasses
import itertools
from typing import Any, Final

from hearth.proxy.api.body import (
    field_readers as fields,
    sampling_params,
    thinking_options,
    tool_definitions as tools,
)
from hearth.proxy.api.body.message_content import (
    document,
    document_url_error,
    ends_open,
    image,
    is_media,
    omission_note,
    readable_texts,
    refuse_media,
    texts_only,
    uploaded_file_error,
)
from hearth.proxy.api.messages.errors import THREAD_UNSUPPORTED
from hearth.proxy.api.messages.tools import MessagesTools, read_choice, read_tools
from hearth.proxy.request.content_pieces import (
    ContentPart,
    join,
    join_text,
    joined_if_texts,
    merge_texts,
)
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.proxy.request.volatile_fields import without_telemetry
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

ROLES: Final = ("system", "user", "assistant")
_RESULT: Final = "tool_result"
_TEMPLATES_KNOW: Final = ("text", "image", _RESULT)  # other blocks become texts of our own
_Placed = tuple[dict[str, Any], str]  # a block and its path in the body
_READABLE: Final = ("text", "content", "base64")  # types of a document's source


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field has a value that the API or this server does not allow.
    """
    if body.get("thread") is not None:
        # The history would have to be stored here. After this error code the SDK sends the whole
        # conversation in each request.
        raise RequestError(
            "thread is not supported; send the whole conversation in messages.",
            code=THREAD_UNSUPPORTED,
            param="thread",
        )
    request_tools = read_tools(body)
    raw_messages = fields.json_list(body.get("messages"), "messages")
    if not raw_messages:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    reader = _MessagesReader(request_tools)
    reader.read_system(body.get("system"))
    for index, raw_message in enumerate(raw_messages):
        reader.read(raw_message, f"messages[{index}]")
    template_kwargs, thinking = thinking_options.read(body)
    limit = sampling_params.read_max_tokens(body, "max_tokens", low=0)
    return ParsedRequest(
        dialect="messages",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            reader.messages,
            request_tools.shown,
            template_kwargs,
            request_tools.deferred,
            continues=ends_open(reader.messages),
            thinking=thinking,
        ),
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit or None, stop="stop_sequences"
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        left_out=(*request_tools.dropped, *reader.left_out),
        constraints=dataclasses.replace(
            read_choice(body, request_tools), **_format(body), thinking_budget=thinking.budget
        ),
        prefill_only=limit == 0,
    )


def _format(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Constraints for a JSON schema, which the beta had in another field."""
    config = fields.optional_object(body, "output_config")
    for value, param in (
        (config.get("format"), "output_config.format"),
        (body.get("output_format"), "output_format"),
    ):
        if value is not None:
            answer_format = fields.json_object(value, param)
            if answer_format.get("type") != "json_schema":
                fields.refuse(f"{param}.type", answer_format.get("type"), "json_schema")
            return {
                "is_json": True,
                "schema": fields.json_object(answer_format.get("schema"), f"{param}.schema"),
            }
    return {}


# ---------------------------------------------------------------- the conversation


class _MessagesReader:
    """Reads messages; each becomes one or more messages of the prompt, in the order of blocks."""

    def __init__(self, request_tools: MessagesTools) -> None:
        """`request_tools` also receives the tools that the conversation defines."""
        self.messages: list[Any] = []
        self.left_out: list[str] = []  # types of the blocks that were left out
        self._tools = request_tools

    def read_system(self, system: Any) -> None:
        """Read the system prompt; telemetry in its first block is removed."""
        if system is None:
            return
        if type(system) is str:
            text = join([without_telemetry(system)])
        else:
            texts = texts_only(self._pieces(system, "system"))
            if texts and system[0].get("type") == "text":
                rest = without_telemetry(texts[0])
                texts[:1] = [rest] if rest or not texts[0] else []
            text = join(texts)
        if text:
            self.messages.append({"role": "system", "content": text})

    def read(self, value: Any, param: str) -> None:
        """Read the next message.

        Raises:
            RequestError: the message is malformed, or has a block that no model here can read.
        """
        message = fields.json_object(value, param)
        role = message.get("role")
        if type(role) is not str or role not in ROLES:
            fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
        content = message.get("content")
        where = f"{param}.content"
        if role == "system" and content is None:
            return  # the message carries settings only
        if type(content) is str:
            self.messages.append({"role": role, "content": content})
            return
        if type(content) is not list:
            fields.refuse(where, content, "a string or a list of blocks")
        blocks = list(fields.json_objects(content, where))
        reader = {"system": self._later_system, "user": self._user, "assistant": self._assistant}
        reader[role](blocks)

    # ---------------------------------------------------------------- by role

    def _later_system(self, blocks: list[_Placed]) -> None:
        texts: list[str] = []
        loaded: list[str] = []
        for block, param in blocks:
            if block.get("type") not in ("tool_addition", "tool_removal"):
                texts += texts_only(self._block(block, param))
            elif (name := self._changed_tool(block, param)) and block["type"] == "tool_addition":
                loaded.append(name)
            elif name:
                notice = f"The tool {name} is not available from here on."
                texts[-1:] = [join_text([*texts[-1:], notice])]
        message: dict[str, Any] = {"role": "system", "content": join(texts)}
        self.messages.append(message | {"tool_references": loaded} if loaded else message)

    def _changed_tool(self, block: dict[str, Any], param: str) -> str:
        """Return the name of the tool that `block` adds or removes; "" for a hosted tool."""
        tool = fields.json_object(block.get("tool"), f"{param}.tool")
        kind = tool.get("type")
        if kind == "tool_definition" and block["type"] == "tool_addition":
            where = f"{param}.tool.definition"
            return self._tools.add(
                fields.json_object(tool.get("definition"), where), where, late=True
            )
        if kind == "tool_reference":
            return fields.required_text(tool, "name", f"{param}.tool.name")
        self.left_out.append(str(kind))  # a hosted tool, not run here
        return ""

    def _user(self, blocks: list[_Placed]) -> None:
        count = len(self.messages)
        is_plain = all(block.get("type") in _TEMPLATES_KNOW for block, _ in blocks)
        for is_result, group in itertools.groupby(
            blocks, lambda placed: placed[0].get("type") == _RESULT
        ):
            if is_result:
                self.messages += [self._tool_result(*placed) for placed in group]
            elif pieces := [piece for placed in group for piece in self._block(*placed)]:
                content = join(pieces) if is_plain else merge_texts(join(pieces))
                self.messages.append({"role": "user", "content": content})
        if len(self.messages) == count:
            self.messages.append({"role": "user", "content": ""})

    def _assistant(self, blocks: list[_Placed]) -> None:
        texts, thoughts, signatures, calls = [], [], [], []
        for block, param in blocks:
            kind = block.get("type")
            if kind == "thinking":
                thoughts.append(fields.text(block, "thinking", f"{param}.thinking") or "")
                signatures.append(fields.text(block, "signature", f"{param}.signature"))
            elif kind == "tool_use":
                name = fields.required_text(block, "name", f"{param}.name")
                call_id = fields.required_text(block, "id", f"{param}.id")
                tool_input = block.get("input")
                tool_input = (
                    {} if tool_input is None else fields.json_object(tool_input, f"{param}.input")
                )
                calls.append(tools.tool_call(call_id, name, tool_input))
            elif kind == "redacted_thinking":  # no text to show; its data may name a turn
                signatures.append(fields.text(block, "data", f"{param}.data"))
                self.left_out.append(kind)
            else:
                texts += texts_only(self._block(block, param))
        message: dict[str, Any] = {"role": "assistant", "content": join(texts)}
        if any(thoughts):
            message["reasoning_content"] = join_text(thoughts)
        if any(signatures):
            message["signatures"] = [signature for signature in signatures if signature]
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _tool_result(self, block: dict[str, Any], param: str) -> dict[str, Any]:
        call_id = fields.required_text(block, "tool_use_id", f"{param}.tool_use_id")
        content = block.get("content")
        references: list[str] = []
        pieces: list[ContentPart] = []
        if type(content) is str:
            pieces.append(content)
        elif content is not None:
            for part, where in fields.json_objects(content, f"{param}.content"):
                kind = fields.text(part, "type", f"{where}.type") or ""
                if kind == "tool_reference":  # loads a deferred tool
                    name = fields.required_text(part, "tool_name", f"{where}.tool_name")
                    references.append(name)
                elif _is_lost(kind, part):
                    # A client cannot withdraw a result, so a refusal would end the conversation.
                    self.left_out.append(kind)
                    pieces.append(omission_note(kind))
                else:
                    pieces += self._block(part, where)
        if fields.boolean(block, "is_error"):  # templates have no field for an error
            head = pieces.pop(0) if pieces and type(pieces[0]) is str else ""
            assert isinstance(head, str), type(head)
            pieces.insert(0, head if head.lower().startswith("error") else f"Error: {head}")
        message = {"role": "tool", "tool_call_id": call_id, "content": join(pieces)}
        return message | {"tool_references": references} if references else message

    # ---------------------------------------------------------------- blocks

    def _pieces(self, content: Any, param: str) -> list[ContentPart]:
        if type(content) is str:
            return [content]
        if type(content) is not list:
            fields.refuse(param, content, "a string or a list of blocks")
        blocks = fields.json_objects(content, param)
        return [piece for block, where in blocks for piece in self._block(block, where)]

    def _block(self, block: dict[str, Any], param: str) -> list[ContentPart]:
        """Return the pieces that a block shows; none for a block without readable texts."""
        kind = fields.text(block, "type", f"{param}.type")
        if kind == "text":
            return [fields.some_text(block, "text", f"{param}.text")]
        if kind == "image":
            return [_image(block, param)]
        if kind == "document":
            return self._document(block, param)
        if kind == "search_result":
            title = fields.text(block, "title", f"{param}.title") or ""
            return joined_if_texts([title, *self._pieces(block.get("content"), f"{param}.content")])
        if not kind:
            fields.refuse(f"{param}.type", kind, "the type of a content block")
        refuse_media(param, kind)
        self.left_out.append(kind)
        return joined_if_texts(list(readable_texts(block)))

    def _document(self, block: dict[str, Any], param: str) -> list[ContentPart]:
        where = f"{param}.source"
        source = fields.json_object(block.get("source"), where)
        kind = source.get("type")
        lines = (fields.text(block, name, f"{param}.{name}") for name in ("title", "context"))
        head = [line for line in lines if line]
        if kind == "text":
            return joined_if_texts([*head, fields.required_text(source, "data", f"{where}.data")])
        if kind == "content":
            return joined_if_texts(
                [*head, *self._pieces(source.get("content"), f"{where}.content")]
            ) or [""]
        if kind == "base64":
            data = fields.required_text(source, "data", f"{where}.data")
            return [document(data, where, *head)]
        if kind == "url":
            raise document_url_error(where)
        if kind == "file":
            raise uploaded_file_error(where)
        fields.refuse(f"{where}.type", kind, "text, content or base64")


def _is_lost(kind: str, block: dict[str, Any]) -> bool:
    """Return whether no model here can read `block`, of type `kind`."""
    if kind == "document":
        source = block.get("source")
        return type(source) is not dict or source.get("type") not in _READABLE
    return kind != "image" and is_media(kind)


def _image(block: dict[str, Any], param: str) -> ContentPart:
    where = f"{param}.source"
    try:
        source = fields.json_object(block.get("source"), where)
        kind = source.get("type")
        if kind == "base64":
            media_type = fields.required_text(source, "media_type", f"{where}.media_type")
            data = fields.required_text(source, "data", f"{where}.data")
            return image(f"data:{media_type};base64,{data}", where)
        if kind == "url":
            return image(fields.required_text(source, "url", f"{where}.url"), where)
        if kind == "file":
            raise uploaded_file_error(where)
        fields.refuse(f"{where}.type", kind, "base64 or url")
    except RequestError as error:
        text = f"{param} is an image that cannot be read: {error}"
        raise RequestError(text, code=error.code, param=error.param) from None
