"""Leads one conversation through an official SDK, in the same way for all dialects.

What is sent back as history are the SDK's own objects, as its documentation has them.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import ollama
import openai

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.model_families import family
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.server import Server
from tests.helpers.worker_processes.scripted_worker import DICTATION

Tool = dict[str, Any]  # name, description, parameters

WEATHER: Final[Tool] = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "enum": [1, 3, 7]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: Final[Tool] = {
    "name": "get_time",
    "description": "Tells the time.",
    "parameters": {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    },
}
TOOLS: Final = (WEATHER, CLOCK)
OSLO: Final = ToolCall("get_weather", {"city": "Oslo", "days": 3})
UTC: Final = ToolCall("get_time", {"utc": True})


def written(parts: AnswerParts, after: str = "") -> str:
    """Return how the scripted model writes `parts`, with `after` behind its calls."""
    return family("qwen3").written(parts) + (f"\n{after}" if after else "")


def dictation(*turns: AnswerParts | str) -> str:
    """Return what a user says to have the model write `turns`, one an answer."""
    texts = [written(turn) if isinstance(turn, AnswerParts) else turn for turn in turns]
    return DICTATION + json.dumps(texts).replace("<", "\\u003c")  # no marks in what a user says


@dataclass(frozen=True)
class Told:
    """One answer, whatever the dialect."""

    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]  # name, arguments
    call_ids: list[str]
    reason: str  # "stop" | "length" | "tool_calls"
    prompt: int  # tokens, as the following
    cached: int
    completion: int
    thought: int
    raw: Any  # the SDK's object
    kinds: list[str] = field(default_factory=list)  # of blocks or items, where there are such


def _count(details: Any, name: str) -> int:
    """Return tokens that other servers need not tell."""
    return getattr(details, name, None) or 0


@dataclass(frozen=True)
class Sdks:
    """Both SDKs' clients of one server."""

    server: Server
    gpt: openai.OpenAI
    claude: anthropic.Anthropic


@contextmanager
def sdks_of(server: Server) -> Iterator[Sdks]:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    with server.openai() as gpt, claude:
        yield Sdks(server, gpt, claude)


class Talk:
    """A conversation. `options` are of every request, in the dialect's own words.

    `thinking`, `limit` and `formed` give options: whether it thinks, how long an answer may be, and
    the schema of one. A choice is "auto", "none", "required", or a tool's name.
    """

    def __init__(self, sdks: Sdks, **options: Any) -> None:
        self.sdks = sdks
        self.options = options
        self.history: list[Any] = []
        self.system = ""

    def user(self, text: str) -> "Talk":
        self.history.append({"role": "user", "content": text})
        return self

    def result(self, call_id: str, text: str) -> "Talk":
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})
        return self

    def tools(self, tools: Sequence[Tool]) -> list[Any]:
        return [{"type": "function", "function": tool} for tool in tools]

    def choice(self, choice: str) -> Any:
        named = {"type": "function", "function": {"name": choice}}
        return choice if choice in ("auto", "none", "required") else named

    def thinking(self, on: bool) -> dict[str, Any]:
        return {"extra_body": {"enable_thinking": on}}

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def formed(self, schema: Any) -> dict[str, Any]:
        shape = {"name": "r", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": shape}}

    def ask(self, *, stream: bool = False, tools: Sequence[Tool] = (), choice: str = "") -> Told:
        """Have the conversation answered, and take the answer up."""
        body = dict(self.options)
        if tools:
            body["tools"] = self.tools(tools)
        if choice:
            body["tool_choice"] = self.choice(choice)
        return self.answered(body, stream=stream)

    def answered(self, body: dict[str, Any], *, stream: bool) -> Told:
        raise NotImplementedError


class ChatTalk(Talk):
    def answered(self, body: dict[str, Any], *, stream: bool) -> Told:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": MODEL, "messages": [*system, *self.history], **body}
        answer = self._final(body) if stream else self.sdks.gpt.chat.completions.create(**body)
        (choice,) = answer.choices
        message, usage = choice.message, answer.usage
        self.history.append(message.model_dump())
        calls = message.tool_calls or []
        return Told(
            reasoning=getattr(message, "reasoning_content", None) or "",
            content=message.content or "",
            calls=[(call.function.name, json.loads(call.function.arguments)) for call in calls],
            call_ids=[call.id for call in calls],
            reason=choice.finish_reason,
            prompt=usage.prompt_tokens,
            cached=_count(usage.prompt_tokens_details, "cached_tokens"),
            completion=usage.completion_tokens,
            thought=_count(usage.completion_tokens_details, "reasoning_tokens"),
            raw=answer,
        )

    def _final(self, body: dict[str, Any]) -> Any:
        body["stream_options"] = {"include_usage": True}
        with self.sdks.gpt.chat.completions.stream(**body) as events:
            try:
                return events.get_final_completion()
            except openai.LengthFinishReasonError as cut:
                return cut.completion


class MessagesTalk(Talk):
    REASONS: Final = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}

    def result(self, call_id: str, text: str) -> Talk:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        if self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})
        return self

    def tools(self, tools: Sequence[Tool]) -> list[Any]:
        return [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in tools
        ]

    def choice(self, choice: str) -> Any:
        kinds = {"auto": "auto", "none": "none", "required": "any"}
        named = {"type": "tool", "name": choice}
        return {"type": kinds[choice]} if choice in kinds else named

    def thinking(self, on: bool) -> dict[str, Any]:
        enabled = {"type": "enabled", "budget_tokens": 2_000}
        return {"thinking": enabled if on else {"type": "disabled"}}

    def formed(self, schema: Any) -> dict[str, Any]:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def answered(self, body: dict[str, Any], *, stream: bool) -> Told:
        body = {"model": MODEL, "max_tokens": 4_000, "messages": self.history, **body}
        if self.system:
            body["system"] = self.system
        if stream:
            with self.sdks.claude.messages.stream(**body) as events:
                answer: Any = events.get_final_message()
        else:
            answer = self.sdks.claude.messages.create(**body)
        self.history.append({"role": "assistant", "content": answer.content})
        blocks, usage = answer.content, answer.usage
        calls = [block for block in blocks if block.type == "tool_use"]
        return Told(
            reasoning="".join(block.thinking for block in blocks if block.type == "thinking"),
            content="".join(block.text for block in blocks if block.type == "text"),
            calls=[(call.name, call.input) for call in calls],
            call_ids=[call.id for call in calls],
            reason=self.REASONS.get(answer.stop_reason, answer.stop_reason),
            prompt=usage.input_tokens + _count(usage, "cache_read_input_tokens"),
            cached=_count(usage, "cache_read_input_tokens"),
            completion=usage.output_tokens,
            thought=_count(usage.output_tokens_details, "thinking_tokens"),
            raw=answer,
            kinds=[block.type for block in blocks],
        )


class ResponsesTalk(Talk):
    def result(self, call_id: str, text: str) -> Talk:
        row = {"type": "function_call_output", "call_id": call_id, "output": text}
        self.history.append(row)
        return self

    def tools(self, tools: Sequence[Tool]) -> list[Any]:
        return [{"type": "function", **tool} for tool in tools]

    def choice(self, choice: str) -> Any:
        named = {"type": "function", "name": choice}
        return choice if choice in ("auto", "none", "required") else named

    def thinking(self, on: bool) -> dict[str, Any]:
        return {"reasoning": {"effort": "medium" if on else "none"}}

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"max_output_tokens": tokens}

    def formed(self, schema: Any) -> dict[str, Any]:
        return {"text": {"format": {"type": "json_schema", "name": "r", "schema": schema}}}

    def answered(self, body: dict[str, Any], *, stream: bool) -> Told:
        body = {"model": MODEL, "input": self.history, "store": False, **body}
        body["include"] = ["reasoning.encrypted_content"]
        if self.system:
            body["instructions"] = self.system
        if stream:
            with self.sdks.gpt.responses.stream(**body) as events:
                *_, last = events
            answer: Any = getattr(last, "response", None)
        else:
            answer = self.sdks.gpt.responses.create(**body)
        self.history += answer.output
        return self._told(answer)

    @staticmethod
    def _told(answer: Any) -> Told:
        items, usage = answer.output, answer.usage
        calls = [item for item in items if item.type == "function_call"]
        thoughts = [item for item in items if item.type == "reasoning"]
        reason = "tool_calls" if calls else "stop"
        return Told(
            reasoning="".join(part.text for item in thoughts for part in item.content or ()),
            content=answer.output_text,
            calls=[(call.name, json.loads(call.arguments)) for call in calls],
            call_ids=[call.call_id for call in calls],
            reason="length" if answer.status == "incomplete" else reason,
            prompt=usage.input_tokens,
            cached=_count(usage.input_tokens_details, "cached_tokens"),
            completion=usage.output_tokens,
            thought=_count(usage.output_tokens_details, "reasoning_tokens"),
            raw=answer,
            kinds=[item.type for item in items],
        )


class OllamaTalk(Talk):
    """Its client drops the ids of calls, and what its API has not: a choice, and what was kept."""

    def thinking(self, on: bool) -> dict[str, Any]:
        return {"think": on}

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"options": {"num_predict": tokens}}

    def formed(self, schema: Any) -> dict[str, Any]:
        return {"format": schema}

    def answered(self, body: dict[str, Any], *, stream: bool) -> Told:
        system = [{"role": "system", "content": self.system}] if self.system else []
        with ollama.Client(host=self.sdks.server.url) as client:
            chat: Any = client.chat(MODEL, [*system, *self.history], stream=stream, **body)
            parts: list[Any] = list(chat) if stream else [chat]
        messages, end = [part.message for part in parts], parts[-1]
        calls = [call for message in messages for call in message.tool_calls or ()]
        content = "".join(message.content or "" for message in messages)
        reasoning = "".join(message.thinking or "" for message in messages)
        turn = {"role": "assistant", "content": content, "thinking": reasoning}
        self.history.append(turn | {"tool_calls": calls})
        return Told(
            reasoning=reasoning,
            content=content,
            calls=[(call.function.name, dict(call.function.arguments)) for call in calls],
            call_ids=[str(number) for number in range(len(calls))],
            reason="tool_calls" if calls else end.done_reason,  # it has no word for calls
            prompt=end.prompt_eval_count,
            cached=0,
            completion=end.eval_count,
            thought=0,
            raw=parts,
        )


TALKS: Final[dict[str, type[Talk]]] = {
    "chat": ChatTalk,
    "messages": MessagesTalk,
    "responses": ResponsesTalk,
}
