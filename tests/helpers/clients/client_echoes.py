"""Makes the request bodies in which each agent client sends an answer back.

The forms are those that the clients of docs/clients.md were seen to send.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall

CWD = "/home/dev/project"
ENVIRONMENT = (  # Claude Code's
    "# Environment\nYou have been invoked in the following environment: \n"
    f" - Primary working directory: {CWD}\n - Is a git repository: true\n - Platform: linux\n"
)
CLAUDE_HEADERS = {"user-agent": "claude-cli/2.1.329 (external, cli)"}
OPENCLAW_CONTEXT = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: none\n"
    "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
)


@dataclass
class Client(ABC):
    """One client's conversation, kept as that client keeps it."""

    dialect: str
    strips_thinking: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    system: str = f"You are an agent.\nWorking directory: {CWD}\n" + "Mind the rules. " * 40
    turns: list[Any] = field(default_factory=list)  # messages or items, as sent
    tools: list[dict[str, Any]] = field(default_factory=list)  # name, description, parameters

    def user(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the next request."""

    @abstractmethod
    def answered(self, parts: AnswerParts, call_ids: tuple[str, ...], signature: str) -> None:
        """Take the server's answer into the conversation, altered as this client alters it."""

    @abstractmethod
    def results(self, call_ids: tuple[str, ...], texts: list[str]) -> None:
        """Take the results of these calls into the conversation."""


def as_javascript(value: Any) -> Any:
    """Return the value as JSON.parse and JSON.stringify give it back."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: as_javascript(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_javascript(inner) for inner in value]
    return value


class ClaudeCode(Client):
    """Messages: `cd <cwd> &&` stripped, replace_all put first, keys reordered, strings coerced."""

    def body(self) -> dict[str, Any]:
        tools = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in self.tools
        ]
        billing = "x-anthropic-billing-header: cc_version=2.1.329.649; cc_entrypoint=sdk-cli;"
        system = [{"type": "text", "text": billing}, {"type": "text", "text": self.system}]
        first, *others = [dict(turn) for turn in self.turns]
        messages = [first, {"role": "system", "content": ENVIRONMENT}, *others]
        last = messages[-1]
        if isinstance(last["content"], str):  # the marker moves with the last message
            marker = {"cache_control": {"type": "ephemeral"}}
            last["content"] = [{"type": "text", "text": last["content"], **marker}]
        return {"system": system, "tools": tools, "messages": messages, "max_tokens": 9}

    def answered(self, parts: AnswerParts, call_ids: tuple[str, ...], signature: str) -> None:
        blocks: list[dict[str, Any]] = []
        if parts.reasoning and not self.strips_thinking:
            thinking = {"thinking": parts.reasoning, "signature": signature}
            blocks.append({"type": "thinking", **thinking})
        if parts.content:
            blocks.append({"type": "text", "text": parts.content})
        for call, call_id in zip(parts.calls, call_ids, strict=True):
            given = self._rewritten(call)
            blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": given})
        self.turns.append({"role": "assistant", "content": blocks})

    @staticmethod
    def _rewritten(call: ToolCall) -> dict[str, Any]:
        assert isinstance(call.arguments, dict)
        given = as_javascript(call.arguments)
        if "command" in given:
            given["command"] = given["command"].removeprefix(f"cd {CWD} && ")
        if call.name == "Edit":
            given = {"replace_all": False, **given}
        if isinstance(given.get("offset"), str):
            given["offset"] = int(given["offset"])
        return dict(reversed(given.items())) if call.name == "Write" else given

    def results(self, call_ids: tuple[str, ...], texts: list[str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": call_id, "content": text}
            for call_id, text in zip(call_ids, texts, strict=True)
        ]
        self.turns.append({"role": "user", "content": blocks})


@dataclass
class Chat(Client):
    """PI, opencode, Qwen Code, Cline: arguments re-serialised, 5000.0 as 5000."""

    null_as_text: bool = False  # opencode sends "" for null
    plain_ids: bool = False  # OpenClaw keeps letters and digits only
    trailing: str = ""  # OpenClaw's passing context message

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        messages = [{"role": "system", "content": self.system}, *self.turns]
        if self.trailing:
            messages.append({"role": "user", "content": self.trailing})
        return {"messages": messages, "tools": tools}

    def answered(self, parts: AnswerParts, call_ids: tuple[str, ...], signature: str) -> None:
        content = parts.content or ("" if self.null_as_text else None)
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if parts.reasoning and not self.strips_thinking:
            turn["reasoning_content"] = parts.reasoning
        if parts.calls:
            turn["tool_calls"] = [
                {
                    "id": self._id(call_id),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(
                            as_javascript(call.arguments),
                            separators=(",", ":"),
                            ensure_ascii=False,
                        ),
                    },
                }
                for call, call_id in zip(parts.calls, call_ids, strict=True)
            ]
        self.turns.append(turn)

    def _id(self, call_id: str) -> str:
        return call_id.replace("_", "") if self.plain_ids else call_id

    def results(self, call_ids: tuple[str, ...], texts: list[str]) -> None:
        self.turns += [
            {"role": "tool", "tool_call_id": self._id(call_id), "content": text}
            for call_id, text in zip(call_ids, texts, strict=True)
        ]


class Codex(Client):
    """Responses: arguments verbatim, reasoning as encrypted_content, with or without a summary."""

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", **tool} for tool in self.tools]
        first = {"role": "developer", "content": self.system}
        return {"input": [first, *self.turns], "tools": tools, "prompt_cache_key": "thread-1"}

    def answered(self, parts: AnswerParts, call_ids: tuple[str, ...], signature: str) -> None:
        if parts.reasoning:
            shown = [] if self.strips_thinking else [parts.reasoning]
            summary = [{"type": "summary_text", "text": text} for text in shown]
            thought = {"type": "reasoning", "summary": summary, "encrypted_content": signature}
            self.turns.append(thought)
        if parts.content:
            said = [{"type": "output_text", "text": parts.content}]
            self.turns.append({"type": "message", "role": "assistant", "content": said})
        for call, call_id in zip(parts.calls, call_ids, strict=True):
            arguments = json.dumps(call.arguments)
            item = {"call_id": call_id, "name": call.name, "arguments": arguments}
            self.turns.append({"type": "function_call", **item})

    def results(self, call_ids: tuple[str, ...], texts: list[str]) -> None:
        self.turns += [
            {"type": "function_call_output", "call_id": call_id, "output": text}
            for call_id, text in zip(call_ids, texts, strict=True)
        ]


CLIENTS: dict[str, Callable[..., Client]] = {
    "claude-code": lambda **given: ClaudeCode("messages", headers=CLAUDE_HEADERS, **given),
    "pi": lambda **given: Chat("chat", **given),
    "opencode": lambda **given: Chat("chat", null_as_text=True, **given),
    "openclaw": lambda **given: Chat("chat", plain_ids=True, trailing=OPENCLAW_CONTEXT, **given),
    "codex": lambda **given: Codex("responses", **given),
}
