"""Turns the body of an Anthropic Messages request, and the blocks in it, into our request."""

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
    ends_open,
    image,
    is_media,
    no_files,
    no_urls,
    omitted,
    refuse_media,
    texts_of,
    texts_only,
)
from hearth.proxy.api.messages.errors import THREAD_UNSUPPORTED
from hearth.proxy.api.messages.tools import MessagesTools, read_choice, read_tools
from hearth.proxy.request.content_pieces import ContentPart, as_one, join, join_text, merged
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.proxy.request.volatile_fields import without_telemetry
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

ROLES: Final = ("system", "user", "assistant")
_RESULT: Final = "tool_result"
_TEMPLATES_KNOW: Final = ("text", "image", _RESULT)  # the words that show any other are ours
_Placed = tuple[dict[str, Any], str]  # a block, and where it stands
_READABLE: Final = ("text", "content", "base64")  # sources of a document


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    if body.get("thread") is not None:
        # We would have to hold the conversation: passed over, it would lose its history. At this
        # code the SDK sends the whole from then on.
        raise RequestError(
            "thread is not supported; send the whole conversation in messages.",
            code=THREAD_UNSUPPORTED,
            param="thread",
        )
    found = read_tools(body)
    given = fields.rows(body.get("messages"), "messages")
    if not given:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    conversation = _MessagesReader(found)
    conversation.read_system(body.get("system"))
    for index, value in enumerate(given):
        conversation.read(value, f"messages[{index}]")
    template_kwargs, thinking = thinking_options.read(body)
    limit = sampling_params.read_max_tokens(body, "max_tokens", low=0)
    return ParsedRequest(
        dialect="messages",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            conversation.messages,
            found.shown,
            template_kwargs,
            found.deferred,
            continues=ends_open(conversation.messages),
            thinking=thinking,
        ),
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit or None, stop="stop_sequences"
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        left_out=(*found.dropped, *conversation.left_out),
        constraints=dataclasses.replace(
            read_choice(body, found), **_format(body), thinking_budget=thinking.budget
        ),
        prefill_only=limit == 0,
    )


def _format(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Constraints that ask for a JSON schema, by its name or the beta's."""
    config = fields.optional_record(body, "output_config")
    for value, param in (
        (config.get("format"), "output_config.format"),
        (body.get("output_format"), "output_format"),
    ):
        if value is not None:
            shape = fields.record(value, param)
            if shape.get("type") != "json_schema":
                fields.refuse(f"{param}.type", shape.get("type"), "json_schema")
            return {
                "is_json": True,
                "schema": fields.record(shape.get("schema"), f"{param}.schema"),
            }
    return {}


# ---------------------------------------------------------------- the conversation


class _MessagesReader:
    """Turns messages into ours, each into one or more, in its blocks' order."""

    def __init__(self, found: MessagesTools) -> None:
        """Tools that the conversation itself defines are added to `found`."""
        self.messages: list[Any] = []
        self.left_out: list[str] = []  # types of blocks that no model here reads
        self._tools = found

    def read_system(self, system: Any) -> None:
        """Take the system prompt; a first block that is telemetry alone is left out."""
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
        """Take the next message.

        Raises:
            RequestError: it is none, or holds what no model here can read.
        """
        row = fields.record(value, param)
        role = row.get("role")
        if type(role) is not str or role not in ROLES:
            fields.refuse(f"{param}.role", role, "one of " + ", ".join(ROLES))
        content = row.get("content")
        where = f"{param}.content"
        if role == "system" and content is None:
            return  # one that carries settings only
        if type(content) is str:
            self.messages.append({"role": role, "content": content})
            return
        if type(content) is not list:
            fields.refuse(where, content, "a string or a list of blocks")
        blocks = list(fields.records(content, where))
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
                gone = f"The tool {name} is not available from here on."
                texts[-1:] = [join_text([*texts[-1:], gone])]
        message: dict[str, Any] = {"role": "system", "content": join(texts)}
        self.messages.append(message | {"tool_references": loaded} if loaded else message)

    def _changed_tool(self, block: dict[str, Any], param: str) -> str:
        """Return which tool comes or goes in mid-conversation; "" of a server's."""
        tool = fields.record(block.get("tool"), f"{param}.tool")
        kind = tool.get("type")
        if kind == "tool_definition" and block["type"] == "tool_addition":
            where = f"{param}.tool.definition"
            return self._tools.add(fields.record(tool.get("definition"), where), where, late=True)
        if kind == "tool_reference":
            return fields.required_text(tool, "name", f"{param}.tool.name")
        self.left_out.append(str(kind))  # which are not run here
        return ""

    def _user(self, blocks: list[_Placed]) -> None:
        count = len(self.messages)
        is_plain = all(block.get("type") in _TEMPLATES_KNOW for block, _ in blocks)
        for are_results, run in itertools.groupby(
            blocks, lambda each: each[0].get("type") == _RESULT
        ):
            if are_results:
                self.messages += [self._tool_result(*each) for each in run]
            elif pieces := [piece for each in run for piece in self._block(*each)]:
                content = join(pieces) if is_plain else merged(join(pieces))
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
                given = block.get("input")
                given = {} if given is None else fields.record(given, f"{param}.input")
                calls.append(tools.tool_call(call_id, name, given))
            elif kind == "redacted_thinking":  # nothing to show: at most a name of what was thought
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
            for part, where in fields.records(content, f"{param}.content"):
                kind = fields.text(part, "type", f"{where}.type") or ""
                if kind == "tool_reference":  # the name of a deferred tool, which it loads
                    name = fields.required_text(part, "tool_name", f"{where}.tool_name")
                    references.append(name)
                elif _is_lost(kind, part):
                    # No client can take a result back: refused, it would end the session.
                    self.left_out.append(kind)
                    pieces.append(omitted(kind))
                else:
                    pieces += self._block(part, where)
        if fields.boolean(block, "is_error"):  # templates have no other place for it
            head = pieces.pop(0) if pieces and type(pieces[0]) is str else ""
            assert isinstance(head, str), type(head)
            pieces.insert(0, head if head.lower().startswith("error") else f"Error: {head}")
        message = {"role": "tool", "tool_call_id": call_id, "content": join(pieces)}
        return message | {"tool_references": references} if references else message

    # ---------------------------------------------------------------- what blocks show

    def _pieces(self, content: Any, param: str) -> list[ContentPart]:
        if type(content) is str:
            return [content]
        if type(content) is not list:
            fields.refuse(param, content, "a string or a list of blocks")
        blocks = fields.records(content, param)
        return [piece for block, where in blocks for piece in self._block(block, where)]

    def _block(self, block: dict[str, Any], param: str) -> list[ContentPart]:
        """Return what a block shows: nothing where it is of a kind that has nothing to show."""
        kind = fields.text(block, "type", f"{param}.type")
        if kind == "text":
            return [fields.some_text(block, "text", f"{param}.text")]
        if kind == "image":
            return [_image(block, param)]
        if kind == "document":
            return self._document(block, param)
        if kind == "search_result":
            title = fields.text(block, "title", f"{param}.title") or ""
            return as_one([title, *self._pieces(block.get("content"), f"{param}.content")])
        if not kind:
            fields.refuse(f"{param}.type", kind, "the type of a content block")
        refuse_media(param, kind)
        self.left_out.append(kind)
        return as_one(list(texts_of(block)))

    def _document(self, block: dict[str, Any], param: str) -> list[ContentPart]:
        where = f"{param}.source"
        source = fields.record(block.get("source"), where)
        kind = source.get("type")
        named = (fields.text(block, name, f"{param}.{name}") for name in ("title", "context"))
        head = [row for row in named if row]
        if kind == "text":
            return as_one([*head, fields.required_text(source, "data", f"{where}.data")])
        if kind == "content":
            return as_one([*head, *self._pieces(source.get("content"), f"{where}.content")]) or [""]
        if kind == "base64":
            data = fields.required_text(source, "data", f"{where}.data")
            return [document(data, where, *head)]
        if kind == "url":
            raise no_urls(where)
        if kind == "file":
            raise no_files(where)
        fields.refuse(f"{where}.type", kind, "text, content or base64")


def _is_lost(kind: str, block: dict[str, Any]) -> bool:
    """Return whether no model here can read `block`."""
    if kind == "document":
        source = block.get("source")
        return type(source) is not dict or source.get("type") not in _READABLE
    return kind != "image" and is_media(kind)


def _image(block: dict[str, Any], param: str) -> ContentPart:
    where = f"{param}.source"
    try:
        source = fields.record(block.get("source"), where)
        kind = source.get("type")
        if kind == "base64":
            media_type = fields.required_text(source, "media_type", f"{where}.media_type")
            data = fields.required_text(source, "data", f"{where}.data")
            return image(f"data:{media_type};base64,{data}", where)
        if kind == "url":
            return image(fields.required_text(source, "url", f"{where}.url"), where)
        if kind == "file":
            raise no_files(where)
        fields.refuse(f"{where}.type", kind, "base64 or url")
    except RequestError as error:
        text = f"{param} is an image that cannot be read: {error}"
        raise RequestError(text, code=error.code, param=error.param) from None
