"""Makes the body and the headers that a cloud model is sent of those that a client sent.

LiteLLM acts upon many names that a body may hold: another address for the request and the user's
key with it, another model's key, callbacks, files, MCP servers. So a body is built anew of the
fields in `cloud_fields`, in the parts that it nests too, and everything else stays behind. A tool,
or a block of the history, of a kind that does not pass is left out as the local side leaves it out;
what a user shows and the cloud would not be shown is refused.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from hearth.proxy.api.body import (
    field_readers as fields,
    unknown_blocks_to_text as unknown_blocks,
)
from hearth.proxy.api.error_bodies import THREAD_UNSUPPORTED
from hearth.proxy.gateway.cloud import cloud_fields as allowed
from hearth.proxy.gateway.cloud.cloud_urls import check_data, check_url
from hearth.proxy.gateway.cloud.schema_limits import check_schemas
from hearth.proxy.http.http_exchange import RawHeaders
from hearth.shared.errors import RequestError

CloudDialect = Literal[
    "chat",
    "completions",
    "messages",
    "messages_count",
    "responses",
    "responses_count",
    "embeddings",
]
Row = dict[str, Any]

HEADER_CHARS_MAX: Final = 1_024
NESTED_MAX: Final = 4  # blocks within blocks: an image of a document of a result of a message
_HEADERS: Final = {  # whose values say nothing but this
    "anthropic-version": re.compile(r"\d{4}-\d\d-\d\d"),
    "anthropic-beta": re.compile(r"[a-z0-9._-]+(?: ?, ?[a-z0-9._-]+)*", re.I),
    "user-agent": re.compile(r"[ -~]+"),
}
_DATED: Final = re.compile(r"_\d{4}_\d\d_\d\d")  # of a hosted tool's type
_PARTED: Final = ("function_call_output", "custom_tool_call_output")  # with parts as output
# Passed over they would change what is asked: each names a state that this server does not keep.
_STATES: Final = {
    "conversation": "send the whole conversation in input",
    "prompt": "send the prompt's text itself",
    "background": "leave it out, or send false",
}


def cloud_body(dialect: CloudDialect, body: Row, group: str) -> Row:
    """Return the body that the model `group` is sent; `body` stays as it is.

    Of a Responses body, ResponseStore.for_cloud has judged what it refers to.

    Raises:
        RequestError: it is not of the API's shape, or shows or needs what does not pass.
    """
    picked = _only(body, allowed.BODY[dialect]) | {"model": group}
    for name in ("user", "safety_identifier"):
        if name in picked and type(picked[name]) is not str:
            del picked[name]
    found = _Filter()
    if dialect == "chat":
        found.chat(picked)
    elif dialect in ("messages", "messages_count"):
        if body.get("thread") is not None:
            text = "thread is not supported; send the whole conversation in messages."
            raise RequestError(text, code=THREAD_UNSUPPORTED, param="thread")
        found.messages(picked)
    elif dialect in ("responses", "responses_count"):
        _refuse_states(body)
        found.responses(picked)
    check_schemas(picked)
    unknown_blocks.note(found.left_out)
    return picked


def cloud_headers(headers: Mapping[str, str]) -> RawHeaders:
    """Return what of a client's `headers`, their names in lower case, goes with the body."""
    passed = [(b"content-type", b"application/json")]
    for name, pattern in _HEADERS.items():
        value = headers.get(name, "")
        if len(value) <= HEADER_CHARS_MAX and pattern.fullmatch(value):
            passed.append((name.encode(), value.encode()))
    return passed


def _refuse_states(body: Row) -> None:
    for name, remedy in _STATES.items():
        if body.get(name):
            raise RequestError(
                f"{name} is not supported; {remedy}.", code="unsupported_parameter", param=name
            )


def _only(row: Row, names: allowed.Fields) -> Row:
    return {name: value for name, value in row.items() if name in names}


class _Filter:
    """Filters one body, in place at its top and by copies below; `left_out` are kinds that go."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    # ---------------------------------------------------------------- chat

    def chat(self, body: Row) -> None:
        if "messages" in body:
            body["messages"] = _mapped(body["messages"], "messages", self._chat_message)
        self._tools(body, self._chat_tool)
        if "functions" in body:
            body["functions"] = _mapped(body["functions"], "functions", _function)

    def _chat_message(self, row: Row, param: str) -> Row:
        row = _only(row, allowed.CHAT_MESSAGE)
        self._content(row, param, self._chat_part)
        if row.get("content") == []:  # which no provider takes
            row["content"] = ""
        if row.get("tool_calls") is not None:
            row["tool_calls"] = _mapped(row["tool_calls"], f"{param}.tool_calls", _chat_call)
        if row.get("audio") is not None:
            row["audio"] = _only(fields.record(row["audio"], f"{param}.audio"), allowed.AUDIO)
        self._opaque(row, param)
        return row

    def _opaque(self, row: Row, param: str) -> None:
        """Filter what LiteLLM gave the client of a provider's opaque blocks."""
        for name, kinds in allowed.CHAT_OPAQUE.items():
            if row.get(name) is not None:
                known = functools.partial(self._opaque_block, kinds)
                row[name] = self._kept(row[name], f"{param}.{name}", known)
        if row.get("provider_specific_fields") is not None:
            where = f"{param}.provider_specific_fields"
            held = _only(
                fields.record(row["provider_specific_fields"], where), allowed.PROVIDER_BLOCKS
            )
            for name, value in held.items():
                if type(value) is list and name != "thought_signatures":
                    held[name] = self._blocks(value, f"{where}.{name}", "assistant", 0)
            _set_or_leave_out(row, held)

    def _opaque_block(
        self, kinds: Mapping[str, allowed.Fields], row: Row, param: str
    ) -> Row | None:
        block = self._known(row, row.get("type"), kinds, param)
        if (
            block is not None
            and block["type"] == "reasoning"
            and not block.get("encrypted_content")
        ):
            return None  # an id alone may be of another client's
        return block

    def _chat_part(self, row: Row, param: str, role: Any) -> Row | None:
        kind = row.get("type", "text")
        part = self._known(row, kind, allowed.CHAT_PARTS, param, role)
        if part is None:
            return None
        if kind == "image_url":
            part["image_url"] = _image_url(part.get("image_url"), f"{param}.image_url")
        elif kind == "file":
            part["file"] = _file(part.get("file"), f"{param}.file")
        elif kind == "input_audio":
            audio = fields.record(part.get("input_audio"), f"{param}.input_audio")
            check_data(fields.text(audio, "data", f"{param}.input_audio.data") or "", param)
        return part

    def _chat_tool(self, row: Row, param: str) -> Row | None:
        kind = row.get("type", "function")
        tool = self._known(row, kind, allowed.CHAT_TOOLS, param)
        if tool is not None and kind == "function":
            tool["function"] = _function(
                fields.record(row.get("function"), f"{param}.function"), param
            )
        return tool

    # ---------------------------------------------------------------- Messages

    def messages(self, body: Row) -> None:
        if "messages" in body:
            body["messages"] = self._kept(body["messages"], "messages", self._messages_message)
        if body.get("system") is not None and type(body["system"]) is not str:
            body["system"] = self._blocks(body["system"], "system", "system", 0)
        self._tools(body, self._messages_tool)
        if "metadata" in body:
            metadata = fields.optional_record(body, "metadata")
            user_id = metadata.get("user_id")
            body["metadata"] = {"user_id": user_id} if type(user_id) is str else {}

    def _messages_message(self, row: Row, param: str) -> Row | None:
        message = _only(row, allowed.MESSAGES_MESSAGE)
        self._content(message, param, lambda part, where, role: self._block(part, where, role, 0))
        return None if row.get("content") and not message["content"] else message

    def _blocks(self, value: Any, param: str, role: Any, depth: int) -> list[Row]:
        if depth > NESTED_MAX:
            fields.refuse(param, value, f"blocks nested up to {NESTED_MAX} deep")
        found = []
        for index, item in enumerate(fields.rows(value, param)):
            where = f"{param}[{index}]"
            if (block := self._block(fields.record(item, where), where, role, depth)) is not None:
                found.append(block)
        return found

    def _block(self, row: Row, param: str, role: Any, depth: int) -> Row | None:
        kind = row.get("type")
        block = self._known(row, kind, allowed.MESSAGES_BLOCKS, param, role)
        if block is None:
            return None
        if kind in ("image", "document"):
            block["source"] = self._source(block.get("source"), f"{param}.source", role, depth)
        elif kind in ("tool_result", "search_result") and type(block.get("content")) is list:
            block["content"] = self._blocks(block["content"], f"{param}.content", "tool", depth + 1)
        elif kind in ("tool_addition", "tool_removal"):
            return self._tool_change(block, param)
        return block

    def _source(self, value: Any, param: str, role: Any, depth: int) -> Row:
        row = fields.record(value, param)
        kind = row.get("type")
        if kind == "file":
            raise _no_files(f"{param}.file_id")
        if type(kind) is not str or kind not in allowed.MESSAGES_SOURCES:
            fields.refuse(f"{param}.type", kind, ", ".join(allowed.MESSAGES_SOURCES))
        source = _only(row, allowed.MESSAGES_SOURCES[kind])
        if kind == "url":
            check_url(fields.required_text(source, "url", f"{param}.url"), f"{param}.url")
        elif kind == "content" and type(source.get("content")) is list:
            source["content"] = self._blocks(source["content"], f"{param}.content", role, depth + 1)
        return source

    def _tool_change(self, block: Row, param: str) -> Row | None:
        """Return a tool that comes or goes amid the conversation; None where it may not."""
        tool = fields.record(block.get("tool"), f"{param}.tool")
        kind = tool.get("type")
        if kind == "tool_reference":
            return block | {"tool": _only(tool, frozenset(("type", "name")))}
        if kind != "tool_definition":
            self.left_out.append(str(kind))
            return None
        where = f"{param}.tool.definition"
        known = self._messages_tool(fields.record(tool.get("definition"), where), where)
        return None if known is None else block | {"tool": {"type": kind, "definition": known}}

    def _messages_tool(self, row: Row, param: str) -> Row | None:
        kind = row.get("type")
        if kind is None or kind == "custom" or _begins(kind, allowed.MESSAGES_TOOL_TYPES):
            return _only(row, allowed.MESSAGES_TOOL)
        self.left_out.append(str(kind))
        return None

    # ---------------------------------------------------------------- Responses

    def responses(self, body: Row) -> None:
        if body.get("input") is not None and type(body["input"]) is not str:
            body["input"] = self._kept(body["input"], "input", self._item)
        self._tools(body, self._responses_tool)

    def _item(self, row: Row, param: str) -> Row | None:
        kind = row.get("type") or ("message" if "role" in row else "item_reference")
        item = self._known(row, kind, allowed.RESPONSES_ITEMS, param)
        if item is None:
            return None
        if kind == "message":
            self._content(item, param, self._responses_part)
            return None if row.get("content") and not item["content"] else item
        if type(item.get("tools")) is list:
            item["tools"] = self._kept(item["tools"], f"{param}.tools", self._responses_tool)
        elif kind == "computer_call_output":
            where = f"{param}.output"
            item["output"] = self._responses_part(fields.record(item.get("output"), where), where)
        elif kind in _PARTED and type(item.get("output")) is list:
            item["output"] = self._kept(item["output"], f"{param}.output", self._responses_part)
        return item

    def _responses_part(self, row: Row, param: str, role: Any = "user") -> Row | None:
        kind = row.get("type")
        part = self._known(row, kind, allowed.RESPONSES_PARTS, param, role)
        if part is None:
            return None
        if row.get("file_id") is not None:
            raise _no_files(f"{param}.file_id")
        for name in ("image_url", "file_url"):
            if part.get(name) is not None:
                check_url(fields.required_text(part, name, f"{param}.{name}"), f"{param}.{name}")
        if part.get("file_data") is not None:
            check_data(fields.text(part, "file_data", f"{param}.file_data") or "", param)
        return part

    def _responses_tool(self, row: Row, param: str) -> Row | None:
        kind = row.get("type")
        plain = _DATED.sub("", kind) if type(kind) is str else None
        tool = self._known(row, plain, allowed.RESPONSES_TOOLS, param)
        if tool is None:
            return None
        if plain == "code_interpreter":  # else of files and containers of the user's account
            tool["container"] = {"type": "auto"}
        elif plain == "namespace":
            tool["tools"] = self._kept(tool.get("tools"), f"{param}.tools", self._responses_tool)
        return tool

    # ---------------------------------------------------------------- in all of them

    def _known(
        self, row: Row, kind: Any, kinds: Mapping[str, allowed.Fields], param: str, role: Any = ""
    ) -> Row | None:
        """Return the fields that a part of `kind` may have; None where it is left out.

        Raises:
            RequestError: what a user or a tool shows is of an unknown kind: without it the answer
                would be to another question.
        """
        if type(kind) is str and (names := kinds.get(kind)) is not None:
            return _only(row, names)
        if role in ("user", "tool"):
            fields.refuse(f"{param}.type", kind, "for a cloud model " + ", ".join(kinds))
        self.left_out.append(str(kind))
        return None

    def _content(self, row: Row, param: str, part: Callable[[Row, str, Any], Row | None]) -> None:
        content = row.get("content")
        if content is None or type(content) is str:
            return
        where, role = f"{param}.content", row.get("role")
        row["content"] = self._kept(content, where, lambda item, at: part(item, at, role))

    def _kept(self, value: Any, param: str, part: Callable[[Row, str], Row | None]) -> list[Row]:
        found = []
        for index, item in enumerate(fields.rows(value, param)):
            where = f"{param}[{index}]"
            if (kept := part(fields.record(item, where), where)) is not None:
                found.append(kept)
        return found

    def _tools(self, body: Row, tool: Callable[[Row, str], Row | None]) -> None:
        """Filter the tools, and with the last of them take out what chooses among them."""
        if body.get("tools") is None:
            body.pop("tools", None)
            return
        body["tools"] = self._kept(body["tools"], "tools", tool)
        choice = body.get("tool_choice")
        chosen = choice.get("type") if type(choice) is dict else None
        if not body["tools"] or (type(chosen) is str and chosen in self.left_out):
            body.pop("tool_choice", None)
        if not body["tools"]:
            del body["tools"]
            body.pop("parallel_tool_calls", None)


def _mapped(value: Any, param: str, part: Callable[[Row, str], Row]) -> list[Row]:
    found = []
    for index, item in enumerate(fields.rows(value, param)):
        where = f"{param}[{index}]"
        found.append(part(fields.record(item, where), where))
    return found


def _chat_call(row: Row, param: str) -> Row:
    call = _only(row, allowed.CHAT_CALL)
    if call.get("function") is not None:
        called = fields.record(call["function"], f"{param}.function")
        call["function"] = _only(called, allowed.CALLED)
    if call.get("provider_specific_fields") is not None:
        held = fields.record(call["provider_specific_fields"], f"{param}.provider_specific_fields")
        _set_or_leave_out(call, _only(held, allowed.PROVIDER_BLOCKS))
    return call


def _set_or_leave_out(row: Row, held: Row) -> None:
    """Put LiteLLM's own field into `row` where it holds something: OpenAI refuses the name."""
    row["provider_specific_fields"] = held
    if not any(value is not None for value in held.values()):
        del row["provider_specific_fields"]


def _function(row: Row, param: str) -> Row:
    return _only(row, allowed.FUNCTION)


def _image_url(value: Any, param: str) -> Any:
    if type(value) is str:
        check_url(value, param)
        return value
    holder = _only(fields.record(value, param), allowed.IMAGE_URL)
    check_url(fields.required_text(holder, "url", f"{param}.url"), f"{param}.url")
    return holder


def _file(value: Any, param: str) -> Row:
    row = fields.record(value, param)
    if row.get("file_id") is not None:
        raise _no_files(f"{param}.file_id")
    holder = _only(row, allowed.FILE)
    check_data(fields.required_text(holder, "file_data", f"{param}.file_data"), param)
    return holder


def _begins(kind: Any, begins: tuple[str, ...]) -> bool:
    return type(kind) is str and kind.startswith(begins)


def _no_files(param: str) -> RequestError:
    return RequestError(
        f"{param} names an uploaded file, and this server passes none on. Send the file itself, in "
        "base64.",
        code="unsupported_content",
        param=param,
    )
