"""Translates OpenAI chat completions: the body to our request, our events to the API's chunks.

Nothing of LiteLLM is imported here.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.body import (
    field_readers as fields,
    response_format,
    sampling_params,
    thinking_options,
    tool_definitions as tools,
)
from hearth.proxy.api.body.message_content import (
    content_text,
    join_text,
    read_content,
    result_content,
    said_texts,
)
from hearth.proxy.api.body.prediction import read_prediction
from hearth.proxy.api.multi_choice_stream import MergedChoices
from hearth.proxy.api.usage_extras import extra_fields, image_fields, prediction_fields
from hearth.proxy.request.parsed_request import AdmittedRequest, ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints, Delta, Finished, Prompt, TokenLogprob, Usage

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_ROLE_SHOWN: Final = {"developer": "system", "function": "tool"}  # as chat templates know them
CHOICES_MAX: Final = 8  # answers to one request
LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    shown, deferred, dropped = _tools(body)
    rows, left_out = _messages(body)
    thought = thinking_options.read(body)
    choices = fields.integer(body, "n", 1, CHOICES_MAX) or 1
    stream_options = fields.optional_record(body, "stream_options")
    limit = sampling_params.read_max_tokens(body, "max_completion_tokens", "max_tokens")
    return ParsedRequest(
        dialect="chat",
        model=str(body.get("model") or ""),
        prompt=Prompt(rows, shown, thought.template_kwargs, deferred),
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit, stop="stop", top_logprobs=_top_logprobs(body)
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        include_usage=fields.boolean(stream_options, "include_usage"),
        left_out=(*dropped, *left_out),
        constraints=_constraints(body, [*shown, *deferred], dropped, thought.budget),
        choices=choices,
        prediction=read_prediction(body, choices),
    )


def _constraints(
    body: dict[str, Any], offered: list[Any], dropped: tuple[str, ...], budget: int | None
) -> Constraints:
    names = {tool["function"]["name"]: [tool["function"]["name"]] for tool in offered}
    choice = tools.openai_choice(_tool_choice(body), names, dropped)
    wanted = response_format.read_format(
        body.get("response_format"), "response_format", "json_schema"
    )
    return Constraints(
        tool_choice=choice.mode,
        tool_names=choice.names,
        parallel_calls=fields.boolean(body, "parallel_tool_calls", default=not is_legacy(body)),
        is_json=wanted.is_json,
        schema=wanted.schema,
        thinking_budget=budget,
    )


def _tool_choice(body: dict[str, Any]) -> Any:
    """Return the `tool_choice`, or what the legacy `function_call` says in its words."""
    legacy = body.get("function_call")
    if body.get("tool_choice") is not None or legacy is None:
        return body.get("tool_choice")
    if type(legacy) is dict:
        return {"type": "function", "function": legacy}
    if legacy not in ("none", "auto"):
        fields.refuse("function_call", legacy, "none, auto or an object with a name")
    return legacy


def is_legacy(body: dict[str, Any]) -> bool:
    """Return whether `body` offers functions of the API before tools: one call an answer."""
    return bool(body.get("functions")) and not body.get("tools")


def custom_names(body: dict[str, Any]) -> frozenset[str]:
    """Return the names of the tools of a parsed `body` that take free text."""
    rows = body.get("tools") or []
    return frozenset(row["custom"]["name"] for row in rows if row.get("type") == "custom")


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
    """Give results without an id those of the calls before them, in order: templates want one."""
    waiting: list[str] = []
    for row in rows:
        if row["role"] == "assistant":
            waiting = [call["id"] for call in row.get("tool_calls", ())]
        elif row.get("tool_call_id") in waiting:
            waiting.remove(row["tool_call_id"])
        elif row["role"] == "tool" and "tool_call_id" not in row and waiting:
            row["tool_call_id"] = waiting.pop(0)


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
        read = read_content if role == "user" else content_text
        message["content"] = read(content, where, untyped="text")
    if name := fields.text(row, "name", f"{param}.name"):
        message["name"] = name
    return message


def _assistant(row: dict[str, Any], param: str, left_out: list[str]) -> dict[str, Any]:
    calls = _tool_calls(row, param)
    content, thoughts = _said(row.get("content"), f"{param}.content", left_out)
    if row.get("thinking_blocks") is not None:  # of a cloud model, as LiteLLM tells them
        where = f"{param}.thinking_blocks"
        blocks = fields.rows(row["thinking_blocks"], where)
        thoughts = join_text(said_texts(blocks, where, left_out)[1]) or thoughts
    reasoning = fields.text(row, "reasoning_content", f"{param}.reasoning_content")
    if reasoning is None:
        reasoning = fields.text(row, "reasoning", f"{param}.reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if refusal := fields.text(row, "refusal", f"{param}.refusal"):
        message["content"] = content or refusal
    if reasoning := reasoning or thoughts:
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


def _said(content: Any, param: str, left_out: list[str]) -> tuple[str, str]:
    """Return what an assistant said and what it thought; null where it only called."""
    if content is None:
        return "", ""
    if type(content) is not list:
        return content_text(content, param), ""
    texts, thoughts = said_texts(content, param, left_out)
    return join_text(texts), join_text(thoughts)


# ---------------------------------------------------------------- our events to its fields


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return `usage` as chat completions have it, with our own fields beside them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} | image_fields(usage),
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **prediction_fields(usage),
        },
        **extra_fields(usage),
    }


def logprob_fields(rows: list[TokenLogprob]) -> dict[str, Any]:
    """Return `logprobs` of a choice for the tokens in `rows`."""
    return {
        "content": [
            {
                "token": row.token,
                "bytes": list(row.token_bytes),
                "logprob": max(row.logprob, LOGPROB_MIN),
                "top_logprobs": [
                    {"token": text, "bytes": list(octets), "logprob": max(logprob, LOGPROB_MIN)}
                    for _, text, octets, logprob in row.top
                ],
            }
            for row in rows
        ],
        "refusal": None,
    }


PROGRESS: Final = "prefill"  # our field of a chunk that says only that the prompt is being read


@dataclass(slots=True)
class ChatChunk:
    """One chunk of one choice; where `progress` is set it says nothing else."""

    index: int
    delta: dict[str, Any]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    progress: dict[str, int] | None = None  # of the prefill, in tokens


async def chunks(
    admitted: AdmittedRequest, choices: MergedChoices
) -> AsyncGenerator[ChatChunk, None]:
    """Yield the chunks of a stream, beginning at once; silences too, so that it never falls silent.

    Raises:
        RequestError: it broke off.
    """
    writers = [_DeltaWriter(index, admitted.request.body) for index in range(len(admitted.answers))]
    for writer in writers:
        yield ChatChunk(writer.index, {"role": "assistant", "content": ""})
    sent_at = time.monotonic()
    async with aclosing(choices.events(sse.PING_S)) as events:
        async for index, row in events:
            found = writers[index].chunks(row) if row is not None else []
            if not found and (row is None or time.monotonic() - sent_at >= sse.PING_S):
                # LiteLLM drops a chunk that says nothing at all: a sign of life tells the progress.
                found = [ChatChunk(0, {}, progress=_progress(admitted))]
            for chunk in found:
                yield chunk
                sent_at = time.monotonic()


def _progress(admitted: AdmittedRequest) -> dict[str, int]:
    answer = admitted.answer
    return {"done_tokens": answer.done_tokens, "prompt_tokens": answer.prompt_tokens}


class _DeltaWriter:
    """Writes one choice as chunks. A custom tool's text, inside JSON, waits until it is whole."""

    def __init__(self, index: int, body: dict[str, Any]) -> None:
        """`body` is of the request: it says which shapes calls have."""
        self.index = index
        self._custom = custom_names(body)
        self._is_legacy = is_legacy(body)
        self._calls = 0
        self._open: dict[str, Any] | None = None  # the delta of a custom call
        self._arguments: list[str] = []  # of that

    def chunks(self, row: Delta | Finished) -> list[ChatChunk]:
        if isinstance(row, Finished):
            called = "function_call" if self._is_legacy else "tool_calls"
            reason = called if row.reason == "tool_calls" else row.reason
            return [
                *(ChatChunk(self.index, delta) for delta in self._close()),
                ChatChunk(self.index, {}, finish_reason=reason),
            ]
        deltas = self._called(row) if row.channel == "tool_call" else _text_deltas(row)
        if row.logprobs and not deltas:
            deltas = [{}]
        found = [ChatChunk(self.index, delta) for delta in deltas]
        if found:
            found[-1].logprobs = row.logprobs
        return found

    def _called(self, row: Delta) -> list[dict[str, Any]]:
        if row.call is None:
            if self._open is None:
                return [self._more(row.text)] if row.text else []
            self._arguments.append(row.text)
            return []
        ended = self._close()
        index, self._calls = self._calls, self._calls + 1
        call: dict[str, Any] = {"index": index, "id": row.call.id}
        if row.call.name in self._custom:
            self._open = call | {"type": "custom", "custom": {"name": row.call.name}}
            self._arguments = [row.text]
            return ended
        function = {"name": row.call.name, "arguments": row.text}
        if self._is_legacy:
            return [*ended, {"function_call": function}]
        return [*ended, {"tool_calls": [call | {"type": "function", "function": function}]}]

    def _more(self, text: str) -> dict[str, Any]:
        if self._is_legacy:
            return {"function_call": {"arguments": text}}
        return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": text}}]}

    def _close(self) -> list[dict[str, Any]]:
        """Return the delta of the custom call that was open, if one was."""
        call, self._open = self._open, None
        if call is None:
            return []
        call["custom"]["input"] = tools.free_text("".join(self._arguments))
        return [{"tool_calls": [call]}]


def _text_deltas(row: Delta) -> list[dict[str, Any]]:
    name = "reasoning_content" if row.channel == "reasoning" else "content"
    return [{name: row.text}] if row.text else []


@dataclass(slots=True)
class WholeChoice:
    """One choice, complete: what its chunks add up to."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    function_call: dict[str, str] = field(default_factory=dict)  # a legacy request's one call
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, chunk: ChatChunk) -> None:
        self.content.append(chunk.delta.get("content", ""))
        self.reasoning.append(chunk.delta.get("reasoning_content", ""))
        for call in chunk.delta.get("tool_calls", ()):
            if call["index"] == len(self.calls):
                self.calls.append({name: call[name] for name in call if name != "index"})
            else:
                self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        for name, text in chunk.delta.get("function_call", {}).items():
            self.function_call[name] = self.function_call.get(name, "") + text
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason

    def message(self) -> dict[str, Any]:
        """Return the message; its content is null where it only calls."""
        content = "".join(self.content)
        is_call = bool(self.calls or self.function_call)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if not is_call:
            message["content"] = content
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        if self.function_call:
            message["function_call"] = self.function_call
        return message


async def whole_choices(admitted: AdmittedRequest, choices: MergedChoices) -> list[WholeChoice]:
    """Return the choices once all are complete.

    Raises:
        RequestError: one broke off.
    """
    found = [WholeChoice() for _ in admitted.answers]
    async with aclosing(chunks(admitted, choices)) as rows:
        async for chunk in rows:
            found[chunk.index].add(chunk)
    return found


# ---------------------------------------------------------------- what LiteLLM makes of it


def exact_chunk(row: dict[str, Any], created: int) -> dict[str, Any]:
    """Return a chunk as OpenAI's API has it.

    LiteLLM leaves out what is null, types each piece of a call, puts a choice into the chunk of the
    usage, and gives its last chunks another time.
    """
    row["created"] = created
    if "usage" in row:
        row["choices"] = []
    for choice in row["choices"]:
        choice.setdefault("finish_reason", None)
        extra = choice["delta"].get("provider_specific_fields") or {}
        if PROGRESS in extra:  # ours: a client's field, not the message's
            del choice["delta"]["provider_specific_fields"]
            row[PROGRESS] = extra[PROGRESS]
        for call in choice["delta"].get("tool_calls", ()):
            if "id" not in call:
                call.pop("type", None)
    return row


def exact_whole(row: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer as OpenAI's API has it: LiteLLM leaves out what is null."""
    for choice in row["choices"]:
        choice.setdefault("logprobs", None)
        choice["message"].setdefault("content", None)
        choice["message"].setdefault("refusal", None)
    return row
